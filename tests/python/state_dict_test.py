"""state_dict() and load_state_dict() of sharded models give and take what torch's own FSDP1 does.

Each case runs twice in the same ranks: on FSDP1, and after tsm.init() on ours. FSDP1's state dicts are also loaded into
our models, and ours into FSDP1's.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tesserae as tsm
from models import MODELS, WIDTH, tokens
from ranks import run_ranks
from same_state import differences
from with_ours import with_ours

CPU = torch.device("cpu")
FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    model: str
    use_orig_params: bool = True
    strategy: str = "FULL_SHARD"
    mesh: bool = False
    precision: MixedPrecision | None = None
    checkpointing: bool = False


CASES = [
    Case("t5"),
    Case("t5", use_orig_params=False, checkpointing=True),
    Case("llama", strategy="SHARD_GRAD_OP", precision=LOW),
    Case("llama", use_orig_params=False, mesh=True, precision=LOW),
    Case("tied", mesh=True),
    Case("tied", use_orig_params=False, strategy="NO_SHARD"),
    Case("frozen", precision=LOW, checkpointing=True),
    Case("unused", strategy="NO_SHARD"),
    Case("buffers", precision=LOW),
    Case("buffers", use_orig_params=False, precision=LOW),
    Case("buffers", strategy="HYBRID_SHARD", mesh=True),
]


def settings(offload: bool = True) -> dict[str, tuple[StateDictType, Any]]:
    """New ones each time: FSDP1 writes into them. `offload=False`: nothing is moved to the host. Where models compute
    there it makes no difference, but FSDP1 crashes."""
    return {
        "full": (FULL, FullStateDictConfig()),
        "full on rank 0": (FULL, FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)),
        "sharded": (SHARDED, ShardedStateDictConfig()),
        "sharded on the host": (SHARDED, ShardedStateDictConfig(offload_to_cpu=offload)),
    }


class Normed(nn.Module):
    """Buffers of several dtypes, one of them not persistent, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH, dtype=torch.float64))
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.loaded: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.scale.to(x.dtype)

    def get_extra_state(self) -> Any:
        return {"answer": 42}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


def build(case: Case, seed: int = 0) -> FSDP:
    if case.model == "buffers":
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(Normed(), nn.Linear(WIDTH, WIDTH), Normed())
        units: set[type[nn.Module]] = {Normed}
    else:
        kind = MODELS[case.model]
        model, units = kind(seed), set(kind.units)
    shape = (dist.get_world_size() // 2, 2) if case.strategy == "HYBRID_SHARD" else (dist.get_world_size(),)
    sharded = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy(units),
        device_id=CPU,
        use_orig_params=case.use_orig_params,
        sharding_strategy=ShardingStrategy[case.strategy],
        mixed_precision=case.precision,
        device_mesh=init_device_mesh("cpu", shape) if case.mesh else None,
    )
    if case.checkpointing:
        apply_activation_checkpointing(sharded, check_fn=lambda module: type(module) in units)
    return sharded


def run_once(case: Case, model: FSDP) -> None:
    """Buffers have their dtype of mixed precision from the first forward on."""
    with torch.no_grad():
        if case.model == "buffers":
            model(torch.ones(3, WIDTH))
        else:
            MODELS[case.model].loss(model, tokens(0, 0, 0))


def states(model: FSDP, offload: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, config) in settings(offload).items():
        with FSDP.state_dict_type(model, kind, config):
            found[name] = model.state_dict()
    outer = nn.ModuleDict({"inside": model})
    found["inside a plain module"] = outer.state_dict()
    found["with variables"] = model.state_dict(keep_vars=True)
    found["with a prefix"] = model.state_dict(prefix="a.b.")
    return found


def load(model: FSDP, name: str, state: dict[str, Any]) -> dict[str, Any]:
    """The full state dict of the model after it has loaded `state`, of that setting."""
    with FSDP.state_dict_type(model, *settings()[name]):
        keys = model.load_state_dict(state)
    assert not keys.missing_keys and not keys.unexpected_keys
    return model.state_dict()


def saves_what_fsdp1_saves(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    warnings.simplefilter("ignore")
    theirs = []
    for case in cases:
        model = build(case)
        run_once(case, model)
        theirs.append((model, states(model, offload=False)))
    tsm.init()
    found = []
    for case, (their_model, expected) in zip(cases, theirs):
        print(case, flush=True)  # in the report, if it is the last
        model = build(case)
        run_once(case, model)
        ours = states(model)
        if rank > 0:  # FSDP1 has all of it everywhere with NO_SHARD, and on the first rank of each replica
            full = expected["full on rank 0"].items()
            expected["full on rank 0"] = {key: value for key, value in full if key.endswith("_extra_state")}
        texts = differences(ours, expected, 0.0)
        texts += [f"order in {name}" for name in expected if list(ours[name]) != list(expected[name])]
        for name in ("full", "sharded"):
            other = build(case, seed=1)
            texts += differences(load(other, name, expected[name]), expected["full"], 0.0, f"{name}, loaded")
            texts += differences(load(their_model, name, ours[name]), ours["full"], 0.0, f"{name}, loaded by FSDP1")
        found += [f"{case}: {text}" for text in texts]
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_saves_what_fsdp1_saves(world_size: int) -> None:
    cases = [case for case in CASES if world_size == 4 or case.strategy != "HYBRID_SHARD"]
    ranks = run_ranks(saves_what_fsdp1_saves, world_size, cases, deadline=240)
    found = [text for texts in ranks for text in texts]
    assert not found, "\n".join(found[:40])


# ---- our own rules ----
def plain_model(seed: int = 0) -> nn.Module:
    return MODELS["tied"](seed)


def names_are_those_of_the_module(rank: int, world_size: int, use_orig_params: bool) -> None:
    """What is missing, unexpected or of another shape is called as in the module without FSDP."""
    model = build(Case("tied", use_orig_params))
    state = plain_model(seed=1).state_dict()
    del state["blocks.0.up.weight"], state["blocks.1.norm.bias"]
    state |= {"blocks.0.extra": torch.zeros(2), "further.on": torch.zeros(2)}
    keys = model.load_state_dict(state, strict=False)
    assert sorted(keys.missing_keys) == ["blocks.0.up.weight", "blocks.1.norm.bias"]
    assert sorted(keys.unexpected_keys) == ["blocks.0.extra", "further.on"]
    now, before, after = model.state_dict(), plain_model().state_dict(), plain_model(seed=1).state_dict()
    for name, value in now.items():
        assert torch.equal(value, (before if name in keys.missing_keys else after)[name]), name
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"blocks.0.up.weight".*Unexpected.*"blocks.0.extra"'):
        model.load_state_dict(state)
    state["blocks.1.up.bias"] = torch.zeros(5)
    with pytest.raises(RuntimeError, match="size mismatch for blocks.1.up.bias"):
        model.load_state_dict(state, strict=False)
    with pytest.raises(tsm.InvalidArgument, match="assign=True"):
        model.load_state_dict(plain_model().state_dict(), assign=True)
    assert differences(load(model, "full", plain_model().state_dict()), plain_model().state_dict()) == []


def an_exception_leaves_the_model_sharded(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Also where nobody of ours is around the call that threw."""
    kind = MODELS["tied"]
    for wrap in (lambda model: model, lambda model: nn.Sequential(model)):
        model = build(Case("tied", use_orig_params))
        shapes = [parameter.shape for parameter in model.parameters()]
        outer = wrap(model)
        state = outer.state_dict()

        def fail(*_: Any) -> None:
            raise KeyError("in the middle")

        handles = [
            model.module.blocks[1].module.up.register_load_state_dict_pre_hook(fail),
            model.module.blocks[1].module.up.register_state_dict_pre_hook(fail),
        ]
        for call in (outer.state_dict, functools.partial(outer.load_state_dict, state)):
            with pytest.raises(KeyError, match="in the middle"):
                call()
            loss = kind.loss(model, tokens(0, 0, rank))
            loss.backward()
            assert [parameter.shape for parameter in model.parameters()] == shapes
            assert loss.item() == pytest.approx(kind.loss(kind(), tokens(0, 0, rank)).item(), rel=1e-5)
        for handle in handles:
            handle.remove()
        assert differences(outer.state_dict(), state) == []
        outer.load_state_dict(state)


def hooks_of_the_user_see_the_whole(rank: int, world_size: int, use_orig_params: bool) -> None:
    """They may rename, transform and read: copies are made of whatever is ours by then."""
    model = build(Case("tied", use_orig_params))
    block = model.module.blocks[0].module

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        assert module is block and state[f"{prefix}up.weight"].shape == (41, WIDTH)
        state[f"{prefix}other_name"] = state.pop(f"{prefix}up.weight")
        state[f"{prefix}half"] = state[f"{prefix}down.weight"][:5]

    seen = []
    block._register_state_dict_hook(rename)
    model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: seen.append("before"))
    model._register_state_dict_hook(lambda module, state, prefix, metadata: seen.append(sorted(state)))
    state, expected = model.state_dict(), plain_model().state_dict()
    assert seen == ["before", sorted(state)]
    assert torch.equal(state["blocks.0.other_name"], expected["blocks.0.up.weight"])
    assert torch.equal(state["blocks.0.half"], expected["blocks.0.down.weight"][:5])
    assert "blocks.0.up.weight" not in state
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()  # tied, as in the module
    addresses = [value.untyped_storage().data_ptr() for value in state.values()]
    assert len(set(addresses)) == len(state) - 1


def local_state_dicts_come_back(rank: int, world_size: int, use_orig_params: bool) -> None:
    case, expected = Case("tied", use_orig_params), plain_model(seed=1).state_dict()
    model, source = build(case), build(case, seed=1)
    with FSDP.state_dict_type(source, LOCAL):
        state = source.state_dict()
    assert set(state) == {"_flat_param", "blocks.0._flat_param", "blocks.1._flat_param"}
    with FSDP.state_dict_type(model, LOCAL):
        model.load_state_dict(state)
    assert differences(model.state_dict(), expected) == []
    two = build(Case("tied", use_orig_params, strategy="NO_SHARD"))
    with FSDP.state_dict_type(two, LOCAL):
        assert differences(two.state_dict(), plain_model().state_dict()) == []  # not sharded: the full one
    mesh = build(Case("tied", use_orig_params, mesh=True))
    with FSDP.state_dict_type(mesh, LOCAL), pytest.raises(tsm.InvalidArgument, match="with a device mesh"):
        mesh.state_dict()
    other = FSDP(MODELS["tied"](), device_id=CPU, use_orig_params=use_orig_params)
    with FSDP.state_dict_type(other, LOCAL), pytest.raises(tsm.InvalidArgument, match="was saved with other degrees"):
        other.load_state_dict(state)


def types_are_settings(rank: int, world_size: int, use_orig_params: bool) -> None:
    """The settings of before come back after the context, also after an exception."""
    model = nn.Sequential(build(Case("tied", use_orig_params)))
    assert FSDP.get_state_dict_type(model).state_dict_type == FULL
    with pytest.raises(KeyError), FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        assert FSDP.get_state_dict_type(model).state_dict_config == ShardedStateDictConfig(offload_to_cpu=True)
        raise KeyError
    assert FSDP.get_state_dict_type(model).state_dict_type == FULL
    before = FSDP.set_state_dict_type(model, LOCAL)
    assert (before.state_dict_type, FSDP.get_state_dict_type(model).state_dict_type) == (FULL, LOCAL)
    assert FSDP.fsdp_modules(model, root_only=True) == [model[0]]
    assert len(FSDP.fsdp_modules(model)) == 3


RULES = [
    names_are_those_of_the_module,
    an_exception_leaves_the_model_sharded,
    hooks_of_the_user_see_the_whole,
    local_state_dicts_come_back,
    types_are_settings,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Callable[..., None]) -> None:
    run_ranks(with_ours, 2, rule)


def three_degrees(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")
    tsm.init({"degrees": {"parameters": 1, "gradients": 2, "optimizer": 2}})
    expected = plain_model(seed=1).state_dict()
    model, source = build(Case("tied")), build(Case("tied"), seed=1)
    for name, (kind, config) in settings().items():
        if name == "full on rank 0":
            continue
        with FSDP.state_dict_type(source, kind, config):
            state = source.state_dict()
        model.load_state_dict(plain_model().state_dict())
        assert differences(load(model, name, state), expected) == []
        loss = MODELS["tied"].loss(model, tokens(0, 0, rank)).item()  # the parameter pieces have it too
        assert loss == pytest.approx(MODELS["tied"].loss(plain_model(seed=1), tokens(0, 0, rank)).item(), rel=1e-5)
    with FSDP.state_dict_type(source, LOCAL), pytest.raises(tsm.InvalidArgument, match="some hold the same part"):
        source.state_dict()


def test_three_degrees() -> None:
    run_ranks(three_degrees, 4)
