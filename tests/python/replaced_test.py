"""Parameters that a script puts in the place of sharded ones after wrapping, beside torch's FSDP in the same ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import tesserae as tsm
from features_test import loss_of, make_model, same_as_fsdp1, take_step, wrap
from ranks import run_ranks


def replace(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() * 0.5))


def replaced(trained_before: bool) -> list[float]:
    """The new parameters are trained by an optimizer made after they took their place, not by one made before."""
    model = wrap(make_model())
    old = list(model.parameters())
    before = torch.optim.SGD(old, lr=0.1)
    losses = [take_step(model, before, 0)] if trained_before else []
    replace(model)
    after = torch.optim.SGD(model.parameters(), lr=0.1)
    losses += [
        take_step(model, after, 1),
        take_step(model, after, 2),
        take_step(model, before, 3),
        loss_of(model, 3).item(),
    ]
    held = [parameter for parameter in model.parameters() if parameter.numel() > 0]
    assert held and not {id(parameter) for parameter in held} & {id(parameter) for parameter in old}
    assert losses[-1] == losses[-2], "the optimizer made before has trained"
    return losses


@pytest.mark.parametrize("trained_before", [True, False])
def test_new_parameters_are_trained(trained_before: bool) -> None:
    run_ranks(same_as_fsdp1, 2, functools.partial(replaced, trained_before))


def whole_before_the_next_step() -> list[float]:
    """What is read without a forward in between is the new parameters', too."""
    model = wrap(make_model())
    replace(model)
    with FSDP.summon_full_params(model):
        found = [parameter.sum().item() for parameter in model.parameters()]
    replace(model)
    return found + [value.float().abs().sum().item() for value in model.state_dict().values()]


def test_state_has_the_new_values() -> None:
    run_ranks(same_as_fsdp1, 2, whole_before_the_next_step)


def hooks_of_the_new(rank: int, world_size: int) -> None:
    tsm.init()
    model = wrap(make_model())
    seen: list[Tensor] = []
    new = nn.Parameter(model.module[2].weight.detach().clone())
    new.register_hook(seen.append)
    model.module[2].weight = new
    loss_of(model, 0).backward()
    assert [list(gradient.shape) for gradient in seen] == [[4, 16]]
    assert model.module[2].weight is new
    assert new.numel() == 0 or (new.grad is not None and new.grad.shape == new.shape)


def test_hooks_of_a_new_parameter_run() -> None:
    run_ranks(hooks_of_the_new, 2)


def what_does_not_fit(rank: int, world_size: int) -> None:
    tsm.init()
    model = wrap(make_model())
    last = model.module[2]
    kept = last.weight
    for other, said in (
        (nn.Parameter(torch.zeros(4, 16)), r"Parameter \(torch.float32 of shape \[4, 16\] on cpu\).* of shape \[\d+\]"),
        (nn.Parameter(kept.detach().bfloat16()), r"\(torch.bfloat16 of shape \[\d+\].* has torch.float32"),
        (nn.Parameter(torch.zeros(kept.numel(), device="meta")), "on meta"),
        (None, "NoneType"),
    ):
        last.weight = other
        with pytest.raises(
            tsm.InvalidArgument, match=rf"\[FSDP\] Cannot writeback: parameter 2.weight was replaced by .*{said}"
        ):
            loss_of(model, 0)
        with pytest.raises(tsm.InvalidArgument, match=said):
            model.state_dict()
    last.weight = kept
    loss_of(model, 0).backward()
    assert kept.numel() == 0 or kept.grad is not None


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(what_does_not_fit, 2)
