"""tsm.init and tsm.uninstall with the real class, in real ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # before tsm.init, as in many scripts
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tesserae as tsm
import tesserae.fsdp
from ranks import run_ranks
from tesserae.job import fabrics
from tesserae.logger import get_logger


def make(**arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"), **arguments)


def train(model: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.full((2, 4), 0.1 * (rank + 1) + step)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours_and_theirs(rank: int, world_size: int) -> None:
    before = make()
    assert type(before) is FSDP
    tsm.init({"hybrid_shard_degree": world_size})
    tsm.init({"hybrid_shard_degree": world_size})  # says the same
    ours = make(use_orig_params=True)
    assert type(ours) is tesserae.fsdp.FullyShardedDataParallel
    assert isinstance(ours, FSDP)
    assert [type(m) for m in FSDP.fsdp_modules(ours)] == [type(ours)] * 3
    assert [type(m) for m in FSDP.fsdp_modules(before)] == [FSDP] * 3, "wrapped before: goes on as it was"
    tsm.uninstall()
    assert not tsm.is_initialized()
    after = make()
    assert type(after) is FSDP
    losses = train(ours, rank)
    assert losses == pytest.approx(train(before, rank), rel=1e-6)
    assert losses == pytest.approx(train(after, rank), rel=1e-6)
    assert len(FSDP.fsdp_modules(ours)) == 3, "a model of ours lives on"


def test_one_job_can_have_models_of_both() -> None:
    run_ranks(ours_and_theirs, 2)


S = ShardingStrategy
DEGREES: list[tuple[dict[str, Any], ShardingStrategy | None, int]] = [  # configuration, script, ranks of one copy
    ({}, None, 4),
    ({}, S.SHARD_GRAD_OP, 4),
    ({}, S.NO_SHARD, 1),
    ({}, S.HYBRID_SHARD, 4),  # the ranks of a host: all of them
    ({"hybrid_shard_degree": 1}, None, 1),
    ({"hybrid_shard_degree": 2}, None, 2),
    ({"hybrid_shard_degree": 2}, S.SHARD_GRAD_OP, 2),
    ({"hybrid_shard_degree": 2}, S._HYBRID_SHARD_ZERO2, 2),
    ({"hybrid_shard_degree": 4}, S.NO_SHARD, 4),
    ({"degrees": {"parameters": 1, "gradients": 2, "optimizer": 4}}, None, 4),
]


def strategies(rank: int, world_size: int) -> list[int]:
    """How many parameters this rank holds in each case."""
    reference = train(make(), rank)
    held = []
    for document, asked, _ in DEGREES:
        tsm.init(document)
        model = make(use_orig_params=True, sharding_strategy=asked)
        held.append(sum(p.numel() for p in model.parameters()))
        assert train(model, rank) == pytest.approx(reference, rel=1e-5), (document, asked)
        tsm.uninstall()
    return held


def test_the_degree_is_the_configurations_else_the_scripts() -> None:
    held = run_ranks(strategies, 4)
    parameters = 4 * 8 + 8 + 8 * 2 + 2
    assert [sum(counts) / parameters for counts in zip(*held)] == [4 / ranks for _, _, ranks in DEGREES]


def another_configuration(rank: int, world_size: int) -> None:
    tsm.init({"hybrid_shard_degree": 2})
    with pytest.raises(tsm.InvalidArgument, match=r"\[tsm.init\] initialised already.*call tsm.uninstall\(\) before"):
        tsm.init({"hybrid_shard_degree": 1})
    assert tsm.state.hybrid_shard_degree == 2
    tsm.uninstall()
    with pytest.raises(tsm.InvalidArgument, match="3"):
        tsm.init({"hybrid_shard_degree": 3})
    assert not tsm.is_initialized(), "an error leaves things as they were"
    assert type(make()) is FSDP
    dist.barrier()
    tsm.init({"hybrid_shard_degree": 1})


def test_another_configuration_needs_uninstall_first() -> None:
    run_ranks(another_configuration, 2)


class AnyOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.wide = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor, order: list[int], branches: bool) -> torch.Tensor:
        for i in order:
            x = self.layers[i](x)
        return x + self.layers[0](self.layers[1](x)) + self.wide(x)[:, :8] if branches else x


def departs(rank: int, world_size: int, warn: bool) -> list[str]:
    tsm.init({"fsdp_cache_flush_warnings": warn})
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    # Ranks that share memory have one copy of all units, which always suffices.
    fabrics.HOST_BACKEND = "gloo"
    model = FSDP(AnyOrder(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"))
    there, back = list(range(6)), list(range(5, -1, -1))
    for order, branches in [
        (there, False),
        (there, False),
        (back, True),
        (there, True),
        (there, False),
        (there, False),
    ]:
        model(torch.ones(2, 8), order, branches).sum().backward()
    assert model._unit.statistics().pool_misses > 0
    return [record.getMessage() for record in records]


def test_memory_that_did_not_suffice_is_warned_of_unless_told_not_to() -> None:
    for messages in run_ranks(departs, 2, True):
        assert len(messages) == 1
        assert "the memory planned for gathered parameters did not suffice" in messages[0]
    assert run_ranks(departs, 2, False) == [[], []]


def reuse_of_freed_blocks() -> float:
    """Of tensors that are freed between others that stay: the share whose place the next of their size get."""
    blocks = [torch.empty(96 << 10, dtype=torch.uint8) for _ in range(64)]
    freed = {block.data_ptr() for block in blocks[1::2]}
    del blocks[1::2]
    blocks += [torch.empty(96 << 10, dtype=torch.uint8) for _ in freed]
    return len(freed & {block.data_ptr() for block in blocks}) / len(freed)


def a_step_finds_room_in_what_the_last_one_freed(rank: int, world_size: int) -> None:
    tsm.init()
    assert reuse_of_freed_blocks() > 0.9
    tensor = torch.arange(10)
    assert tensor.resize_(100_000)[:10].tolist() == list(range(10))


def test_what_a_step_frees_serves_the_next() -> None:
    run_ranks(a_step_finds_room_in_what_the_last_one_freed, 1)
