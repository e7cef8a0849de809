"""FSDP.optim_state_dict of optimizers whose state has names, and of optimizers that differ by rank; and what
tsm.status says of parameters that units ignore."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard

import tesserae as tsm
from ranks import run_ranks


class Named(torch.optim.Adam):
    """Its state dict has names, as those of torch's _NamedOptimizer and of TorchRec have."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        super().__init__(model.parameters())

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        groups = [group | {"params": [self.names[i] for i in group["params"]]} for group in state["param_groups"]]
        return {"state": {self.names[i]: value for i, value in state["state"].items()}, "param_groups": groups}


def sharded(use_orig_params: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(FSDP(nn.Linear(8, 8), use_orig_params=use_orig_params) for _ in range(2)))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(2, 8)).pow(2).sum().backward()
    optimizer.step()
    return optimizer


def states(rank: int, world_size: int) -> None:
    tsm.init()
    everything = ["0.weight", "0.bias", "1.weight", "1.bias"]
    for use_orig_params in (True, False):
        model = sharded(use_orig_params)
        named = FSDP.optim_state_dict(model, stepped(model, Named(model)))["state"]
        assert sorted(named) == sorted(everything)

        model = sharded(use_orig_params)
        parameters = list(model.parameters())
        optimizer = stepped(model, torch.optim.Adam(parameters[::-1] if rank else parameters))
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            names = list(FSDP.optim_state_dict(model, optimizer)["state"])
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, names)
        assert everyone == [names] * world_size

    model = sharded(False)
    parameters = list(model.parameters())
    optimizer = stepped(model, torch.optim.Adam(parameters[:-1] if rank else parameters))
    with pytest.raises(tsm.InvalidArgument, match="rank 1 holds a part of 1.* that of rank 0 has"):
        FSDP.optim_state_dict(model, optimizer)


def test_optimizers_with_names_and_of_other_orders() -> None:
    run_ranks(states, 2)


def ignores(rank: int, world_size: int) -> None:
    tsm.init()

    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    model = layers()
    assert len(tsm.status(FSDP(model, ignored_modules=[model[1]], use_orig_params=True)).left_to_torch) == 2
    model = layers()
    fully_shard(model, ignored_params={model[1].weight})
    assert tsm.status(model).left_to_torch == ["1.weight"]
    assert tsm.status(FSDP(layers(), use_orig_params=False)).left_to_torch == []


def test_what_units_ignore_is_left_to_torch() -> None:
    run_ranks(ignores, 2)


def rests(rank: int, world_size: int) -> None:
    """A number of ranks that torch takes, where tsm.init asks for another degree."""
    tsm.init({"hybrid_shard_degree": 1})
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (world_size,)), reshard_after_forward=2)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ValueError, match="factor of 4, not 3"):
        fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (world_size,)), reshard_after_forward=3)


def test_reshard_after_forward_is_of_the_scripts_mesh() -> None:
    run_ranks(rests, 4)
