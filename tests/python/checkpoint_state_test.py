"""tsm.checkpoint where a rank has no rows, where modules show what they gathered, and of optimizers with state and
options of other kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import tesserae as tsm
from ranks import run_ranks
from tesserae.checkpoint import load, save


def whole(model: nn.Module) -> list[Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


# ---- fewer rows than ranks ----
def train_narrow(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 + 2 * step + rank))
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_narrow() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for part in (model[0], model[2], model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def resumes_narrow(rank: int, world_size: int, folder: Path) -> None:
    tsm.init({})
    model, optimizer = make_narrow()
    train_narrow(model, optimizer, rank, range(3))
    save(folder, model, optimizer, step=3)
    again, fresh = make_narrow()
    load(folder, again, fresh)
    options = StateDictOptions(full_state_dict=True)  # collective: a rank without state would not come
    theirs = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    ours = get_optimizer_state_dict(again, fresh, options=options)["state"]
    for name, state in theirs.items():
        for key, value in state.items():
            assert torch.equal(ours[name][key], value), (name, key)
    tsm.reshard(again, fresh, hybrid_shard_degree=1)  # nobody has to have trained between
    tsm.reshard(again, fresh, hybrid_shard_degree=2)
    train_narrow(model, optimizer, rank, range(3, 5))
    train_narrow(again, fresh, rank, range(3, 5))
    assert {float(fresh.state[parameter]["step"]) for parameter in again.parameters()} == {5.0}
    assert all(map(torch.equal, whole(again), whole(model)))


def test_a_rank_without_rows_has_state_again(tmp_path: Path) -> None:
    run_ranks(resumes_narrow, 2, tmp_path)


# ---- between a forward and its backward ----
def between(rank: int, world_size: int, folder: Path) -> None:
    """The root stays gathered from its forward on: what it shows then is in another dtype than the masters."""
    tsm.init({})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (model[0], model):
        fully_shard(part, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    values, result = whole(model), model(x)
    save(folder, model, optimizer, step=1)
    stored = tsm._C.Checkpoint.open(str(folder / "step-1")).tensors()
    assert {dtype for name, (_, dtype) in stored.items() if name.startswith("model/")} == {torch.float32}
    result.sum().backward()
    optimizer.step()
    model(x)  # no backward comes: its loss was not finite, say
    load(folder, model, optimizer)
    assert all(map(torch.equal, whole(model), values))
    assert torch.equal(model(x), result)


def test_between_a_forward_and_its_backward_masters_are_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(between, 2, tmp_path)


# ---- optimizers ----
def zero_redundancy(rank: int, world_size: int, folder: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with pytest.raises(tsm.InvalidArgument, match="ZeroRedundancyOptimizer keeps its state"):
        save(folder, model, optimizer, step=1)
    dist.barrier()


def test_an_optimizer_whose_state_is_elsewhere_is_refused(tmp_path: Path) -> None:
    run_ranks(zero_redundancy, 2, tmp_path)


class Counting(torch.optim.SGD):
    """Counts its steps in an integer of Python."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


def test_numbers_are_of_the_kind_that_each_optimizer_has(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        return model, [torch.optim.AdamW(model[0].parameters()), Counting(model[1].parameters(), lr=0.1)]

    def step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    for order in (1, -1):
        model, optimizers = make()
        step(model, optimizers)
        save(tmp_path / str(order), model, optimizers, step=1)
        again, fresh = make()
        load(tmp_path / str(order), again, fresh[::order])
        assert isinstance(fresh[0].state[again[0].weight]["step"], Tensor)
        assert fresh[1].state[again[1].weight]["step"] == 1
        step(again, fresh)
        step(model, optimizers)
        assert all(map(torch.equal, again.parameters(), model.parameters()))


def test_options_of_tensors_and_of_empty_groups_come_back(tmp_path: Path) -> None:
    def make(lr: float, beta: float) -> torch.optim.Optimizer:
        groups = [{"params": [model.weight]}, {"params": [], "lr": lr}]
        return torch.optim.AdamW(groups, lr=0.1, betas=(torch.tensor(beta), torch.tensor(0.99)), foreach=False)

    model = nn.Linear(2, 2, bias=False)
    save(tmp_path, model, make(0.05, 0.8), step=1)
    optimizer = make(0.2, 0.5)
    load(tmp_path, model, optimizer)
    assert optimizer.param_groups[1]["lr"] == 0.05
    first, second = optimizer.param_groups[0]["betas"]
    assert isinstance(first, Tensor)
    assert (first.item(), second.item()) == (pytest.approx(0.8), pytest.approx(0.99))


# ---- from DCP ----
def test_tensors_beside_model_and_optimizer_are_extra(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    large = torch.arange(5 << 20, dtype=torch.int32)
    state = {"model": model.state_dict(), "epoch": 3, "sampler": {"seed": 7, "order": torch.arange(4)}, "large": large}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tsm.checkpoint.from_dcp(tmp_path / "dcp", tmp_path / "ours")
    extra = load(path, model).extra
    assert torch.equal(extra["sampler"].pop("order"), torch.arange(4))
    assert extra == {"epoch": 3, "sampler": {"seed": 7}}
    assert torch.equal(tsm._C.Checkpoint.open(str(path)).read("state/large"), large)
