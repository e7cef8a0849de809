"""Expert parallelism in Python: tsm.transform and FSDP against one process with whole models."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, StateDictType, fully_shard

from both_faces import TOLERANCE, away_from, clipped_norm, sharded, whole_state
from closeness import distance, furthest
from expert_models import MAX_NORM, MODELS, RANKS, STEPS, alone, batch, built, loss_of, wrap
from ranks import run_ranks
from share_out import share_out
from tensor_cases import LAYOUTS

FULL_STEPS = 20


@dataclass(frozen=True)
class Case:
    model: str
    experts: int  # E
    degrees: tuple[int, int, int] = (4, 4, 4)
    checkpointing: bool = False
    auxiliary: bool = False
    accumulate: bool = False
    use_orig_params: bool = True
    face: str = "fsdp"
    context: int = 1  # ranks that share out the positions of the same sequences
    one_expert: bool = False  # routers send every token to the first experts: the others get none
    tensor: int = 1  # T
    sequence: bool = False  # parallelism of sequences over the tensor-parallel ranks
    smp_keys: bool = False  # all that SMP v2 knows are given

    @property
    def heads(self) -> int:
        """Of keys and values: T must divide them."""
        return max(2, self.tensor)

    def reference(self, ranks: int) -> tuple[str, bool, bool, int, int, int]:
        """What alone() is asked for, but for the number of steps."""
        batches = ranks // (self.context * self.tensor)
        return self.model, self.one_expert, self.auxiliary, 2 if self.accumulate else 1, batches, self.heads

    def config(self) -> dict[str, Any]:
        axes = {
            "tensor_parallel_degree": self.tensor,
            "context_parallel_degree": self.context,
            "expert_parallel_degree": self.experts,
        }
        if self.smp_keys:
            rest = {"fsdp_cache_flush_warnings": True, "allow_empty_shards": False, "random_seed": 7}
            activations = {"sm_activation_offloading": True, "activation_loading_horizon": 1}
            return {**axes, **rest, **activations, "hybrid_shard_degree": self.degrees[0]}
        return {**axes, "degrees": dict(zip(("parameters", "gradients", "optimizer"), self.degrees, strict=True))}


# Every E of four ranks for every family, degrees of all three, options spread over them.
CASES = [
    Case("mixtral", 1, (2, 4, 4)),
    Case("mixtral", 2, (4, 4, 4), checkpointing=True, auxiliary=True),
    Case("mixtral", 4, (2, 2, 4), one_expert=True),
    Case("mixtral", 2, (1, 2, 4), accumulate=True, use_orig_params=False),
    Case("qwen2_moe", 1, (4, 4, 4), auxiliary=True),
    Case("qwen2_moe", 2, (2, 2, 2), accumulate=True),
    Case("qwen2_moe", 4, (4, 4, 4), auxiliary=True, use_orig_params=False),
    Case("qwen3_moe", 1, (1, 1, 1)),
    Case("qwen3_moe", 2, (1, 4, 4), auxiliary=True, one_expert=True),
    Case("qwen3_moe", 4, (1, 1, 4), checkpointing=True),
    Case("gpt_oss", 1, (2, 2, 2)),
    Case("gpt_oss", 2, (4, 4, 4), one_expert=True, checkpointing=True, use_orig_params=False),
    Case("gpt_oss", 4, (1, 2, 2), auxiliary=True),
    Case("mixtral", 2, (4, 4, 4), context=2, checkpointing=True),
    Case("qwen2_moe", 2, (2, 2, 4), context=2, accumulate=True),
    Case("qwen3_moe", 4, (1, 4, 4), context=4, checkpointing=True),
    Case("mixtral", 2, (4, 4, 4), face="fully_shard", accumulate=True),
    Case("qwen2_moe", 4, (1, 1, 4), face="fully_shard", checkpointing=True),
    Case("gpt_oss", 2, (2, 2, 2), face="fully_shard", one_expert=True),
]
# The same for every (T, E) of four ranks with T > 1.
TENSOR_CASES = [
    Case("mixtral", 2, (2, 2, 2), tensor=2, auxiliary=True),
    Case("mixtral", 2, (1, 1, 2), tensor=2, sequence=True, accumulate=True, use_orig_params=False),
    Case("mixtral", 1, (1, 2, 2), tensor=2, sequence=True, auxiliary=True, checkpointing=True),
    Case("mixtral", 1, (1, 1, 1), tensor=4, one_expert=True),
    Case("mixtral", 2, (2, 2, 2), tensor=2, context=2, checkpointing=True, smp_keys=True),
    Case("qwen2_moe", 2, (2, 2, 2), tensor=2, sequence=True, auxiliary=True, checkpointing=True),
    Case("qwen2_moe", 1, (2, 2, 2), tensor=2, accumulate=True, use_orig_params=False),
    Case("qwen2_moe", 1, (1, 1, 1), tensor=4, sequence=True),
    Case("qwen3_moe", 2, (1, 2, 2), tensor=2, one_expert=True, sequence=True, use_orig_params=False),
    Case("qwen3_moe", 1, (1, 1, 2), tensor=2, context=2, checkpointing=True),
    Case("qwen3_moe", 1, (1, 1, 1), tensor=4, auxiliary=True),
    Case("gpt_oss", 2, (2, 2, 2), tensor=2, one_expert=True, checkpointing=True),
    Case("gpt_oss", 2, (1, 1, 1), tensor=2, auxiliary=True, accumulate=True),
    Case("gpt_oss", 1, (2, 2, 2), tensor=2, sequence=True, use_orig_params=False),
    Case("gpt_oss", 1, (1, 1, 1), tensor=4, sequence=True, checkpointing=True),
]


def product() -> list[Case]:
    """Every (T, C, E, P, G, O) of four ranks for every family; options are drawn."""
    choice, cases = random.Random(1), []
    for model, tensor, context, experts in itertools.product(MODELS, (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        ranks = RANKS // tensor
        if max(context, experts) > ranks or (context > 1 and model == "gpt_oss"):
            continue
        for degrees in (layout for layout in LAYOUTS if max(layout) <= ranks):
            options = {name: choice.random() < 0.5 for name in ("checkpointing", "accumulate", "one_expert")}
            options["use_orig_params"] = choice.random() < 0.5
            options["auxiliary"] = context == 1 and choice.random() < 0.5
            options["sequence"] = tensor > 1 and choice.random() < 0.5
            cases.append(Case(model, experts, degrees, tensor=tensor, context=context, **options))
    return cases


def whole_momenta(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return {name: value["momentum_buffer"] for name, value in state.items()}


def gradients_away(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By how much, as a share of all gradients: those of keys' biases are nothing but rounding."""
    assert sorted(ours) == sorted(expected)
    norm = torch.stack([value.norm() for value in expected.values()]).norm()
    away = {name: ((ours[name] - value).norm() / norm).item() for name, value in expected.items()}
    return {name: off for name, off in away.items() if not off <= TOLERANCE}


def trains(rank: int, world_size: int, cases: list[Case], steps: int = STEPS) -> list[str]:
    import tesserae as tsm

    # Scores that begin equal stay so to 1e-6: after some steps it is rounding that chooses experts. Of the others the
    # second best is 6e-6 to 9e-4 behind.
    steps_of = {True: min(STEPS, steps), False: steps}
    found = []
    references = share_out(lambda key: alone(*key, steps_of[key[1]]), [case.reference(world_size) for case in cases])
    for case in cases:
        print(case, flush=True)
        tsm.init(case.config())
        try:
            index = rank // case.tensor % case.experts
            assert (tsm.state.ep_size, tsm.state.ep_rank) == (case.experts, index)
            members = dist.get_process_group_ranks(tsm.state.ep_process_group)
            assert members == [rank + case.tensor * (i - index) for i in range(case.experts)]
            assert tsm.state.dp_size == world_size // (case.context * case.tensor)
            model = built(case.model, case.one_expert, num_key_value_heads=case.heads)
            model = tsm.transform(model, sequence_parallel=case.sequence).train()
            if case.checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            fsdp = case.face == "fsdp"
            if fsdp:
                model = wrap(case.model, model, use_orig_params=case.use_orig_params)
            else:
                model = sharded(MODELS[case.model].unit, model)
            called = offload_wrapper(model) if case.smp_keys else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            losses, norms, parts = [], [], 2 if case.accumulate else 1
            for step in range(steps_of[case.one_expert]):
                for part in range(parts):
                    last = part == parts - 1
                    if not fsdp:
                        model.set_requires_gradient_sync(last)
                    with model.no_sync() if fsdp and not last else contextlib.nullcontext():
                        loss = loss_of(called, batch(10 * step + part, tsm.state.dp_rank), case.auxiliary)
                        loss.backward()
                    total = loss.detach().clone()
                    dist.all_reduce(total)
                    losses.append(total.item() / world_size)
                norms.append(clipped_norm(model, MAX_NORM))
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                logits = model.eval()(input_ids=batch(0, 0), use_cache=False).logits
            expected = references[case.reference(world_size)]
            if not furthest(losses, expected.losses) <= TOLERANCE:
                found.append(f"{case}: losses {losses}, expected {expected.losses}")
            if not furthest(norms, expected.norms) <= TOLERANCE:
                found.append(f"{case}: norms {norms}, expected {expected.norms}")
            if not distance(logits, expected.logits) <= 10 * TOLERANCE:
                found.append(f"{case}: logits differ by {distance(logits, expected.logits)}")
            if wrong := away_from(expected.state, whole_state(model)):
                found.append(f"{case}: parameters {wrong}")
            if fsdp and (wrong := gradients_away(whole_momenta(model, optimizer), expected.momenta)):
                found.append(f"{case}: gradients {wrong}")
        finally:
            tsm.uninstall()
    return found


@pytest.mark.parametrize("part", range(2))
def test_models_train_as_on_one_process(part: int) -> None:
    assert run_ranks(trains, RANKS, CASES[part::2], deadline=240) == [[]] * RANKS


def test_experts_train_with_tensor_parallelism() -> None:
    assert run_ranks(trains, RANKS, TENSOR_CASES, deadline=240) == [[]] * RANKS


@pytest.mark.parity_full
@pytest.mark.parametrize("tensor", (1, 2, 4))
def test_product(tensor: int) -> None:
    cases = [case for case in product() if case.tensor == tensor]
    assert run_ranks(trains, RANKS, cases, FULL_STEPS, deadline=7200) == [[]] * RANKS


# ---- what is trained otherwise ----
def variants(rank: int, world_size: int, tensor: int) -> list[str]:
    import tesserae as tsm

    axes = {"tensor_parallel_degree": tensor, "expert_parallel_degree": 2}
    tsm.init({**axes, "hybrid_shard_degree": world_size // tensor})
    return in_bf16() + without_tokens() + frozen() + (planned() if tensor > 1 else [])


def in_bf16() -> list[str]:
    """The weights of choices stay in fp32 beside activations in bf16, as in a model that is not wrapped."""
    import tesserae as tsm

    model = tsm.transform(MODELS["mixtral"]())
    seen: list[list[torch.dtype]] = []
    for part in model.modules():
        if type(part).__name__ == "SplitMixtralExperts":
            part.register_forward_pre_hook(lambda _, args: seen.append([args[0].dtype, args[2].dtype]))
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap("mixtral", model, mixed_precision=bf16)
    loss = loss_of(model, batch(0, tsm.state.dp_rank))
    loss.backward()
    total = loss.detach().float()
    dist.all_reduce(total)
    found = [] if seen == [[torch.bfloat16, torch.float32]] * 2 else [f"experts get {seen}"]
    expected = alone("mixtral", False, False, 1, tsm.state.dp_size).losses[0]
    return found if furthest([total.item() / RANKS], [expected]) <= 2e-2 else [*found, "the loss in bf16 is another"]


def without_tokens() -> list[str]:
    """A rank whose batch is empty takes part, and its experts learn from the tokens of others."""
    import tesserae as tsm

    def run(layer: nn.Module, x: Tensor) -> None:
        (layer(x).square().sum()).backward()

    rank = tsm.state.dp_rank
    x = torch.randn(tsm.state.dp_size, 5, 32, generator=torch.Generator().manual_seed(1))
    layers = [MODELS["qwen3_moe"]().model.layers[0].mlp for _ in range(2)]
    model = tsm.transform(MODELS["qwen3_moe"]())
    run(layers[0], x[1:].reshape(1, -1, 32))
    run(model.model.layers[0].mlp, x[rank : rank + 1] if rank > 0 else x[:1, :0])
    experts = model.model.layers[0].mlp.experts
    found = []
    for name in ("gate_up_proj", "down_proj"):
        # Of the tokens of this expert-parallel group; the other group has the others.
        own = getattr(experts, name).grad.clone()
        dist.all_reduce(own, group=tsm.state.exp_dp_process_group)
        expected = tsm._C.part_of(getattr(layers[0].experts, name).grad, experts._tesserae_splits[name].split)
        if not distance(own, expected) <= TOLERANCE:
            found.append(f"the gradient of {name} is another where a rank has no tokens")
    return found


def frozen() -> list[str]:
    """Only experts are trained, or all but them."""
    import tesserae as tsm

    def built_frozen(only_experts: bool) -> nn.Module:
        model = MODELS["gpt_oss"]()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_((".experts." in name) == only_experts)
        return model

    def train(model: nn.Module, batches: range) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(2):
            torch.stack([loss_of(model, batch(step, index)) for index in batches]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found, rank = [], tsm.state.dp_rank
    for only_experts in (True, False):
        whole = built_frozen(only_experts)
        train(whole, range(tsm.state.dp_size))
        models = [wrap("gpt_oss", tsm.transform(built_frozen(only_experts)))]
        if tsm.state.tp_size == 1:
            models.append(sharded(MODELS["gpt_oss"].unit, tsm.transform(built_frozen(only_experts))))
        for model in models:
            train(model, range(rank, rank + 1))
            if wrong := away_from(whole.state_dict(), whole_state(model)):
                found.append(f"frozen, only_experts={only_experts}: {wrong}")
    return found


def planned() -> list[str]:
    """By a plan of the script's: stacks are cut all the same, and norms of single heads have whole gradients."""
    import tesserae as tsm

    plan = {"*self_attn.[qkv]_proj": "column", "*self_attn.o_proj": "row", "*self_attn.[qk]_norm": "summed"}
    whole, model = MODELS["qwen3_moe"](), MODELS["qwen3_moe"]()
    before = list(model.parameters())
    model = tsm.transform(model, plan=plan)
    for each in (whole, model):
        loss_of(each, batch(0, tsm.state.dp_rank)).backward()
    theirs = {name: p.grad for name, p in whole.named_parameters()}
    found = [] if model.model.layers[0].mlp.experts.down_proj.shape == (4, 32, 12) else ["stacks are not cut"]
    if not all(ours is user for ours, user in zip(model.parameters(), before, strict=True)):
        found.append("parameters are other objects, which an optimizer of before would not train")
    for name, parameter in model.named_parameters():
        same = parameter.shape == theirs[name].shape
        if same and not distance(parameter.grad, theirs[name]) <= TOLERANCE:
            found.append(f"by a plan, the gradient of {name} is another")
    return found


@pytest.mark.parametrize("tensor", (1, 2))
def test_dtypes_empty_batches_and_frozen_parts(tensor: int) -> None:
    assert run_ranks(variants, RANKS, tensor, deadline=120) == [[]] * RANKS


def autocasts(rank: int, world_size: int) -> None:
    """Products are in the dtype of autocast, as those of one process."""
    import tesserae as tsm

    tsm.init({"expert_parallel_degree": 2})
    whole, model = MODELS["gpt_oss"](), tsm.transform(MODELS["gpt_oss"]())
    seen = []
    experts = model.model.layers[0].mlp.experts
    gate = experts._apply_gate
    experts._apply_gate = lambda rows: (seen.append(rows.dtype), gate(rows))[1]
    tokens = batch(0, rank)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = loss_of(whole, tokens), loss_of(model, tokens)
    assert furthest([ours.item()], [theirs.item()]) <= 1e-3
    in_fp32 = loss_of(whole, tokens)
    assert abs(ours.item() - theirs.item()) <= abs(in_fp32.item() - theirs.item()) + 1e-4
    ours.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert seen == [torch.bfloat16]


def test_autocast_reaches_experts() -> None:
    run_ranks(autocasts, 2)


# ---- errors ----
def adapted(model: nn.Module) -> nn.Module:
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=stacks))


def refuses(rank: int, world_size: int) -> list[str]:
    """What cannot be, and what the error must say."""
    import tesserae as tsm

    with pytest.raises(tsm.InvalidArgument, match="expert-parallel degree of 3 .* nearest valid: 2 and 4"):
        tsm.init({"expert_parallel_degree": 3})
    tsm.init({"expert_parallel_degree": 2})
    half = dist.new_group([0, 1]) if rank < 2 else dist.new_group([0, 1])
    other = dist.new_group([2, 3])
    group = half if rank < 2 else other
    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: tsm.transform(MODELS["mixtral"](num_local_experts=5)), ["5 experts", "degrees that would do: 1, 5"]),
        (lambda: tsm.transform(nn.Linear(4, 4)), ["a Linear", "mixtral, qwen2_moe", "expert_parallel_degree 1"]),
        (lambda: tsm.transform(MODELS["qwen2_moe"](mlp_only_layers=[0, 1])), ["0 modules of class Qwen2MoeExperts"]),
        (lambda: tsm.transform(tsm.transform(MODELS["mixtral"]())), ["transform a model once"]),
        (lambda: tsm.transform(wrap("mixtral", MODELS["mixtral"]())), ["wrapped by FSDP already"]),
        (lambda: tsm.transform(MODELS["mixtral"](), config={"smp_moe": True}), ["config", "leave it out"]),
        (lambda: wrap("mixtral", tsm.transform(MODELS["mixtral"]()), process_group=group), ["process_group", "leave"]),
        (
            lambda: wrap("mixtral", tsm.transform(MODELS["mixtral"]())).register_comm_hook(None, lambda *_: None),
            ["register_comm_hook", "experts"],
        ),
        (
            lambda: wrap("mixtral", tsm.transform(MODELS["mixtral"]()), sync_module_states=True),
            ["sync_module_states", "load_state_dict_from_rank0=True"],
        ),
        (
            lambda: tsm.transform(adapted(MODELS["mixtral"]())),
            ["[tsm.transform] adapters of experts", "both degrees 1"],
        ),
        (
            lambda: loss_of(wrap("mixtral", adapted(tsm.transform(MODELS["mixtral"]()))), batch(0, 0)),
            ["[forward] adapters of experts", "leave target_parameters out"],
        ),
    ]
    found = []

    def check(name: str, call: Callable[[], Any], words: list[str]) -> None:
        try:
            call()
            found.append(f"case {name}: no error")
        except tsm.InvalidArgument as error:
            missing = [word for word in words if word not in str(error)]
            found.extend([f"case {name}: {missing} is not in {error}"] if missing else [])

    for index, (call, words) in enumerate(cases):
        check(str(index), call, words)
    with torch.device("meta"):
        nowhere = MODELS["mixtral"]()
    if rank < 2:  # the first group: both of its ranks
        check("meta", lambda: tsm.transform(nowhere, load_state_dict_from_rank0=True), ["meta device", "its values"])
    else:
        tsm.transform(nowhere, load_state_dict_from_rank0=True)
    layer = tsm.transform(MODELS["mixtral"]()).model.layers[0]
    assert not hasattr(layer.mlp.experts, "reset_parameters"), "as the module of transformers"
    check("group", lambda: fully_shard([layer.input_layernorm, layer.mlp.experts]), ["group of 2", "by themselves"])
    layer = tsm.transform(MODELS["mixtral"]()).model.layers[0]
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    check("mesh", lambda: fully_shard(layer, mesh=two), ["the mesh has 2 of 4 ranks", "leave it out"])
    tsm.uninstall()
    tsm.init({"expert_parallel_degree": 2, "tensor_parallel_degree": 2})
    model = MODELS["mixtral"](intermediate_size=25)
    check("hidden", lambda: tsm.transform(model), ["hidden layer of experts: 25", "1, 5, 25"])
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear, "nothing was changed before"
    model = adapted(tsm.transform(MODELS["mixtral"]()))
    check("adapters", lambda: loss_of(model, batch(0, 0)), ["[forward] adapters of experts"])
    check(
        "parts",
        lambda: sharded(MODELS["gpt_oss"].unit, tsm.transform(MODELS["gpt_oss"]())),
        ["tsm.transform", "FullyShardedDataParallel"],
    )
    tsm.uninstall()
    tsm.init({"expert_parallel_degree": 2, "context_parallel_degree": 2})
    check("context", lambda: tsm.transform(MODELS["gpt_oss"]()), ["cut the sequences", "mixtral"])
    sliding = MODELS["qwen2_moe"](use_sliding_window=True, sliding_window=4, max_window_layers=1)
    check("windows", lambda: tsm.transform(sliding), ["sliding windows", "use_sliding_window=False"])
    model = tsm.transform(MODELS["mixtral"]())
    check("auxiliary", lambda: loss_of(model, batch(0, 0), auxiliary=True), ["output_router_logits", "False"])
    return found


def test_refused() -> None:
    assert run_ranks(refuses, RANKS, deadline=120) == [[]] * RANKS
