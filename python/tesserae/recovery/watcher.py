"""tsm.with_recovery: when a rank is lost, all of them begin again from what they saved, in a second or two.

The process that a launcher started only watches. It has imported what the script imports, and trains in a child that it
forks: so a new rank costs no start of Python, and all that a broken job has in memory ends with it. The launcher
(torchrun, srun, mpirun) sees nothing of it: its processes live on.

 1. The watchers share a store: the launcher's, or one that the watcher of rank 0 serves where ranks were to meet.
 2. An epoch begins when all of them are there. The watcher of rank 0 serves a store for the ranks of this epoch: keys
    of an earlier one would lead them to processes that are gone.
 3. Each forks its rank, which meets the others by that store, and is told if the end has been asked for meanwhile:
    watchers that were still to meet have ended then.
 4. A rank ends. If it returned, or meant to end, its watcher says so, and waits for the others.
 5. Else it is lost, and its watcher says so. One that only lost a peer waits for a better culprit, for a moment.
 6. Whoever hears of a loss kills its rank, also one that has ended well, and the next epoch begins at 2; unless that
    has happened too often, or the same exception has ended two epochs in a row: then the watchers fail.
 7. When all have ended, each watcher returns, or ends with its rank's status. That of rank 0 ends last: it may serve
    the store.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tesserae import _C
from tesserae.recovery.rank import End, Rank, signals_go_to

PATIENCE = 3.0  # seconds for which one that lost a peer waits for who was lost


class RecoveryFailed(_C.Error):
    """Ranks were lost more often than allowed, or of the same exception again."""


def with_recovery(train: Callable[[], Any], *, restarts: int = 16, deadline: float = 600.0) -> None:
    """Runs train() on every rank; if a rank is lost, on all of them again, in new processes, until it has run through.

    `train` sets up torch.distributed, makes model and optimizer, loads the newest checkpoint
    (tsm.checkpoint.load), trains and saves: what it has not saved is lost with a rank. What it returns is dropped. It
    runs in a forked child, so this process must have imported things, but neither computed nor talked to an accelerator
    or other ranks before. `restarts`: how many losses there may be. `deadline`: seconds for which ranks wait for each
    other to begin.

    A rank is lost that is killed, or raises an exception; sys.exit() ends the script as meant, and so do signals that
    it handles (tsm.preemption). Collective over the job. Under any launcher that sets torchrun's, Slurm's or MPI's
    variables; without one it is a job of one rank.

    Raises RecoveryFailed with who was lost last, InvalidArgument where this process has begun too much.
    """
    _require_fresh()
    _Watcher(train, restarts, deadline).run()


@dataclass(frozen=True)
class Outcome(End):
    """Of an epoch: how this rank ended, if all have ended well; else how the first lost one did."""

    rank: int = 0

    @property
    def who(self) -> str:
        return f"rank {self.rank} {'' if self.kind in ('killed', 'ended') else 'ended by '}{self.text}"


class _Watcher:
    def __init__(self, train: Callable[[], Any], restarts: int, deadline: float) -> None:
        self._train, self._restarts, self._deadline = train, restarts, deadline
        self._launch = launch = _C.Launch()
        self._number, self._size = launch.rank, launch.size
        self._serves = not launch.served and self._number == 0
        # Of this start, on a store that outlives it. Each host's torchrun counts its own failures only.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launch.served else "0"
        self._store = dist.PrefixStore(  # 1.
            f"tesserae/recovery/{start}",
            dist.TCPStore(
                launch.address,
                launch.port if launch.size > 1 else 0,
                is_master=self._serves,
                wait_for_workers=False,
                timeout=timedelta(seconds=deadline),
            ),
        )
        self._pause = 0.02 * max(1.0, self._size / 64)  # between two questions: the store serves them all
        self._rank: Rank | None = None
        self._signals: list[int] = []

    def run(self) -> None:
        last: Outcome | None = None
        with signals_go_to(lambda: self._rank, self._signals):
            for epoch in range(self._restarts + 1):
                outcome = self._run_epoch(epoch)
                if outcome.kind == "ended":
                    self._leave(epoch)  # 7.
                    if outcome.status != 0:
                        sys.exit(outcome.status)
                    return
                if last is not None and outcome.kind == "failed" and outcome.text == last.text:
                    raise RecoveryFailed(f"[with_recovery] {outcome.who}, as in the epoch before: it would fail again")
                last = outcome
        assert last is not None
        raise RecoveryFailed(
            f"[with_recovery] {last.who}, and ranks were lost {self._restarts} times before; restarts allows no more"
        )

    def _run_epoch(self, epoch: int) -> Outcome:
        begin = time.monotonic()
        serving = self._meet(epoch)  # 2.
        port = int(self._store.get(f"port/{epoch}"))
        self._rank = Rank(self._train, self._variables(port, epoch))  # 3.
        for number in self._asked():
            self._rank.signal(number)
        if epoch > 0 and self._number == 0:
            say(f"all ranks begin again ({epoch} of {self._restarts}), after {time.monotonic() - begin:.1f} s")
        try:
            return self._watch(epoch, self._rank)
        finally:
            self._rank.kill()  # 6.
            self._rank = None
            del serving

    def _meet(self, epoch: int) -> dist.Store | None:
        here, asked = f"here/{epoch}", f"asked/{epoch}"
        self._store.add(here, 1)
        end = time.monotonic() + self._deadline
        while (count := self._store.add(here, 0)) < self._size:
            for number in self._asked():
                self._store.set(asked, str(number))
            if self._store.check([asked]):
                if self._serves:
                    time.sleep(PATIENCE)  # for the others to see it
                sys.exit(128 + int(self._store.get(asked)))
            if time.monotonic() > end:
                raise RecoveryFailed(
                    f"[with_recovery] {count} of {self._size} ranks have come within {self._deadline:g} s; see what "
                    "the launcher says of the others"
                )
            time.sleep(self._pause)
        if self._number != 0:
            return None
        serving = dist.TCPStore("0.0.0.0" if self._size > 1 else "127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store.set(f"port/{epoch}", str(serving.port))
        return serving

    def _variables(self, port: int, epoch: int) -> dict[str, str]:
        launch = self._launch
        return {
            "RANK": str(launch.rank),
            "WORLD_SIZE": str(launch.size),
            "LOCAL_RANK": str(launch.local_rank),
            "LOCAL_WORLD_SIZE": str(launch.local_size),
            "MASTER_ADDR": launch.address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(epoch),
        }

    def _watch(self, epoch: int, rank: Rank) -> Outcome:
        lost, ended = f"lost/{epoch}", f"ended/{epoch}"
        told = False
        since: float | None = None  # its end
        while True:
            if self._store.check([lost]):
                return Outcome(**json.loads(self._store.get(lost)))
            end = rank.end()
            since = since or (time.monotonic() if end is not None else None)
            if end is not None and end.kind == "ended":  # 4.
                if not told:
                    self._store.add(ended, 1)
                    told = True
                if self._store.add(ended, 0) == self._size:
                    return Outcome(**vars(end), rank=self._number)
            elif end is not None and since is not None:  # 5.
                if self._was_told_to(end):
                    end = replace(end, kind="ended")  # no loss, and the end of them all
                if end.kind != "lost a peer" or time.monotonic() > since + PATIENCE:
                    self._tell(lost, Outcome(**vars(end), rank=self._number))
            time.sleep(self._pause)

    def _was_told_to(self, end: End) -> bool:
        """By a signal that asks for the end, or one that it died of; others a script may handle and go on."""
        return bool(self._asked()) or any(end.status == 128 + number for number in self._signals)

    def _asked(self) -> list[int]:
        """The signals that ask for the end; SIGUSR1 warns, and would kill a rank that has no handler yet."""
        return [number for number in self._signals if number in (signal.SIGINT, signal.SIGTERM)]

    def _tell(self, lost: str, outcome: Outcome) -> None:
        """The first one to tell counts."""
        text = json.dumps(vars(outcome))
        if self._store.compare_set(lost, "", text).decode() == text:
            say(outcome.who)

    def _leave(self, epoch: int) -> None:
        gone = f"gone/{epoch}"
        self._store.add(gone, 1)
        end = time.monotonic() + PATIENCE
        while self._number == 0 and self._store.add(gone, 0) < self._size and time.monotonic() < end:
            time.sleep(self._pause)


def say(text: str) -> None:
    """A line for people, on standard error."""
    sys.stderr.write(f"tesserae: {text}\n")  # in one piece, whoever else writes
    sys.stderr.flush()


def _require_fresh() -> None:
    begun = None
    # Whether there is one must not be asked here: CUDA's answer alone spoils a child that is forked.
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    if dist.is_available() and dist.is_initialized():
        begun = "torch.distributed is set up already: call init_process_group() inside of train()"
    elif getattr(module, "is_initialized", bool)():
        begun = "this process has talked to an accelerator, which a forked child cannot: do that inside of train()"
    if begun is not None:
        raise _C.InvalidArgument(f"[with_recovery] {begun}")
