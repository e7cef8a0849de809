"""fully_shard, called otherwise than once a step: twice before a backward, by itself, without its root, with other
weights in the middle of an accumulation. Each against torch's own in the same ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tesserae as tsm
from fully_shard_runs import WIDTH, Seen, batch, both, halved, look, make_model, run_steps, shard_all
from ranks import run_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def like_torch(rank: int, world_size: int, run: Callable[[], Seen]) -> None:
    both(run)


def siamese() -> Seen:
    model = shard_all(make_model())
    seen = Seen()
    for step in range(2):
        a, b = model(batch(step)), model(batch(step, 1))
        (a * b).sum().backward(retain_graph=True)
        look(seen, model, None, f"step {step}, first:")
        model.zero_grad()
        (a - b).square().sum().backward()
        look(seen, model, None, f"step {step}, second:")
        model.zero_grad()
    return seen


def other_weights() -> Seen:
    """In the middle of an accumulation, whose gradients stay."""
    model = shard_all(make_model(), mp_policy=BF16)
    seen = Seen()
    parameters = list(model.parameters())
    model.set_requires_gradient_sync(False)
    model(batch(0)).sum().backward()
    with halved(model, parameters):
        seen.add("evaluated", model(batch(1)))
    with torch.no_grad():
        seen.add("evaluated again", model(batch(1)))
    model.set_requires_gradient_sync(True)
    model(batch(2)).sum().backward()
    look(seen, model, None, "after:")
    return seen


def loaded_after_unshard() -> Seen:
    model = shard_all(make_model(), mp_policy=BF16)
    seen = Seen()
    model(batch(0))
    model.unshard()
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
    with torch.no_grad():
        seen.add("evaluated", model(batch(1)))
    return seen


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)


def without_the_outermost() -> Seen:
    model = Policy()
    for module in (model.body, model.value, model):
        fully_shard(module)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    seen = Seen()
    for step in range(3):
        loss = model.value(model.body(batch(step))).square().mean()
        loss.backward()
        seen.losses.append(loss.item())
    look(seen, model, None, "after:")
    return seen


class SelfConditioned(nn.Module):
    """The outermost, or a unit, that calls itself; in the middle it may throw, which it catches."""

    def __init__(self, throws: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.throws = throws

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        if condition is None:
            with torch.no_grad():
                condition = self(x, torch.zeros_like(x))
            try:
                self(x, x)
            except ValueError:
                assert self.throws
        elif self.throws and condition is x:
            raise ValueError
        return self.last(torch.tanh(self.first(x + condition)))


def self_conditioned(outermost: bool, throws: bool) -> Seen:
    model: nn.Module = SelfConditioned(throws)
    if not outermost:
        fully_shard(model)
        model = nn.Sequential(model, nn.Linear(WIDTH, WIDTH))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return run_steps(model, optimizer, lambda step: model(batch(step)).square().mean())


def by_the_outermost() -> Seen:
    return self_conditioned(outermost=True, throws=False)


def nested_tensors() -> Seen:
    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    seen = Seen()
    rows = torch.nested.nested_tensor([batch(0), batch(1)[:2]], layout=torch.jagged)
    model(rows).values().sum().backward()
    look(seen, model, None, "after:")
    return seen


CALLS = [
    siamese,
    other_weights,
    loaded_after_unshard,
    without_the_outermost,
    by_the_outermost,
    nested_tensors,
]


@pytest.mark.parametrize("run", CALLS, ids=lambda run: run.__name__)
def test_as_torch(run: Callable[[], Seen]) -> None:
    run_ranks(like_torch, 2, run)


def a_call_within_throws(rank: int, world_size: int) -> None:
    """Torch's class trains with neither."""
    tsm.init()
    for outermost in (True, False):
        whole, caught = self_conditioned(outermost, throws=False), self_conditioned(outermost, throws=True)
        assert caught.losses == whole.losses


def test_a_call_within_a_call_may_throw() -> None:
    run_ranks(a_call_within_throws, 2)


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def sample(self, x: Tensor, throws: bool) -> Tensor:
        y = self(x)
        if throws:
            raise ValueError
        return self.last(y)


def by_name(throws: bool, outermost: bool) -> list[float]:
    """It calls itself, too, and computes with the unit's own layers after that."""
    unit = fully_shard(Sampler())
    register_fsdp_forward_method(unit, "sample")
    model = unit if outermost else fully_shard(nn.Sequential(unit))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        if throws:
            with pytest.raises(ValueError), torch.no_grad():
                unit.sample(batch(step), throws=True)
        with torch.no_grad():
            losses.append(unit.sample(batch(step), throws=False).square().mean().item())
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def calls_by_name(rank: int, world_size: int) -> None:
    tsm.init()
    for outermost in (True, False):
        assert by_name(True, outermost) == by_name(False, outermost)


def test_a_method_that_throws_leaves_the_unit_usable() -> None:
    run_ranks(calls_by_name, 2)


def split(config: dict | None) -> list[float]:
    tsm.init(config)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank()))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tsm.uninstall()
    return losses


def degrees_beside_split_layers(rank: int, world_size: int) -> None:
    """Each of the ranks that split a layer makes meshes of its own data-parallel ranks."""
    assert split({"hybrid_shard_degree": 2}) == pytest.approx(split(None), rel=1e-5)


def test_a_degree_beside_split_layers() -> None:
    run_ranks(degrees_beside_split_layers, 8)
