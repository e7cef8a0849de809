"""tsm.transform beside training: random numbers, models that begin without weights, the dial, errors, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from closeness import distance, furthest
from ranks import run_ranks
from tensor_models import MODELS, batch, loss_of, wrap
from tesserae.utils.module_utils import empty_module_params, move_buffers_to_device

TOLERANCE = 1e-5


# ---- random numbers ----
def dropout_of(name: str, seed: int, sequence: bool = False, **changes: Any) -> list[str]:
    """Masks of split activations differ between the ranks, those of repeated ones do not, and what is recomputed has
    the same."""
    import tesserae as tsm

    torch.manual_seed(seed)
    model = tsm.transform(MODELS[name](**changes), sequence_parallel=sequence).train()
    seen: list[Tensor] = []  # the generator's state where activations are the same on all ranks
    drawn: list[Tensor] = []  # and inside attention, where they are split
    masks: list[Tensor] = []  # on the residual branches, which are split if the sequence is
    for path, module in model.named_modules():
        if path.endswith("resid_dropout"):
            module.register_forward_hook(lambda _, __, y: masks.append(y == 0))
        if type(module).__name__.startswith("Row"):
            module.register_forward_hook(lambda *_: seen.append(torch.get_rng_state()))
        if type(module).__name__.startswith("Column") and "attn" in path:
            module.register_forward_hook(lambda *_: drawn.append(torch.get_rng_state()))
    tokens, found = batch(0, 0, 0), []
    torch.manual_seed(seed)
    first = loss_of(name, model, tokens)
    first.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    group = tsm.state.tp_process_group
    checks = [("repeated", seen, True), ("split", drawn, False)]
    checks += [("residual", masks, not sequence)] if masks else []
    for what, states, equal in checks:
        everyone: list[Any] = [None] * tsm.state.tp_size
        dist.all_gather_object(everyone, torch.stack(states), group)
        same = [bool(torch.equal(a, b)) for a, b in zip(everyone[0], everyone[-1], strict=True)]
        if set(same) != {equal}:
            found.append(f"{name}: random numbers of {what} activations are the same on the ranks: {same}")
    model.zero_grad()
    model.gradient_checkpointing_enable()
    torch.manual_seed(seed)
    again = loss_of(name, model, tokens)
    again.backward()
    if again.item() != first.item():
        found.append(f"{name}: the loss is {again.item()} with checkpointing, not {first.item()}")
    for key, parameter in model.named_parameters():
        if not distance(parameter.grad, gradients[key]) <= TOLERANCE:
            found.append(f"{name}: the gradient of {key} differs with checkpointing")
    return found


# ---- from the meta device, from rank 0 ----
def drawn(module: nn.Module) -> None:
    """A script's own init_method_using_config."""
    empty_module_params(module, torch.device("cpu"))
    move_buffers_to_device(module, torch.device("cpu"))
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.02)


def delayed(rank: int, world_size: int) -> list[str]:
    import tesserae as tsm
    from tesserae.delayed_param import DelayedParamIniter

    schedule = [{"step": 2, "hybrid_shard_degree": 1}]
    tsm.init(
        {
            "tensor_parallel_degree": 2,
            "hybrid_shard_degree": 2,
            "random_seed": 5,
            "dial": {"schedule": schedule},
        }
    )
    found = []

    def whole_state(model: FullyShardedDataParallel, kind: StateDictType = StateDictType.FULL_STATE_DICT) -> Any:
        with FullyShardedDataParallel.state_dict_type(model, kind):
            return model.state_dict()

    def check(what: str, model: FullyShardedDataParallel, expected: dict[str, Tensor]) -> None:
        state = whole_state(model)
        wrong = [key for key in expected if not torch.equal(state[key], expected[key])]
        found.extend([f"{what}: {wrong}"] if wrong else [])

    # Any degree gives the numbers of one.
    for name, method in (("llama", None), ("gpt_neox", None), ("llama", drawn), ("gpt2", drawn)):
        with torch.device("meta"):
            model, alone = MODELS[name](), MODELS[name]()
        states = []
        for part in (tsm.transform(model), alone):
            torch.manual_seed(3)
            init = DelayedParamIniter(part, method)
            with init.validate_params_and_buffers_inited():
                states.append(
                    wrap(
                        name,
                        part,
                        param_init_fn=init.get_param_init_fn(),
                        post_param_init_fn=init.get_post_param_init_fn(),
                    )
                )
        check(f"{name} from the meta device", states[0], whole_state(states[1]))

    # Also by a script's own function, which knows nothing of parts.
    for name in ("llama", "gpt2"):
        with torch.device("meta"):
            model, alone = MODELS[name](), MODELS[name]()
        states = []
        for part in (tsm.transform(model), alone):
            torch.manual_seed(3)
            states.append(wrap(name, part, param_init_fn=drawn))
        check(f"{name} by the script's own function", states[0], whole_state(states[1]))

    # Only rank 0 has the weights.
    for name in ("mistral", "gpt2"):
        with torch.device("cpu" if rank == 0 else "meta"):
            model = MODELS[name]()
        model = tsm.transform(model, load_state_dict_from_rank0=True)
        init = DelayedParamIniter(model)
        sharded = wrap(name, model, param_init_fn=init.get_param_init_fn(), sync_module_states=True)
        check(f"{name} from rank 0", sharded, MODELS[name]().state_dict())
        # Whole tensors, and sharded ones, go in and come out.
        other = MODELS[name](seed=1).state_dict()
        sharded.load_state_dict(copy.deepcopy(other))
        check(f"{name}, loaded", sharded, other)
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
            chunks = sharded.state_dict()
            sharded.load_state_dict(MODELS[name]().state_dict())
            sharded.load_state_dict(chunks)
        check(f"{name}, loaded from chunks", sharded, other)
        from torch.distributed.fsdp import FullStateDictConfig

        with FullyShardedDataParallel.state_dict_type(
            sharded, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        ):
            state = sharded.state_dict()
        if sorted(state) != (sorted(other) if rank == 0 else []):
            found.append(f"{name}: with rank0_only this rank has {list(state)}")
        elif not all(torch.equal(state[key], other[key]) for key in state):
            found.append(f"{name}: with rank0_only other values")

    # Masks.
    found += dropout_of("gpt2", 7, attn_pdrop=0.5, resid_pdrop=0.1, embd_pdrop=0.1)
    found += dropout_of("llama", 8, attention_dropout=0.5)
    found += dropout_of("gpt2", 9, sequence=True, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.1)
    found += sequences() + recomputed_lengths()
    return found + turning() + errors()


def sequences() -> list[str]:
    """With sequence parallelism a rank keeps less for backward, evaluation is as without it, and so is the output of a
    model that has no loss."""
    import tesserae as tsm

    def kept(model: nn.Module, tokens: Tensor) -> int:
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hold = model(input_ids=tokens, use_cache=False).logits
        assert hold.requires_grad
        return sum(seen.values())

    tokens, found = batch(0, 0, 0).repeat(1, 9), []  # 63 of them: not divided by 2
    whole = tsm.transform(MODELS["llama"]()).train()
    cut = tsm.transform(MODELS["llama"](), sequence_parallel=True).train()
    share = kept(cut, tokens) / kept(whole, tokens)
    if not share < 0.9:
        found.append(f"sequence parallelism keeps {share:.2f} of what a rank keeps without it")
    print(f"sequence parallelism keeps {share:.2f} of what a rank keeps without it")
    trained = [model(input_ids=tokens, use_cache=False).logits for model in (cut, whole)]
    if not distance(trained[0].detach(), trained[1].detach()) <= TOLERANCE:
        found.append("logits differ with sequence parallelism")
    generated = [m.eval().generate(tokens[:, :5], max_new_tokens=4, do_sample=False) for m in (cut, whole)]
    if not torch.equal(*generated):
        found.append("generates otherwise with sequence parallelism")
    return found


def recomputed_lengths() -> list[str]:
    """Reentrant checkpointing runs blocks again without saying of which forward they are: where two that wait for their
    backward differ in length, but not with padding, that is an error; what can be told is right."""
    import tesserae as tsm

    def gradients(model: nn.Module, *lengths: int) -> dict[str, Tensor]:
        model.zero_grad()
        torch.stack([loss_of("gpt2", model, tokens[:, :length]) for length in lengths]).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    tokens, found = batch(0, 0, 0), []
    models = [tsm.transform(MODELS["gpt2"](), sequence_parallel=cut).train() for cut in (True, False)]
    models[0].gradient_checkpointing_enable({"use_reentrant": True})
    for lengths in ((7,), (6, 6), (6,), (7, 7), (5,)):
        ours, targets = (gradients(model, *lengths) for model in models)
        far = max(distance(ours[name], targets[name]) for name in targets)
        if not far <= TOLERANCE:
            found.append(f"forwards of {lengths} tokens, computed again: gradients differ by {far:.1e}")
    with torch.no_grad():  # of which no backward comes
        loss_of("gpt2", models[0], tokens[:, :5])
    far = max(distance(ours, target) for ours, target in zip(*(gradients(m, 6).values() for m in models), strict=True))
    if not far <= TOLERANCE:
        found.append(f"after a forward without gradients: gradients differ by {far:.1e}")
    for lengths in ((6, 5), (5, 6)):
        try:
            gradients(models[0], *lengths)
            found.append(f"forwards of {lengths} tokens, computed again: no error")
        except tsm.InvalidArgument as error:
            if "use_reentrant=False" not in str(error):
                found.append(f"does not help: {error}")
    return found


def turning() -> list[str]:
    """The dial turns in the middle of training, by schedule and by hand, at all tensor indices."""
    import tesserae as tsm

    model = wrap("llama", tsm.transform(MODELS["llama"]()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, degrees = [], []
    for step in range(6):
        loss = loss_of("llama", model, batch(0, 0, tsm.state.dp_rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        degrees.append(tsm.state.hybrid_shard_degree)
        if step == 3:
            tsm.reshard(model, optimizer, hybrid_shard_degree=2)
    if degrees != [2, 2, 1, 1, 2, 2]:
        return [f"degrees {degrees}"]
    plain = MODELS["llama"]()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for _ in range(6):
        each = [loss_of("llama", plain, batch(0, 0, rank)) for rank in range(tsm.state.dp_size)]
        (sum(each) / len(each)).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(each[tsm.state.dp_rank].item())
    return [] if furthest(losses, expected) <= 1e-4 else [f"losses {losses} over changes of degree, not {expected}"]


def errors() -> list[str]:
    """What cannot be, and what the error must say."""
    import tesserae as tsm

    def mlp(**sizes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, sizes.get("inner", 12)), nn.GELU(), nn.Linear(sizes.get("inner", 12), 8))

    def adapted(model: nn.Module, parameters: list[str] | None = None) -> nn.Module:
        modules = [] if parameters else ["q_proj"]
        return get_peft_model(model, LoraConfig(r=2, target_modules=modules, target_parameters=parameters))

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 12), nn.Sequential(nn.LayerNorm(12), nn.GELU()), nn.Linear(12, 8))

    world = dist.group.WORLD
    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: tsm.transform(MODELS["llama"](num_key_value_heads=1)), ["heads", "1"]),
        (lambda: tsm.transform(mlp()), ["a Sequential over 2 ranks is not known", "plan="]),
        (lambda: tsm.transform(mlp(), plan={"*q_proj": "column"}), ["no module matches '*q_proj'", "'0', '2'"]),
        (lambda: tsm.transform(mlp(), plan={"0": "columns"}), ["'columns' of '0'", "column, row"]),
        (lambda: tsm.transform(mlp(inner=15), plan={"0": "column", "2": "row"}), ["15", "1, 3, 5, 15"]),
        (lambda: tsm.transform(mlp(), plan={"1": "row"}), ["1 is a GELU"]),
        (lambda: tsm.transform(mlp(), plan={"0": "row"}, sequence_parallel=True), ["sequence_parallel", "Leave it"]),
        (
            lambda: tsm.transform(normed(), plan={"0": "column", "1": "summed", "2": "row"}),
            ["summed of '1', a Sequential without", "that have some: '1.0'"],
        ),
        (lambda: tsm.transform(mlp(), plan={"0": "column", "1": "summed", "2": "row"}), ["summed of '1'", "none"]),
        (lambda: tsm.transform(mlp(), config={"moe": True}), ["config =", "expert_parallel_degree"]),
        (lambda: tsm.transform(tsm.transform(MODELS["llama"]())), ["transform a model once"]),
        (
            lambda: FullyShardedDataParallel(tsm.transform(MODELS["llama"]()), process_group=world),
            ["tsm.state.dp_process_group", "[0, 1, 2, 3]"],
        ),
        (lambda: tsm.transform(adapted(MODELS["llama"]())), ["q_proj is a Linear with adapters", "degree 1"]),
        (lambda: wrap("llama", adapted(tsm.transform(MODELS["llama"]()))), ["q_proj has adapters", "degree 1"]),
        (
            lambda: wrap("llama", adapted(tsm.transform(MODELS["llama"]()), ["mlp.down_proj.weight"])),
            ["down_proj has adapters", "degree 1"],
        ),
    ]
    found = []
    for index, (call, words) in enumerate(cases):
        try:
            call()
            found.append(f"case {index}: no error")
        except tsm.InvalidArgument as error:
            missing = [word for word in words if word not in str(error)]
            found += [f"case {index}: {missing} is not in {error}"] if missing else []
    tsm.transform(normed(), plan={"0": "column", "1*": "summed", "2": "row"})  # the norm is named, too
    found += unchanged_where_refused()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    plain = mlp()
    split = tsm.transform(copy.deepcopy(plain), plan={"0": "column", "2": "row"})
    if not distance(split(x).detach(), plain(x).detach()) <= TOLERANCE:
        found.append("a plan gives another output")
    if split[0].weight.shape != (6, 8) or split[2].weight.shape != (8, 6):
        found.append(f"a plan gives parts {split[0].weight.shape} and {split[2].weight.shape}")
    one_by_one = tsm.transform(copy.deepcopy(plain), plan={"0": "column_gather", "2": "row_scatter"})
    if not distance(one_by_one(x).detach(), plain(x).detach()) <= TOLERANCE:
        found.append("layers that gather and cut by themselves give another output")
    odd = mlp(inner=15)
    padded = tsm.transform(copy.deepcopy(odd), plan={"0": "column_gather"})
    if not distance(padded(x).detach(), odd(x).detach()) <= TOLERANCE:
        found.append("a column layer of 15 features gives another output on 2 ranks")
    return found


def unchanged_where_refused() -> list[str]:
    """What cannot be split is found before anything is: the model that was refused is what it was."""
    import tesserae as tsm

    def stack(last: int = 12, tied: bool = False) -> nn.Module:
        model = nn.ModuleList([nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, last, bias=False), nn.LSTM(8, 9)])
        if tied:
            model[2].weight = model[0].weight  # type: ignore[union-attr]
        return model

    def renamed() -> nn.Module:
        model = MODELS["llama"]()
        model.model.blocks = model.model.layers
        del model.model.layers
        return model

    plan = {"0": "vocabulary", "1": "summed"}
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (MODELS["llama"](intermediate_size=41), {}, "41"),
        (MODELS["gpt2"](n_inner=41), {}, "41"),  # its attention has divided numbers before
        (stack(15), {"plan": {**plan, "2": "column"}}, "15"),
        (stack(), {"plan": {**plan, "3": "divide:input_size,hidden_size"}}, "9"),
        (stack(), {"plan": {**plan, "3": "row"}}, "LSTM"),
        (stack(tied=True), {"plan": plan}, "2.weight is tied"),
        (stack(tied=True), {"plan": {**plan, "2": "row"}}, "cut differently"),
        (renamed(), {"sequence_parallel": True}, "no list of blocks named 'layers'"),
    ]
    found = []
    for index, (model, arguments, word) in enumerate(cases):
        parts = list(model.modules())
        before = [(type(part), dict(vars(part))) for part in parts]
        shapes = [parameter.shape for parameter in model.parameters()]
        with pytest.raises(tsm.InvalidArgument, match=word):
            tsm.transform(model, **arguments)
        changed = [p for p, (kind, own) in zip(parts, before, strict=True) if type(p) is not kind or vars(p) != own]
        if changed or shapes != [parameter.shape for parameter in model.parameters()]:
            found.append(f"case {index}: refused, and changed: {changed}")
    return found


def test_beginnings_dropout_dial_and_errors() -> None:
    assert run_ranks(delayed, 4, deadline=240) == [[]] * 4


# ---- checkpoints ----
def trained(rank: int, world_size: int, tp: int, folder: str, load: bool) -> dict[str, Any]:
    """Two steps of AdamW, saved; or what was saved, loaded at this degree. The logical tensors, from every rank."""
    import tesserae as tsm

    if tp > 1:
        tsm.init({"tensor_parallel_degree": tp})
    found = {}
    for name in ("mistral", "gpt2"):
        model: Any = tsm.transform(MODELS[name](seed=2 if load else 0))
        model = wrap(name, model) if tp > 1 else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if load:
            assert tsm.checkpoint.load(f"{folder}/{name}", model, optimizer).step == 2
        else:
            for step in range(2):
                loss_of(name, model, batch(step, 0, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            tsm.checkpoint.save(f"{folder}/{name}", model, optimizer, step=2)
        if tp == 1:
            named = dict(model.named_parameters())
            moments = {key: optimizer.state[p]["exp_avg"] for key, p in named.items()}
            found[name] = model.state_dict(), moments
            continue
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
            found[name] = model.state_dict(), {key: value["exp_avg"] for key, value in state.items()}
            again = FullyShardedDataParallel.optim_state_dict_to_load(
                model, optimizer, FullyShardedDataParallel.optim_state_dict(model, optimizer)
            )
        before = [t.clone() for values in optimizer.state.values() for t in values.values()]
        optimizer.load_state_dict(again)
        after = [t for values in optimizer.state.values() for t in values.values()]
        assert all(map(torch.equal, before, after)) and len(before) == len(after)
    return found


def test_checkpoints_load_at_any_degree(tmp_path: Path) -> None:
    """Bitwise: weights and moments."""
    saved = run_ranks(trained, 4, 2, str(tmp_path), False, deadline=240)
    loaded = run_ranks(trained, 4, 4, str(tmp_path), True, deadline=240)
    alone = trained(0, 1, 1, str(tmp_path), True)
    for everyone in (*saved[1:], *loaded, alone):
        for name, tensors in saved[0].items():
            for ours, theirs in zip(everyone[name], tensors, strict=True):
                assert set(ours) == set(theirs)
                assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def impossible_degrees(rank: int, world_size: int) -> list[str]:
    import tesserae as tsm

    texts = []
    scheduled = {"step": 1, "degrees": {"parameters": 1, "gradients": 2, "optimizer": 2}}
    for config in (
        {"tensor_parallel_degree": 3},
        {"tensor_parallel_degree": 2, "hybrid_shard_degree": 4},
        {"tensor_parallel_degree": 4, "dial": {"schedule": [scheduled]}},
        {"tensor_parallel_degree": 2, "hybrid_shard_degree": 3},
    ):
        with pytest.raises(tsm.InvalidArgument) as raised:
            tsm.init(config)
        texts.append(str(raised.value))
        assert not tsm.is_initialized()
    return texts


def test_impossible_degrees() -> None:
    """The text names what would be possible."""
    for tensor, data, scheduled, never in run_ranks(impossible_degrees, 4):
        assert "3" in tensor and "2 or 4" in tensor.replace(" and ", " or "), tensor
        assert "P=4 does not divide" in data or "O=4 does not divide" in data, data
        assert data.endswith("; N = 2 = 4 ranks / tensor_parallel_degree 2; this fits tensor_parallel_degree 1"), data
        assert scheduled.endswith("N = 1 = 4 ranks / tensor_parallel_degree 4; this fits tensor_parallel_degree 1, 2")
        assert never.endswith("; N = 2 = 4 ranks / tensor_parallel_degree 2"), never
