"""FSDP.optim_state_dict and its kin give and take what torch's own FSDP1 does, for optimizers in any state.

As in state_dict_test.py each case runs on FSDP1 and on ours in the same ranks, and each loads what the other saves.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, AdamW, Optimizer

import tesserae as tsm
from models import MODELS, tokens
from ranks import run_ranks
from same_state import differences
from with_ours import with_ours

CPU = torch.device("cpu")
CLOSE = 1e-4  # gradients are summed in another order, second moments square that


def decay_groups(model: nn.Module, flat: bool) -> list[dict[str, Any]]:
    """Norms and biases do not decay; where parameters are flat it is one of the units."""
    named = list(model.named_parameters())
    second = [p for name, p in named if ("blocks.1" in name if flat else "norm" in name or "bias" in name)]
    ids = {id(p) for p in second}
    return [
        {"params": [p for _, p in named if id(p) not in ids], "weight_decay": 0.1, "lr": 0.01},
        {"params": second, "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module, bool], Optimizer]] = {
    "adamw": lambda model, flat: AdamW(model.parameters(), lr=1e-3),
    "amsgrad in groups": lambda model, flat: AdamW(decay_groups(model, flat), lr=1e-3, amsgrad=True),
    "momentum": lambda model, flat: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "plain": lambda model, flat: SGD(model.parameters(), lr=0.1),
}


@dataclass(frozen=True)
class Case:
    model: str
    optimizer: str = "adamw"
    use_orig_params: bool = True
    strategy: str = "FULL_SHARD"
    mesh: bool = False
    steps: int = 2


CASES = [
    Case("tied"),
    Case("tied", use_orig_params=False),
    Case("t5", "momentum", mesh=True),
    Case("llama", use_orig_params=False, mesh=True),
    Case("tied", "amsgrad in groups"),
    Case("tied", "amsgrad in groups", use_orig_params=False),
    Case("frozen", "momentum"),
    Case("tied", "plain"),
    Case("tied", "plain", use_orig_params=False),
    Case("gpt_neox", steps=0),
    Case("gpt_neox", "momentum", steps=0, use_orig_params=False),
    Case("unused", "momentum", use_orig_params=False),
    Case("twice", strategy="SHARD_GRAD_OP"),
    Case("tied", strategy="NO_SHARD"),
    Case("tied", strategy="HYBRID_SHARD", mesh=True),
]


def build(case: Case, seed: int = 0) -> FSDP:
    kind = MODELS[case.model]
    shape = (dist.get_world_size() // 2, 2) if case.strategy == "HYBRID_SHARD" else (dist.get_world_size(),)
    return FSDP(
        kind(seed),
        auto_wrap_policy=ModuleWrapPolicy(set(kind.units)),
        device_id=CPU,
        use_orig_params=case.use_orig_params,
        sharding_strategy=ShardingStrategy[case.strategy],
        device_mesh=init_device_mesh("cpu", shape) if case.mesh else None,
    )


def train(case: Case, model: nn.Module, optimizer: Optimizer, first: int = 0, steps: int | None = None) -> list[float]:
    losses = []
    for step in range(first, first + (case.steps if steps is None else steps)):
        optimizer.zero_grad()
        loss = MODELS[case.model].loss(model, tokens(step, 0, dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def build_trained(case: Case) -> tuple[FSDP, Optimizer]:
    model = build(case)
    optimizer = OPTIMIZERS[case.optimizer](model, not case.use_orig_params)
    train(case, model, optimizer)
    return model, optimizer


def settings(model: nn.Module, kind: str, offload: bool = False, rank0_only: bool = False) -> Any:
    """`offload=True` makes FSDP1 return the last kind of state under all names where models compute on the host."""
    if kind == "full":
        config = FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
        return FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config)
    config = ShardedOptimStateDictConfig(offload_to_cpu=offload)
    return FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), config)


def save(model: nn.Module, optimizer: Optimizer, kind: str, **options: bool) -> dict[str, Any]:
    with settings(model, kind, **options):
        return FSDP.optim_state_dict(model, optimizer)


def load(model: nn.Module, optimizer: Optimizer, kind: str, state: dict[str, Any]) -> None:
    with settings(model, kind):
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state)))


def saves_what_fsdp1_saves(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    warnings.simplefilter("ignore")
    theirs = []
    for case in cases:
        print("FSDP1", case, flush=True)
        model, optimizer = build_trained(case)
        theirs.append((model, optimizer, save(model, optimizer, "full"), save(model, optimizer, "sharded")))
    tsm.init()
    found = []
    for case, (their_model, their_optimizer, full, sharded) in zip(cases, theirs):
        print(case, flush=True)  # in the report, if it is the last
        model, optimizer = build_trained(case)
        ours = save(model, optimizer, "full")
        texts = differences(ours, full, CLOSE)
        texts += differences(save(model, optimizer, "full", offload=True), ours, path="on the host")
        alone = save(model, optimizer, "full", rank0_only=True)
        texts += differences(alone, ours if rank == 0 else {}, path="rank 0 only")
        chunks = save(model, optimizer, "sharded")
        texts += differences(chunks, sharded, CLOSE, "sharded")
        for kind, state, expected in (("full", full, full), ("sharded", sharded, full), ("full", ours, ours)):
            other = build(case)
            fresh = OPTIMIZERS[case.optimizer](other, not case.use_orig_params)
            load(other, fresh, kind, state)
            texts += differences(save(other, fresh, "full"), expected, path=f"{kind}, loaded")
        for kind, state in (("full", ours), ("sharded", chunks)):
            load(their_model, their_optimizer, kind, state)
            texts += differences(save(their_model, their_optimizer, "full"), ours, path=f"{kind}, loaded by FSDP1")
        found += [f"{case}: {text}" for text in texts]
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_saves_what_fsdp1_saves(world_size: int) -> None:
    cases = [case for case in CASES if world_size == 4 or case.strategy != "HYBRID_SHARD"]
    ranks = run_ranks(saves_what_fsdp1_saves, world_size, cases, deadline=240)
    found = [text for texts in ranks for text in texts]
    assert not found, "\n".join(found[:40])


# ---- the older names, and going on after a load ----
def training_goes_on(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Each way to carry the state over gives the losses of training that was not interrupted."""
    case = Case("tied", "amsgrad in groups", use_orig_params)
    make = OPTIMIZERS[case.optimizer]
    model, optimizer = build_trained(case)
    weights = model.state_dict()
    full = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(full) == (rank == 0)
    everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert differences(save(model, optimizer, "full"), everywhere) == []
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    assert differences(save(model, optimizer, "sharded"), sharded) == []
    expected = train(case, model, optimizer, first=2, steps=2)
    for name, convert in {
        "scatter": lambda new, fresh: FSDP.scatter_full_optim_state_dict(full, new, optim=fresh),
        "scatter, by input": lambda new, fresh: FSDP.scatter_full_optim_state_dict(
            full, new, decay_groups(new, not use_orig_params)
        ),
        "shard": lambda new, fresh: FSDP.shard_full_optim_state_dict(everywhere, new, optim=fresh),
        "flatten": lambda new, fresh: FSDP.flatten_sharded_optim_state_dict(sharded, new, fresh),
        "directly": lambda new, fresh: FSDP.optim_state_dict_to_load(new, fresh, everywhere, load_directly=True),
    }.items():
        new = build(case, seed=1)
        fresh = make(new, not use_orig_params)
        new.load_state_dict(weights)
        converted = convert(new, fresh)
        if name != "directly":
            fresh.load_state_dict(converted)
        assert train(case, new, fresh, first=2, steps=2) == pytest.approx(expected, rel=1e-6), name


def keys_become_ids_and_names(rank: int, world_size: int, use_orig_params: bool) -> None:
    """An optimizer of the model without FSDP takes the state, and the reverse."""
    case = Case("twice", use_orig_params=use_orig_params)
    model, optimizer = build_trained(case)
    full = save(model, optimizer, "full")
    kind = MODELS[case.model]
    plain = kind()
    theirs = AdamW(plain.parameters())
    ids = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=theirs)
    theirs.load_state_dict(ids)
    names = FSDP.rekey_optim_state_dict(theirs.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=theirs)
    assert differences(names["state"], full["state"]) == []
    if use_orig_params:
        own = FSDP.rekey_optim_state_dict(optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
        assert set(own["state"]) <= set(full["state"])
    other = build(case)
    fresh = AdamW(other.parameters())
    load(other, fresh, "full", names)
    assert differences(save(other, fresh, "full")["state"], full["state"]) == []


# ---- optimizers in any state ----
class Keeping(SGD):
    """Keeps state of its own making."""

    def __init__(self, parameters: Any, make: Callable[[Tensor], Any]) -> None:
        super().__init__(parameters, lr=0.0)
        self.make = make

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["kept"] = self.make(parameter)


def keeping(use_orig_params: bool, make: Callable[[Tensor], Any]) -> tuple[FSDP, Optimizer]:
    model = build(Case("tied", use_orig_params=use_orig_params))
    optimizer = Keeping(model.parameters(), make)
    train(Case("tied"), model, optimizer, steps=1)
    return model, optimizer


def state_of_other_makes(rank: int, world_size: int, use_orig_params: bool) -> None:
    whole = MODELS["tied"]()
    for make, expected in (
        (lambda p: torch.full_like(p, 3, dtype=torch.int8), lambda p: torch.full_like(p, 3, dtype=torch.int8)),
        (lambda p: p.detach().double() * 2, lambda p: p.detach().double() * 2),
        (lambda p: torch.tensor(5), lambda p: torch.tensor(5)),
        (lambda p: ("a", {"b": None}), lambda p: ("a", {"b": None})),
    ):
        model, optimizer = keeping(use_orig_params, make)
        full = save(model, optimizer, "full")
        assert differences(full["state"], {name: {"kept": expected(p)} for name, p in whole.named_parameters()}) == []
        with settings(model, "full"):
            converted = FSDP.optim_state_dict_to_load(model, optimizer, full)
            assert differences(FSDP.optim_state_dict(model, optimizer, converted), full) == []
    model, optimizer = keeping(use_orig_params, lambda p: torch.zeros(7))
    with pytest.raises(tsm.InvalidArgument, match=r"state 'kept' of .* has shape \[7\]"):
        save(model, optimizer, "full")
    model, optimizer = keeping(use_orig_params, lambda p: dist.get_rank())
    with pytest.raises(tsm.InvalidArgument, match="ranks differ in state 'kept'"):
        save(model, optimizer, "full")
    wrong = {"state": {"embedding.weight": {"kept": torch.zeros(3)}}}
    with pytest.raises(tsm.InvalidArgument, match=r"'kept' of embedding.weight has shape \[3\]"):
        load(model, optimizer, "full", wrong)
    with pytest.raises(tsm.InvalidArgument, match="expected a state dict with 'state'"):
        load(model, optimizer, "full", {})
    with pytest.raises(tsm.InvalidArgument, match="has not: .'nobody'"):
        load(model, optimizer, "full", {"state": {}, "param_groups": [{"params": ["nobody"]}]})
    with FSDP.summon_full_params(model, writeback=False), pytest.raises(tsm.InvalidArgument, match="inside summon"):
        save(model, optimizer, "full")


def not_everything_is_ours(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Ignored parameters, parameters outside of FSDP, some that the optimizer has not, state without a parameter."""
    torch.manual_seed(0)
    inner, kind = MODELS["tied"](), MODELS["tied"]
    inside = FSDP(
        inner,
        auto_wrap_policy=ModuleWrapPolicy(set(kind.units)),
        ignored_modules=[inner.blocks[0].norm],
        use_orig_params=use_orig_params,
    )
    model = nn.ModuleDict({"inside": inside, "outside": nn.Linear(2, 2)})
    last = set(inside.module.blocks[1].parameters())
    optimizer = AdamW([p for p in model.parameters() if p not in last])
    (kind.loss(inside, tokens(0, 0, rank)) + model["outside"](torch.ones(2)).sum()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"]["note"] = "of the user"
    with settings(model, "full"), pytest.warns(UserWarning, match="own state 'note'"):
        full = FSDP.optim_state_dict(model, optimizer, state)
    names = {name for name, _ in kind().named_parameters() if "blocks.1" not in name}
    expected = {f"inside.{name}" for name in names} | {"outside.weight", "outside.bias"}
    assert set(full["state"]) == expected | {"note"}
    assert set(full["param_groups"][0]["params"]) == expected
    assert full["state"]["inside.blocks.0.norm.weight"]["exp_avg"].shape == (24,)
    converted = FSDP.optim_state_dict_to_load(model, optimizer, full)
    assert converted["state"].pop("note") == "of the user"
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(converted)
    assert differences(optimizer.state_dict(), before) == []


def parameters_without_state(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Units that have never had a gradient have none; FSDP1 cannot save that with use_orig_params=True."""
    case = Case("unused", use_orig_params=use_orig_params)
    model, optimizer = build_trained(case)
    full = save(model, optimizer, "full")
    with_state = {name for name, _ in MODELS["unused"]().named_parameters() if "spare" not in name}
    assert set(full["state"]) == with_state
    fresh = AdamW(model.parameters())
    load(model, fresh, "full", full)
    assert differences(save(model, fresh, "full")["state"], full["state"]) == []
    assert differences(fresh.state_dict()["state"], optimizer.state_dict()["state"]) == []
    if not use_orig_params:  # one flat parameter: what is missing in the middle is zero
        del full["state"]["blocks.0.up.weight"]
        load(model, fresh, "full", full)
        again = save(model, fresh, "full")["state"]
        assert not again["blocks.0.up.weight"]["exp_avg"].any() and again["blocks.0.up.weight"]["step"] == 2
        full["state"]["blocks.0.up.bias"]["step"] += 1
        with pytest.raises(tsm.InvalidArgument, match="differ in state 'step'"):
            load(model, fresh, "full", full)


def scalar_parameters(rank: int, world_size: int, use_orig_params: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 5), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    model = FSDP(Scaled(), use_orig_params=use_orig_params)
    optimizer = AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    for kind in ("full", "sharded"):
        state, fresh = save(model, optimizer, kind), AdamW(model.parameters())
        assert state["state"]["scale"]["exp_avg"].shape == ()
        load(model, fresh, kind, state)
        assert differences(fresh.state_dict(), optimizer.state_dict()) == []


RULES = [
    training_goes_on,
    keys_become_ids_and_names,
    state_of_other_makes,
    not_everything_is_ours,
    parameters_without_state,
    scalar_parameters,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Callable[..., None]) -> None:
    run_ranks(with_ours, 2, rule)


# ---- other numbers of ranks ----
def saved(rank: int, world_size: int, case: Case, degrees: dict[str, int] | None) -> tuple[dict[str, Any], list[float]]:
    warnings.simplefilter("ignore")
    tsm.init({"degrees": degrees} if degrees else None)
    model, optimizer = build_trained(case)
    return model.state_dict(), save(model, optimizer, "full")


def loaded(rank: int, world_size: int, case: Case, weights: dict[str, Any], state: dict[str, Any]) -> list[str]:
    warnings.simplefilter("ignore")
    tsm.init()
    model = build(case, seed=1)
    optimizer = OPTIMIZERS[case.optimizer](model, not case.use_orig_params)
    model.load_state_dict(weights)
    load(model, optimizer, "full", state)
    return differences(model.state_dict(), weights) + differences(save(model, optimizer, "full"), state)


@pytest.mark.parametrize("degrees", [None, {"parameters": 1, "gradients": 2, "optimizer": 4}], ids=["equal", "three"])
def test_other_numbers_of_ranks(degrees: dict[str, int] | None) -> None:
    weights, state = run_ranks(saved, 4, Case("tied", use_orig_params=True), degrees)[0]
    assert run_ranks(loaded, 2, Case("tied", use_orig_params=True), weights, state) == [[], []]
    assert run_ranks(loaded, 1, Case("tied", use_orig_params=False), weights, state) == [[]]
