"""tsm.preemption: the examples of docs/preemption.md as they stand there, ended by real signals and gone on with,
against the same without a disturbance; and its rules."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, skip_first_batches
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import tesserae as tsm
from library_runs import LAYERS, is_ours, make_model, prepare, sequences, whole
from ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "preemption.md"
REQUEUE = 75
STEPS = 12
# After which step which rank gets which signal, one run after the other.
SIGNALS = [(3, 1, signal.SIGTERM), (4, 0, signal.SIGUSR1), (9, 1, signal.SIGUSR1)]

Signals = tuple[int, int, signal.Signals]


def example(number: int) -> dict[str, Any]:
    """What the example of that number on the page defines."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[number]
    names = {
        "tsm": tsm,
        "os": os,
        "skip_first_batches": skip_first_batches,
        "TrainerCallback": TrainerCallback,
        "get_last_checkpoint": get_last_checkpoint,
    }
    exec(compile(code, f"{PAGE.name}, example {number}", "exec"), names)
    return names


def disturb(model: nn.Module, rank: int, done: int, at: Signals | None) -> None:
    """In the forward of step `at[0]`, rank `at[1]` gets the signal, in the middle of a step as from a scheduler."""
    steps = done

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if at is not None and at[:2] == (steps, rank):
            os.kill(os.getpid(), at[2])

    model.register_forward_pre_hook(count)


def ended_with(body: Callable[[], Any]) -> tuple[int, Any]:
    """The status with which the script would end, and what it has."""
    try:
        return 0, body()
    except SystemExit as end:
        return end.code, None  # type: ignore[return-value]


Outcome = tuple[int, tuple[float, dict[str, Tensor]] | None]  # of a rank: status, loss and weights at the end


def goes_on_to_the_same(run: Callable[..., Outcome], folder: Path, *args: Any) -> None:
    undisturbed = run_ranks(run, 2, str(folder / "undisturbed"), 0, None, *args)
    done = 0
    for at in SIGNALS:
        ended = run_ranks(run, 2, str(folder / "preempted"), done, at, *args)
        assert [status for status, _ in ended] == [REQUEUE, REQUEUE]
        done = at[0]
    assert done < STEPS
    for (status, one), (_, other) in zip(
        run_ranks(run, 2, str(folder / "preempted"), done, None, *args), undisturbed, strict=True
    ):
        assert status == 0 and one is not None and other is not None
        assert one[0] == other[0]
        assert one[1].keys() == other[1].keys()
        for name, weight in one[1].items():
            torch.testing.assert_close(weight, other[1][name], rtol=0, atol=0, msg=name)


# ---- a plain loop ----
def plain(rank: int, world_size: int, folder: str, done: int, at: Signals | None, kind: str) -> Outcome:
    tsm.init()
    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if kind == "fully_shard":
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=True)
    disturb(model, rank, done, at)
    batches = torch.randn(STEPS, 2, 8, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    status, loss = ended_with(lambda: example(0)["train"](model, optimizer, batches, folder))
    return status, (loss, whole(model)) if status == 0 else None


@pytest.mark.parametrize("kind", ["FSDP1", "fully_shard"])
def test_a_plain_loop(kind: str, tmp_path: Path) -> None:
    goes_on_to_the_same(plain, tmp_path, kind)


# ---- Accelerate ----
def accelerated(rank: int, world_size: int, folder: str, done: int, at: Signals | None) -> Outcome:
    prepare(ours=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYERS["llama"]],
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(sequences(STEPS * 4), batch_size=2)  # shared out among two ranks
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert is_ours(model)
    disturb(model, rank, done, at)
    status, loss = ended_with(lambda: example(1)["train"](accelerator, model, optimizer, loader, folder))
    return status, (loss, whole(model)) if status == 0 else None


def test_accelerate(tmp_path: Path) -> None:
    goes_on_to_the_same(accelerated, tmp_path)


# ---- transformers.Trainer ----
def trained(rank: int, world_size: int, folder: str, done: int, at: Signals | None) -> Outcome:
    prepare(ours=True)
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
        fsdp=True,
        fsdp_config={},
    )
    model = make_model("llama")
    disturb(model, rank, done, at)
    trainer = Trainer(model, arguments, train_dataset=sequences(32))
    status, _ = ended_with(lambda: example(2)["train"](trainer, folder))
    if status != 0:
        return status, None
    assert is_ours(trainer.model)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return status, (losses[-1], whole(trainer.model))


def test_trainer(tmp_path: Path) -> None:
    goes_on_to_the_same(trained, tmp_path)


# ---- rules ----
def script(code: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """A process of its own, without torch.distributed."""
    text = "import os, signal, sys, time\nimport tesserae as tsm\n" + code
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, **more)


def test_one_process_alone() -> None:
    run = script("""
preemption = tsm.preemption(exit_code=75)
assert not preemption.requested() and not preemption.requested_here and preemption.reason is None
os.kill(os.getpid(), signal.SIGTERM)
assert preemption.requested_here
assert preemption.requested() and preemption.reason == "SIGTERM"
os.kill(os.getpid(), signal.SIGTERM)  # again: it goes on saving
preemption.exit()
""")
    assert run.returncode == 75, run.stderr


def test_handlers_are_called_and_come_back() -> None:
    run = script("""
heard = []
before = lambda number, frame: heard.append(number)
signal.signal(signal.SIGTERM, before)
with tsm.preemption() as preemption:
    os.kill(os.getpid(), signal.SIGTERM)
    while not heard: time.sleep(0.01)
    assert preemption.requested()
os.kill(os.getpid(), signal.SIGTERM)
while len(heard) < 2: time.sleep(0.01)
preemption.close()
assert preemption.requested()
os.kill(os.getpid(), signal.SIGUSR1)  # has its default again
""")
    assert run.returncode == -signal.SIGUSR1, run.stderr


@pytest.mark.parametrize("source", ["file", "command"])
def test_file_and_command(source: str, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    asks = {"file": str(notice), "command": f"test -e '{notice}'"}[source]
    with tsm.preemption(**{source: asks}, every_seconds=0.01) as preemption:
        time.sleep(0.2)
        assert not preemption.requested()
        notice.touch()
        end = time.monotonic() + 60
        while not preemption.requested() and time.monotonic() < end:
            time.sleep(0.01)
        assert preemption.reason == {"file": f"the file {asks}", "command": f"the command `{asks}`"}[source]


def test_one_at_a_time() -> None:
    with tsm.preemption(), pytest.raises(tsm.InvalidArgument, match="one is alive already"):
        tsm.preemption()
    tsm.preemption().close()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"exit_code": 1}, "preemption.exit_code: is 1, which says that a run failed"),
        ({"exit_code": 256}, "preemption.exit_code: must be at most 255"),
        ({"every_seconds": 0}, "preemption.every_seconds: must be more than 0"),
        ({"file": ""}, "preemption.file"),
    ],
)
def test_values_that_cannot_work(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(tsm.InvalidArgument, match=re.escape(text)):
        tsm.preemption(**keys)


def test_init_has_the_section() -> None:
    tsm.init({"preemption": {"exit_code": 75, "file": "/nowhere/notice"}})
    try:
        with tsm.preemption() as preemption:
            assert preemption.exit_code == 75
        with tsm.preemption(exit_code=76) as preemption:
            assert preemption.exit_code == 76
    finally:
        tsm.uninstall()


def waits_for_ever(ready: Any) -> None:
    ready.set()
    time.sleep(1000)


def test_processes_that_are_forked_are_not_asked() -> None:
    """As multiprocessing ends what is left of them when the script ends."""
    fork = multiprocessing.get_context("fork")
    with tsm.preemption() as preemption:
        ready = fork.Event()
        child = fork.Process(target=waits_for_ever, args=(ready,))
        child.start()
        assert ready.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM
        assert not preemption.requested()


def agrees(rank: int, world_size: int) -> str | None:
    with tsm.preemption() as preemption:
        assert not preemption.requested()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.requested()
        assert preemption.requested()
        return preemption.reason


def test_ranks_agree_in_a_script_that_knows_nothing_else_of_tesserae() -> None:
    assert run_ranks(agrees, 3) == ["SIGUSR1 (rank 2)"] * 3
