"""Watches the memory of a run's processes from outside: the sum of their PSS (pages that several have count once).

PSS is in /proc/PID/smaps_rollup, for which the kernel walks the page tables and holds up page faults meanwhile. At a
hundredth of the time that is once in several seconds, which misses what a step holds for a part of itself. So the two
parts of PSS are watched apart:

1. What is private counts in full, and the kernel keeps count of it: `statm` is read ten times a second. Processes
   that are copies of each other (fork) have private pages in common until one changes them: how many PSS tells, too,
   and it counts only where `copies` says that the run's own launcher makes such copies, not where a benchmark does.
2. Of what is not (libraries, shared memory), `statm` knows how much each process has; which part of that PSS counts
   comes from smaps_rollup. It changes where such memory grows, so it is read whenever there is 2 % more than at any
   reading before (imports, the first step), and otherwise so seldom that it costs at most 1 % of the time.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

INTERVAL = 0.1  # seconds, of 1
SHORTEST_INTERVAL = 0.25  # of 2
SHARE_OF_TIME = 0.01  # that 2 may take
GROWTH = 1.02
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int) -> tuple[int, int]:
    """Bytes in memory of a process: private ones, and others. None of one that has ended."""
    try:
        _, whole, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except (OSError, ValueError):
        return 0, 0
    return (whole - shared) * PAGE, shared * PAGE


def rollup(pid: int) -> dict[str, int]:
    """KiB of a process, by the kernel's names (Rss, Pss, ...). Empty: it has ended, or the kernel does not tell."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return {}
    return {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def shared(pid: int) -> tuple[int, int, int]:
    """Bytes in memory that are not private: as PSS counts them, and in full. How much less than in full it counts of
    those that are."""
    kib = rollup(pid)
    if "Pss_File" not in kib:  # or an old kernel
        return 0, 0, 0
    in_common = kib["Anonymous"] - kib["Pss_Anon"]
    return (kib["Pss_File"] + kib["Pss_Shmem"]) * 1024, (kib["Rss"] - kib["Anonymous"]) * 1024, in_common * 1024


def children(pid: int) -> list[int]:
    """The processes that it has started and that have not been waited for; none once it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def family(pid: int) -> list[int]:
    """The process and all below it."""
    return [pid] + [below for child in children(pid) for below in family(child)]


class Memory:
    """`peak`: the most that was seen, in bytes; 0 where the kernel does not tell."""

    def __init__(self, copies: bool = False) -> None:
        self.peak = 0
        self._copies = copies
        self._in_common = 0  # private pages that copies have not changed
        self._read_of: list[int] = []  # processes
        self._counted = 0.0  # which part of what is not private PSS counts
        self._most_shared = 0  # at any reading of that part
        self._next_look = self._next_reading = self._earliest_reading = 0.0

    def look(self, pids: list[int]) -> None:
        """At these processes and all below them; to be called often, most calls do nothing."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + INTERVAL
        processes = [below for pid in pids for below in family(pid)]
        private_now, shared_now = self._resident(processes)
        grown = shared_now > GROWTH * self._most_shared and now >= self._earliest_reading
        others = self._copies and processes != self._read_of
        if grown or others or now >= self._next_reading:
            self._read(processes)
            self._most_shared = max(self._most_shared, shared_now)
            # Again: one that has ended since must not count in full, after what it had in common was not seen.
            private_now, shared_now = self._resident(processes)
        if self._counted:
            # What has come since the last reading may count for less: what it counts for is known from the next one on.
            known = min(shared_now, GROWTH * self._most_shared)
            self.peak = max(self.peak, private_now - self._in_common + int(self._counted * known))

    @staticmethod
    def _resident(processes: list[int]) -> tuple[int, int]:
        seen = [resident(process) for process in processes]
        private, others = (sum(column) for column in zip(*seen, strict=True)) if seen else (0, 0)
        return private, others

    def _read(self, processes: list[int]) -> None:
        began = time.thread_time()  # not the time that it waits for a core
        readings = [shared(process) for process in processes]
        cost, now = time.thread_time() - began, time.monotonic()
        counted, in_full, common = (sum(column) for column in zip(*readings, strict=True)) if readings else (0, 0, 0)
        self._counted = counted / in_full if in_full else 0.0
        self._in_common, self._read_of = (common, processes) if self._copies else (0, [])
        self._earliest_reading = now + SHORTEST_INTERVAL
        self._next_reading = now + max(SHORTEST_INTERVAL, cost / SHARE_OF_TIME)
