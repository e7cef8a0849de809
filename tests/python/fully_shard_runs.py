"""Runs of one script with torch's fully_shard and with ours, in the same ranks: before tsm.init and after it. What the
script sees of them is compared: losses, parameters, gradients and the state of the optimizer, as DTensors and whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tesserae as tsm

WIDTH = 10  # 3 and 4 ranks do not divide it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


def make_model(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, 3))


def shard_all(model: nn.Module, **arguments: Any) -> nn.Module:
    for child in model.children():
        if isinstance(child, Block):
            fully_shard(child, **arguments)
    fully_shard(model, **arguments)
    return model


def batch(step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


@contextmanager
def ours(config: dict[str, Any] | None = None):
    tsm.init(config)
    try:
        yield
    finally:
        tsm.uninstall()


@contextmanager
def halved(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Without gradients and with other weights, as an average of them is evaluated; afterwards these are back."""
    with torch.no_grad():
        kept = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.mul_(0.5)
        yield
        model.reshard()  # torch's outermost keeps what it has gathered
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)


@dataclass
class Seen:
    """What a script sees of a training run, as plain tensors."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            self.tensors[name + " (local)"] = tensor.to_local().detach().clone()
            tensor = tensor.full_tensor()
        self.tensors[name] = tensor.detach().clone()


def look(seen: Seen, model: nn.Module, optimizer: torch.optim.Optimizer | None, when: str) -> None:
    for name, parameter in model.named_parameters():
        seen.add(f"{when} {name}", parameter)
        if parameter.grad is not None:
            seen.add(f"{when} {name}.grad", parameter.grad)
        for kind, value in (optimizer.state[parameter] if optimizer is not None else {}).items():
            if isinstance(value, Tensor):
                seen.add(f"{when} {name}.{kind}", value)


def assert_same(ours: Seen, theirs: Seen, tolerance: float = 1e-6) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        torch.testing.assert_close(ours.tensors[name], tensor, rtol=10 * tolerance, atol=tolerance, msg=name)


def run_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[int], Tensor], steps: int = 3
) -> Seen:
    """What is there after each backward and after each step; `loss_of(step)` is the forward."""
    seen = Seen()
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        look(seen, model, None, f"step {step} after backward:")
        optimizer.step()
        look(seen, model, optimizer, f"step {step}:")
        optimizer.zero_grad()
        seen.losses.append(loss.item())
    return seen


def train(make: Callable[[], nn.Module], steps: int = 3, **optimizer: Any) -> Seen:
    model = make()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, **optimizer)
    return run_steps(model, adam, lambda step: model(batch(step)).square().mean(), steps)


def both(run: Callable[[], Seen], config: dict[str, Any] | None = None, tolerance: float = 1e-6) -> None:
    theirs = run()
    with ours(config):
        mine = run()
    assert_same(mine, theirs, tolerance)
