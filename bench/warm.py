"""Ranks in Python that begin as copies of this process, which has imported torch once for all: for tests of the scripts
here, where nearly all time goes to imports (3 s of a processor a rank). Not for figures: what a rank takes to start,
and the memory that it has for itself, are not what they would be.
"""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

from cases import find_tesserae

IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # which libraries read as they are loaded

_ready = False


def prepare() -> None:
    """From now on launch.py starts ranks in Python as copies of this process, as long as it has one thread."""
    global _ready
    os.environ.update(ONE_THREAD)
    for name in (*IMPORTED, *(["tesserae"] if find_tesserae() else [])):
        importlib.import_module(name)
    _ready = True


def takes(command: list[str], environment: Mapping[str, str]) -> bool:
    """Whether a copy of this process can do it: `python SCRIPT ...` or `python -c PROGRAM ...` with one thread."""
    if not _ready or command[0] != sys.executable or not ONE_THREAD.items() <= environment.items():
        return False
    return len(os.listdir("/proc/self/task")) == 1


@dataclass
class Copy:
    """What launch.py uses of subprocess.Popen."""

    pid: int
    returncode: int | None = None


def start(command: list[str], environment: Mapping[str, str], sink: IO[bytes]) -> Copy:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # here too: whoever has the Copy may signal its group at once
        return Copy(pid)
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        atexit._clear()  # what this process has to do at its end
        os.environ.clear()
        os.environ.update(environment)
        status = _status_of(lambda: _run(command[1:]))
    finally:
        os._exit(status)


def _run(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def _status_of(main: Callable[[], None]) -> int:
    """What the interpreter would exit with, after all that it does before."""
    status = 0
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status
