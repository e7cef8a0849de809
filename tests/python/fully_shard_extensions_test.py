"""What parameters and scripts put in the place of gathers and reductions of fully_shard: all-gather extensions, custom
collectives, and fewer ranks to rest on between forward and backward. Against torch's own where it has the same.
"""

from __future__ import annotations

import gc
import math
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import tesserae as tsm
from fully_shard_runs import WIDTH, Block, Seen, assert_same, batch, both, make_model, ours, shard_all, train
from ranks import RankFailed, run_ranks
from tesserae.job import fabrics


class Rounded(Tensor):
    """Travels in bf16; modules compute with what arrives, in the dtype of the parameter."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Rounded:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self.data_ = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Rounded:
        return Rounded(inner["data_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda t: t.data_, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any) -> Any:
        assert mesh.ndim == 1
        assert isinstance(module, nn.Linear) and isinstance(policy, MixedPrecisionPolicy)
        rows = math.ceil(outer_size[0] / mesh.size())
        padded = torch.zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        padded[: self.size(0)] = self.data_
        return (padded,), "metadata"

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (tensor,) = outputs
        assert metadata == "metadata" and tensor.dtype is torch.bfloat16
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(tensor[: out.size(0)])
            return None
        whole = tensor.to(dtype)
        return whole, (tensor, whole)


def rounded(model: nn.Sequential) -> nn.Sequential:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Rounded(module.weight.detach()))
    return model


def as_dense(seen: Seen) -> Seen:
    seen.tensors = {n: t.data_ if isinstance(t, Rounded) else t for n, t in seen.tensors.items()}
    return seen


class Recomputed(nn.Module):
    def __init__(self, inner: Block) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def extends(rank: int, world_size: int, variant: str) -> None:
    mesh = None
    if variant == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    arguments: dict[str, Any] = {
        "kept": {"reshard_after_forward": False},
        "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        "hybrid": {"mesh": mesh},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }.get(variant, {})

    def make() -> nn.Module:
        model = rounded(make_model())
        if variant == "recomputed":
            for i in range(3):
                fully_shard(model[i])
                model[i] = Recomputed(model[i])
            return fully_shard(model)
        return shard_all(model, **arguments)

    both(lambda: as_dense(train(make)), tolerance=1e-2 if variant == "bf16" else 1e-6)


@pytest.mark.parametrize("variant", ["kept", "freed", "bf16", "recomputed", "offloaded"])
def test_parameters_extend_their_gather(variant: str) -> None:
    run_ranks(extends, 3, variant)  # which do not divide the rows


def test_extensions_among_replicas() -> None:
    run_ranks(extends, 4, "hybrid")


def turns(rank: int, world_size: int) -> None:
    def run(dial: bool) -> list[float]:
        model = shard_all(rounded(make_model()))
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step, degrees in enumerate([(1, 1, 2), (1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 2)]):
            loss = model(batch(step)).square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
            losses.append(loss.item())
            if dial:
                before = model[0].wide.weight.full_tensor().data_
                assert tsm.reshard(model, adam, degrees=degrees).after == degrees
                torch.testing.assert_close(model[0].wide.weight.full_tensor().data_, before, rtol=0, atol=0)
                assert model[0].wide.weight.to_local().shape[0] == 3 * WIDTH // degrees[2]
        return losses

    theirs = run(dial=False)
    with ours():
        assert run(dial=True) == pytest.approx(theirs, rel=1e-5)


def test_the_dial_turns_under_extensions() -> None:
    run_ranks(turns, 2)


def two_tensors(monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    def before(self: TwoTensor, mesh: Any) -> Any:
        return (self.a, self.b), None

    def after(self: TwoTensor, outputs: Any, metadata: None, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            assert [t.data_ptr() for t in outputs] == [out.a.data_ptr(), out.b.data_ptr()]
            return None
        return TwoTensor(*outputs), outputs

    monkeypatch.setattr(TwoTensor, "fsdp_pre_all_gather", before, raising=False)
    monkeypatch.setattr(TwoTensor, "fsdp_post_all_gather", after, raising=False)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    for layer in model:
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
    return model


def has_two_tensors(rank: int, world_size: int) -> None:
    """Two tensors travel for one parameter; an optimizer updates both."""
    with pytest.MonkeyPatch.context() as patch:

        def run(turn: bool) -> list[Tensor]:
            torch.manual_seed(3)
            model = two_tensors(patch)
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            adam = torch.optim.Adam(model.parameters(), lr=1e-2)
            for step in range(3):
                torch.manual_seed(10 * step + rank)
                model(torch.randn(2, 4)).square().sum().backward()
                adam.step()
                adam.zero_grad()
            if turn:
                with pytest.raises(tsm.InvalidArgument, match=r"holds 2 tensors \(a, b\)"):
                    tsm.reshard(model, adam, degrees=(1, 1, 1))
                with pytest.raises(tsm.InvalidArgument, match=r"0.weight holds 2 tensors \(a, b\)"):
                    tsm.checkpoint.save("never-made", model, step=1)
            return [t for p in model.parameters() for t in (p.to_local().a.clone(), p.to_local().b.clone())]

        theirs = run(turn=False)
        with ours():
            mine = run(turn=True)
        for ours_, torchs in zip(mine, theirs, strict=True):
            torch.testing.assert_close(ours_, torchs)


def test_tensors_of_two_tensors() -> None:
    run_ranks(has_two_tensors, 2)


class Half(Rounded):
    """Brings rows without padding."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any) -> Any:
        return (self.data_,), "metadata"


class Lone(Rounded):
    fsdp_post_all_gather = property()  # type: ignore[assignment]  # hasattr says no


class Packed(Rounded):
    """Has its values in a tensor that does not look like it."""

    @property
    def packed(self) -> Tensor:
        return self.data_.to(torch.uint8)[..., ::2]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed", "data_"], None


class PackedAlone(Packed):
    fsdp_pre_all_gather = fsdp_post_all_gather = property()  # type: ignore[assignment]


def refuses(rank: int, world_size: int) -> None:
    with ours():
        for make, where, match in (
            (Lone, {}, "has fsdp_pre_all_gather and no fsdp_post_all_gather"),
            (Rounded, {"shard_placement_fn": lambda parameter: Shard(1)}, "sharded by dimension 1"),
            (Packed, {}, r"weight, a Packed of shape .* torch.float32, keeps .* torch.uint8 .*\(packed\)"),
            (PackedAlone, {}, "weight, a PackedAlone of shape"),
        ):
            layer = nn.Linear(2, 3, bias=False)
            layer.weight = nn.Parameter(make(layer.weight.detach()))
            fully_shard(layer, **where)
            with pytest.raises(tsm.InvalidArgument, match=match):
                layer(torch.ones(1, 2))


def brings_no_padding(rank: int, world_size: int) -> None:
    with ours():
        layer = nn.Linear(2, 3, bias=False)
        layer.weight = nn.Parameter(Half(layer.weight.detach()))
        fully_shard(layer)(torch.ones(1, 2))


class Copying:
    """Gathers or sums by all_reduce, in memory of its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.allocated = 0
        self.dtypes: set[torch.dtype] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated += 1
        self.dtypes.add(dtype)
        return torch.empty(size, dtype=dtype, device=device)


class Gather(Copying):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Sum(Copying):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        dist.all_reduce(input_tensor, group=group, op=op)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


class Slow(Gather):
    seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        work = super().__call__(*args, **kwargs)
        time.sleep(self.seconds)
        return work


class FailsOnce(Gather):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise KeyError("of the script's")
        return super().__call__(*args, **kwargs)


class Fails(Gather):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("of the script's")


def custom(rank: int, world_size: int, hybrid: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    made: list[Copying] = []

    def make(with_comms: bool) -> nn.Module:
        model = shard_all(make_model(), mesh=mesh)
        if with_comms:
            made.extend((Gather(), Sum()))
            model[1].set_custom_all_gather(made[0])
            model[1].set_custom_reduce_scatter(made[1])
        return model

    theirs = train(lambda: make(with_comms=False))
    with ours():
        mine = train(lambda: make(with_comms=True))
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-6)
        for name, tensor in theirs.tensors.items():
            torch.testing.assert_close(mine.tensors[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
        gather, total = made
        assert gather.calls == 6 and total.calls == 3  # of three steps; one call for the unit
        assert gather.allocated == 6 and total.allocated == 6
        model = shard_all(make_model())
        with pytest.raises(tsm.InvalidArgument, match="comm is a int"):
            model.set_custom_all_gather(3)
        model[1].set_custom_all_gather(Fails())
        with pytest.raises(KeyError, match="of the script's"):
            model(batch(0))
        model[1].set_custom_all_gather(Gather())
        model(batch(0)).sum().backward()


@pytest.mark.parametrize("hybrid", [False, True])
def test_collectives_of_the_script(hybrid: bool) -> None:
    run_ranks(custom, 4 if hybrid else 2, hybrid)


def gathers_extended(rank: int, world_size: int) -> None:
    """What extensions bring travels by the script's collective, too."""
    gather = Gather()

    def make(with_comm: bool) -> nn.Module:
        model = shard_all(rounded(make_model()))
        if with_comm:
            model[1].set_custom_all_gather(gather)
        return model

    theirs = as_dense(train(lambda: make(with_comm=False)))
    with ours():
        mine = as_dense(train(lambda: make(with_comm=True)))
    assert_same(mine, theirs)
    assert gather.dtypes == {torch.bfloat16, torch.float32}


def test_collectives_of_the_script_for_extensions() -> None:
    run_ranks(gathers_extended, 2)


def ends_while_gathering(rank: int, world_size: int) -> None:
    def fails(module: nn.Module, args: Any) -> None:
        raise ZeroDivisionError

    with ours():
        gather = Slow()
        model = shard_all(make_model())
        for i in range(3):
            model[i].set_custom_all_gather(gather)
        model(batch(0)).sum().backward()
        model[0].norm.register_forward_pre_hook(fails)
        gather.seconds = 1
        with pytest.raises(ZeroDivisionError):
            model(batch(1))  # the gather of the next block has begun
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None


def test_a_model_ends_while_it_gathers() -> None:
    run_ranks(ends_while_gathering, 2, deadline=60)


def keeps_what_it_had(rank: int, world_size: int) -> None:
    with ours():
        model = shard_all(make_model())
        model(batch(0)).sum().backward()
        with pytest.raises(tsm.InvalidArgument, match="before the first forward"):
            model[1].set_custom_all_gather(Gather())
        total = Sum()
        model[1].set_custom_reduce_scatter(total)
        model(batch(1)).sum().backward()
        assert total.calls > 0
        assert tsm.reshard(model, None, degrees=(1, 1, 1)).after == (1, 1, 1)
        model(batch(2)).sum().backward()


def test_a_refused_collective_is_not_kept() -> None:
    run_ranks(keeps_what_it_had, 2)


def tries_again(rank: int, world_size: int) -> None:
    with ours():
        model = shard_all(make_model())
        model[1].set_custom_all_gather(FailsOnce())
        with pytest.raises(KeyError, match="of the script's"):
            model[1].unshard()
        model[1].unshard()
        whole = model[1].wide.weight.detach().clone()
        model[1].reshard()
        torch.testing.assert_close(whole, model[1].wide.weight.full_tensor())
        model(batch(0)).sum().backward()


class Flaky(Rounded):
    """Fails once, when a unit's gather has begun with another one."""

    calls = 0

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any) -> Any:
        Flaky.calls += 1
        if Flaky.calls == 2:
            raise KeyError("of the script's")
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, policy)


def tries_extensions_again(rank: int, world_size: int) -> None:
    with ours():
        model = make_model()
        for layer in (model[1].wide, model[1].narrow):
            layer.weight = nn.Parameter(Flaky(layer.weight.detach()))
        shard_all(model)
        with pytest.raises(KeyError, match="of the script's"):
            model[1].unshard()
        model[1].unshard()
        wholes = [layer.weight.detach().clone() for layer in (model[1].wide, model[1].narrow)]
        model[1].reshard()
        for whole, layer in zip(wholes, (model[1].wide, model[1].narrow)):
            torch.testing.assert_close(whole, layer.weight.full_tensor().data_.bfloat16().float())
        model(batch(0)).sum().backward()


@pytest.mark.parametrize("run", [tries_again, tries_extensions_again])
def test_a_gather_begins_anew_after_a_failure(run: Any) -> None:
    run_ranks(run, 2)


CLOSED = "was read while it is sharded|out of bounds for storage of size 0"  # torch looks at sizes first


def ends_graphs(rank: int, world_size: int) -> None:
    with ours():
        model = shard_all(rounded(make_model()))
        seen: list[Tensor] = []
        model[0].wide.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
        model(batch(0)).sum().backward()
        with pytest.raises(RuntimeError, match=r"wide\.weight of unit .*0.* was read while it is sharded"):
            seen[0].sum()
        loss = model(batch(1)).sum()
        tsm.reshard(model, None, degrees=(1, 1, 1))
        with pytest.raises(RuntimeError, match=CLOSED):
            loss.backward()
        loss = model(batch(2)).sum()
        loss.backward()
        assert model[0].wide.weight.grad is not None
        loss = model(batch(3)).sum()
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None
        with pytest.raises(RuntimeError, match=CLOSED):
            loss.backward()


def ends_graphs_that_read_nothing(rank: int, world_size: int) -> None:
    """The gradient of a first layer needs no parameter."""
    with ours():
        layer = nn.Linear(2, 4, bias=False)
        layer.weight = nn.Parameter(Rounded(layer.weight.detach()))
        fully_shard(layer)
        loss = layer(torch.ones(1, 2)).sum()
        tsm.reshard(layer, None, degrees=(1, 1, 1))
        with pytest.raises(tsm.InvalidArgument, match="from before a change of degrees"):
            loss.backward()
        loss = layer(torch.ones(1, 2)).sum()
        del layer
        gc.collect()
        with pytest.raises(tsm.InvalidArgument, match="whose model is gone"):
            loss.backward()


@pytest.mark.parametrize("run", [ends_graphs, ends_graphs_that_read_nothing])
def test_graphs_of_extensions_end(run: Any) -> None:
    run_ranks(run, 2)


def makes_graphs(rank: int, world_size: int) -> None:
    def gradients(create_graph: bool) -> list[Tensor]:
        model = shard_all(rounded(make_model()))
        for step in range(2):
            model(batch(step)).square().mean().backward(create_graph=create_graph)
        assert not any(p.grad.requires_grad for p in model.parameters())
        return [p.grad.to_local().clone() for p in model.parameters()]

    with ours():
        for with_graph, without in zip(gradients(True), gradients(False), strict=True):
            torch.testing.assert_close(with_graph, without)


def test_backwards_of_extensions_create_graphs() -> None:
    run_ranks(makes_graphs, 2)


def freezes(rank: int, world_size: int) -> None:
    def gradients(wanted: list[bool], degrees: dict[int, tuple[int, int, int]]) -> list[Tensor | None]:
        model = shard_all(rounded(make_model()))
        parameter = model[0].wide.weight
        found: list[Tensor | None] = []
        for step, trains in enumerate(wanted):
            parameter.requires_grad_(trains)
            if step in degrees:
                tsm.reshard(model, None, degrees=degrees[step])
            model(batch(step)).square().mean().backward()
            found.append(None if parameter.grad is None else parameter.grad.full_tensor())
            for each in model.parameters():
                each.grad = None
        return found

    with ours():
        reference = gradients([True] * 5, {})
        for degrees in ({}, {1: (1, 1, 1), 3: (2, 2, 2)}):
            wanted = [True, False, True, False, True]
            for trains, gradient, expected in zip(wanted, gradients(wanted, degrees), reference, strict=True):
                assert (gradient is not None) == trains
                if trains:
                    torch.testing.assert_close(gradient, expected)


def test_extensions_freeze_and_unfreeze() -> None:
    run_ranks(freezes, 2)


class WithNothing(Rounded):
    """Brings a tensor without elements, too."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any) -> Any:
        (padded,), metadata = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, policy)
        return (padded, torch.empty(0, dtype=torch.float64)), metadata

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        padded, nothing = outputs
        assert nothing.numel() == 0 and nothing.dtype is torch.float64
        return super().fsdp_post_all_gather((padded,), metadata, dtype, out=out)


def gathers_nothing(rank: int, world_size: int) -> None:
    with ours():
        model = make_model()
        model[1].wide.weight = nn.Parameter(WithNothing(model[1].wide.weight.detach()))
        model[1].nothing = nn.Parameter(torch.empty(0, 3))
        shard_all(model)
        gather, total = Gather(), Sum()
        model[1].set_custom_all_gather(gather)
        model[1].set_custom_reduce_scatter(total)
        model[1].set_reduce_scatter_unused_params(True)
        for step in range(2):
            model(batch(step)).sum().backward()
        assert gather.calls == 8 and total.calls == 2  # the former for two dtypes


def test_collectives_of_buffers_without_elements() -> None:
    run_ranks(gathers_nothing, 2)


def test_what_cannot_be_extended() -> None:
    run_ranks(refuses, 2)
    with pytest.raises(RankFailed, match=r"sharded unevenly over 2 ranks.*\[2, 2\]"):
        run_ranks(brings_no_padding, 2)


def trains_resting(rank: int, world_size: int) -> None:
    both(lambda: train(lambda: shard_all(make_model(), reshard_after_forward=2)))


def rests(rank: int, world_size: int, resting: bool | int) -> tuple[int, int]:
    """Bytes that leave this rank in the first forward, and in its backward."""
    with pytest.MonkeyPatch.context() as patch, ours():
        patch.setattr(fabrics, "HOST_BACKEND", "gloo")  # ranks that share memory send nothing
        mesh = init_device_mesh("cpu", (world_size,))
        model = shard_all(make_model(), reshard_after_forward=resting, mesh=mesh)
        fabric = fabrics.fabric_of(mesh.get_group(), torch.device("cpu"))
        loss = model(batch(0)).sum()
        forward = fabric.counters().bytes()
        loss.backward()
        return forward, fabric.counters().bytes() - forward


def test_parameters_rest_on_fewer_ranks() -> None:
    run_ranks(trains_resting, 4)
    kept, of_all, of_two = (run_ranks(rests, 4, resting) for resting in (False, True, 2))
    for (_, reduced), (forward, backward), (same, less) in zip(kept, of_all, of_two, strict=True):
        assert same == forward > 0
        # Each sends its half to one other rank, in place of its quarter to three.
        assert 3 * (less - reduced) == 2 * (backward - reduced) > 0
