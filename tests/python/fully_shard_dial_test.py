"""The dial under a model of fully_shard: everything stays what it is while degrees change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import tesserae as tsm
from fully_shard_runs import WIDTH, Seen, batch, look, make_model, ours, shard_all, train
from ranks import run_ranks

IN_ORDER = [
    (4, 4, 4),
    (1, 1, 1),
    (2, 2, 2),
    (1, 1, 4),
    (1, 4, 4),
    (1, 1, 2),
    (4, 4, 4),
    (1, 2, 2),
    (2, 2, 2),
    (4, 4, 4),
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    seen = Seen()
    look(seen, model, optimizer, "")
    return {name: tensor for name, tensor in seen.tensors.items() if "(local)" not in name}


def turns(rank: int, world_size: int, optimizer: str, policy: MixedPrecisionPolicy) -> None:
    def run(dial: bool) -> list[float]:
        model = shard_all(make_model(), mp_policy=policy)
        parameters = list(model.parameters())
        steps = OPTIMIZERS[optimizer](parameters)
        losses = []
        for step, degrees in enumerate(IN_ORDER):
            loss = model(batch(step)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            if dial and step % 2:  # with the gradients of a step
                turn(model, steps, degrees)
            steps.step()
            if dial and not step % 2:
                turn(model, steps, degrees)
            steps.zero_grad()
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        return losses

    def turn(model: nn.Module, steps: torch.optim.Optimizer, degrees: tuple[int, int, int]) -> None:
        before = whole_state(model, steps)
        assert tsm.reshard(model, steps, degrees=degrees).after == degrees
        after = whole_state(model, steps)
        assert before.keys() == after.keys()
        for name in before:
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=0, msg=f"{name} at {degrees}")
        size = model[0].wide.bias.to_local().numel()
        assert size == len(torch.arange(3 * WIDTH).chunk(degrees[2])[rank % degrees[2]])
        with pytest.raises(tsm.InvalidArgument, match="rows in their order"):
            tsm.reshard(model, steps, degrees=(2, 4, 4))

    theirs = run(dial=False)
    with ours():
        mine = run(dial=True)
    assert mine == pytest.approx(theirs, rel=1e-5 if policy.param_dtype is None else 2e-2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_dial_turns(optimizer: str) -> None:
    run_ranks(turns, 4, optimizer, MixedPrecisionPolicy())


def test_the_dial_turns_in_bf16() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run_ranks(turns, 4, "AdamW", policy)


def follows_a_schedule(rank: int, world_size: int) -> None:
    schedule = [{"step": 2, "hybrid_shard_degree": 1}, {"step": 4, "hybrid_shard_degree": 2}]
    theirs = train(lambda: shard_all(make_model()), steps=6).losses
    with ours({"dial": {"schedule": schedule}}):
        models = []
        mine = train(lambda: models.append(shard_all(make_model())) or models[0], steps=6).losses
        assert models[0][0].wide.weight.placements == (Shard(0),)
    assert mine == pytest.approx(theirs, rel=1e-5)


def test_the_dial_follows_a_schedule() -> None:
    run_ranks(follows_a_schedule, 2)
