"""Starts the ranks of one benchmark run on this machine, watches their memory, and collects their report.

Memory is the sum of PSS over the ranks (shared pages count once), sampled from /proc/PID/smaps_rollup. For that the
kernel walks the page tables and holds up page faults meanwhile: samples are spaced to cost at most 1% of the time.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SHARE_OF_TIME = 0.01  # that sampling may take
SHORTEST_INTERVAL = 0.25  # seconds


@dataclass(frozen=True)
class Run:
    report: dict  # what rank 0 wrote
    peak_pss: int  # bytes, sum over the ranks; 0 where the kernel does not tell
    peak_rss: int  # bytes, sum over the ranks of each one's own peak: exact, but counts shared pages for every rank
    cpu_seconds: float  # sum over the ranks, start and end included
    seconds: float


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set. One compute thread a rank."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def proportional_set_size(pid: int) -> int:
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:  # ended meanwhile, or no such file on this kernel
        return 0
    return int(found.group(1)) * 1024 if found else 0


class Ranks:
    """The processes of one run; leaving the `with` block kills those that still live."""

    def __init__(self, command: list[str], ranks: int, log: Path):
        port = free_port()
        self.usage: list[resource.struct_rusage] = []
        with log.open("wb") as sink:
            self.processes = [
                subprocess.Popen(
                    command, env=rank_environment(rank, ranks, port), stdout=sink, stderr=sink, start_new_session=True
                )
                for rank in range(ranks)
            ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.alive():
            os.killpg(process.pid, signal.SIGKILL)
        while self.alive():
            self.reap(block=True)

    def alive(self) -> list[subprocess.Popen]:
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


def launch(command: list[str], ranks: int, deadline: float) -> Run:
    """Runs `command --json FILE` as `ranks` processes. RuntimeError, with the end of their output, if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report.json"), Path(folder, "log")
        start, peak, next_sample = time.monotonic(), 0, 0.0
        with Ranks([*command, "--json", str(report)], ranks, log) as processes:
            while processes.alive():
                processes.reap()
                now = time.monotonic()
                if failures := processes.failures():
                    raise RuntimeError(f"{' '.join(command)}: a rank ended with {failures[0]}\n{tail(log)}")
                if now - start > deadline:
                    raise RuntimeError(f"{' '.join(command)}: no end after {deadline:.0f} s\n{tail(log)}")
                if now >= next_sample:
                    peak = max(peak, sum(proportional_set_size(process.pid) for process in processes.alive()))
                    next_sample = time.monotonic() + max(SHORTEST_INTERVAL, (time.monotonic() - now) / SHARE_OF_TIME)
                time.sleep(0.02)
        if not report.exists():
            raise RuntimeError(f"{' '.join(command)}: ended without a report\n{tail(log)}")
        usage = processes.usage
        return Run(
            report=json.loads(report.read_text()),
            peak_pss=peak,
            peak_rss=sum(u.ru_maxrss for u in usage) * 1024,
            cpu_seconds=sum(u.ru_utime + u.ru_stime for u in usage),
            seconds=time.monotonic() - start,
        )


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
