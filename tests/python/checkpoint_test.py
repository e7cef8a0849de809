"""tsm.checkpoint: what is saved is what is loaded, at any layout, in any wrapper, whatever happens in between."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tesserae as tsm
from checkpoint_models import Way, assert_same, loaded_plainly, make, phase, plain_tensors, train, whole_tensors
from ranks import RankFailed, run_ranks
from tesserae.checkpoint import Damaged, SaveFailed, load, maybe_finalize_async_calls, save

# Layouts.


def trains_and_saves(rank: int, world_size: int, way: Way, folder: Path) -> dict[str, Tensor]:
    model, optimizer = make(way, seed=0)
    train(model, optimizer, range(3), rank)
    optimizer.param_groups[0]["lr"] = 0.004
    save(folder, model, optimizer, {"epoch": 2}, step=3, rank_extra={"rank": rank})
    return whole_tensors(model, optimizer)


def loads_and_saves(rank: int, world_size: int, way: Way, old: Path, new: Path) -> tuple[dict[str, Tensor], object]:
    model, optimizer = make(way, seed=1, lr=1.0)
    train(model, optimizer, range(1), rank)  # there is another state to be replaced
    found = load(old, model, optimizer)
    assert (found.step, found.extra) == (3, {"epoch": 2})
    assert optimizer.param_groups[0]["lr"] == 0.004
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    save(new, model, optimizer, step=3)
    return whole_tensors(model, optimizer), found.rank_extra


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Way(2), Way(3, use_orig_params=False)),
        (Way(3, "SHARD_GRAD_OP", use_orig_params=False), Way(4, "HYBRID_SHARD", degree=2)),
        (Way(4, "HYBRID_SHARD", degree=2, use_orig_params=False), Way(1, use_orig_params=False)),
        (Way(2, "NO_SHARD"), Way(2)),
    ],
    ids=str,
)
def test_loads_bitwise_at_another_layout(one: Way, other: Way, tmp_path: Path) -> None:
    saved = run_ranks(trains_and_saves, one.ranks, one, tmp_path / "old")[0]
    assert len(saved) == 25  # eight trainable parameters with two moments each, one frozen, tied ones once
    plain, model, optimizer = loaded_plainly(tmp_path / "old")
    assert_same(plain, saved)
    assert model.calls == 3
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}
    for rank, (loaded, extra) in enumerate(
        run_ranks(loads_and_saves, other.ranks, other, tmp_path / "old", tmp_path / "new")
    ):
        assert_same(loaded, saved)
        assert extra == ({"rank": rank} if rank < one.ranks else None)
    assert_same(loaded_plainly(tmp_path / "new")[0], saved)


def saves_plain(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = make(Way(0), seed=0)
    train(model, optimizer, range(2))
    ddp = nn.parallel.DistributedDataParallel(model)
    save(folder, torch.compile(ddp, backend="eager"), optimizer, step=2)


def test_what_ddp_saved_fsdp_loads(tmp_path: Path) -> None:
    run_ranks(saves_plain, 2, tmp_path)
    model, optimizer = make(Way(0), seed=0)
    train(model, optimizer, range(2))
    assert_same(loaded_plainly(tmp_path)[0], dict(plain_tensors(model, optimizer)))
    assert_same(run_ranks(loads_sharded, 2, tmp_path)[0], dict(plain_tensors(model, optimizer)))


def loads_sharded(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    model, optimizer = make(Way(2), seed=1)
    load(folder, model, optimizer)
    return whole_tensors(model, optimizer)


def continues(rank: int, world_size: int, way: Way, folder: Path) -> None:
    model, optimizer = make(way, seed=0)
    train(model, optimizer, range(2), rank)
    save(folder, model, optimizer, step=2)
    losses = train(model, optimizer, range(2, 5), rank)
    again, fresh = make(way, seed=5)
    load(folder, again, fresh)
    assert train(again, fresh, range(2, 5), rank) == losses
    assert_same(whole_tensors(again, fresh), whole_tensors(model, optimizer))


@pytest.mark.parametrize("way", [Way(2), Way(4, "HYBRID_SHARD", degree=2, use_orig_params=False)], ids=str)
def test_goes_on_as_if_never_stopped(way: Way, tmp_path: Path) -> None:
    run_ranks(continues, way.ranks, way, tmp_path)


# Beside training.


def saves_beside_training(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    model, optimizer = make(Way(world_size), seed=0)
    train(model, optimizer, range(2), rank)
    tsm.checkpoint.async_save(folder, model, optimizer, step=2)
    before = whole_tensors(model, optimizer)
    train(model, optimizer, range(2, 4), rank)
    tsm.checkpoint.async_save(folder, model, optimizer, step=4)
    train(model, optimizer, range(4, 6), rank)
    assert maybe_finalize_async_calls() == [0, 1]
    assert maybe_finalize_async_calls(blocking=False) == []
    tsm.checkpoint.async_save(folder, model, optimizer, step=6)
    return before  # the last one is finished at exit


def test_async_save_has_the_values_of_the_call(tmp_path: Path) -> None:
    before = run_ranks(saves_beside_training, 2, tmp_path)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4", "step-6"]
    plain, model, _ = loaded_plainly(tmp_path / "step-2")
    assert_same(plain, before)
    assert model.calls == 2
    assert loaded_plainly(tmp_path)[1].calls == 6


def saves_with_two_groups(rank: int, world_size: int, folder: Path) -> list[int]:
    groups = {"a": dist.new_group([0, 1]), "b": dist.new_group([0, 2])}
    mine = {name: group for name, group in groups.items() if rank in dist.get_process_group_ranks(group)}
    model = nn.Linear(3, 3)
    for name, group in mine.items():
        tsm.checkpoint.async_save(folder / name, model, step=1, process_group=group)
    finished = maybe_finalize_async_calls(process_group=groups["a"]) if "a" in mine else []
    dist.barrier()  # until here, rank 2 takes no part in anything of b
    return finished + maybe_finalize_async_calls()


def test_finalizes_the_saves_of_one_group_alone(tmp_path: Path) -> None:
    assert run_ranks(saves_with_two_groups, 3, tmp_path) == [[0, 1], [0], [0]]
    assert all((tmp_path / name / "step-1").is_dir() for name in "ab")


def test_the_optimizer_waits_for_the_copy(tmp_path: Path) -> None:
    model = nn.Linear(1, 1 << 24, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones_like(model.weight)
    before = model.weight.detach().clone()
    tsm.checkpoint.async_save(tmp_path, model, step=1)
    optimizer.step()
    assert maybe_finalize_async_calls() != []
    assert not torch.equal(model.weight, before)
    load(tmp_path, model)
    assert torch.equal(model.weight, before)


def fails_beside_training(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = make(Way(world_size), seed=0)
    save(folder / "good", model, optimizer, step=1)
    if rank == 0:
        (folder / "no-folder").touch()
    dist.barrier()
    tsm.checkpoint.async_save(folder / "no-folder", model, optimizer, step=2)
    train(model, optimizer, range(2), rank)
    with pytest.raises(SaveFailed, match="step 2 was not saved.*rank 0: .*no-folder") as caught:
        maybe_finalize_async_calls()
    assert caught.value.step == 2
    tsm.checkpoint.async_save(folder / "no-folder", model, optimizer, step=3)
    train(model, optimizer, range(1), rank)
    with pytest.raises(SaveFailed, match="step 3"):
        save(folder / "good", model, optimizer, step=4)
    save(folder / "good", model, optimizer, step=5, keep=1, read_back=True)


LOSES_ITS_LAST_SAVE = """
import sys
import torch
import torch.distributed as dist
import tesserae as tsm
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
open(f"{folder}/no-folder", "w").close()
dist.barrier()
tsm.checkpoint.async_save(f"{folder}/no-folder", torch.nn.Linear(2, 2), step=7)
print("the script ends")
"""


def test_a_script_whose_last_save_failed_exits_with_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOSES_ITS_LAST_SAVE)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, errors = rank.communicate(timeout=200)
        assert "the script ends" in output
        assert rank.returncode == 1, errors
        assert "step 7 was not saved" in errors and "no-folder" in errors


def test_a_failure_is_raised_on_all_ranks_and_training_goes_on(tmp_path: Path) -> None:
    run_ranks(fails_beside_training, 2, tmp_path)
    assert [path.name for path in (tmp_path / "good").iterdir()] == ["step-5"]


# One process, plain modules.


class Counts(nn.Module):
    """A state of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.conv = nn.Conv2d(3, 6, 1).to(memory_format=torch.channels_last)
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.conv(images).flatten(2))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


Plain = tuple[Counts, torch.optim.Optimizer, list[torch.optim.lr_scheduler.LRScheduler]]


def make_plain(kind: type[torch.optim.Optimizer]) -> Plain:
    model = Counts()
    groups = [{"params": model.conv.parameters(), "lr": 0.3}, {"params": model.norm.parameters()}]
    optimizer = kind(groups, lr=0.1)
    rates = torch.optim.lr_scheduler
    return model, optimizer, [rates.MultiStepLR(optimizer, [1, 3]), rates.ReduceLROnPlateau(optimizer, patience=0)]


def train_plain(model: Counts, optimizer: torch.optim.Optimizer, schedules: list, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        noise = random.random() + numpy.random.rand()
        loss = (model(torch.randn(2, 3, 2, 2)) * noise).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedules[0].step()
        schedules[1].step(loss.item())
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "NAdam", "ASGD", "Adafactor", "Rprop", "Adagrad"])
def test_a_plain_module_goes_on_as_if_never_stopped(kind: str, tmp_path: Path) -> None:
    model, optimizer, schedules = make_plain(getattr(torch.optim, kind))
    train_plain(model, optimizer, schedules, 2)
    extra = {"schedules": [s.state_dict() for s in schedules]}
    save(tmp_path, model, optimizer, extra, step=2, rank_extra=tsm.checkpoint.random_state())
    losses = train_plain(model, optimizer, schedules, 3)

    again, fresh, anew = make_plain(getattr(torch.optim, kind))
    found = load(tmp_path, again, fresh)
    for schedule, state in zip(anew, found.extra["schedules"], strict=True):
        schedule.load_state_dict(state)
    tsm.checkpoint.set_random_state(found.rank_extra)
    assert again.calls == 2
    assert train_plain(again, fresh, anew, 3) == losses
    assert again.conv.weight.is_contiguous(memory_format=torch.channels_last)
    for ours, theirs in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_several_optimizers_whose_groups_are_made_otherwise(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    sgd = torch.optim.SGD(model[0].parameters(), lr=torch.tensor(0.3), momentum=0.5)
    adam = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in (sgd, adam):
        optimizer.step()
    save(tmp_path, model, [sgd, adam], step=1)

    one = torch.optim.SGD([{"params": [p]} for p in model[0].parameters()], lr=torch.tensor(1.0), momentum=0.9)
    load(tmp_path, model, one)
    assert [group["lr"].item() for group in one.param_groups] == [pytest.approx(0.3)] * 2
    assert {group["momentum"] for group in one.param_groups} == {0.5}
    for parameter in model[0].parameters():
        assert torch.equal(one.state[parameter]["momentum_buffer"], sgd.state[parameter]["momentum_buffer"])
    all_in_one = torch.optim.AdamW(model.parameters(), lr=2.0)
    with pytest.raises(tsm.InvalidArgument, match="the optimizer is AdamW and was SGD"):
        load(tmp_path, model, all_in_one)
    with pytest.raises(tsm.InvalidArgument, match="group 0 were in groups with different options"):
        load(tmp_path, model, all_in_one, strict=False)
    larger = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    adam = torch.optim.AdamW([*larger[1].parameters(), *larger[2].parameters()], lr=2.0)
    with pytest.raises(tsm.InvalidArgument, match='"model/2.weight" is missing|2.weight, which no saved group had'):
        load(tmp_path, larger, adam)
    load(tmp_path, larger, adam, strict=False)
    assert adam.param_groups[0]["lr"] == 0.1
    assert len(adam.state) == 2


def test_a_conjugate_buffer_is_filled(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("phase", phase().conj())
    save(tmp_path, model, step=1)
    model.phase = torch.zeros(2, dtype=torch.complex64).conj()
    load(tmp_path, model)
    assert model.phase.is_conj()
    assert model.phase.tolist() == [1 - 2j, 3 + 4j]


def loads_what_is_gone(rank: int, world_size: int, folder: Path) -> None:
    with pytest.raises((Damaged, tsm.InvalidArgument), match="step-7"):
        load(folder / "step-7")


def test_a_named_checkpoint_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """Else a script that asks for it would begin at step 0. So is one that lost its manifest."""
    run_ranks(loads_what_is_gone, 2, tmp_path)
    (tmp_path / "step-7").mkdir()
    run_ranks(loads_what_is_gone, 2, tmp_path)


def loads_a_file(rank: int, world_size: int, folder: Path) -> None:
    with pytest.raises(tsm.IoError, match="rank 0 could not look for checkpoints: .*step-7"):
        load(folder / "step-7")


def test_a_file_in_the_place_of_a_checkpoint_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "step-7").write_text("no directory")
    run_ranks(loads_a_file, 2, tmp_path)


# What cannot work.


@pytest.mark.parametrize("numbers", [{"step": -1}, {"step": 2**63}, {"step": 1.0}, {"keep": -1}, {"keep": 2**31}])
def test_what_is_no_count_is_named(numbers: dict[str, object], tmp_path: Path) -> None:
    ((name, value),) = numbers.items()
    for function in (save, tsm.checkpoint.async_save):
        with pytest.raises(tsm.InvalidArgument, match=f"{name} is {value!r}; pass .* an integer from 0"):
            function(tmp_path, nn.Linear(1, 1), **{"step": 1, **numbers})
    assert list(tmp_path.iterdir()) == []


def test_steps_of_other_kinds_of_integers(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(1, 1), step=numpy.int64(3), keep=numpy.int32(1))
    save(tmp_path, nn.Linear(1, 1), step=torch.tensor(2**63 - 1), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{2**63 - 1}"]
    assert load(tmp_path).step == 2**63 - 1


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path, model, optimizer, step=1)
    with pytest.raises(
        tsm.InvalidArgument, match="2 tensors that the model does not have: model/1.bias, model/1.weight"
    ):
        load(tmp_path, nn.Sequential(nn.Linear(2, 3)))
    assert load(tmp_path, nn.Sequential(nn.Linear(2, 3)), strict=False).step == 1
    with pytest.raises(tsm.InvalidArgument, match='"model/0.weight" has shape .3, 2., here it is .3, 1.'):
        load(tmp_path, nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 2)))
    save(tmp_path / "alone", model, step=1)
    with pytest.raises(tsm.InvalidArgument, match="has nothing of an optimizer"):
        load(tmp_path / "alone", model, optimizer)
    assert load(tmp_path / "alone", model, optimizer, strict=False).step == 1
    other = nn.Linear(1, 1)
    with pytest.raises(tsm.InvalidArgument, match="a parameter of shape .1, 1. that the model does not have"):
        load(tmp_path, model, torch.optim.SGD(other.parameters(), lr=0.1))


def one_rank_has_a_function(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = make(Way(world_size), seed=0)
    with pytest.raises(
        tsm.InvalidArgument, match="rank_extra is a function" if rank else "on rank 1: .*rank_extra is a"
    ):
        save(folder, model, optimizer, step=1, rank_extra=make if rank else None)
    assert not folder.exists()


def test_an_error_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    run_ranks(one_rank_has_a_function, 2, tmp_path / "none")


# Damage and death.


def saves_twice(rank: int, world_size: int, folder: Path, asynchronous: bool) -> None:
    model, optimizer = make(Way(world_size), seed=0)
    save(folder, model, optimizer, step=1)
    (tsm.checkpoint.async_save if asynchronous else save)(folder, model, optimizer, step=2)
    maybe_finalize_async_calls()


@pytest.mark.parametrize(("point", "asynchronous"), [("data-written@1#2", False), ("part-written@0#2", True)])
def test_a_killed_rank_leaves_the_last_checkpoint(point: str, asynchronous: bool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(saves_twice, 2, tmp_path, asynchronous, environment={"TESSERAE_CRASH_AT": point})
    model, optimizer = make(Way(0), seed=3)
    assert load(tmp_path, model, optimizer).step == 1
    save(tmp_path, model, optimizer, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def loads_damaged(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = make(Way(world_size), seed=1)
    with pytest.raises(
        tsm.Corruption, match='step-2/rank-1.safetensors, tensor "[a-z]+/.*", byte [0-9]+: block'
    ) as caught:
        load(folder / "step-2", model, optimizer)
    if isinstance(caught.value, Damaged):  # the others hear of it from the rank that has read there
        assert caught.value.file == str(folder / "step-2" / "rank-1.safetensors")
        assert caught.value.tensor
        assert caught.value.offset is not None
    assert rank == 0 or isinstance(caught.value, Damaged)
    assert load(folder, model, optimizer).step == 1


def test_a_flipped_bit_is_named_and_the_checkpoint_before_is_loaded(tmp_path: Path) -> None:
    run_ranks(saves_twice, 2, tmp_path, False)
    file = tmp_path / "step-2" / "rank-1.safetensors"
    written = bytearray(file.read_bytes())
    written[-5] ^= 4
    file.write_bytes(written)
    run_ranks(loads_damaged, 2, tmp_path)
