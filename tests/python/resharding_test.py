"""tsm.reshard: another degree in the middle of a training, with everything as it was."""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import tesserae as tsm
from checkpoint_models import Net, Way, make, train
from ranks import run_ranks
from same_state import differences

LAYOUTS = [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2), (1, 2, 4), (1, 4, 4), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4)]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All state by name, gathered through state dicts."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}


def walk(rank: int, world_size: int, optimizer_name: str, use_orig_params: bool, compute: torch.dtype | None) -> None:
    warnings.simplefilter("ignore")
    losses: dict[bool, list[float]] = {}
    for turning in (True, False):
        model, _ = make(Way(world_size, use_orig_params=use_orig_params, compute=compute), 0)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = OPTIMIZERS[optimizer_name](parameters)
        losses[turning] = []
        path = [LAYOUTS[i * 7 % 10] for i in range(11)]
        for step, degrees in enumerate(path):
            losses[turning] += train(model, optimizer, range(step, step + 1), rank)
            if not turning:
                continue
            before = whole(model, optimizer)
            result = tsm.reshard(model, optimizer, degrees=degrees)
            assert result.after == degrees
            assert not differences(whole(model, optimizer), before), degrees
            assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in parameters]
        for p in parameters:
            held = {
                value.numel() for value in optimizer.state[p].values() if torch.is_tensor(value) and value.dim() > 0
            }
            assert held <= {p.numel()}, "state and parameter are of one size"
    # A sum in another order is another fp32 number, and now and then another bf16 one.
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-5 if compute is None else 2e-2, atol=0)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_state_and_losses_are_those_of_a_run_that_stays(optimizer_name: str, use_orig_params: bool) -> None:
    run_ranks(walk, 4, optimizer_name, use_orig_params, None)


def test_computing_in_bf16() -> None:
    run_ranks(walk, 4, "AdamW", True, torch.bfloat16)


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def heap_in_use() -> int:
    """Bytes that this process has of malloc's."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    gc.collect()
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def changes_often(rank: int, world_size: int) -> None:
    model, optimizer = make(Way(world_size), 0)
    heap = {}
    for change in range(1, 161):
        train(model, optimizer, range(1), rank)
        tsm.reshard(model, optimizer, degrees=LAYOUTS[change * 7 % 10])
        if change in (80, 160):  # the same layout
            heap[change] = heap_in_use()
    assert heap[160] - heap[80] < 300e3, heap  # what is on its way at the moment counts, too


def test_many_changes_leak_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's flight recorder keeps its last 2,000 collectives, a kilobyte each: that is no leak, but hides ours.
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")  # its name in older versions
    run_ranks(changes_often, 4)


def accumulates(rank: int, world_size: int) -> None:
    found = []
    for turning in (False, True):
        model, optimizer = make(Way(world_size), 0)
        for step in range(4):
            with model.no_sync():
                model(torch.full((2, 3), rank + step)).square().mean().backward()
            if turning:
                tsm.reshard(model, optimizer, hybrid_shard_degree=(2, 1, 4, 2)[step])
            model(torch.full((2, 3), rank + step + 5)).square().mean().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model, optimizer))
    assert not differences(*found, tolerance=1e-5)


def test_in_the_middle_of_an_accumulation() -> None:
    run_ranks(accumulates, 4)


class Factored(torch.optim.SGD):
    """Keeps state that is neither a scalar nor of the parameter's size."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["rows"] = torch.ones(3)
        return super().step(closure)


def refuses(rank: int, world_size: int) -> None:
    model, optimizer = make(Way(world_size), 0)
    train(model, optimizer, range(1), rank)
    before = whole(model, optimizer)

    def error(kind: type[Exception], **wanted: Any) -> str:
        with pytest.raises(kind) as caught:
            tsm.reshard(model, optimizer, **wanted)
        return str(caught.value)

    assert "either" in error(tsm.InvalidArgument)
    assert "either" in error(tsm.InvalidArgument, hybrid_shard_degree=2, degrees=(2, 2, 2))
    assert "P=2 G=2 O=2" in error(tsm.InvalidArgument, hybrid_shard_degree=3)
    assert "it takes" in error(tsm.InvalidArgument, degrees={"parameters": 2})
    assert "three integers" in error(tsm.InvalidArgument, degrees=(1, 2))
    assert "three integers" in error(tsm.InvalidArgument, hybrid_shard_degree=1.0)
    mismatch = error(tsm.Mismatch, hybrid_shard_degree=2 if rank == 1 else 1)
    assert "rank 1" in mismatch
    with pytest.raises(tsm.InvalidArgument, match="summon_full_params"), FSDP.summon_full_params(model):
        tsm.reshard(model, optimizer, hybrid_shard_degree=2)
    with pytest.raises(tsm.InvalidArgument, match="no module in the model that tesserae has sharded"):
        tsm.reshard(Net(), None, hybrid_shard_degree=2)
    factored = Factored(model.parameters(), lr=0.1)
    train(model, factored, range(1, 2), rank)
    with pytest.raises(tsm.InvalidArgument, match=r"'rows' of .* has shape \[3\]"):
        tsm.reshard(model, factored, hybrid_shard_degree=2)
    # Nothing has changed: degrees, state, and it still trains.
    assert model._unit.describe().count("P=4 G=4 O=4") == 2
    assert differences(whole(model, optimizer)["optimizer"], before["optimizer"]) == []
    train(model, optimizer, range(2, 3), rank)
    tsm.reshard(model, optimizer, hybrid_shard_degree=2)
    train(model, optimizer, range(3, 4), rank)


def test_what_can_not_be_is_refused_and_changes_nothing() -> None:
    run_ranks(refuses, 4)


def tells(rank: int, world_size: int) -> None:
    model, optimizer = make(Way(world_size, degree=4), 0)
    replicas = tsm.state.rep_rank_process_group
    assert tsm.state.hybrid_shard_degree == 4 and dist.get_world_size(replicas) == 1
    train(model, optimizer, range(1), rank)
    result = tsm.reshard(model, optimizer, hybrid_shard_degree=2)
    assert result.before == (4, 4, 4) and result.after == (2, 2, 2)
    sent = torch.tensor(result.bytes)  # a rank whose part is padding sends nothing
    dist.all_reduce(sent)
    assert result.seconds > 0 and sent > 0
    assert model.sharding_strategy.name == "HYBRID_SHARD"
    assert tsm.state.hybrid_shard_degree == 2 and dist.get_world_size(tsm.state.rep_rank_process_group) == 2
    tsm.init({"hybrid_shard_degree": 4})  # as at the start: does nothing
    assert tsm.state.hybrid_shard_degree == 2
    tsm.reshard(model, optimizer, degrees={"parameters": 1, "gradients": 2, "optimizer": 4})
    assert tsm.state.hybrid_shard_degree == 0
    assert tsm.reshard(model, optimizer, degrees=(1, 2, 4)).bytes == 0


def test_it_tells_what_it_did() -> None:
    run_ranks(tells, 4)


def saves(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = make(Way(world_size), 0)
    train(model, optimizer, range(2), rank)
    saved = whole(model, optimizer)
    tsm.checkpoint.async_save(folder, model, optimizer, step=2)
    tsm.reshard(model, optimizer, hybrid_shard_degree=1)  # while the save still copies
    train(model, optimizer, range(2, 4), rank)
    tsm.checkpoint.maybe_finalize_async_calls()
    tsm.reshard(model, optimizer, hybrid_shard_degree=2)
    tsm.checkpoint.load(folder, model, optimizer)
    assert not differences(whole(model, optimizer), saved)


def test_checkpoints_before_and_after(tmp_path: Path) -> None:
    run_ranks(saves, 4, str(tmp_path))
