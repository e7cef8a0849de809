"""Trainers, checkpoints and DTensors of torch on torch.distributed's backend "tesserae"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tesserae
from ranks import run_ranks

Op = dist.ReduceOp


def start(backend: str = "tesserae", **arguments: object) -> None:
    dist.init_process_group(backend, **arguments)  # type: ignore[arg-type]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24)) for _ in range(3)))


def train(kind: str, rank: int) -> list[float]:
    model = network()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach(), Op.AVG)
        losses.append(loss.item())
    return losses


def trains(rank: int, world_size: int, backend: str, kind: str) -> list[float]:
    start(backend)
    return train(kind, rank)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_trainers_reach_the_losses_of_gloo(kind: str, ranks: int) -> None:
    ours = run_ranks(trains, ranks, "cpu:tesserae", kind, init=False)
    theirs = run_ranks(trains, ranks, "gloo", kind, init=False)
    if ranks == 2:  # a sum of two has one order
        assert ours == theirs
    else:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


def checkpoints(rank: int, world_size: int, folder: str) -> None:
    start()
    mesh = init_device_mesh("cpu", (world_size,))
    model = network()
    fully_shard(model, mesh=mesh)
    state = {"model": model.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=folder)
    other = network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fully_shard(other, mesh=mesh)
    found = {"model": other.state_dict(), "step": 0}
    dcp.load(found, checkpoint_id=folder)
    assert found["step"] == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), other.state_dict()[name].full_tensor()), name


def test_distributed_checkpoints(tmp_path: Path) -> None:
    run_ranks(checkpoints, 2, str(tmp_path / "checkpoint"), init=False)


def engine(rank: int, world_size: int) -> list[float]:
    start()
    tesserae.init({"hybrid_shard_degree": 2})
    model = FullyShardedDataParallel(network(), use_orig_params=True)
    assert type(model).__module__.startswith("tesserae")
    loss = model(torch.ones(2, 24)).square().mean()
    loss.backward()
    return [loss.item()]


def test_scripts_of_the_engine_run_on_it() -> None:
    assert len(set(map(tuple, run_ranks(engine, 2, init=False)))) == 1
