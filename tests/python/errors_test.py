"""What people get wrong, and what they are told: which function, what happened, the values, what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tesserae as tsm
from ranks import run_ranks

WIDTH = 24  # wide enough that every rank has elements of every unit


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def before_init_process_group(rank: int, world_size: int) -> None:
    tsm.init()
    with pytest.raises(tsm.InvalidArgument, match=r"init_process_group\(\) before FSDP"):
        FSDP(make_model())


def test_fsdp_before_init_process_group() -> None:
    run_ranks(before_init_process_group, 1, init=False)


def degree_does_not_divide(rank: int, world_size: int) -> None:
    with pytest.raises(tsm.InvalidArgument, match="3 does not divide.*N=4.*nearest valid: P=2") as error:
        tsm.init({"hybrid_shard_degree": 3})
    assert isinstance(error.value, ValueError)
    assert not tsm.is_initialized()


def degree_does_not_divide_later(rank: int, world_size: int) -> None:
    tsm.init({"hybrid_shard_degree": 3})  # how many ranks there are is not known yet
    dist.init_process_group("gloo")
    with pytest.raises(tsm.InvalidArgument, match="hybrid_shard_degree=3 does not divide the 4.*nearest valid: 2, 4"):
        FSDP(make_model())


def test_degree_that_does_not_divide() -> None:
    run_ranks(degree_does_not_divide, 4)
    run_ranks(degree_does_not_divide_later, 4, init=False)


def shape_changed(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()
    model = FSDP(make_model(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
    inputs = torch.randn(2, WIDTH)
    model(inputs).sum().backward()
    changed = next(p for p in model.parameters() if p.numel() > 0)
    changed.data = torch.zeros(changed.numel() + 1)
    with pytest.raises(tsm.InvalidArgument, match=r"parameter \S*(linear\.|_flat_param)\S* .*elements") as error:
        model(inputs)
    assert str(changed.numel()) in str(error.value)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_parameter_changed_in_shape(use_orig_params: bool) -> None:
    run_ranks(shape_changed, 2, use_orig_params)


def optimizer_before_wrapping(rank: int, world_size: int) -> None:
    tsm.init()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = FSDP(model, use_orig_params=False)
    model(torch.randn(2, WIDTH)).sum().backward()
    with pytest.raises(tsm.InvalidArgument, match=r"(?s)SGD.*before FSDP.*use_orig_params=False.*use_orig_params=True"):
        optimizer.step()

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = FSDP(model, use_orig_params=True)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    assert any(not torch.equal(p, q) for p, q in zip(before, model.parameters()))


def test_optimizer_built_before_wrapping() -> None:
    run_ranks(optimizer_before_wrapping, 2)


def wrapped_twice(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()
    model = make_model()
    first = FSDP(model, use_orig_params=use_orig_params)
    with pytest.raises(tsm.InvalidArgument, match="wrapped twice"):
        FSDP(model, use_orig_params=use_orig_params)
    first(torch.randn(2, WIDTH)).sum().backward()  # is as it was

    with pytest.raises(ValueError, match="FSDP"):
        FSDP(first, auto_wrap_policy=ModuleWrapPolicy({Block}))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_module_wrapped_twice(use_orig_params: bool) -> None:
    run_ranks(wrapped_twice, 2, use_orig_params)


def different_models(rank: int, world_size: int, difference: str) -> str:
    tsm.init()
    model = make_model()
    if rank == 1:
        if difference == "shape":
            model[1].linear = nn.Linear(WIDTH, WIDTH + 1)
        elif difference == "frozen":
            model[1].linear.bias.requires_grad_(False)
        elif difference == "dtype":
            model[1].linear.to(torch.bfloat16)
        else:
            model.append(Block())
    with pytest.raises(tsm.Mismatch) as error:
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    return str(error.value)


@pytest.mark.parametrize("difference", ["shape", "frozen", "dtype", "more"])
def test_ranks_with_different_models(difference: str) -> None:
    rank_0, rank_1 = run_ranks(different_models, 2, difference)
    assert "rank 1 has another model" in rank_0
    assert {"shape": "1.linear.weight", "frozen": "1.linear.bias", "dtype": "1.linear.weight", "more": 'unit "2"'}[
        difference
    ] in rank_1


def mixed_devices(rank: int, world_size: int) -> None:
    tsm.init()
    model = make_model()
    model[0].own = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(tsm.InvalidArgument, match=r"several devices \(cpu, meta\)"):
        FSDP(model, use_orig_params=True, param_init_fn=lambda module: None)  # gives it no values


def test_mixed_devices() -> None:
    run_ranks(mixed_devices, 2)


class OwnFSDP(FSDP):
    pass


def subclass(rank: int, world_size: int) -> None:
    tsm.init()
    with pytest.raises(tsm.InvalidArgument, match="OwnFSDP"):
        OwnFSDP(make_model())


def test_own_subclass() -> None:
    run_ranks(subclass, 1)
