"""torch's own FSDP test models and its own check of them, on our FSDP.

`FSDPTestMixin._test_fsdp_parity` of torch.testing._internal.common_fsdp trains a model with DDP and the same model with
FSDP, by SGD with momentum; saves, zeroes and loads it after each step; and compares losses and all parameters. Its test
classes skip themselves on a machine without accelerators, so the check runs in ranks of ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.testing._internal.common_fsdp import (
    AlwaysWrapNestedWrappedModule,
    DEVICEInitMode,
    DummyDDP,
    FSDPInitMode,
    FSDPTestMixin,
    FSDPTestModel,
    MixtureOfExperts,
    NestedWrappedModule,
    NonUniformReqGradNWM,
    TransformerWithSharedParams,
    _assert_module_states,
    _zero_model,
    get_full_params,
)
from torch.testing._internal.common_utils import TestCase

import tesserae as tsm
from ranks import run_ranks

MODELS: dict[str, tuple[type[FSDPTestModel], dict[str, Any]]] = {
    "nested": (NestedWrappedModule, {}),
    "always_wrap": (AlwaysWrapNestedWrappedModule, {}),
    "shared_params": (TransformerWithSharedParams, {"init_kwargs": {"add_bn": False}}),
    "experts": (MixtureOfExperts, {"ref_init_fn": DummyDDP}),
    "frozen_later": (NonUniformReqGradNWM, {"use_orig_params": True}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full_shard": {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    "shard_grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(offload_params=True), "use_orig_params": True},
    "prefetch": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True},
    "no_prefetch": {"backward_prefetch": None, "use_orig_params": True},
}


class Check(FSDPTestMixin, TestCase):
    """What torch's check expects of the test case that it is part of."""

    __test__ = False  # not for pytest: it lives in the ranks

    def __init__(self, rank: int) -> None:
        super().__init__("run_parity")
        self.rank = rank
        self.process_group = dist.distributed_c10d._get_default_group()

    def run_parity(self, model: type[FSDPTestModel], **options: Any) -> None:
        self._test_fsdp_parity(model, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, **options)


def trains_like_ddp(rank: int, world_size: int, name: str) -> None:
    tsm.init()
    model, needed = MODELS[name]
    for label, options in OPTIONS.items():
        print(label, flush=True)  # in the report, if it is the last
        Check(rank).run_parity(model, **(options | needed))


@pytest.mark.parametrize(("name", "world_size"), [*((name, 2) for name in MODELS), ("nested", 4), ("experts", 4)])
def test_trains_like_ddp(name: str, world_size: int) -> None:
    run_ranks(trains_like_ddp, world_size, name)


def full_params_are_those_of_the_module(rank: int, world_size: int) -> None:
    tsm.init()
    group = dist.distributed_c10d._get_default_group()
    plain = NestedWrappedModule.init(group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True)
    for use_orig_params in (False, True):
        model = FSDP(
            NestedWrappedModule.init(
                group,
                FSDPInitMode.RECURSIVE,
                DEVICEInitMode.DEVICE_BEFORE,
                {"use_orig_params": use_orig_params},
                deterministic=True,
            ),
            use_orig_params=use_orig_params,
        )
        torch.testing.assert_close(get_full_params(model), list(plain.parameters()))
        _zero_model(model)
        assert all(not parameter.any() for parameter in get_full_params(model))


def test_full_params_are_those_of_the_module() -> None:
    run_ranks(full_params_are_those_of_the_module, 2)


def rank_0_decides(rank: int, world_size: int) -> None:
    tsm.init()
    torch.manual_seed(rank)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))

    model = make()
    model[1].running_mean.fill_(rank)
    model = FSDP(model, sync_module_states=True, use_orig_params=True)
    torch.manual_seed(0)
    with FSDP.summon_full_params(model):
        torch.testing.assert_close(list(model.parameters()), list(make().parameters()))
        _assert_module_states(model, dist.group.WORLD, torch.testing.assert_close)
    assert not model.module[1].running_mean.any()


def test_sync_module_states() -> None:
    run_ranks(rank_0_decides, 2)
