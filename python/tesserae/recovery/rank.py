"""The process that trains: forked by a watcher (watcher.py), which is told how it ended."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist

from tesserae import _C

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # ask this process to end, or warn it

_handlers: dict[int, Any] = {}  # of signals, that the script had


@dataclass(frozen=True)
class End:
    """How a rank ended. "ended": it returned, or meant to end with `status`; "lost a peer": an operation with other
    ranks failed; "failed": another exception; "killed": it did not say."""

    kind: Literal["ended", "lost a peer", "failed", "killed"]
    status: int = 0
    text: str = ""


class Rank:
    """One that runs. Used from one thread; whoever drops it has ended it."""

    def __init__(self, train: Callable[[], Any], variables: dict[str, str]) -> None:
        self._reports, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of threads: those of a store, of which the child makes no use.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Until the rank has its own handlers: those that it begins with are its parent's.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            self.process = os.fork()
        if self.process == 0:
            os.close(self._reports)
            _run(train, variables, writer, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with suppress(OSError):  # the rank does it, too: whoever comes first
            os.setpgid(self.process, self.process)
        os.close(writer)
        self._end: End | None = None

    def end(self) -> End | None:
        """How it ended; None: it still runs. Never blocks."""
        if self._end is None:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process != 0:
                self._end = self._read_end(status)
        return self._end

    def signal(self, number: int) -> None:
        """To the rank alone: what it has started is its own affair."""
        if self._end is None:
            os.kill(self.process, number)

    def kill(self) -> None:
        """It, and what it has started: workers of a DataLoader."""
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        if self._end is None:
            self._end = self._read_end(os.waitpid(self.process, 0)[1])

    def _read_end(self, status: int) -> End:
        with open(self._reports, "rb") as file:
            os.set_blocking(self._reports, False)  # what it has started may still hold the other end
            text = file.read()
        if text:
            return End(**json.loads(text))
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return End("killed", 128 - code, f"was killed by signal {-code} ({signal.strsignal(-code)})")
        return End("killed", code, f"exited with code {code}")


def _run(train: Callable[[], Any], variables: dict[str, str], writer: int, mask: set[int]) -> None:
    """Never returns: what the watcher has on its stack, and would do at its end, is not the rank's."""
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number, handler in _handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.update(variables)
        end = _outcome(train)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, json.dumps(asdict(end)).encode())
        status = end.status
    finally:
        os._exit(status)


def _outcome(train: Callable[[], Any]) -> End:
    try:
        train()
        return End("ended")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return End("ended", leaving.code or 0)
        print(leaving.code, file=sys.stderr)
        return End("ended", 1)
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error  # saves that run are given up (checkpoint/saving.py)
        kind: Any = "lost a peer" if is_of_communication(error) else "failed"
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        return End(kind, status, f"{type(error).__name__}: {error}".splitlines()[0][:500])


def is_of_communication(error: BaseException) -> bool:
    """Whether it says that other ranks were lost, and not that this one has failed."""
    # Gloo's, and ours that have come through a backward of torch, are RuntimeErrors that say where they come from.
    text = str(error)
    ours = text.startswith(("[Group]", "[Fabric]", "[ProcessGroup]"))
    return isinstance(error, (_C.CommError, dist.DistError)) or ours or "gloo/" in text


@contextmanager
def signals_go_to(rank: Callable[[], Rank | None], seen: list[int]) -> Iterator[None]:
    """What asks this process to end asks its rank; `seen` has what came."""

    def hand_on(number: int, frame: Any) -> None:
        seen.append(number)
        if (running := rank()) is not None:
            running.signal(number)

    for number in SIGNALS:
        _handlers[number] = signal.signal(number, hand_on)
    try:
        yield
    finally:
        while _handlers:
            signal.signal(*_handlers.popitem())
