"""Expert parallelism in Python: tsm.transform and FSDP against one process with whole models."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
    fully_shard,
)

from expert_models import MODELS, batch, loss_of, wrap
from parity_test import distance, furthest
from ranks import run_ranks

RANKS, STEPS, MAX_NORM, TOLERANCE = 4, 3, 0.7, 1e-5


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
    Case("mixtral", 2, (4, 4, 4), face="fully_shard", accumulate=True),
    Case("qwen2_moe", 4, (1, 1, 4), face="fully_shard", checkpointing=True),
    Case("gpt_oss", 2, (2, 2, 2), face="fully_shard", one_expert=True),
]


def built(name: str, one_expert: bool = False, **changes: Any) -> nn.Module:
    """`one_expert`: the experts' scores do not depend on tokens, the first two win."""
    model = MODELS[name](**changes)
    for path, parameter in model.named_parameters():
        if one_expert and path.endswith((".gate.weight", ".router.weight")):
            nn.init.zeros_(parameter)  # of equal scores topk takes what it takes: the same on every rank
    return model


@functools.cache
def alone(
    name: str, one_expert: bool, auxiliary: bool, parts: int, batches: int = RANKS
) -> tuple[list[float], list[float], dict[str, Tensor], Tensor]:
    """Losses, norms, parameters, and logits in the end, of one process that trains the batches of all ranks. The
    auxiliary loss is that of each rank's tokens, averaged."""
    model = built(name, one_expert)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        for part in range(parts):
            each = [loss_of(model, batch(10 * step + part, rank), auxiliary) for rank in range(batches)]
            loss = torch.stack(each).mean()
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model.eval()(input_ids=batch(0, 0), use_cache=False).logits
    return losses, norms, copy.deepcopy(model.state_dict()), logits


def sharded(name: str, model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, MODELS[name].unit):
            fully_shard(module)
    return fully_shard(model)


def whole_dtensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def whole_state(model: nn.Module, kind: StateDictType = StateDictType.FULL_STATE_DICT) -> Any:
    with FullyShardedDataParallel.state_dict_type(model, kind):
        return model.state_dict()


def away_from(expected: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, float]:
    """Entries that are not as expected, and by how much."""
    assert list(state) == list(expected)
    assert [name for name in expected if state[name].shape != expected[name].shape] == []
    found = {name: distance(state[name], value) for name, value in expected.items()}
    return {name: off for name, off in found.items() if not off <= TOLERANCE}


def trains(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    import tesserae as tsm

    found = []
    for case in cases:
        print(case, flush=True)
        names = dict(zip(("parameters", "gradients", "optimizer"), case.degrees, strict=True))
        axes = {"expert_parallel_degree": case.experts, "context_parallel_degree": case.context}
        tsm.init({**axes, "degrees": names})
        try:
            assert (tsm.state.ep_size, tsm.state.ep_rank) == (case.experts, rank % case.experts)
            first = rank - rank % case.experts
            members = dist.get_process_group_ranks(tsm.state.ep_process_group)
            assert members == list(range(first, first + case.experts))
            assert tsm.state.dp_size == world_size // case.context
            model = tsm.transform(built(case.model, case.one_expert)).train()
            if case.checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            fsdp = case.face == "fsdp"
            if fsdp:
                model = wrap(case.model, model, use_orig_params=case.use_orig_params)
            else:
                model = sharded(case.model, model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            losses, norms, parts = [], [], 2 if case.accumulate else 1
            for step in range(STEPS):
                for part in range(parts):
                    last = part == parts - 1
                    if not fsdp:
                        model.set_requires_gradient_sync(last)
                    with model.no_sync() if fsdp and not last else contextlib.nullcontext():
                        loss = loss_of(model, batch(10 * step + part, tsm.state.dp_rank), case.auxiliary)
                        loss.backward()
                    total = loss.detach().clone()
                    dist.all_reduce(total)
                    losses.append(total.item() / world_size)
                if fsdp:
                    norms.append(model.clip_grad_norm_(MAX_NORM).item())
                else:
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor().item())
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                logits = model.eval()(input_ids=batch(0, 0), use_cache=False).logits
            expected = alone(case.model, case.one_expert, case.auxiliary, parts, tsm.state.dp_size)
            if not furthest(losses, expected[0]) <= TOLERANCE:
                found.append(f"{case}: losses {losses}, expected {expected[0]}")
            if not furthest(norms, expected[1]) <= TOLERANCE:
                found.append(f"{case}: norms {norms}, expected {expected[1]}")
            if not distance(logits, expected[3]) <= 10 * TOLERANCE:
                found.append(f"{case}: logits differ by {distance(logits, expected[3])}")
            if fsdp:
                state = whole_state(model)
            else:
                state = whole_dtensors(model)
            if wrong := away_from(expected[2], state):
                found.append(f"{case}: parameters {wrong}")
        finally:
            tsm.uninstall()
    return found


@pytest.mark.parametrize("part", range(2))
def test_models_train_as_on_one_process(part: int) -> None:
    assert run_ranks(trains, RANKS, CASES[part::2], deadline=240) == [[]] * RANKS


# ---- state ----
def beginnings(rank: int, world_size: int) -> list[str]:
    """From the meta device, from rank 0, and what goes in and comes out of state dicts."""
    import tesserae as tsm
    from tesserae.delayed_param import DelayedParamIniter

    tsm.init({"expert_parallel_degree": 2, "hybrid_shard_degree": 4})
    found = []

    def check(what: str, state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert list(state) == list(expected), what
        wrong = [name for name in expected if not torch.equal(state[name], expected[name])]
        found.extend([f"{what}: {wrong}"] if wrong else [])

    # Not wrapped: whole tensors under the names of Hugging Face.
    for name in MODELS:
        expected, other = MODELS[name]().state_dict(), MODELS[name](seed=1).state_dict()
        model = tsm.transform(MODELS[name]())
        check(f"{name}, transformed", model.state_dict(), expected)
        model.load_state_dict(copy.deepcopy(other))
        check(f"{name}, loaded", model.state_dict(), other)

    # Any degree gives the numbers of one, if units are made in the same order: experts before the layer around them.
    for name in ("mixtral", "gpt_oss"):
        with torch.device("meta"):
            model, whole = MODELS[name](), MODELS[name]()
        states = []
        for each in (tsm.transform(model), whole):
            torch.manual_seed(3)
            init = DelayedParamIniter(each)
            functions = {"param_init_fn": init.get_param_init_fn(), "post_param_init_fn": init.get_post_param_init_fn()}
            with init.validate_params_and_buffers_inited():
                experts = {type(p) for p in each.modules() if type(p).__name__.endswith("Experts")}
                states.append(whole_state(wrap(name, each, *experts, **functions)))
        check(f"{name} from the meta device", *states)

    # Only rank 0 has values.
    for name in ("mixtral", "qwen2_moe"):
        with torch.device("cpu" if rank == 0 else "meta"):
            model = MODELS[name]()
        model = tsm.transform(model, load_state_dict_from_rank0=True)
        init = DelayedParamIniter(model).get_param_init_fn()
        sharded = wrap(name, model, param_init_fn=init, sync_module_states=True, use_orig_params=name == "mixtral")
        check(f"{name} from rank 0", whole_state(sharded), MODELS[name]().state_dict())
        other = MODELS[name](seed=1).state_dict()
        sharded.load_state_dict(copy.deepcopy(other))
        check(f"{name}, loaded", whole_state(sharded), other)
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
            chunks = sharded.state_dict()
            sharded.load_state_dict(MODELS[name]().state_dict())
            sharded.load_state_dict(chunks)
        check(f"{name}, loaded from chunks", whole_state(sharded), other)
        options = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, options):
            state = sharded.state_dict()
        check(f"{name} of rank 0", state, other if rank == 0 else {})
    return found + moments() + turning() + in_bf16() + without_tokens() + in_dtensors() + frozen()


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

    found, rank = [], dist.get_rank()
    for only_experts in (True, False):
        whole = built_frozen(only_experts)
        train(whole, range(RANKS))
        one = wrap("gpt_oss", tsm.transform(built_frozen(only_experts)))
        two = sharded("gpt_oss", tsm.transform(built_frozen(only_experts)))
        for model, state_of in ((one, whole_state), (two, whole_dtensors)):
            train(model, range(rank, rank + 1))
            if wrong := away_from(whole.state_dict(), state_of(model)):
                found.append(f"frozen, only_experts={only_experts}: {wrong}")
    return found


def in_dtensors() -> list[str]:
    """The dial and torch's state dicts under fully_shard."""
    import tesserae as tsm

    model = sharded("mixtral", tsm.transform(MODELS["mixtral"]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, degree in enumerate((1, 2, 4)):
        loss_of(model, batch(10 * step, dist.get_rank())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        before = whole_dtensors(model)
        tsm.reshard(model, optimizer, hybrid_shard_degree=degree)
        if not all(map(torch.equal, before.values(), whole_dtensors(model).values())):
            found.append(f"DTensors changed on the way to {degree}")
    if wrong := away_from(alone("mixtral", False, False, 1)[2], whole_dtensors(model)):
        found.append(f"DTensors trained over changes of degrees: {wrong}")
    expected = MODELS["gpt_oss"](seed=1).state_dict()
    with torch.device("meta"):
        empty = MODELS["gpt_oss"]()
    empty = sharded("gpt_oss", tsm.transform(empty)).to_empty(device="cpu")
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(empty, copy.deepcopy(expected), options=whole)
    state = get_model_state_dict(empty, options=whole)
    if wrong_names := [name for name in expected if not torch.equal(state[name], expected[name])]:
        found.append(f"full state dicts of DTensors: {wrong_names}")
    return found


def moments() -> list[str]:
    """Optimizers' state by name: whole, of rank 0 alone, and back."""
    import tesserae as tsm

    found = []
    for use_orig_params in (True, False):
        model = wrap("qwen3_moe", tsm.transform(MODELS["qwen3_moe"]()), use_orig_params=use_orig_params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, batch(0, dist.get_rank())).backward()
        optimizer.step()
        plain = MODELS["qwen3_moe"]()
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        torch.stack([loss_of(plain, batch(0, rank)) for rank in range(RANKS)]).mean().backward()
        theirs.step()
        expected = {name: theirs.state[p] for name, p in plain.named_parameters()}
        for rank0_only in (False, True):
            options = FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
            config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, options, config):
                state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                again = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state))
            before = [t.clone() for values in optimizer.state.values() for t in values.values()]
            optimizer.load_state_dict(again)
            after = [t for values in optimizer.state.values() for t in values.values()]
            if len(before) != len(after) or not all(map(torch.equal, before, after)):
                found.append(f"optimizer state changes on its way (rank0_only={rank0_only})")
            if state and sorted(state["state"]) != sorted(expected):
                found.append(f"optimizer state of {sorted(state['state'])}")
            for name, values in state.get("state", {}).items():
                if not distance(values["exp_avg"], expected[name]["exp_avg"]) <= TOLERANCE:
                    found.append(f"exp_avg of {name} differs")
    return found


def turning() -> list[str]:
    """The dial moves experts too, to the bit."""
    import tesserae as tsm

    model = wrap("mixtral", tsm.transform(MODELS["mixtral"]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, degrees in enumerate([(1, 1, 1), (2, 4, 4), (4, 4, 4)]):
        loss_of(model, batch(10 * step, dist.get_rank())).backward()
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        before = whole_state(model)
        tsm.reshard(model, optimizer, degrees=degrees)
        if not all(map(torch.equal, before.values(), whole_state(model).values())):
            found.append(f"parameters changed on the way to {degrees}")
    if wrong := away_from(alone("mixtral", False, False, 1)[2], whole_state(model)):
        found.append(f"trained over changes of degrees: {wrong}")
    return found


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
    loss = loss_of(model, batch(0, dist.get_rank()))
    loss.backward()
    total = loss.detach().float()
    dist.all_reduce(total)
    found = [] if seen == [[torch.bfloat16, torch.float32]] * 2 else [f"experts get {seen}"]
    expected = alone("mixtral", False, False, 1)[0][0]
    return found if furthest([total.item() / RANKS], [expected]) <= 2e-2 else [*found, "the loss in bf16 is another"]


def without_tokens() -> list[str]:
    """A rank whose batch is empty takes part, and its experts learn from the tokens of others."""
    import tesserae as tsm

    def run(layer: nn.Module, x: Tensor) -> None:
        (layer(x).square().sum()).backward()

    rank = dist.get_rank()
    x = torch.randn(RANKS, 5, 32, generator=torch.Generator().manual_seed(1))
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
        begin = 4 * tsm.state.ep_rank
        if not distance(own, getattr(layers[0].experts, name).grad[begin : begin + 4]) <= TOLERANCE:
            found.append(f"the gradient of {name} is another where a rank has no tokens")
    return found


def test_state_dial_dtypes_and_empty_batches() -> None:
    assert run_ranks(beginnings, RANKS, deadline=120) == [[]] * RANKS


# ---- checkpoints ----
def saves(
    rank: int, world_size: int, degree: int, folder: str, load: bool, in_dtensors: bool = False
) -> dict[str, Any]:
    """Two steps of AdamW at this degree, saved; or what was saved, loaded. The logical tensors."""
    import tesserae as tsm

    if world_size > 1:
        tsm.init({"expert_parallel_degree": degree, "hybrid_shard_degree": 2 if load else 4})
    found = {}
    for name in ("mixtral", "gpt_oss"):
        model: Any = MODELS[name](seed=2 if load else 0)
        if world_size > 1:
            model = (sharded if in_dtensors else wrap)(name, tsm.transform(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if load:
            assert tsm.checkpoint.load(f"{folder}/{name}", model, optimizer).step == 2
            if in_dtensors:
                tsm.checkpoint.save(f"{folder}/again/{name}", model, optimizer, step=2)
        else:
            for step in range(2):
                loss_of(model, batch(step, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            tsm.checkpoint.save(f"{folder}/{name}", model, optimizer, step=2)
        if world_size == 1:
            found[name] = model.state_dict(), {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
            continue
        if in_dtensors:
            moments = {n: optimizer.state[p]["exp_avg"].full_tensor() for n, p in model.named_parameters()}
            found[name] = whole_dtensors(model), moments
            continue
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
            found[name] = model.state_dict(), {key: value["exp_avg"] for key, value in state.items()}
    return found


def test_checkpoints_load_at_any_degree(tmp_path: Path) -> None:
    """Bitwise, weights and moments: saved at E = 2, loaded at 4, at 1 and on one process; under fully_shard, too."""
    folder = str(tmp_path)
    saved = run_ranks(saves, RANKS, 2, folder, False, deadline=120)
    loaded = run_ranks(saves, RANKS, 4, folder, True, deadline=120)
    loaded += run_ranks(saves, RANKS, 1, folder, True, deadline=120)
    dtensors = run_ranks(saves, RANKS, 4, folder, True, True, deadline=120)
    alone_again = [saves(0, 1, 1, each, True) for each in (folder, f"{folder}/again")]
    for everyone in (*saved[1:], *loaded, *dtensors, *alone_again):
        for name, tensors in saved[0].items():
            for ours, theirs in zip(everyone[name], tensors, strict=True):
                assert set(ours) == set(theirs)
                assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


# ---- errors ----
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
    tsm.init({"expert_parallel_degree": 2, "context_parallel_degree": 2})
    check("context", lambda: tsm.transform(MODELS["gpt_oss"]()), ["cut the sequences", "mixtral"])
    model = tsm.transform(MODELS["mixtral"]())
    check("auxiliary", lambda: loss_of(model, batch(0, 0), auxiliary=True), ["output_router_logits", "False"])
    return found


def test_refused() -> None:
    assert run_ranks(refuses, RANKS, deadline=120) == [[]] * RANKS


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
