"""Starts the ranks of one benchmark run on this machine, watches their memory, and collects their report. Ranks of
several hosts are started by bench/hosts.sh.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import warm
from memory import Memory

UNAVAILABLE = 77  # how a program ends that cannot run here
HOSTS = Path(__file__).resolve().parent / "hosts.sh"
BYTE_CODE = HOSTS.parent.parent / "build" / "pycache"


class Unavailable(RuntimeError):
    """This run is impossible on this machine, or with what is built; the message says why."""


@dataclass(frozen=True)
class Run:
    report: dict  # what rank 0 wrote
    peak_pss: int  # bytes, sum over the ranks; 0 where the kernel does not tell
    peak_rss: int  # bytes, sum over the ranks of each one's own peak: counts shared pages for every rank; 0: not known
    cpu_seconds: float  # sum over the ranks, start and end included
    seconds: float
    link: dict | None = None  # of several hosts: what bench/hosts.sh says of the bytes between them


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment() -> dict[str, str]:
    """Byte code of Python modules is kept, whatever the machine's settings and however torch was installed: compiling
    torch's modules anew in each process takes seconds, and would be charged to whoever restarts."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(BYTE_CODE)}


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set. One compute thread a rank."""
    return environment() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class Ranks:
    """The processes of one run; leaving the `with` block kills those that still live."""

    def __init__(self, commands: list[list[str]], environments: list[dict[str, str]], log: Path):
        self.usage: list[resource.struct_rusage] = []
        with log.open("wb") as sink:
            self.processes: list[subprocess.Popen | warm.Copy] = [
                warm.start(command, environment, sink)
                if warm.takes(command, environment)
                else subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
                for command, environment in zip(commands, environments, strict=True)
            ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.alive():
            os.killpg(process.pid, signal.SIGKILL)
        while self.alive():
            self.reap(block=True)

    def alive(self) -> list[subprocess.Popen | warm.Copy]:
        return [process for process in self.processes if process.returncode is None]

    def failures(self) -> list[int]:
        return [process.returncode for process in self.processes if process.returncode]

    def reap(self, block: bool = False) -> None:
        """In place of Popen.poll, because only wait4 tells what the process used."""
        for process in self.alive():
            ended, status, usage = os.wait4(process.pid, 0 if block else os.WNOHANG)
            if ended:
                process.returncode = os.waitstatus_to_exitcode(status)
                self.usage.append(usage)


def launch(command: list[str], ranks: int, deadline: float, hosts: int = 1, rate: str = "") -> Run:
    """Runs `command --json FILE` as `ranks` processes, on `hosts` hosts that links of `rate` join. RuntimeError, with
    the end of their output, if one fails; Unavailable if this machine cannot do it."""
    with tempfile.TemporaryDirectory() as folder:
        report, link = Path(folder, "report.json"), Path(folder, "link.json")
        command = [*command, "--json", str(report)]
        if hosts > 1:
            where = ["--hosts", str(hosts), "--ranks", str(ranks // hosts), "--rate", rate, "--report", str(link)]
            watched = watch([[str(HOSTS), *where, "--", *command]], [environment()], Path(folder, "log"), deadline)
        else:
            port = free_port()
            environments = [rank_environment(rank, ranks, port) for rank in range(ranks)]
            watched = watch([command] * ranks, environments, Path(folder, "log"), deadline)
        if not report.exists():
            raise RuntimeError(f"{' '.join(command)}: ended without a report")
        usage = watched.usage
        return Run(
            report=json.loads(report.read_text()),
            peak_pss=watched.peak_pss,
            peak_rss=sum(u.ru_maxrss for u in usage) * 1024 if hosts == 1 else 0,
            cpu_seconds=sum(u.ru_utime + u.ru_stime for u in usage),
            seconds=watched.seconds,
            link=json.loads(link.read_text()) if hosts > 1 else None,
        )


@dataclass(frozen=True)
class Watched:
    peak_pss: int
    seconds: float
    usage: list[resource.struct_rusage]


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """An exit that leaves blocks as an exception does, so that ranks are ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def watch(commands: list[list[str]], environments: list[dict[str, str]], log: Path, deadline: float) -> Watched:
    """Runs the commands side by side until all have ended; the memory of what they start counts too."""
    start, memory = time.monotonic(), Memory()
    with ended_by_sigterm(), Ranks(commands, environments, log) as processes:
        while processes.alive():
            processes.reap()
            now = time.monotonic()
            if failures := processes.failures():
                if failures[0] == UNAVAILABLE:
                    raise Unavailable(tail(log, lines=1))
                raise RuntimeError(f"{' '.join(commands[0])}: a rank ended with {failures[0]}\n{tail(log)}")
            if now - start > deadline:
                raise RuntimeError(f"{' '.join(commands[0])}: no end after {deadline:.0f} s\n{tail(log)}")
            memory.look([process.pid for process in processes.alive()])
            time.sleep(0.02)
    return Watched(memory.peak, time.monotonic() - start, processes.usage)


def tail(log: Path, lines: int = 30) -> str:
    """The end of what the ranks wrote. They share the file, and two may write a line's text before either ends it: then
    a blank line follows."""
    written = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(written[-lines:])
