"""Losses of gradients: forces inside the root's forward, penalties after it. The graph that create_graph makes reads
parameters again, and nothing announces it. What is compared is one process that trains on the batches of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tesserae as tsm
from ranks import run_ranks

RANKS, STEPS, WIDTH = 2, 3, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Energy(nn.Module):
    """Of positions; with `forces`, these are its gradient."""

    def __init__(self, forces: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(WIDTH, 1)
        self.forces = forces

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        energy = self.head(torch.tanh(self.blocks(positions))).sum()
        if not self.forces:
            return energy, None
        return energy, torch.autograd.grad(energy, positions, create_graph=True)[0]


@dataclass(frozen=True)
class Case:
    forces: bool  # inside the forward
    face: str
    frees: bool = True


CASES = [Case(forces, face) for forces in (True, False) for face in ("FSDP", "flat FSDP", "fully_shard")]
CASES += [Case(forces, "fully_shard", frees=False) for forces in (True, False)]


def wrap(case: Case, model: Energy) -> nn.Module:
    if case.face == "fully_shard":
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=case.frees)
        return fully_shard(model, reshard_after_forward=case.frees)
    policy, cpu = ModuleWrapPolicy({Block}), torch.device("cpu")
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=case.face == "FSDP", device_id=cpu)


def loss_of(model: nn.Module, step: int, rank: int, forces: bool) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    positions = torch.randn(5, WIDTH, generator=generator).requires_grad_()
    energy, found = model(positions)
    if not forces:
        found = torch.autograd.grad(energy, positions, create_graph=True)[0]
    return (found - 1).square().mean() + 0.1 * energy.square()


def train(model: nn.Module, ranks: range, forces: bool) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = torch.stack([loss_of(model, step, rank, forces) for rank in ranks]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trains_as_one_process(rank: int, world_size: int, case: Case) -> None:
    tsm.init()
    expected = train(Energy(case.forces), range(world_size), case.forces)
    mean = torch.tensor(train(wrap(case, Energy(case.forces)), range(rank, rank + 1), case.forces))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_one_process(case: Case) -> None:
    run_ranks(trains_as_one_process, RANKS, case)
