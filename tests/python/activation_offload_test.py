"""torch's offload_wrapper and save_on_cpu in models of ours: where activations go, and that no bit changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tesserae as tsm
from ranks import run_ranks

WIDTH, LENGTH, BLOCKS = 64, 640, 6
LEAVES = "128KiB"  # and more; an input of a block has 160 KiB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.second(torch.tanh(self.first(self.norm(x)))))


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)))


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: isinstance(m, Block)
    )
    return model


def as_fsdp(model: nn.Sequential) -> nn.Module:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))


def as_fully_shard(model: nn.Sequential) -> nn.Module:
    for child in model:
        if isinstance(child, Block):
            fully_shard(child)
    return fully_shard(model)


SHARDED = {"fsdp": as_fsdp, "fully_shard": as_fully_shard}


def losses_of(
    model: nn.Module, around: Callable[[], Any] = contextlib.nullcontext, parts: int = 1
) -> tuple[list[float], Tensor]:
    """Of three steps, and the norms of the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, norms = [], []
    rank = torch.distributed.get_rank()
    for step in range(3):
        for part in range(parts):
            torch.manual_seed(10 * step + part)
            x = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
            with around():
                loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        norms += [p.grad.norm().item() for p in model.parameters() if p.grad is not None and p.grad.numel() > 0]
        optimizer.step()
        optimizer.zero_grad()
    return losses, torch.tensor(norms)


def assert_same_bits(actual: tuple[list[float], Tensor], expected: tuple[list[float], Tensor]) -> None:
    assert actual[0] == expected[0]
    assert actual[1].tolist() == expected[1].tolist()


@contextlib.contextmanager
def ours(folder: str, **more: Any):
    tsm.init({"offload": {"folder": folder, "activation_size": LEAVES}, **more})
    try:
        yield
    finally:
        tsm.uninstall()


def wraps_the_model(rank: int, world_size: int, how: str, recomputes: bool, folder: str) -> None:
    """As SMP v2's scripts do: shard, checkpoint blocks, then offload_wrapper around all."""
    prepare = checkpointed if recomputes else lambda model: model

    with ours(folder):
        expected = losses_of(prepare(SHARDED[how](make_model())))
        assert tsm.state.activations.bytes_out == 0
    with ours(folder, activation_loading_horizon=3):
        assert_same_bits(losses_of(offload_wrapper(prepare(SHARDED[how](make_model())))), expected)
        counters = tsm.state.activations
        assert counters.bytes_out == counters.bytes_in > 0
        assert counters.bytes_stayed > 0
        if recomputes:
            # The inputs of the model and of its blocks. The first forward knows no order, so all of them leave. Then
            # those stay that the horizon brings back at the end of the forward.
            size, units = LENGTH * WIDTH * 4, 1 + BLOCKS
            assert counters.bytes_out == pytest.approx((units + 2 * (units - 3)) * size, rel=0.03)
    with ours(folder, sm_activation_offloading=False):
        assert_same_bits(losses_of(offload_wrapper(prepare(SHARDED[how](make_model())))), expected)
        assert tsm.state.activations is None


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("how", SHARDED)
def test_offload_wrapper_around_the_model(how: str, recomputes: bool, tmp_path: Path) -> None:
    run_ranks(wraps_the_model, 2, how, recomputes, str(tmp_path))


def wraps_blocks(rank: int, world_size: int, how: str, folder: str) -> None:
    """In each unit, with and without a checkpoint_wrapper in and around it; and in an accumulation."""

    def wrapped(*wrappers: Callable[[nn.Module], nn.Module]) -> nn.Module:
        model = make_model()
        for i in range(1, BLOCKS + 1):
            inner: nn.Module = model[i]
            for wrapper in wrappers:
                inner = wrapper(inner)
            # Inside of what the policy finds, so that units are the same with and without.
            model[i] = Holder(inner)
        if how == "fsdp":
            return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Holder}))
        for child in model:
            if isinstance(child, Holder):
                fully_shard(child)
        return fully_shard(model)

    for parts in (1, 2):
        with ours(folder):
            expected = losses_of(wrapped(), parts=parts)
        for wrappers in (
            (offload_wrapper,),
            (checkpoint_wrapper, offload_wrapper),
            (offload_wrapper, checkpoint_wrapper),
        ):
            with ours(folder):
                assert_same_bits(losses_of(wrapped(*wrappers), parts=parts), expected)
                assert tsm.state.activations.bytes_out > 0


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("how", SHARDED)
def test_offload_wrapper_around_blocks(how: str, tmp_path: Path) -> None:
    run_ranks(wraps_blocks, 2, how, str(tmp_path))


def saves_on_cpu(rank: int, world_size: int, how: str, folder: str) -> None:
    """What scripts say themselves is what happens."""
    with ours(folder):
        expected = losses_of(SHARDED[how](make_model()))
        for pin_memory in (False, True):
            around = lambda pin_memory=pin_memory: save_on_cpu(pin_memory=pin_memory)  # noqa: E731
            assert_same_bits(losses_of(SHARDED[how](make_model()), around), expected)
            assert_same_bits(losses_of(checkpointed(SHARDED[how](make_model())), around), expected)
        assert tsm.state.activations.bytes_out == 0


@pytest.mark.parametrize("how", SHARDED)
def test_save_on_cpu(how: str, tmp_path: Path) -> None:
    run_ranks(saves_on_cpu, 2, how, str(tmp_path))


def leaves_others_alone(rank: int, world_size: int, folder: str) -> None:
    """A model that nobody shards: torch's own way, and no store. And an error in the forward is forgotten."""
    expected = losses_of(make_model())
    with ours(folder):
        assert_same_bits(losses_of(offload_wrapper(make_model())), expected)
        assert tsm.state.activations.bytes_out == 0

        model = offload_wrapper(as_fsdp(make_model()))
        expected = losses_of(as_fsdp(make_model()))
        with pytest.raises(RuntimeError):
            model(torch.randn(LENGTH, WIDTH + 1))
        assert_same_bits(losses_of(model), expected)
        assert tsm.state.activations.bytes_away == 0


def test_models_of_others_and_errors(tmp_path: Path) -> None:
    run_ranks(leaves_others_alone, 2, str(tmp_path))


def keeps_the_graph(rank: int, world_size: int, folder: str) -> None:
    """A second backward through the same graph reads the same values."""
    with ours(folder):
        model = offload_wrapper(as_fully_shard(make_model()))
        x = torch.randn(LENGTH, WIDTH)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        first = [p.grad.to_local().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        loss.backward()
        for p, expected in zip(model.parameters(), first, strict=True):
            assert torch.equal(p.grad.to_local(), expected)
        del loss
        assert tsm.state.activations.bytes_away == 0


def test_a_graph_that_is_retained(tmp_path: Path) -> None:
    run_ranks(keeps_the_graph, 2, str(tmp_path))


class Changes(nn.Module):
    """Autograd needs the sigmoid as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        half = torch.sigmoid(x)
        y = half * self.weight
        half.add_(1)
        return y


def changes_what_was_saved(rank: int, world_size: int, how: str, folder: str) -> None:
    with ours(folder):
        model = offload_wrapper(SHARDED[how](nn.Sequential(Changes())))
        for _ in range(3):  # what leaves in the first stays then
            for rows in (1, LENGTH):
                loss = model(torch.randn(rows, WIDTH)).sum()
                with pytest.raises((RuntimeError, ValueError), match=r"changed in place since \(version"):
                    loss.backward()


@pytest.mark.parametrize("how", SHARDED)
def test_what_was_changed_in_place_is_an_error_as_without_the_wrapper(how: str, tmp_path: Path) -> None:
    run_ranks(changes_what_was_saved, 2, how, str(tmp_path))
