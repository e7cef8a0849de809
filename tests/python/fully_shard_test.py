"""torch.distributed.fsdp.fully_shard on our engine against torch's own: the same values, whatever is sharded how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

import models
from fully_shard_runs import WIDTH, Block, Seen, batch, both, look, make_model, ours, run_steps, shard_all, train
from ranks import run_ranks


def trains_like_torch(rank: int, world_size: int, arguments: dict[str, Any], optimizer: dict[str, Any]) -> None:
    both(lambda: train(lambda: shard_all(make_model(), **arguments), **optimizer))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_trains_like_torch(world_size: int) -> None:
    run_ranks(trains_like_torch, world_size, {}, {})


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_lifetimes(reshard: bool | int) -> None:
    run_ranks(trains_like_torch, 4, {"reshard_after_forward": reshard}, {})


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers_of_many_tensors(kind: str) -> None:
    run_ranks(trains_like_torch, 2, {}, {kind: True})


@pytest.mark.parametrize("reduce", [None, torch.float32])
def test_mixed_precision(reduce: torch.dtype | None) -> None:
    run_ranks(trains_in_bf16, 2, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce))


def trains_in_bf16(rank: int, world_size: int, policy: MixedPrecisionPolicy) -> None:
    both(lambda: train(lambda: shard_all(make_model(), mp_policy=policy)), tolerance=1e-3)


def is_hybrid(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both(lambda: train(lambda: shard_all(make_model(), mesh=mesh)))
    with ours():
        parameter = shard_all(make_model(), mesh=mesh)[0].wide.weight
        assert parameter.placements == (Replicate(), Shard(0)) and parameter.device_mesh == mesh


def test_hybrid_mesh() -> None:
    run_ranks(is_hybrid, 4)


def places_one_rank(rank: int, world_size: int) -> None:
    """Where one rank has all rows, DTensors say Shard all the same: of replicas, and of a job of one rank."""

    def run() -> Seen:
        mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
        for model in (shard_all(make_model(), mesh=mesh), shard_all(make_model(), mesh=mesh["shard"])):
            parameter = model[0].wide.weight
            assert parameter.placements == (Replicate(), Shard(0))[-parameter.device_mesh.ndim :]
        return train(lambda: shard_all(make_model(), mesh=mesh))

    both(run)


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_of_one_rank(world_size: int) -> None:
    run_ranks(places_one_rank, world_size)


def begins_the_job(rank: int, world_size: int) -> None:
    with ours():
        model = shard_all(make_model())
        assert dist.is_initialized() and dist.get_world_size() == world_size
        train(lambda: model, steps=1)
    dist.destroy_process_group()


def test_makes_the_default_group() -> None:
    run_ranks(begins_the_job, 2, init=False)


def takes_the_configuration(rank: int, world_size: int, config: dict[str, Any], placements: tuple) -> None:
    both(lambda: Seen(losses=train(lambda: shard_all(make_model())).losses), config)
    with ours(config):
        model = shard_all(make_model())
        assert model[0].wide.weight.placements == placements
        train(lambda: model, steps=1)


@pytest.mark.parametrize(
    ("config", "placements"),
    [
        ({"hybrid_shard_degree": 1}, (Replicate(),)),
        ({"hybrid_shard_degree": 2}, (Replicate(), Shard(0))),
        ({"degrees": {"parameters": 1, "gradients": 1, "optimizer": 4}}, (Shard(0),)),
        ({"degrees": {"parameters": 1, "gradients": 4, "optimizer": 4}}, (Shard(0),)),
    ],
)
def test_degrees_of_the_configuration(config: dict[str, Any], placements: tuple) -> None:
    run_ranks(takes_the_configuration, 4, config, placements)


def trains_a_model(rank: int, world_size: int, name: str) -> None:
    case = models.MODELS[name]

    def run() -> Seen:
        model = case()
        for part in reversed(list(model.modules())):
            if isinstance(part, case.units):
                fully_shard(part)
        fully_shard(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = Seen()
        for step in range(3):
            loss = case.loss(model, models.tokens(step, 0, rank))
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            seen.losses.append(loss.item())
        look(seen, model, sgd, "at the end:")
        return seen

    both(run, tolerance=1e-5)


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_models(name: str) -> None:
    run_ranks(trains_a_model, 2, name)


def recomputes(rank: int, world_size: int, reentrant: bool, inside: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    def make() -> nn.Module:
        model = make_model()
        for i in range(3):
            model[i] = Checkpointed(model[i])
            fully_shard(model[i].block if inside else model[i])
        return fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), model))

    both(lambda: train(lambda: (torch.manual_seed(3), make())[1]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_recomputation(reentrant: bool, inside: bool) -> None:
    run_ranks(recomputes, 2, reentrant, inside)


def groups(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        model = make_model()
        fully_shard(model[0])
        fully_shard([model[2], model[3]])
        return fully_shard(model)

    both(lambda: train(make))


def test_a_group_of_modules() -> None:
    run_ranks(groups, 2)


def calls_a_part_of_a_group(rank: int, world_size: int) -> None:
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.body(x))

    def run() -> Seen:
        torch.manual_seed(2)
        model = Chunked()
        fully_shard(model.body)
        fully_shard([model.norm, model.head])
        fully_shard(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return run_steps(
            model, sgd, lambda step: sum(model.head(part).square().mean() for part in model(batch(step)).chunk(2))
        )

    both(run)


def test_a_part_of_a_group_is_called_by_itself() -> None:
    run_ranks(calls_a_part_of_a_group, 2)


def frozen(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        model = make_model()
        for parameter in model[1].parameters():
            parameter.requires_grad_(False)
        model[0].wide.weight.requires_grad_(False)
        return shard_all(model)

    both(lambda: train(make))


def test_frozen_parameters() -> None:
    run_ranks(frozen, 2)


def cuts_columns(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, WIDTH))
        model.insert(0, nn.Linear(WIDTH, 8))
        return fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.shape[-1] % 2 == 0 else None)

    both(lambda: train(make))


def test_shards_of_another_dimension() -> None:
    run_ranks(cuts_columns, 2)


def splits_layers(rank: int, world_size: int, hybrid: bool) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2, 2) if hybrid else (2, 2), mesh_dim_names=("pp", "dp", "tp")[1 - hybrid :])

    def make() -> nn.Module:
        model = make_model()
        for i in range(3):
            parallelize_module(model[i], mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        return shard_all(model, mesh=mesh["dp"])

    def run() -> Seen:
        model = make()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

        def loss_of(step: int) -> Tensor:
            generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
            return model(torch.randn(4, WIDTH, generator=generator)).square().mean()

        return run_steps(model, adam, loss_of)

    both(run, tolerance=1e-5)


@pytest.mark.parametrize("hybrid", [False, True])
def test_tensor_parallel_layers_of_torch(hybrid: bool) -> None:
    run_ranks(splits_layers, 4, hybrid)
