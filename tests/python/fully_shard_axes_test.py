"""fully_shard with dp_mesh_dims: parameters that are DTensors on a mesh of all axes, against torch's own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import tesserae as tsm
from fully_shard_runs import Seen, both, ours, run_steps
from ranks import run_ranks

WIDTH = 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


def split_layers(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Columns of `wide` and rows of `narrow` over the last axis."""
    others = [Replicate()] * (mesh.ndim - 1)
    for entry, parameter in list(module.named_parameters(recurse=False)):
        last = Replicate() if name == "narrow" and entry == "bias" else Shard(1 if name == "narrow" else 0)
        module.register_parameter(entry, nn.Parameter(distribute_tensor(parameter, mesh, [*others, last])))


def other_dim(parameter: DTensor) -> Shard:
    return Shard(1) if parameter.ndim == 2 and any(p.is_shard(0) for p in parameter.placements) else Shard(0)


# (sizes, names, data-parallel dimensions, whether the last axis splits layers)
MESHES = {
    "sharded": ((4,), ("fsdp",), {"shard": "fsdp"}, False),
    "replicated": ((4,), ("ddp",), {"replicate": "ddp"}, False),
    "hybrid": ((2, 2), ("rep", "shard"), {"shard": "shard", "replicate": "rep"}, False),
    "two axes of shards": ((2, 2), ("dp", "cp"), {"shard": ("dp", "cp")}, False),
    "tensor parallel": ((2, 2), ("fsdp", "tp"), {"shard": "fsdp"}, True),
    "tensor parallel, replicated": ((2, 2), ("ddp", "tp"), {"replicate": "ddp"}, True),
    "tensor parallel, two axes": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}, True),
}


@functools.cache
def mesh_of(name: str) -> DeviceMesh:
    """One for both engines: torch takes an equal one for another mesh."""
    return init_device_mesh("cpu", MESHES[name][0], mesh_dim_names=MESHES[name][1])


def make(name: str, shard_placement_fn: Any = None) -> tuple[nn.Module, DeviceMesh]:
    _, _, dims, splits = MESHES[name]
    mesh = mesh_of(name)
    torch.manual_seed(3)
    model = Model()
    distribute_module(model, mesh, split_layers if splits else None)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims), shard_placement_fn=shard_placement_fn)
    return model, mesh


def train(name: str, shard_placement_fn: Any = None, freezes: bool = False) -> Seen:
    """`freezes`: `wide` is frozen in every other step, first in the first."""
    model, mesh = make(name, shard_placement_fn)
    index = mesh.get_rank() if not MESHES[name][3] else mesh.get_rank() // 2  # ranks of a tensor group read one batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        model.wide.requires_grad_(not freezes or step % 2 == 1)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + index))
        given = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return model(given).square().mean().full_tensor()

    return run_steps(model, optimizer, loss, steps=4 if freezes else 3)


def trains_like_torch(rank: int, world_size: int, name: str) -> None:
    both(lambda: train(name))


def freezes_in_turn(rank: int, world_size: int) -> None:
    both(lambda: train("tensor parallel", freezes=True))


def test_split_parameters_are_frozen_in_turn() -> None:
    run_ranks(freezes_in_turn, 4)


@pytest.mark.parametrize("name", MESHES)
def test_trains_like_torch(name: str) -> None:
    run_ranks(trains_like_torch, 4, name)


def cuts_another_dimension(rank: int, world_size: int) -> None:
    both(lambda: train("tensor parallel", other_dim))
    with ours():
        model, mesh = make("tensor parallel", other_dim)
        assert model.wide.weight.device_mesh == mesh
        assert model.wide.weight.placements == (Shard(1), Shard(0))
        assert model.narrow.bias.placements == (Shard(0), Replicate())


def test_another_dimension_than_that_of_the_split() -> None:
    run_ranks(cuts_another_dimension, 4)


def says_how_it_is_placed(rank: int, world_size: int) -> None:
    def seen() -> list[Any]:
        return [(p.device_mesh, p.placements) for name in MESHES for p in make(name)[0].parameters()]

    theirs = seen()
    with ours():
        assert seen() == theirs


def test_parameters_say_what_torchs_say() -> None:
    run_ranks(says_how_it_is_placed, 4)


def turns(rank: int, world_size: int) -> None:
    expected = train("sharded")
    with ours():
        model, mesh = make("sharded")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step, degree in enumerate((2, 1, 4)):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(DTensor.from_local(x, mesh, [Replicate()], run_check=False)).square().mean().full_tensor()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            tsm.reshard(model, optimizer, hybrid_shard_degree=degree)
        assert losses == pytest.approx(expected.losses, rel=1e-6)


def test_the_dial_turns() -> None:
    run_ranks(turns, 4)


def refuses(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    dims = DataParallelMeshDims(shard="fsdp")
    with ours():
        with pytest.raises(ValueError, match="'nowhere' not found"):
            fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="nowhere"))
        with pytest.raises(ValueError, match="must have mesh_dim_names"):
            fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)), dp_mesh_dims=dims)
        with pytest.raises(ValueError, match="must be DTensors .* parameter 'Linear.weight'"):
            fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=dims)
        split = distribute_module(nn.Linear(2, 2), mesh, split_layers)
        with pytest.raises(ValueError, match="Expected Replicate.. on DP dim 'fsdp'"):
            fully_shard(split, mesh=mesh, dp_mesh_dims=dims)
        elsewhere = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
        with pytest.raises(ValueError, match="same mesh"):
            fully_shard(elsewhere, mesh=mesh, dp_mesh_dims=dims)
        with pytest.raises(tsm.InvalidArgument, match="pass a DataParallelMeshDims"):
            fully_shard(distribute_module(nn.Linear(2, 2), mesh), mesh=mesh, dp_mesh_dims="fsdp")
        whole = distribute_module(nn.Linear(2, 2), mesh)
        with pytest.raises(NotImplementedError, match="as int"):
            fully_shard(whole, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)
        with pytest.raises(tsm.InvalidArgument, match="pass that mesh and dp_mesh_dims"):
            fully_shard(distribute_module(nn.Linear(2, 2), mesh), mesh=mesh)


def test_refuses_what_does_not_fit() -> None:
    run_ranks(refuses, 2)
