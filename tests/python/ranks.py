"""Tests with real ranks: one process each, Gloo on the loopback, one thread.

    def adds_up(rank, world_size, start):          # a function of a module, called once in every rank
        total = torch.tensor(float(rank + start))
        dist.all_reduce(total)
        assert total == 3
        return total.item()

    def test_adds_up():
        assert run_ranks(adds_up, 2, 1) == [3.0, 3.0]

Ranks are forked from a server that has imported what the test session has imported, but has run nothing and started
no thread: a launch costs tenths of a second, not the seconds that importing torch takes in each process.
  1. The first launch starts the server (multiprocessing's own), which imports torch, tesserae and the like.
  2. Each launch has its own store, served by the test process, and the variables that torchrun would set: the default
     process group is there when the function is called. `init=False` leaves that to the function.
     A group of torch's Gloo has one worker (OneWorkerGloo).
  3. A rank writes to a file of its own and reports its result or its traceback; the first one to fail is raised as
     RankFailed, with the values of the local variables and the end of what it wrote.
  4. What still runs GRACE seconds after a failure, or at the deadline, is killed; at the deadline each rank first
     writes where it is, and gdb, where there is one, says where its C++ is. No rank outlives the call, nor the test
     process.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

GRACE = 3.0
# Imported by every module of tests, or late by what nearly every test does: half a second to three of each rank.
ALWAYS = (
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tesserae.smp.init",
)
PRELOADED = ("tesserae", "transformers", "accelerate", "lightning", "peft")
PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")


class RankFailed(AssertionError):
    """A rank raised, died or was still running at the deadline. `rank` is the first one."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} {text}")
        self.rank = rank


@dataclass
class _Rank:
    number: int
    process: Any
    reports: Connection
    output: Path
    report: tuple[str, Any] | None = None  # ("result", value) or ("failure", text)
    ended: bool = False
    killed: bool = False  # by a signal, before it reported

    def tail(self, lines: int = 40) -> str:
        """The end of what it wrote; of one that aborted, from where it says why on: stacks of all threads follow."""
        written = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        whys = [i for i, line in enumerate(written) if line.startswith("Fatal Python error")]
        start = max(whys[0] - 10, 0) if whys else max(len(written) - lines, 0)
        return "\n".join(["--- what it wrote last ---", *written[start:]]) if written else "(it wrote nothing)"

    def native_stacks(self, frames: int = 12) -> str:
        """Of all its threads, as gdb sees them: a rank that waits in C++ has no Python frame that says for what."""
        gdb = shutil.which("gdb")
        if gdb is None:
            return "--- no stacks of C++: there is no gdb ---"
        asks = [gdb, "-p", str(self.process.pid), "-batch", "-ex", f"thread apply all bt {frames}"]
        try:
            said = subprocess.run(asks, capture_output=True, text=True, errors="replace", timeout=120).stdout
        except subprocess.TimeoutExpired:
            return "--- no stacks of C++: gdb took too long ---"
        lines = [line[:200] for line in said.splitlines() if line.startswith(("Thread", "#"))]
        return "\n".join(["--- stacks of C++ ---", *lines])

    def kill(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)  # with its children: workers of a DataLoader
        except ProcessLookupError:
            if self.process.is_alive():  # it has not made its process group yet
                self.process.kill()


def free_port() -> int:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline: float = 120.0,
    environment: Mapping[str, str] | None = None,
    init: bool = True,
) -> list[Any]:
    """Calls `function(rank, world_size, *args)` in `world_size` processes; returns their results in order of rank.

    `function` lies at the top of a module; arguments and results are pickled. `environment` is added to that of each
    rank. Raises RankFailed.
    """
    _start_server()
    store = _serve_store()
    with tempfile.TemporaryDirectory(prefix="tesserae-ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                output = Path(folder) / f"rank-{number}"
                reports, sender = _context.Pipe(duplex=False)
                variables = {**_launch_variables(number, world_size, store.port), **(environment or {})}
                process = _context.Process(
                    target=_rank_main, args=(function, number, world_size, args, variables, init, str(output), sender)
                )
                process.start()
                sender.close()
                ranks.append(_Rank(number, process, reports, output))
            return _collect(ranks, deadline)
        finally:
            for rank in ranks:
                if rank.process.is_alive():
                    rank.kill(signal.SIGKILL)
                rank.process.join()
                rank.reports.close()


def _serve_store() -> dist.TCPStore:
    """At 127.0.0.1 only: a server that listens at all addresses sees it as ::ffff:127.0.0.1, and torch's serves nobody
    until the name server has said whose that is. One launch in twenty waited 5 s for an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _start_server() -> None:
    """What the test session has imported by now is what the server imports, and its ranks find there."""
    imported = [name for name in sys.modules if name.split(".")[0] in PRELOADED]
    _context.set_forkserver_preload([*ALWAYS, *imported])  # no effect once it runs


def _launch_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"tests-{port}",
        "OMP_NUM_THREADS": "1",
    }


def _collect(ranks: list[_Rank], deadline: float) -> list[Any]:
    end = time.monotonic() + deadline
    first: _Rank | None = None  # to fail
    while running := [rank for rank in ranks if not rank.ended]:
        remaining = end - time.monotonic()
        if remaining <= 0:
            if first is not None:
                break
            for rank in running:
                rank.kill(signal.SIGUSR1)
            time.sleep(0.5)
            late = running[0]
            others = ", ".join(str(rank.number) for rank in running)
            texts = "\n".join(f"rank {rank.number}: {rank.tail()}\n{rank.native_stacks()}" for rank in running)
            raise RankFailed(late.number, f"still runs after {deadline:g} s (as do {others})\n{texts}")
        wait([rank.reports for rank in running], timeout=remaining)
        for rank in running:
            _receive(rank)
            if not rank.ended or rank.report is None or rank.report[0] != "failure":
                continue
            # One that was killed is the cause, even where the exception of another one is heard of earlier.
            if first is None or (rank.killed and not first.killed):
                first = rank
                end = min(end, time.monotonic() + GRACE)  # the others wait for it in vain
    if first is not None:
        raise RankFailed(first.number, f"failed\n{first.report[1]}\n{first.tail()}")  # type: ignore[index]
    return [rank.report[1] for rank in ranks]  # type: ignore[index]


def _receive(rank: _Rank) -> None:
    if not rank.reports.poll():
        return
    try:
        rank.report = rank.reports.recv()
    except EOFError:
        rank.process.join()
        code = rank.process.exitcode
        rank.killed = code < 0
        how = f"by signal {signal.Signals(-code).name}" if rank.killed else f"with status {code}"
        rank.report = ("failure", f"its process ended {how} before it reported")
    rank.ended = True


# ---- in the rank ----
class OneWorkerGloo(dist.ProcessGroupGloo):
    """Of the two workers that torch 2.13 gives a group, each notes the name of what it has done in one string, without
    a lock. Two collectives that end together, one with a name of more than 15 characters (a gather for DTensor), damage
    the heap: one run in some hundreds died of it, of malloc() or later (docs/limits.md). What a rank calls is the same.

    The thread that polls its sockets does so without a pause while another one holds the lock of a connection, which
    waits for a processor where ranks are more than these: it yields to the others (132 tests took 8 % less time).
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_of_later_torch: bool) -> None:
        options = dist.ProcessGroupGloo._Options()
        before = set(os.listdir("/proc/self/task"))
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        for thread in set(os.listdir("/proc/self/task")) - before:
            os.setpriority(os.PRIO_PROCESS, int(thread), 10)
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    variables: dict[str, str],
    init: bool,
    output: str,
    sender: Connection,
) -> None:
    # What the imports of the server would undo at their exit (of torch 174 libraries: 40 ms) ends with the process.
    for undo in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        undo.atexit = False
    gc.freeze()  # what the server has imported is no garbage, and its pages stay shared
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(variables)
    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = OneWorkerGloo  # type: ignore[misc]
    try:
        if init:
            dist.init_process_group("gloo")
            dist.barrier()  # a rank that ends while others still connect to it fails them
        result = function(rank, world_size, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        atexit._run_exitfuncs()  # multiprocessing leaves these out, a script does not
        report = pickle.dumps(("result", result))
    except BaseException as error:
        report = pickle.dumps(("failure", _describe(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(report)


def _describe(error: BaseException) -> str:
    """The traceback, and the local variables of the function that failed and of those in tests that called it."""
    text = "".join(traceback.format_exception(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    shown = [frame for frame in frames[1:] if frame is frames[-1] or "tests" in Path(frame.f_code.co_filename).parts]
    for frame in shown[-2:]:
        text += f"--- variables of {frame.f_code.co_name} ---\n"
        for name, value in frame.f_locals.items():
            try:
                shown_value = repr(value)
            except Exception as failed:
                shown_value = f"(its repr failed: {failed!r})"
            text += f"{name} = {shown_value if len(shown_value) <= 400 else shown_value[:400] + '...'}\n"
    return text
