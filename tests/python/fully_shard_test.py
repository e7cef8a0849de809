"""torch.distributed.fsdp.fully_shard on our engine against torch's own: the same script, the same values.

Each test trains a model twice in the same ranks, before tsm.init (torch) and after it (ours), and compares what the
script sees: losses, parameters, gradients and the state of the optimizer, as DTensors and whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import models
import tesserae as tsm
from ranks import run_ranks

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


def train(make: Callable[[], nn.Module], steps: int = 3, **optimizer: Any) -> Seen:
    model = make()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, **optimizer)
    seen = Seen()
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        look(seen, model, None, f"step {step} after backward:")
        adam.step()
        look(seen, model, adam, f"step {step}:")
        adam.zero_grad()
        seen.losses.append(loss.item())
    return seen


def both(run: Callable[[], Seen], config: dict[str, Any] | None = None, tolerance: float = 1e-6) -> None:
    theirs = run()
    with ours(config):
        mine = run()
    assert_same(mine, theirs, tolerance)


# ---- values ----
def trains_like_torch(rank: int, world_size: int, arguments: dict[str, Any], optimizer: dict[str, Any]) -> None:
    both(lambda: train(lambda: shard_all(make_model(), **arguments), **optimizer))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_trains_like_torch(world_size: int) -> None:
    run_ranks(trains_like_torch, world_size, {}, {})


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_lifetimes(reshard: bool | int) -> None:
    run_ranks(trains_like_torch, 4, {"reshard_after_forward": reshard}, {})


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers_of_many_tensors(kind: str) -> None:
    run_ranks(trains_like_torch, 2, {}, {kind: True})


@pytest.mark.parametrize("reduce", [None, torch.float32])
def test_mixed_precision(reduce: torch.dtype | None) -> None:
    run_ranks(trains_in_bf16, 2, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce))


def trains_in_bf16(rank: int, world_size: int, policy: MixedPrecisionPolicy) -> None:
    both(lambda: train(lambda: shard_all(make_model(), mp_policy=policy)), tolerance=1e-3)


def is_hybrid(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both(lambda: train(lambda: shard_all(make_model(), mesh=mesh)))
    with ours():
        parameter = shard_all(make_model(), mesh=mesh)[0].wide.weight
        assert parameter.placements == (Replicate(), Shard(0)) and parameter.device_mesh == mesh


def test_hybrid_mesh() -> None:
    run_ranks(is_hybrid, 4)


def takes_the_configuration(rank: int, world_size: int, config: dict[str, Any], placements: tuple) -> None:
    both(lambda: Seen(losses=train(lambda: shard_all(make_model())).losses), config)
    with ours(config):
        model = shard_all(make_model())
        assert model[0].wide.weight.placements == placements
        train(lambda: model, steps=1)


@pytest.mark.parametrize(
    ("config", "placements"),
    [
        ({"hybrid_shard_degree": 1}, (Replicate(),)),
        ({"hybrid_shard_degree": 2}, (Replicate(), Shard(0))),
        ({"degrees": {"parameters": 1, "gradients": 1, "optimizer": 4}}, (Shard(0),)),
        ({"degrees": {"parameters": 1, "gradients": 4, "optimizer": 4}}, (Shard(0),)),
    ],
)
def test_degrees_of_the_configuration(config: dict[str, Any], placements: tuple) -> None:
    run_ranks(takes_the_configuration, 4, config, placements)


# ---- models ----
def trains_a_model(rank: int, world_size: int, name: str) -> None:
    case = models.MODELS[name]

    def run() -> Seen:
        model = case()
        for part in reversed(list(model.modules())):
            if isinstance(part, case.units):
                fully_shard(part)
        fully_shard(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = Seen()
        for step in range(3):
            loss = case.loss(model, models.tokens(step, 0, rank))
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            seen.losses.append(loss.item())
        look(seen, model, sgd, "at the end:")
        return seen

    both(run, tolerance=1e-5)


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_models(name: str) -> None:
    run_ranks(trains_a_model, 2, name)


# ---- around a step ----
def accumulates(rank: int, world_size: int, keep: bool) -> None:
    def run() -> Seen:
        model = shard_all(make_model())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = Seen()
        for step in range(2):
            for part in range(3):
                model.set_requires_gradient_sync(part == 2)
                if keep:
                    model.set_reshard_after_backward(part == 2)
                loss = model(batch(step, part)).square().mean()
                loss.backward()
                seen.losses.append(loss.item())
            look(seen, model, None, f"step {step}:")
            sgd.step()
            sgd.zero_grad()
        return seen

    both(run)


@pytest.mark.parametrize("keep", [False, True])
def test_accumulation(keep: bool) -> None:
    run_ranks(accumulates, 2, keep)


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
        seen = Seen()
        for step in range(2):
            loss = model(batch(step).double()).square().mean()
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            seen.losses.append(loss.item())
        look(seen, model, None, "at the end:")
        return seen

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


def recomputes(rank: int, world_size: int, reentrant: bool, inside: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    def make() -> nn.Module:
        model = make_model()
        for i in range(3):
            model[i] = Checkpointed(model[i])
            fully_shard(model[i].block if inside else model[i])
        return fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), model))

    both(lambda: train(lambda: (torch.manual_seed(3), make())[1]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_recomputation(reentrant: bool, inside: bool) -> None:
    run_ranks(recomputes, 2, reentrant, inside)


def groups(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        model = make_model()
        fully_shard(model[0])
        fully_shard([model[2], model[3]])
        return fully_shard(model)

    both(lambda: train(make))


def test_a_group_of_modules() -> None:
    run_ranks(groups, 2)


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


def calls_a_part_of_a_group(rank: int, world_size: int) -> None:
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.body(x))

    def run() -> Seen:
        torch.manual_seed(2)
        model = Chunked()
        fully_shard(model.body)
        fully_shard([model.norm, model.head])
        fully_shard(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = Seen()
        for number in range(3):
            hidden = model(batch(number))
            loss = sum(model.head(part).square().mean() for part in hidden.chunk(2))
            loss.backward()
            look(seen, model, None, f"step {number}:")
            sgd.step()
            sgd.zero_grad()
            seen.losses.append(loss.item())
        return seen

    both(run)


def test_a_part_of_a_group_is_called_by_itself() -> None:
    run_ranks(calls_a_part_of_a_group, 2)


def uses_different_parameters(rank: int, world_size: int) -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor, chosen: int) -> Tensor:
            return x + self.experts[chosen](x)

    def run() -> Seen:
        torch.manual_seed(4)
        model = Choice()
        fully_shard(model)
        model.set_reduce_scatter_unused_params(True)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = Seen()
        for step in range(4):
            loss = model(batch(step), (step + rank) % 2).square().mean()
            loss.backward()
            look(seen, model, None, f"step {step}:")
            sgd.step()
            sgd.zero_grad()
            seen.losses.append(loss.item())
        return seen

    both(run)


def test_ranks_that_use_different_parameters() -> None:
    run_ranks(uses_different_parameters, 2)


def frozen(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        model = make_model()
        for parameter in model[1].parameters():
            parameter.requires_grad_(False)
        model[0].wide.weight.requires_grad_(False)
        return shard_all(model)

    both(lambda: train(make))


def test_frozen_parameters() -> None:
    run_ranks(frozen, 2)


def cuts_columns(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, WIDTH))
        model.insert(0, nn.Linear(WIDTH, 8))
        return fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.shape[-1] % 2 == 0 else None)

    both(lambda: train(make))


def test_shards_of_another_dimension() -> None:
    run_ranks(cuts_columns, 2)


def splits_layers(rank: int, world_size: int, hybrid: bool) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2, 2) if hybrid else (2, 2), mesh_dim_names=("pp", "dp", "tp")[1 - hybrid :])

    def make() -> nn.Module:
        model = make_model()
        for i in range(3):
            parallelize_module(model[i], mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        return shard_all(model, mesh=mesh["dp"])

    def run() -> Seen:
        model = make()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        seen = Seen()
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
            loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
            loss.backward()
            look(seen, model, None, f"step {step}:")
            adam.step()
            adam.zero_grad()
            seen.losses.append(loss.item())
        return seen

    both(run, tolerance=1e-5)


@pytest.mark.parametrize("hybrid", [False, True])
def test_tensor_parallel_layers_of_torch(hybrid: bool) -> None:
    run_ranks(splits_layers, 4, hybrid)


# ---- the dial ----
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


# ---- what is said ----
class Borrower(nn.Module):
    """Has a parameter of another module."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def refuses(rank: int, world_size: int) -> None:
    theirs = fully_shard(nn.Linear(4, 4))
    with ours():
        with pytest.raises(tsm.InvalidArgument, match=r"torch's own FSDP.*Call tsm.init\(\) before"):
            fully_shard(nn.Sequential(theirs))
        late = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(late.parameters(), lr=0.1)
        fully_shard(late)(torch.ones(1, 4)).sum().backward()
        with pytest.raises(tsm.InvalidArgument, match=r"built before fully_shard"):
            optimizer.step()
        model = shard_all(make_model())
        assert isinstance(model, FSDPModule) and type(model).__name__ == "FSDPSequential"
        assert type(model[:2]) is nn.Sequential
        with pytest.raises(AssertionError, match="has already been applied"):
            fully_shard(model)
        with pytest.raises(ValueError, match="scalar parameters"):
            scalar = nn.Linear(2, 2)
            scalar.factor = nn.Parameter(torch.tensor(1.0))
            fully_shard(scalar)
        with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
            fully_shard(nn.Linear(5, 4, bias=False), shard_placement_fn=lambda parameter: Shard(1))
        with pytest.raises(tsm.InvalidArgument, match="it was sharded before"):
            again = fully_shard(nn.Linear(4, 4))
            fully_shard(nn.Sequential(Borrower(again.weight)))
        with pytest.raises(ValueError, match="factor of 2"):
            fully_shard(nn.Linear(4, 4), reshard_after_forward=3)
        with pytest.raises(ValueError, match="containers"):
            fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
        with pytest.raises(tsm.InvalidArgument, match="sharded by fully_shard"):
            FullyShardedDataParallel(nn.Sequential(fully_shard(nn.Linear(4, 4))))
        with pytest.raises(tsm.InvalidArgument, match="wrapped by FullyShardedDataParallel"):
            fully_shard(nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4))))
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        fully_shard(tied[0])
        fully_shard(tied)
        with pytest.raises(ValueError, match="shared with a parameter already managed"):
            tied(torch.randn(1, 4))
    assert type(fully_shard(nn.Linear(4, 4))).__mro__[1] is FSDPModule  # torch's again


def says_who_trains_what(rank: int, world_size: int) -> None:
    theirs = fully_shard(nn.Linear(4, 4))
    with ours({"hybrid_shard_degree": 1}):
        model = shard_all(make_model(), ignored_params=set())
        wrapped = FullyShardedDataParallel(nn.Linear(4, 4))
        everything = nn.ModuleDict({"mine": model, "theirs": theirs, "wrapped": wrapped, "plain": nn.Linear(2, 2)})
        status = tsm.status(everything)
        served = status.parts["tesserae (fully_shard)"]
        assert served.units == ["mine", "mine.0", "mine.1", "mine.2"] and served.degrees == (1, 1, 1)
        assert len(served.parameters) == len(list(model.parameters()))
        assert status.parts["torch (fully_shard)"].parameters == ["theirs.weight", "theirs.bias"]
        assert status.left_to_torch == ["theirs.weight", "theirs.bias", "plain.weight", "plain.bias"]
        assert "tesserae (fully_shard), 4 units, P=1 G=1 O=1: 20 parameters (mine.0.norm.weight, " in str(status), str(
            status
        )
        assert "nobody: each rank trains its own: 2 parameters (plain.weight, plain.bias)" in str(status)


def test_status() -> None:
    run_ranks(says_who_trains_what, 2)


def test_bad_input() -> None:
    run_ranks(refuses, 2)
