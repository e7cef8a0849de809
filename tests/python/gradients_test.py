"""Gradients that a script touches beside the backward of the model, each against torch's own FSDP in the same ranks:
penalties on parameters, `.grad` set to None, hooks that give gradients other data; and autocast around the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

import tesserae as tsm
from ranks import run_ranks

WIDTH, STEPS = 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def wrap(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> FSDP:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 4))
    return FSDP(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def loss_of(model: nn.Module, step: int) -> Tensor:
    random = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(3, WIDTH, generator=random)
    return F.cross_entropy(model(inputs).float(), torch.randint(4, (3,), generator=random))


def losses_and_weights(model: FSDP, losses: list[Tensor]) -> list[float]:
    with FSDP.summon_full_params(model):
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    total = torch.stack([loss.detach() for loss in losses])
    dist.all_reduce(total)  # a penalty's part on a rank depends on how parameters are cut
    return [*total.tolist(), *weights.tolist()]


def same_as_fsdp1(rank: int, world_size: int, run: Callable[[], list[float]], tolerance: float = 1e-5) -> None:
    theirs = run()
    tsm.init()
    assert run() == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def penalised(before: bool, set_to_none: bool) -> list[float]:
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anchor = [torch.ones_like(p) for p in model.parameters()]
    losses = []
    for step in range(STEPS):
        parts: list[Callable[[], Tensor]] = [
            lambda: 0.1 * sum((p - a).pow(2).sum() for p, a in zip(model.parameters(), anchor, strict=True)),
            lambda step=step: loss_of(model, step),
        ]
        loss = sum(part() for part in (parts if before else reversed(parts)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        losses.append(loss)
    return losses_and_weights(model, losses)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_a_penalty_on_parameters_counts(before: bool, set_to_none: bool) -> None:
    run_ranks(same_as_fsdp1, 2, functools.partial(penalised, before, set_to_none))


def frozen_meanwhile(recorded: bool) -> list[float]:
    """For a second forward, before the backward of the first: that of reference logits, or (`recorded`) of a critic
    whose input alone is to be trained by it."""
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        model.requires_grad_(False)
        inputs = torch.ones(2, WIDTH, requires_grad=True)
        with torch.set_grad_enabled(recorded):
            other = model(inputs).mean()
        model.requires_grad_(True)
        loss = (loss - other).square()
        loss.backward()
        assert (inputs.grad is not None) == recorded
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses_and_weights(model, losses)


@pytest.mark.parametrize("recorded", [True, False], ids=["critic", "reference"])
def test_parameters_may_be_frozen_between_a_forward_and_its_backward(recorded: bool) -> None:
    run_ranks(same_as_fsdp1, 2, functools.partial(frozen_meanwhile, recorded))


def left_out() -> list[float]:
    """The first layer shares its flat buffer with the last: part of a gradient is there."""
    model = wrap()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        for name, parameter in model.named_parameters():
            if "3." in name and step < 2:
                parameter.grad = None
        model.clip_grad_norm_(0.1)
        with FSDP.summon_full_params(model):
            pass
        assert all(p.grad is None for n, p in model.named_parameters() if "3." in n) or step >= 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses_and_weights(model, losses)


def test_a_gradient_that_was_set_to_none_stays_so() -> None:
    run_ranks(same_as_fsdp1, 2, left_out)


def give_other_data(state: object, gradients: Tensor, mine: Tensor | None = None) -> None:
    gradients.data = gradients.data.clone()
    if mine is None:
        dist.all_reduce(gradients)
        gradients.div_(dist.get_world_size())
        return
    dist.reduce_scatter_tensor(mine, gradients)
    mine.data = mine.data / dist.get_world_size()


def hooked(strategy: ShardingStrategy) -> list[float]:
    model = wrap(strategy)
    model.register_comm_hook(None, give_other_data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses_and_weights(model, losses)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=lambda s: s.name)
def test_a_hook_may_give_gradients_other_data(strategy: ShardingStrategy) -> None:
    run_ranks(same_as_fsdp1, 2, functools.partial(hooked, strategy))


def autocast() -> list[float]:
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2 * STEPS):
            loss = loss_of(model, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        assert torch.is_autocast_cache_enabled()
    assert losses[-1].item() < 0.5 * losses[0].item()
    return losses_and_weights(model, losses)


def test_autocast_around_the_loop_sees_updates() -> None:
    run_ranks(same_as_fsdp1, 2, autocast, 0.02)


def refused(rank: int, world_size: int) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    tsm.init()
    model = nn.Linear(WIDTH, 4)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(tsm.InvalidArgument, match="steps in the backward"):
        FSDP(model, device_id=torch.device("cpu"))


def test_an_optimizer_that_steps_in_the_backward_is_refused() -> None:
    run_ranks(refused, 1)


def in_full_precision(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp import MixedPrecision

    tsm.init()
    with pytest.raises(tsm.InvalidArgument, match="FSDP_USE_FULL_PREC_IN_EVAL"):
        FSDP(nn.Linear(WIDTH, 4), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def test_full_precision_in_evaluation_is_refused() -> None:
    run_ranks(in_full_precision, 1, environment={"FSDP_USE_FULL_PREC_IN_EVAL": "1"})
