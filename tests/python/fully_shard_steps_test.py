"""What scripts do around a step of a model of fully_shard, with torch's own and with ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import tesserae as tsm
from fully_shard_runs import WIDTH, Seen, batch, both, look, make_model, ours, run_steps, shard_all
from ranks import run_ranks
from tesserae.fully_shard.module import _state


def run_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: int,
    before: Callable[[int], None] = lambda part: None,
) -> Seen:
    """Two steps, each of so many backwards; `before` each."""
    seen = Seen()
    for step in range(2):
        for part in range(parts):
            before(part)
            loss = model(batch(step, part)).square().mean()
            loss.backward()
            seen.losses.append(loss.item())
        look(seen, model, None, f"step {step}:")
        optimizer.step()
        optimizer.zero_grad()
    return seen


def accumulates(rank: int, world_size: int, keep: bool) -> None:
    def run() -> Seen:
        model = shard_all(make_model())

        def before(part: int) -> None:
            model.set_requires_gradient_sync(part == 2)
            if keep:
                model.set_reshard_after_backward(part == 2)

        return run_parts(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, before)

    both(run)


@pytest.mark.parametrize("keep", [False, True])
def test_accumulation(keep: bool) -> None:
    run_ranks(accumulates, 2, keep)


def accumulates_shards(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def run() -> Seen:
        model = shard_all(make_model(), mesh=mesh)
        return run_parts(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            3,
            lambda part: model.set_requires_all_reduce(part == 2),
        )

    both(run)
    with ours():
        model = shard_all(make_model(), mesh=mesh)
        model.set_requires_all_reduce(False)
        model(batch(0)).square().mean().backward()
        statistics = _state(model).prepared().statistics()
        assert statistics.reductions == len(list(model.parameters())), "they are shards already"
        assert all(parameter.grad is None for parameter in model.parameters()), "and not final"


def test_accumulation_before_the_all_reduce() -> None:
    run_ranks(accumulates_shards, 4)


def unshards(rank: int, world_size: int) -> None:
    whole = make_model()
    with ours():
        model = shard_all(make_model())
        for async_op in (False, True):
            handle = model[0].unshard(async_op=async_op)
            if handle is not None:
                handle.wait()
            assert not isinstance(model[0].wide.weight, DTensor)
            torch.testing.assert_close(model[0].wide.weight, whole[0].wide.weight)
            assert isinstance(model[1].wide.weight, DTensor)
            model[0].reshard()
            assert isinstance(model[0].wide.weight, DTensor)
        handle = model[0].unshard(async_op=True)
        out = model(batch(0))
        torch.testing.assert_close(out, whole(batch(0)))
        assert isinstance(model[0].wide.weight, DTensor)
        out.sum().backward()
        assert all(p.grad.placements == p.placements for p in model.parameters())


def test_unshard_and_reshard() -> None:
    run_ranks(unshards, 2)


def unshards_between(rank: int, world_size: int, config: dict[str, Any]) -> None:
    """Ahead of a backward, and waited for when it is over: the next step sees what the optimizer has written."""

    def run() -> Seen:
        model = shard_all(make_model())
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        seen = Seen()
        for step in range(3):
            early = model[1].unshard(async_op=True)
            loss = model(batch(step)).square().mean()
            early.wait()
            late = model[0].unshard(async_op=True)
            loss.backward()
            late.wait()
            sgd.step()
            sgd.zero_grad()
            seen.losses.append(loss.item())
        return seen

    both(run, config)


@pytest.mark.parametrize(
    "config", [{}, {"degrees": {"parameters": 1, "gradients": 2, "optimizer": 2}}, {"hybrid_shard_degree": 1}]
)
def test_unshard_around_a_backward(config: dict[str, Any]) -> None:
    run_ranks(unshards_between, 2, config)


def accumulates_after_zero_grad(rank: int, world_size: int) -> None:
    def run() -> Seen:
        model = shard_all(make_model())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = Seen()
        for step in range(3):
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                loss = model(batch(step, part)).square().mean()
                if part == 0:
                    sgd.zero_grad()
                loss.backward()
                seen.losses.append(loss.item())
            look(seen, model, None, f"step {step}:")
            sgd.step()
        return seen

    both(run)


def test_gradients_that_were_zeroed_between_forward_and_backward() -> None:
    run_ranks(accumulates_after_zero_grad, 2)


def loads(rank: int, world_size: int) -> None:
    whole = make_model()
    state = whole.state_dict()
    with ours():
        with torch.device("meta"):
            model = make_model()
        shard_all(model)
        assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
        with pytest.raises(tsm.InvalidArgument, match=r"(?s)meta device.*to_empty"):
            model(batch(0))
        model.to_empty(device="cpu")
        own = model.state_dict()
        placed = {name: distribute(value, own[name]) for name, value in state.items()}
        model.load_state_dict(placed)
        torch.testing.assert_close(model(batch(0)), whole(batch(0)))
        # State dicts show the parameters' memory, before and after steps.
        for name, parameter in model.named_parameters():
            assert model.state_dict()[name].to_local().data_ptr() == parameter.to_local().data_ptr()
        # Others in their place, before and after the first step.
        for factor in (2.0, 3.0):
            assigned = {name: distribute(factor * value, own[name]) for name, value in state.items()}
            model.load_state_dict(assigned, assign=True)
            whole.load_state_dict({name: factor * value for name, value in state.items()})
            torch.testing.assert_close(model(batch(1)), whole(batch(1)))
            model.reshard()  # the outermost module keeps its parameters after a forward
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
                for parameter in whole.parameters():
                    parameter.mul_(0.5)
            torch.testing.assert_close(model(batch(1)), whole(batch(1)))


def distribute(value: Tensor, like: DTensor) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)


def test_state_dicts_and_meta_devices() -> None:
    run_ranks(loads, 3)


def changes_dtype(rank: int, world_size: int) -> None:
    def run() -> Seen:
        model = shard_all(make_model())
        model.to(torch.float64)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return run_steps(model, sgd, lambda step: model(batch(step).double()).square().mean(), steps=2)

    both(run)


def test_another_dtype_before_the_first_step() -> None:
    run_ranks(changes_dtype, 2)


def clips(rank: int, world_size: int) -> None:
    def run() -> Seen:
        model = shard_all(make_model())
        model(10 * batch(0)).square().mean().backward()
        seen = Seen()
        seen.add("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        look(seen, model, None, "clipped:")
        return seen

    both(run)


def test_clipping() -> None:
    run_ranks(clips, 3)


def recovers(rank: int, world_size: int) -> None:
    with ours():
        model = shard_all(make_model())
        expected = model(batch(0)).detach()
        with pytest.raises(RuntimeError):
            model(torch.randn(2, WIDTH + 1))
        assert all(isinstance(parameter, DTensor) for block in model[:3] for parameter in block.parameters())
        torch.testing.assert_close(model(batch(0)).detach(), expected)
        model(batch(0)).sum().backward()
        # What changes after a forward that threw is what the next one sees.
        with pytest.raises(RuntimeError):
            model(torch.randn(2, WIDTH + 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert model(batch(0)).abs().sum() == 0


def test_a_forward_that_threw() -> None:
    run_ranks(recovers, 2)


def freezes_meanwhile(rank: int, world_size: int) -> None:
    """For a second forward, before the backward of the first: that of reference outputs, or of a critic whose input
    alone is to be trained by it."""

    def run(recorded: bool, **arguments: Any) -> Seen:
        model = shard_all(make_model(), **arguments)
        read: list[Tensor] = []

        def loss_of(step: int) -> Tensor:
            first = model(batch(step)).square().mean()
            model.requires_grad_(False)
            read.append(batch(step, 1).requires_grad_())
            with torch.set_grad_enabled(recorded):
                second = model(read[-1]).mean()
            model.requires_grad_(True)
            return (first - second).square()

        seen = run_steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_of)
        for step, inputs in enumerate(read if recorded else []):
            seen.add(f"input {step}", inputs.grad)
        return seen

    for recorded in (True, False):
        for stays in ({}, {"reshard_after_forward": True}, {"reshard_after_forward": False}):
            both(functools.partial(run, recorded, **stays))


def test_parameters_may_be_frozen_between_a_forward_and_its_backward() -> None:
    run_ranks(freezes_meanwhile, 2)


def trains_complex_numbers(rank: int, world_size: int) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.cfloat) @ self.weight).abs()

    def run() -> Seen:
        torch.manual_seed(4)
        model = Spectral()
        fully_shard(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return run_steps(model, sgd, lambda step: model(batch(step)).square().mean(), steps=3)

    both(run)


def test_complex_parameters() -> None:
    run_ranks(trains_complex_numbers, 2)


def steps_in_backward(rank: int, world_size: int) -> None:
    def run() -> Seen:
        model = shard_all(make_model())
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
        names = {p: name for name, p in model.named_parameters()}
        seen = Seen()

        def step(parameter: nn.Parameter) -> None:
            seen.add(f"gradient {len(seen.losses)} {names[parameter]}", parameter.grad)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(3):
            loss = model(batch(number)).square().mean()
            loss.backward()
            seen.losses.append(loss.item())
        return seen

    both(run)


def test_hooks_after_a_gradient_is_accumulated() -> None:
    run_ranks(steps_in_backward, 2)


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return x + self.experts[chosen](x)


def choice(**arguments: Any) -> nn.Module:
    torch.manual_seed(4)
    model = Choice()
    fully_shard(model, **arguments)
    model.set_reduce_scatter_unused_params(True)
    return model


def uses_different_parameters(rank: int, world_size: int) -> None:
    def run() -> Seen:
        model = choice()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return run_steps(model, sgd, lambda step: model(batch(step), (step + rank) % 2).square().mean(), steps=4)

    both(run)


def test_ranks_that_use_different_parameters() -> None:
    run_ranks(uses_different_parameters, 2)


def uses_different_parameters_in_parts(rank: int, world_size: int) -> None:
    """Of a hybrid, whose replicas are added up after the last part only: in the first only some ranks use an expert, or
    in the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def run() -> Seen:
        model, seen = choice(mesh=mesh), Seen()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            for part, chosen in enumerate([(step + rank) % 2, 0] if step % 2 else [0, rank % 2]):
                model.set_requires_all_reduce(part == 1)
                loss = model(batch(step, part), chosen).square().mean()
                loss.backward()
                seen.losses.append(loss.item())
            look(seen, model, sgd, f"step {step}")
            sgd.step()
            sgd.zero_grad()
        return seen

    both(run)


def test_ranks_that_use_different_parameters_in_parts_of_a_step() -> None:
    run_ranks(uses_different_parameters_in_parts, 4)


def reduces_by_itself(rank: int, world_size: int) -> None:
    """A hybrid that the script makes: shards in pairs, and a hook that averages over the replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = mesh["replicate"].get_group()

    def run() -> Seen:
        model = shard_all(make_model(), mesh=mesh["shard"])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda average: dist.all_reduce(average.div_(2), group=replicas))
        return run_parts(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 2)  # the second is added

    both(run)
    theirs = shard_all(make_model(), mesh=mesh)
    with ours():
        mine = shard_all(make_model(), mesh=mesh)
        for model in (theirs, mine):
            with pytest.raises(ValueError, match="stream cannot be set"):
                model.set_all_reduce_hook(lambda _: None, stream=object())


def test_a_hook_on_averages() -> None:
    run_ranks(reduces_by_itself, 4)


def fails_in_a_hook(rank: int, world_size: int) -> None:
    with ours():
        model = shard_all(make_model())

        def hook(average: Tensor) -> None:
            raise RuntimeError("a hook with a bug")

        model[0].set_all_reduce_hook(hook)
        with pytest.raises(RuntimeError, match="a hook with a bug"):
            model(batch(0)).sum().backward()
        model[0].set_all_reduce_hook(lambda average: average.zero_())
        model.zero_grad()
        model(batch(0)).sum().backward()
        assert not model[0].wide.weight.grad.to_local().any() and model[1].wide.weight.grad.to_local().any()
        model[0].set_all_reduce_hook(None)  # as in torch: none any more
        model.zero_grad()
        model(batch(0)).sum().backward()
        assert model[0].wide.weight.grad.to_local().any()


def test_an_error_in_a_hook_ends_the_backward() -> None:
    run_ranks(fails_in_a_hook, 2)


def keeps_a_state_dict(rank: int, world_size: int) -> None:
    def run() -> Seen:
        model = shard_all(make_model())
        cached = model.state_dict()  # as torchtitan does: what is saved is what this shows then
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = run_steps(model, optimizer, lambda step: model(batch(step)).square().mean())
        for name, tensor in cached.items():
            seen.add(f"cached {name}", tensor)
        with torch.no_grad():
            for tensor in cached.values():
                tensor.to_local().fill_(0.25)
        seen.losses.append(model(batch(3)).sum().item())
        return seen

    both(run)


def test_a_state_dict_from_before_the_first_step_shows_what_is_trained() -> None:
    run_ranks(keeps_a_state_dict, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def ties_afterwards(rank: int, world_size: int, units: tuple[str, ...]) -> None:
    def run() -> Seen:
        model = Tied()
        for name in units:
            fully_shard(getattr(model, name))
        fully_shard(model)
        model.last.weight = model.first.weight  # as transformers do once they have sharded a model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return run_steps(model, optimizer, lambda step: model(batch(step)).square().mean())

    both(run)


@pytest.mark.parametrize("units", [("middle",), ("first", "middle"), ("middle", "last"), ("first", "last")])
def test_weights_that_are_tied_after_fully_shard(units: tuple[str, ...]) -> None:
    run_ranks(ties_afterwards, 2, units)


def ties_too_late(rank: int, world_size: int) -> None:
    with ours():
        model = Tied()
        fully_shard(model.first)
        fully_shard(model)
        model(batch(0)).sum().backward()
        model.last.weight = model.first.weight
        with pytest.raises(tsm.InvalidArgument, match="was tied to that of Linear.weight after the first step"):
            model(batch(1))


def test_weights_that_are_tied_after_the_first_step_are_an_error() -> None:
    run_ranks(ties_too_late, 2)


def keeps_gradients(rank: int, world_size: int) -> None:
    def run() -> Seen:
        model = shard_all(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = Seen()
        kept: list[tuple[str, Tensor]] = []
        for step in range(3):
            loss = model(batch(step)).square().mean()
            kept += [(f"step {step} {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, gradient in kept:
            seen.add(name, gradient)
        return seen

    both(run)


def test_gradients_that_a_script_keeps_stay_as_they_are() -> None:
    run_ranks(keeps_gradients, 2)


def freezes_in_turn(rank: int, world_size: int, before: bool, replicas: int, arguments: dict[str, Any]) -> None:
    """Frozen before the call, or between it and the first forward; trained and frozen in turn later."""
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))

    def run() -> Seen:
        def freeze(frozen: bool) -> None:
            for parameter in (*model[1].parameters(), model[0].wide.weight):
                parameter.requires_grad_(not frozen)

        def loss(step: int) -> Tensor:
            freeze(step % 3 != 1)
            return model(batch(step)).square().mean()

        model = make_model()
        freeze(before)
        shard_all(model, mesh=mesh, **arguments)
        freeze(True)
        return run_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss, steps=6)

    both(run)


@pytest.mark.parametrize(
    "arguments", [{}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}]
)
@pytest.mark.parametrize("before", [True, False])
def test_parameters_are_frozen_at_first(before: bool, arguments: dict[str, Any]) -> None:
    run_ranks(freezes_in_turn, 2, before, 1, arguments)


@pytest.mark.parametrize("replicas", [2, 4])
def test_parameters_are_frozen_at_first_beside_replicas(replicas: int) -> None:
    run_ranks(freezes_in_turn, 4, True, replicas, {})


class Pair(nn.Module):
    """Never called itself: as a GAN, whose parts train in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make_model(1), make_model(2)


def trains_parts_in_turn(rank: int, world_size: int) -> None:
    def run() -> Seen:
        pair = Pair()
        pair.second.requires_grad_(False)
        for part in (pair.first, pair.second, pair):
            shard_all(part, reshard_after_forward=True)  # torch shows whole ones after a forward that has no backward
        optimizer = torch.optim.AdamW(pair.parameters(), lr=1e-2)

        def loss(step: int) -> Tensor:
            pair.first.requires_grad_(step % 2 == 0)
            pair.second.requires_grad_(step % 2 == 1)
            return pair.second(torch.cat([batch(step)[:, :7], pair.first(batch(step))], 1)).square().mean()

        return run_steps(pair, optimizer, loss, steps=4)

    both(run)


def test_parts_are_trained_in_turn() -> None:
    run_ranks(trains_parts_in_turn, 2)


def begins_a_part_anew(rank: int, world_size: int) -> None:
    """A backward of a part that is called by itself threw: the next one is whole."""
    with ours():
        pair = Pair()
        for part in (pair.first, pair.second, pair):
            shard_all(part)

        def gradients(throws: bool) -> list[Tensor]:
            output = pair.first(batch(0))
            if throws:
                output.register_hook(lambda gradient: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    output.square().mean().backward()
                output = pair.first(batch(0))
            output.square().mean().backward()
            found = [p.grad.full_tensor() for p in pair.first.parameters()]
            for parameter in pair.parameters():
                parameter.grad = None
            return found

        expected = gradients(throws=False)
        for gradient, wanted in zip(gradients(throws=True), expected, strict=True):
            torch.testing.assert_close(gradient, wanted)


def test_a_part_begins_anew_after_a_backward_that_threw() -> None:
    run_ranks(begins_a_part_anew, 2)
