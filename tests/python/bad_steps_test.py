"""tsm.bad_steps: all ranks hear of a bad step alike, before any of them has updated anything."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tesserae as tsm
from ranks import run_ranks

STEPS = 24


def trains(rank: int, world_size: int, broken: tuple[int, int] | None) -> tuple[list[str], list[float]]:
    """`broken`: step and rank whose data hold a NaN. What was said of each step, and the weights."""
    tsm.init()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    bad = tsm.bad_steps(loss_spike=20)
    said = []
    for step in range(STEPS):
        if broken is None and step == 15:
            continue  # as if it had been left out
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * world_size + rank))
        if broken == (step, rank):
            inputs[0, 0] = math.nan
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        said.append(bad.judge(loss, norm))
        if not said[-1]:
            optimizer.step()
        optimizer.zero_grad()
    return said, [x for p in model.parameters() for x in p.full_tensor().view(-1).tolist()]


def test_a_bad_step_is_left_out_on_all_ranks() -> None:
    broken, whole = run_ranks(trains, 2, (15, 1)), run_ranks(trains, 2, None)
    for said, weights in broken:
        assert said == [""] * 15 + ["the loss is not finite (on rank 1)"] + [""] * 8
        assert weights == whole[0][1], "as if its data had not been there"


def judges(rank: int, world_size: int) -> None:
    bad = tsm.bad_steps(loss_spike=1.5, limit=3)
    for _ in range(8):
        assert bad.judge(2.0 + rank, 1.0) == ""
    assert bad.judge(3.9 - rank, 1.0) == "", "the mean counts"
    spike = "the loss is 4, which is more than 1.5 times 2.5, the median of 9 steps before"
    assert bad.judge(7.0 * rank + 0.5, 1.0) == spike
    assert bad.judge(2.5, math.inf) == "the gradients are not finite"
    assert bad.judge(2.5, math.inf, overflow_expected=True) == ""
    assert bad.in_a_row == 0

    continued = tsm.bad_steps(loss_spike=1.5, limit=3)
    continued.load_state_dict(bad.state_dict())
    assert continued.judge(9, 1.0).startswith("the loss is 9")
    assert continued.judge(math.nan if rank == 0 else 1.0) == "the loss is not finite (on rank 0)"
    with pytest.raises(tsm.BadNumbers, match="on all ranks.; that makes 3 bad steps in a row, which is the limit"):
        continued.judge(math.nan)


def test_a_step_is_judged_by_all_ranks() -> None:
    run_ranks(judges, 2)


def test_one_process_needs_no_others() -> None:
    bad = tsm.bad_steps()
    assert bad.judge(torch.tensor(1e30)) == ""
    assert bad.judge(torch.tensor(math.nan)) == "the loss is not finite"
    assert bad.in_a_row == 1


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(tsm.InvalidArgument, match="loss_spike is 1"):
        tsm.bad_steps(loss_spike=1)
    with pytest.raises(tsm.InvalidArgument, match="limit is 0"):
        tsm.bad_steps(limit=0)
    with pytest.raises(tsm.InvalidArgument, match="load_state_dict"):
        tsm.bad_steps().load_state_dict({"losses": "none"})
