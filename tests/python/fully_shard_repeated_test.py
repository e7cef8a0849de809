"""fully_shard, units that a forward uses several times, writes, or evaluates in between. Each against torch's own in
the same ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import tesserae as tsm
from fully_shard_runs import WIDTH, Seen, batch, both, halved, look, make_model, ours, run_steps, shard_all
from ranks import run_ranks
from tesserae.job import fabrics

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def like_torch(rank: int, world_size: int, run: Callable[[], Seen], backend: str) -> None:
    fabrics.HOST_BACKEND = backend
    both(run)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


# ---- one unit, several calls ----
class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}.get(kind, nn.Linear)(WIDTH, WIDTH)
        if kind == "frozen weight":
            self.cell = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            self.cell[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = torch.zeros_like(x), torch.zeros_like(x)
        for step in range(6):
            embedded = self.embed(x + step)
            if self.kind == "lstm":
                hidden, state = self.cell(embedded, (hidden, state))
            elif self.kind == "gru":
                hidden = self.cell(embedded, hidden)
            else:
                hidden = torch.tanh(self.cell(hidden + embedded))
        if self.kind == "without gradients":
            with torch.no_grad():
                target = self.cell(hidden)
            return hidden - target
        if self.kind == "unused":
            self.cell(hidden)
        return hidden


def recurrent(kind: str) -> Seen:
    model = Recurrent(kind)
    fully_shard(model.cell)
    fully_shard(model)
    return run_steps(model, sgd(model), lambda step: model(batch(step)).square().mean())


KINDS = ("gru", "lstm", "frozen weight", "without gradients", "unused")


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_that_is_called_several_times(kind: str) -> None:
    run_ranks(like_torch, 2, functools.partial(recurrent, kind), "gloo" if kind == "lstm" else "shm")


def wrapped() -> Seen:
    """Torch's older class, ours."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = Recurrent("lstm")
    cpu = torch.device("cpu")
    model.cell = FSDP(model.cell, use_orig_params=True, device_id=cpu)
    sharded = FSDP(model, use_orig_params=True, device_id=cpu)
    optimizer, losses = sgd(sharded), []
    for step in range(4):
        loss = sharded(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Seen(losses)


def of_another_backward() -> Seen:
    """An input that other modules have, too, and whose backward comes first, within an accumulation."""
    model = shard_all(make_model())
    torch.manual_seed(2)
    encoder, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    model.set_requires_gradient_sync(False)
    model(encoder(batch(0))).square().mean().backward()
    model.set_requires_gradient_sync(True)
    shared = encoder(batch(1))
    loss = model(shared).square().mean()
    other(shared).sum().backward(retain_graph=True)
    loss.backward()
    seen = Seen()
    look(seen, model, None, "after:")
    return seen


# ---- weights that are written ----
class Momentum(nn.Module):
    """Its key encoder follows the other one, within the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            for mine, followed in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data.mul_(0.5).add_(followed.data, alpha=0.5)
            key = self.key(x + 0.1)
        return query - key


def momentum_encoder(policy: MixedPrecisionPolicy | None = None) -> Seen:
    model = Momentum()
    arguments = {"mp_policy": policy} if policy is not None else {}
    for module in (model.query, model.key, model):
        fully_shard(module, **arguments)
    return run_steps(model, sgd(model), lambda step: (5 * model(batch(step))).square().mean(), steps=4)


def other_weights_once() -> Seen:
    """Evaluated within an accumulation, and put back: as an average of the weights is by a callback."""
    model, seen = shard_all(make_model(), mp_policy=BF16), Seen()
    parameters = list(model.parameters())
    model.set_requires_gradient_sync(False)
    model(batch(0)).sum().backward()
    with halved(model, parameters):
        seen.add("evaluated", model(batch(1)))
    model.set_requires_gradient_sync(True)
    model(batch(2)).sum().backward()
    look(seen, model, None, "after:")
    return seen


def other_weights_before_the_backward() -> Seen:
    model, seen = shard_all(make_model()), Seen()
    parameters = list(model.parameters())
    loss = model(batch(0)).square().sum()
    dist.barrier()  # docs/limits.md
    with halved(model, parameters):
        model.reshard()
        seen.add("evaluated", model(batch(1)))
    loss.backward()
    look(seen, model, None, "after:")
    return seen


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = nn.Embedding(11, WIDTH, max_norm=1.0, padding_idx=2)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, step: int) -> Tensor:
        return self.last(self.rows((torch.arange(12) * (step + 3)) % 11))


def renormed_rows() -> Seen:
    model = fully_shard(Renormed())
    return run_steps(model, sgd(model), lambda step: model(step).square().mean(), steps=6)


# ---- evaluations ----
def in_inference_mode() -> Seen:
    model, seen = shard_all(make_model()), Seen()
    optimizer = sgd(model)
    for step in range(3):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            seen.losses += [loss.item(), model(batch(step, 1)).square().mean().item()]
    with torch.inference_mode():
        other = shard_all(make_model(2))
        seen.losses.append(other(batch(7)).square().mean().item())
    model.reshard()  # torch's outermost keeps what it has gathered
    look(seen, model, None, "after:")
    return seen


# ---- hooks ----
def hooks_of_alternate_heads() -> Seen:
    torch.manual_seed(3)
    heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = heads

        def forward(self, x: Tensor, head: int) -> Tensor:
            return self.heads[head](x)

    model, seen = fully_shard(Heads()), Seen()
    for head in heads:
        head.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    for step in range(4):
        model(batch(step), step % 2).square().mean().backward()
    look(seen, model, None, "after:")
    return seen


RUNS: list[Callable[[], Seen]] = [
    wrapped,
    of_another_backward,
    momentum_encoder,
    functools.partial(momentum_encoder, BF16),
    other_weights_once,
    other_weights_before_the_backward,
    renormed_rows,
    in_inference_mode,
    hooks_of_alternate_heads,
]


def name_of(run: Callable[[], Seen]) -> str:
    return run.func.__name__ + "_bf16" if isinstance(run, functools.partial) else run.__name__


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_as_torch(run: Callable[[], Seen], backend: str) -> None:
    run_ranks(like_torch, 2, run, backend)


def in_three_degrees(rank: int, world_size: int) -> None:
    both(other_weights_once, {"degrees": {"parameters": 1, "gradients": 2, "optimizer": 2}})
    both(momentum_encoder, {"degrees": {"parameters": 1, "gradients": 2, "optimizer": 2}})


def test_weights_that_are_written_where_pieces_are_refreshed() -> None:
    run_ranks(in_three_degrees, 2)


# ---- ranks that differ ----
class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return x + self.experts[chosen](x)


def uses_others(rank: int, world_size: int, backend: str) -> None:
    fabrics.HOST_BACKEND = backend
    with ours():
        model = fully_shard(Choice())
        with pytest.raises(RuntimeError, match="ranks disagree: .*reduce_scatter of 110 x Float of contents"):
            model(batch(0), rank).sum().backward()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_gradients_of_other_parameters_of_the_same_shape_are_not_added_up(backend: str) -> None:
    run_ranks(uses_others, 2, backend)


def turns_with_unused(rank: int, world_size: int) -> None:
    def gradients(turns: bool) -> list[Tensor]:
        model = fully_shard(Choice())
        model.set_reduce_scatter_unused_params(True)
        model.set_requires_gradient_sync(False)
        model(batch(0), rank % 2).square().mean().backward()
        if turns:
            tsm.reshard(model, torch.optim.SGD(model.parameters(), lr=0.1), degrees=(1, 1, 1))
        model.set_requires_gradient_sync(True)
        model(batch(1), 0).square().mean().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    with ours():
        for mine, wanted in zip(gradients(True), gradients(False), strict=True):
            torch.testing.assert_close(mine, wanted)


def test_the_dial_turns_where_ranks_have_used_different_parameters() -> None:
    run_ranks(turns_with_unused, 2)


# ---- numbers ----
def large_sums(rank: int, world_size: int) -> None:
    """A mean that fp16 has, of a sum that it has not."""

    def run(policy: MixedPrecisionPolicy) -> Seen:
        torch.manual_seed(0)
        model, seen = nn.Linear(WIDTH, WIDTH, bias=False).half(), Seen()
        fully_shard(model, mp_policy=policy)
        (model(torch.ones(1, WIDTH).half()) * 200).sum().mul(200).backward()
        assert torch.isfinite(model.weight.grad.full_tensor()).all()
        look(seen, model, None, "after:")
        return seen

    both(lambda: run(MixedPrecisionPolicy(reduce_dtype=torch.float32)))
    both(lambda: run(MixedPrecisionPolicy()))


def test_sums_beyond_fp16() -> None:
    run_ranks(large_sums, 2)


# ---- arguments ----
def takes(rank: int, world_size: int) -> None:
    import dataclasses

    @dataclasses.dataclass
    class Kind:
        size: int

    class Takes(nn.Linear):
        def forward(self, x: Tensor, kind: type) -> Tensor:
            return F.relu(super().forward(x)) if dataclasses.is_dataclass(kind) else x

    def run() -> Seen:
        torch.manual_seed(0)
        model, seen = fully_shard(Takes(WIDTH, WIDTH), offload_policy=None), Seen()
        model(batch(0), kind=Kind).sum().backward()
        look(seen, model, None, "after:")
        return seen

    both(run)
    assert dist.get_world_size() == world_size


def test_arguments_that_torch_takes() -> None:
    run_ranks(takes, 2)
