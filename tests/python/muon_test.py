"""torch.optim.Muon on a model of fully_shard follows one process, with 1/O of its state on each rank; so does any other
optimizer that works on whole matrices, with tsm.on_whole_matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import _muon

import tesserae as tsm
from fully_shard_runs import Seen, assert_same, look, make_model, ours, shard_all
from ranks import run_ranks

STEPS = 4


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + rank))


class Optimizers:
    """Muon for matrices, AdamW for the rest."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        self.muon = torch.optim.Muon(matrices, **{"lr": 0.02, **options})
        self.all = [self.muon, torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)]

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()
            optimizer.zero_grad()


def see(model: nn.Module, optimizers: Optimizers, losses: list[float]) -> Seen:
    """Whole tensors only: one process has no others."""
    seen = Seen(losses=losses)
    for optimizer in optimizers.all:
        look(seen, model, optimizer, "")
    seen.tensors = {name: tensor for name, tensor in seen.tensors.items() if "(local)" not in name}
    return seen


def alone(world_size: int, **options: Any) -> Seen:
    """One process that has the batches of all ranks."""
    model, losses = make_model(), []
    optimizers = Optimizers(model, **options)
    for step in range(STEPS):
        parts = [model(batch(step, rank)).square().mean() for rank in range(world_size)]
        (sum(parts[1:], parts[0]) / world_size).backward()
        losses.append(float(parts[dist.get_rank()]))
        optimizers.step()
    return see(model, optimizers, losses)


def sharded(
    options: dict[str, Any], each_step: Callable[[int, nn.Module, Optimizers], None] | None = None, **arguments: Any
) -> Seen:
    model, losses = shard_all(make_model(), **arguments), []
    optimizers = Optimizers(model, **options)
    for step in range(STEPS):
        loss = model(batch(step, dist.get_rank())).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizers.step()
        if each_step is not None:
            each_step(step, model, optimizers)
    return see(model, optimizers, losses)


def follows_one_process(rank: int, world_size: int, options: dict[str, Any], config: dict[str, Any] | None) -> None:
    expected = alone(world_size, **options)
    with ours(config):
        assert_same(sharded(options), expected, tolerance=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_follows_one_process(world_size: int) -> None:
    run_ranks(follows_one_process, world_size, {}, None)


@pytest.mark.parametrize(
    "options", [{"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw", "lr": torch.tensor(0.02)}]
)
def test_options(options: dict[str, Any]) -> None:
    run_ranks(follows_one_process, 2, options, None)


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 2, 2), (1, 1, 4), (1, 4, 4)])
def test_degrees(degrees: tuple[int, int, int]) -> None:
    names = ("parameters", "gradients", "optimizer")
    run_ranks(follows_one_process, 4, {}, {"degrees": dict(zip(names, degrees, strict=True))})


def follows_on_a_mesh(rank: int, world_size: int) -> None:
    expected = alone(world_size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with ours():
        assert_same(sharded({}, mesh=mesh), expected, tolerance=1e-5)
        columns = sharded({}, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
        assert_same(columns, expected, tolerance=1e-5)


def test_hybrid_mesh_and_columns() -> None:
    run_ranks(follows_on_a_mesh, 4)


def has_its_share_of_state(rank: int, world_size: int) -> None:
    with ours():
        model = shard_all(make_model())
        muon = Optimizers(model).muon
        model(batch(0, rank)).sum().backward()
        muon.step()
        held = sum(state["momentum_buffer"].to_local().numel() for state in muon.state.values())
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rows = sum(len(torch.arange(p.size(0)).chunk(world_size)[rank]) * p.size(1) for p in matrices)
        assert held == rows <= 1.02 * sum(p.numel() for p in matrices) / world_size
        assert set(muon.state) == set(matrices)


def test_a_rank_has_its_share_of_the_state() -> None:
    run_ranks(has_its_share_of_state, 2)


def turns(rank: int, world_size: int) -> None:
    expected = alone(world_size)
    degrees = [(1, 1, 4), (2, 2, 2), (1, 1, 1), (4, 4, 4)]
    with ours():
        mine = sharded(
            {},
            lambda step, model, optimizers: tsm.reshard(model, optimizers.all, degrees=degrees[step]),
        )
        assert_same(mine, expected, tolerance=1e-5)


def test_the_dial_turns() -> None:
    run_ranks(turns, 4)


def polar(matrix: Tensor, index: int) -> Tensor:
    u, _, v = torch.linalg.svd(matrix.float(), full_matrices=False)
    return (u @ v * (index + 1)).to(matrix.dtype)


def computes_once(rank: int, world_size: int) -> None:
    with ours():
        model = shard_all(make_model())
        matrices = [p for p in model.parameters() if p.ndim == 2]
        called: list[int] = []

        def function(matrix: Tensor, index: int) -> Tensor:
            called.append(index)
            assert matrix.shape == matrices[index].shape and not isinstance(matrix, DTensor)
            return polar(matrix, index)

        results = tsm.on_whole_matrices(function, matrices)
        for index, (result, matrix) in enumerate(zip(results, matrices, strict=True)):
            assert result.placements == matrix.placements and not result.requires_grad
            torch.testing.assert_close(result.full_tensor(), polar(matrix.full_tensor().detach(), index))
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, called)
        assert sorted(sum(everyone, [])) == list(range(len(matrices)))
        again: list[int] = []
        tsm.on_whole_matrices(lambda matrix, index: again.append(index) or matrix, matrices)
        assert again == called  # whoever keeps something of a matrix finds it again
        three = [p for p in model.parameters() if p.ndim == 1]  # any shape
        tripled = tsm.on_whole_matrices(lambda tensor, _: 3 * tensor, three)
        torch.testing.assert_close(tripled[0].full_tensor(), 3 * three[0].full_tensor().detach())
        assert tsm.on_whole_matrices(polar, []) == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_matrix_is_computed_with_once(world_size: int) -> None:
    run_ranks(computes_once, world_size)


def tells_degrees_apart(rank: int, world_size: int) -> None:
    """Another model on the same mesh has been turned to another degree."""
    with ours():
        sharded, whole = shard_all(make_model(1)), shard_all(make_model(1))
        sgd = torch.optim.SGD(whole.parameters(), lr=0.1)
        whole(batch(0, rank)).sum().backward()
        tsm.reshard(whole, sgd, hybrid_shard_degree=1)
        for model in (sharded, whole):
            weight = model[0].wide.weight
            (result,) = tsm.on_whole_matrices(polar, [weight])
            torch.testing.assert_close(result.full_tensor(), polar(weight.full_tensor().detach(), 0))


def test_models_of_other_degrees_on_one_mesh() -> None:
    run_ranks(tells_degrees_apart, 2)


def refuses(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    other = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    with ours():
        with pytest.raises(tsm.InvalidArgument, match="tensor 0 of shape .2, 2. is a Tensor"):
            tsm.on_whole_matrices(polar, [torch.ones(2, 2)])
        with pytest.raises(tsm.InvalidArgument, match="is a DTensor of"):
            tsm.on_whole_matrices(polar, [other])
        with pytest.raises(tsm.InvalidArgument, match="pass a function .* and a list"):
            tsm.on_whole_matrices(polar, other)
        with pytest.raises(tsm.InvalidArgument, match="pass a function"):
            tsm.on_whole_matrices([other], polar)
        model = shard_all(make_model(1))
        weight = model[1].weight
        with pytest.raises(tsm.InvalidArgument, match="same shape and dtype"):
            tsm.on_whole_matrices(lambda matrix, _: matrix.double(), [weight, weight])


def test_refuses_what_it_cannot_bring_together() -> None:
    run_ranks(refuses, 2)


def leaves_others_to_torch(rank: int, world_size: int) -> None:
    torchs = _muon._single_tensor_muon
    mesh = init_device_mesh("cpu", (2,))

    def run() -> Tensor:
        torch.manual_seed(3)
        plain = nn.Parameter(torch.randn(6, 4))
        foreign = nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]))
        muon = torch.optim.Muon([plain, foreign], lr=0.1)
        plain.grad, foreign.grad = torch.ones_like(plain), torch.ones_like(foreign)
        muon.step()
        return torch.cat([plain.detach(), foreign.full_tensor().detach()])

    expected = run()
    with ours():
        assert _muon._single_tensor_muon is not torchs
        assert torch.equal(run(), expected)
    assert _muon._single_tensor_muon is torchs


def test_other_parameters_are_left_to_torch() -> None:
    run_ranks(leaves_others_to_torch, 2)
