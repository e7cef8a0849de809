"""State of torch's optimizers on a disk: that no bit changes, what it saves, and that scripts may look at it."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import tesserae as tsm
from ranks import run_ranks
from tesserae import _C
from tesserae.offload.paged import PagedTensor, page

# AdamW's state of a rank of two is 72 MiB, of which 48 may stay in memory.
WIDTH, LAYERS = 1536, 8


def make_model(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def as_fsdp(model: nn.Sequential) -> nn.Module:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)


def as_flat_fsdp(model: nn.Sequential) -> nn.Module:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def as_fully_shard(model: nn.Sequential) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


SHARDED = {"fsdp": as_fsdp, "flat_fsdp": as_flat_fsdp, "fully_shard": as_fully_shard}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4, centered=True, momentum=0.5),
}


@contextlib.contextmanager
def ours(folder: str | None, **more: Any):
    """`folder`: state lies there; None: in memory. The limit is one that cannot be held: the least stays."""
    tsm.init({"offload": {"optimizer": "disk", "folder": folder}, "memory_limit": "1MiB", **more} if folder else more)
    try:
        yield
    finally:
        tsm.uninstall()


def batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        local(value).clone() for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]


def paged_count(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(_C.is_paged(local(value)) for value in values)


def gives_the_same_bits(rank: int, world_size: int, how: str, name: str, folder: str) -> None:
    with ours(None):
        model = SHARDED[how](make_model())
        optimizer = OPTIMIZERS[name](model.parameters())
        expected, state = train(model, optimizer, range(4)), state_tensors(optimizer)
        assert tsm.state.disk is None
    with ours(folder):
        model = SHARDED[how](make_model())
        optimizer = OPTIMIZERS[name](model.parameters())
        assert train(model, optimizer, range(4)) == expected
        assert paged_count(optimizer) >= LAYERS
        for mine, theirs in zip(state_tensors(optimizer), state, strict=True):
            assert type(mine) is Tensor
            assert mine.equal(theirs)
        counters = tsm.state.disk
        assert counters.bytes_on_disk >= sum(t.nbytes for t in state if t.nbytes >= 1 << 20)
        if name != "sgd":  # whose one moment stays in what a rank has at least
            assert counters.bytes_read > 0
            assert counters.bytes_written > 0


@pytest.mark.parametrize("how", SHARDED)
def test_the_same_bits_of_every_face(how: str, tmp_path: Path) -> None:
    run_ranks(gives_the_same_bits, 2, how, "adamw", str(tmp_path))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_the_same_bits_of_every_optimizer(name: str, tmp_path: Path) -> None:
    run_ranks(gives_the_same_bits, 2, "fully_shard", name, str(tmp_path))


def takes_less_memory(rank: int, world_size: int, folder: str) -> dict[str, int]:
    peaks = {}
    for where in (folder, None):
        with ours(where):
            model = as_fully_shard(make_model(12))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            train(model, optimizer, range(2))
            before = resident()
            train(model, optimizer, range(2, 4))
            peaks["disk" if where else "memory"] = resident()
            assert before > 0
            del model, optimizer
    return peaks


def resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def test_what_lies_on_the_disk_takes_no_memory(tmp_path: Path) -> None:
    # 108 MiB of state, of which 48 may stay.
    for peaks in run_ranks(takes_less_memory, 2, str(tmp_path)):
        assert peaks["memory"] - peaks["disk"] > 40 << 20


def saves_and_loads(rank: int, world_size: int, how: str, folder: str) -> None:
    """Through DCP and our own checkpoints, from memory to disk and back."""
    with ours(None):
        model = SHARDED[how](make_model(3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, range(2))
        expected = train(model, optimizer, range(2, 4))
    for first, second in ((folder, None), (None, folder)):
        with ours(first):
            model = SHARDED[how](make_model(3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            train(model, optimizer, range(2))
            assert (paged_count(optimizer) > 0) == (first is not None)
            kinds = f"{first is not None}-{second is not None}"
            tsm.checkpoint.save(f"{folder}/ours-{kinds}", model, optimizer, step=2)
            tsm.checkpoint.async_save(f"{folder}/async-{kinds}", model, optimizer, step=2)
            dcp.save(
                {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
                checkpoint_id=f"{folder}/dcp-{kinds}",
            )
            begun = None
            if how == "fully_shard":  # torch stages no ShardedTensor, as FSDP1 has them
                begun = dcp.async_save(
                    {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
                    checkpoint_id=f"{folder}/dcp_async-{kinds}",
                )
            assert train(model, optimizer, range(2, 4)) == expected
            tsm.checkpoint.maybe_finalize_async_calls()
            if begun is not None:
                begun.result()
        for form in ("ours", "async", "dcp", *(["dcp_async"] if begun is not None else [])):
            with ours(second):
                model = SHARDED[how](make_model(3))
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                if form.startswith("dcp"):
                    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
                    dcp.load(state, checkpoint_id=f"{folder}/{form}-{kinds}")
                    model.load_state_dict(state["model"])
                    set_optimizer_state_dict(model, optimizer, state["optimizer"])
                    assert (paged_count(optimizer) > 0) == (second is not None)
                else:
                    tsm.checkpoint.load(f"{folder}/{form}-{kinds}", model, optimizer)
                assert train(model, optimizer, range(2, 4)) == expected, (form, kinds)
                assert (paged_count(optimizer) > 0) == (second is not None)


@pytest.mark.parametrize("how", ["fsdp", "fully_shard"])
def test_checkpoints_do_not_know_where_state_lies(how: str, tmp_path: Path) -> None:
    run_ranks(saves_and_loads, 2, how, str(tmp_path))


def turns_the_dial(rank: int, world_size: int, how: str, folder: str) -> None:
    losses = {}
    for where in (None, folder):
        with ours(where, hybrid_shard_degree=2):
            model = SHARDED[how](make_model())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses[where] = train(model, optimizer, range(2))
            tsm.reshard(model, optimizer, hybrid_shard_degree=1)
            losses[where] += train(model, optimizer, range(2, 4))
            tsm.reshard(model, optimizer, hybrid_shard_degree=2)
            losses[where] += train(model, optimizer, range(4, 6))
            assert (paged_count(optimizer) > 0) == (where is not None)
    assert losses[None] == losses[folder]


@pytest.mark.parametrize("how", ["fsdp", "fully_shard"])
def test_the_dial_moves_state_on_a_disk(how: str, tmp_path: Path) -> None:
    run_ranks(turns_the_dial, 2, how, str(tmp_path))


def script(where: str | None) -> list[float]:
    """Groups, a schedule, a closure, hooks, a state dict of its own that is loaded."""
    model = as_fully_shard(make_model())
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    losses = []
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        schedule.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after"] * 4
    assert [len(group["params"]) for group in optimizer.param_groups] == [LAYERS, LAYERS]
    assert (paged_count(optimizer) > 0) == (where is not None)
    return losses


def trains_as_scripts_do(rank: int, world_size: int, folder: str) -> None:
    losses = []
    for where in (None, folder):
        with ours(where), warnings.catch_warnings():
            warnings.simplefilter("error")  # of schedules whose optimizer was replaced
            losses.append(script(where))
    assert losses[0] == losses[1]


def test_scripts_do_not_notice(tmp_path: Path) -> None:
    run_ranks(trains_as_scripts_do, 2, str(tmp_path))


def a_step_that_fails(rank: int, world_size: int, folder: str) -> None:
    with ours(folder):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, range(1))
        parameters = list(model.parameters())
        optimizer.state[parameters[-1]]["exp_avg"] = torch.zeros(3)
        with pytest.raises(RuntimeError):
            train(model, optimizer, range(1, 2))
        assert list(optimizer.param_groups[0]["params"]) == parameters


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    run_ranks(a_step_that_fails, 1, str(tmp_path))


class MySgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def others_stay(rank: int, world_size: int, folder: str) -> None:
    with ours(folder):
        model = make_model()
        for cls in (MySgd, torch.optim.LBFGS):
            optimizer = cls(model.parameters(), lr=1e-2)
            optimizer.step(lambda: model(batch(0)).square().mean())
            assert paged_count(optimizer) == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(1))
    assert paged_count(optimizer) == 0


def test_state_of_other_optimizers_stays_in_memory(tmp_path: Path) -> None:
    run_ranks(others_stay, 1, str(tmp_path))


# A tensor on a disk, by itself.


@pytest.fixture
def disk(tmp_path: Path) -> _C.Disk:
    return _C.Disk(folder=str(tmp_path), limit=1 << 20, ranks=1)


@pytest.fixture
def values() -> Tensor:
    return torch.arange(3 << 20, dtype=torch.float32).view(3, 1024, 1024)


def test_everything_that_reads_it_reads_right(disk: _C.Disk, values: Tensor) -> None:
    # More than may stay in memory, so that the first ones have left.
    paged = [page(disk, values + i) for i in range(8)]
    assert disk.counters.bytes_in_memory < sum(t.nbytes for t in paged)
    first = paged[0]
    assert first.norm().equal(values.norm())
    assert first[1, 2, 3].item() == values[1, 2, 3].item()
    assert (first + 1).equal(values + 1)
    assert type(first + 1) is Tensor
    assert first.tolist() == values.tolist()
    assert (first.numpy() == values.numpy()).all()
    assert copy.deepcopy(first).equal(values)
    assert type(first.in_memory()) is Tensor
    file = io.BytesIO()
    torch.save({"state": first}, file)
    file.seek(0)
    assert torch.load(file)["state"].equal(values)
    assert "0." in repr(first)


def stages(rank: int, world_size: int, folder: str) -> None:
    """As dcp.async_save() does before it returns: storages are copied, and the copies are kept for the next time."""
    disk = _C.Disk(folder=folder, limit=1 << 20, ranks=1)
    values = torch.arange(3 << 20, dtype=torch.float32).view(3, 1024, 1024)
    paged = [page(disk, values + i) for i in range(8)]
    state = {"all": paged, "view": paged[3][1].t(), "values": values}
    for share in (False, True):
        stager = StateDictStager(share_memory=share)
        for _ in range(2):
            staged = stager.stage(state)
            for one, other in zip([*staged["all"], staged["view"]], [*paged, state["view"]], strict=True):
                assert type(one) is Tensor
                assert one.equal(other)
            assert copy.deepcopy(staged)["all"][7].equal(paged[7])
            for tensor in paged:  # goes on: the copies stay what they are
                tensor.add_(1)
            assert staged["all"][0].add(1).equal(paged[0])
        copies = [weakref.ref(tensor.untyped_storage()) for tensor in staged["all"]]
        stager.close()
        del staged, one, other
        assert not any(copy() for copy in copies)
    with pytest.raises(tsm.InvalidArgument, match="shape .3, 1024, 1024. that lies on a disk.*share a copy"):
        paged[0].share_memory_()


def test_what_takes_storages_apart_gets_copies(tmp_path: Path) -> None:
    run_ranks(stages, 1, str(tmp_path))


def test_views_are_on_the_disk_too(disk: _C.Disk, values: Tensor) -> None:
    paged = [page(disk, values + i) for i in range(8)]
    view = paged[0].transpose(0, 2)[5]
    assert isinstance(view, PagedTensor)
    assert view.equal(values.transpose(0, 2)[5])
    assert view.clone().equal(values.transpose(0, 2)[5])
    assert paged[0].flatten()[7::1000].sum().equal(values.flatten()[7::1000].sum())


def test_changes_last(disk: _C.Disk, values: Tensor) -> None:
    paged = [page(disk, values) for _ in range(8)]
    for tensor in paged:
        assert tensor.mul_(2) is tensor
        tensor[0].add_(1)
        torch._foreach_add_([tensor], 3.0)
    expected = values * 2
    expected[0] += 1
    for tensor in paged:
        assert tensor.equal(expected + 3)
    assert disk.counters.bytes_written > 0


def reduces(rank: int, world_size: int, folder: str) -> None:
    disk = _C.Disk(folder=folder, limit=1 << 20, ranks=1)
    paged = page(disk, torch.ones(1 << 20))
    with pytest.raises(tsm.InvalidArgument, match="lies on a disk"):
        dist.all_reduce(paged)


def test_collectives_in_place_are_refused(tmp_path: Path) -> None:
    run_ranks(reduces, 2, str(tmp_path))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(tsm.IoError, match="file"):
        _C.Disk(folder=str(tmp_path / "file"), limit=None, ranks=1)


def test_what_a_script_says_itself_is_no_key() -> None:
    for key in ("parameters", "gradients"):
        with pytest.raises(tsm.InvalidArgument, match=f"offload.{key}"):
            tsm.init({"offload": {key: "disk"}})
    with pytest.raises(tsm.InvalidArgument, match="offload.optimizer"):
        tsm.init({"offload": {"optimizer": "host"}})
