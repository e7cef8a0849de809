"""What scripts and torch's own tests ask of the FSDP class, each of torch's class and of ours in the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FlatParameter, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tesserae as tsm
from ranks import run_ranks

CPU = torch.device("cpu")


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def made_by_both(**arguments: Any) -> list[FSDP]:
    """The same model in torch's class and in ours."""
    theirs = FSDP(net(), **arguments)
    tsm.init()
    ours = FSDP(net(), **arguments)
    tsm.uninstall()
    assert type(theirs) is FSDP and type(ours) is not FSDP
    return [theirs, ours]


def named_device(rank: int, world_size: int) -> None:
    for model in made_by_both(device_id="cpu"):
        assert model.compute_device == CPU
        model(torch.ones(2, 5)).sum().backward()
    tsm.init()
    with pytest.raises(RuntimeError, match="nowhere"):
        FSDP(net(), device_id="nowhere")


def test_device_id_may_be_the_name_of_a_device() -> None:
    run_ranks(named_device, 2)


def what_is_marked(rank: int, world_size: int) -> None:
    """Libraries ask whether a module is FSDP's, and which group it has."""

    def marked(use_orig_params: bool) -> list[Any]:
        module = nn.Sequential(net(), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3))
        ignored = module[1]
        parts = list(module.modules())
        model = FSDP(
            module,
            ignored_modules=[ignored],
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
            device_id=CPU,
        )
        assert model.process_group.size() == world_size
        return [
            (getattr(part, "_is_fsdp_managed_module", False), getattr(part, "_fsdp_use_orig_params", None))
            for part in parts
        ]

    for use_orig_params in (True, False):
        theirs = marked(use_orig_params)
        tsm.init()
        assert marked(use_orig_params) == theirs
        tsm.uninstall()


def test_modules_are_marked_as_those_of_torchs_class() -> None:
    run_ranks(what_is_marked, 2)


def takes_no_dtensors(rank: int, world_size: int) -> None:
    tsm.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with pytest.raises(tsm.InvalidArgument, match=r"parameter 0.weight is a DTensor.*Use fully_shard"):
        FSDP(model, device_mesh=mesh["dp"], use_orig_params=True)


def test_parameters_that_torch_has_split_are_refused() -> None:
    run_ranks(takes_no_dtensors, 4)


def unpadded(flat: Tensor) -> int:
    padded = zip(getattr(flat, "_numels_with_padding", ()), getattr(flat, "_is_padding_mask", ()))
    return flat.numel() - sum(numel for numel, is_padding in padded if is_padding)


def flat_parameters(rank: int, world_size: int, use_orig_params: bool) -> None:
    wanted = sum(parameter.numel() for parameter in net().parameters())
    for model in made_by_both(device_id=CPU, use_orig_params=use_orig_params):
        for _ in range(2):
            (flat,) = model.params
            assert isinstance(flat, FlatParameter) and isinstance(flat, nn.Parameter)
            assert (flat.dtype, flat.device, flat.requires_grad) == (torch.float32, CPU, True)
            assert 0 < flat.numel() < wanted
            total = torch.tensor(flat.numel())
            dist.all_reduce(total)
            padding = 64 * world_size + 8 * 4  # a chunk is a multiple of 64 elements, each of 4 parameters one of 8
            assert wanted <= total.item() < wanted + padding, "each rank has its part, and padding"
            with FSDP.summon_full_params(model):
                (whole,) = model.params
                assert unpadded(whole) == wanted
            model(torch.ones(2, 5)).sum().backward()
            assert all(parameter._fsdp_flattened for parameter in [*model.parameters(), *model.params])
        in_it = [parameter for parameter in model.parameters() if parameter is model.params[0]]
        assert len(in_it) == (0 if use_orig_params else 1)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_params_are_the_flat_parameters(use_orig_params: bool) -> None:
    run_ranks(flat_parameters, 2, use_orig_params)


def nothing_to_shard(rank: int, world_size: int) -> None:
    tsm.init()
    assert FSDP(nn.ReLU(), device_id=CPU).params == []
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    assert [flat.dtype for flat in FSDP(mixed, device_id=CPU).params] == [torch.float32, torch.float64]


def test_params_of_units_with_no_parameters_and_with_several_dtypes() -> None:
    run_ranks(nothing_to_shard, 1)


def applies(rank: int, world_size: int) -> None:
    @torch.no_grad()
    def to_ones(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            module.weight.fill_(1.0)

    for model in made_by_both(device_id=CPU):
        with FSDP.summon_full_params(model):
            before = [parameter.clone() for parameter in model.parameters()]
            with pytest.raises(ValueError, match="expected to be in states"):
                model.apply(to_ones)
            assert all(map(torch.equal, before, model.parameters()))
        model.apply(to_ones)
        with FSDP.summon_full_params(model):
            assert torch.equal(model.module[0].weight, torch.ones(8, 5))


def test_apply_inside_summon_full_params_is_refused() -> None:
    run_ranks(applies, 2)


def hybrid_sync(rank: int, world_size: int) -> None:
    wanted = [parameter.detach().clone() for parameter in net(seed=0).parameters()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tsm.init()
    model = FSDP(
        net(seed=rank),
        device_id=CPU,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        sync_module_states=True,
    )
    with FSDP.summon_full_params(model):
        assert all(map(torch.equal, wanted, model.parameters()))


def test_all_ranks_of_a_hybrid_take_rank_zeros_values() -> None:
    run_ranks(hybrid_sync, 4)
