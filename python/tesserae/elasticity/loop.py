"""tsm.elastic: when a rank is lost the others go on in the same processes, and the number of ranks changes.

1. The launcher (`tesserae run`) counts epochs, starts processes in place of those that were lost, and says who is
   left: all that is decided of that is decided there (tesserae/comm/membership.cpp has the protocol).
2. The ranks of an epoch meet (_C.Fabric). Keys of the store carry the epoch, so whoever is of another one meets
   nobody, and what waits for a rank that is lost ends. What those that are left hold of the last step (5) they save
   together, if it is a whole state, to the ranks' memory: a folder in /dev/shm, or on several hosts in one that all
   see. Rank 0 tells the launcher its name.
   Where nobody replaces the lost ones, those that are left ask for the largest number that the job can have, and 2
   begins anew with these; the others end.
3. torch's default group is made anew, of as many ranks, through a part of that store.
4. train(job) is called, on each rank with the random numbers that it had when elastic() was called, as new processes
   have them, and with the degrees to which the dial was turned before. It makes model and optimizer; job.steps() fills
   them with the newest state, in memory or in a checkpoint.
5. A rank is lost: operations of the others fail. They give up all connections of the epoch, which aborts what still
   blocks elsewhere, then torch's groups, saves at hand (what goes to memory is written, the rest not), and what the
   frames of train() hold. Of the last step's state they keep what is their part, unless an optimizer has begun to
   change it. Then they tell the launcher, also for whom they have waited in vain (it kills these), and wait for the
   next epoch: 2.
6. Another number of ranks is asked for (`tesserae scale`): the dial tells all ranks at a step edge. They finish the
   next step, save it in memory, and rank 0 asks the launcher. Then they leave, as in 5 but with a goodbye: 2.
7. train() raises something else: the process ends with it, and is a rank that was lost.
8. train() returns on all ranks: they meet once more, rank 0 takes back the memory, and elastic() returns.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from tesserae import _C
from tesserae.checkpoint import saving
from tesserae.checkpoint.random_state import random_state, set_random_state
from tesserae.dial import automatic
from tesserae.elasticity.job import SHARED, Job, Leave, shares_memory
from tesserae.fully_shard import places
from tesserae.job import config, fabrics, preemption
from tesserae.monitor import watching
from tesserae.recovery.rank import is_of_communication
from tesserae.recovery.watcher import say
from tesserae.torch_compat.distributed import forget_groups
from tesserae.torch_compat.meshes import retire_meshes

PEER_LOST = 3  # the launcher blames no rank that ends with it


def elastic(
    train: Callable[[Job], Any],
    *,
    backend: str = "tesserae",
    global_batch: int | None = None,
    can_have: Callable[[int], bool] | None = None,
) -> None:
    """Runs train(job) on every rank; if a rank is lost, again in the same processes, with a new process in its place or
    with fewer ranks, until it has run through. For scripts under `tesserae run`, which is told how often it replaces
    (--replacements) and how few ranks may be left (--min-ranks).

    `train` makes model and optimizer and takes its steps from job.steps(). torch.distributed is set up around it, with
    this `backend`: it does not call init_process_group(). What lives outside of it (data that is open, imported
    packages, the context of an accelerator) stays; what it returns is dropped. `global_batch`: how many samples a step
    has in all; a number of ranks that does not divide it cannot be, and job.samples are this rank's. `can_have`: which
    numbers of ranks can be besides; those that tsm.init's degrees do not divide cannot.

    A rank is lost that is killed, lets the others wait for run.deadline_seconds (it is stopped, or hangs), or raises an
    exception of its own, which ends its process. With tsm.init({"run": {"folder": RUN}}) and a model of Tesserae's,
    `tesserae scale RUN` changes the number of ranks. A rank that has no place any more ends with status 0 in here.

    Collective over the job. Under another launcher, or none, train(job) runs once, and a loss ends the job. Raises
    InvalidArgument where torch.distributed is set up already; a rank that the others have lost, or that has nothing to
    go on from, ends with status 3.
    """
    if dist.is_initialized():
        raise _C.InvalidArgument("[elastic] torch.distributed is set up already: tsm.elastic does that")
    _Loop(train, backend, global_batch, can_have).run()


@dataclass(frozen=True)
class _End:
    """Of an epoch, for this rank."""

    kind: Literal["done", "scales", "lost a rank"]
    missing: tuple[int, ...] = ()


class _Loop:
    def __init__(
        self,
        train: Callable[[Job], Any],
        backend: str,
        global_batch: int | None,
        can_have: Callable[[int], bool] | None,
    ) -> None:
        self._train, self._backend, self._global_batch, self._can_have = train, backend, global_batch, can_have
        settings = config.current()
        self._deadline = settings.deadline_seconds if settings else 300.0
        # A host is given up by its launcher's deadline, not by that of operations.
        self._patience = max(self._deadline, float(os.environ.get("TESSERAE_HOST_DEADLINE", "0")))
        # A new process imports its packages before it comes.
        self._connect_deadline = max(120.0, settings.connect_deadline_seconds if settings else 0.0)
        self._least = int(os.environ.get("TESSERAE_MIN_RANKS", "0"))
        self._membership = _C.Membership()
        self._fabric: _C.Fabric | None = None
        self._memory: str | None = None
        self._held: _C.HeldState | None = None  # of an epoch that is over
        self._left_at = time.monotonic()
        self._asked: tuple[int, int] | None = None  # ranks, and the client of rank 0's server
        self._scaling: dict[str, Any] = {}  # what the client is told, on rank 0
        self._server: _C.DialServer | None = None
        self._random = random_state()
        self._turned: tuple[int, int, int] | None = None  # where the dial was in the last epoch

    def run(self) -> None:
        automatic.scales(self if self._membership.served else None)
        gc.collect()
        frozen = gc.get_freeze_count() > 0  # by the script
        gc.freeze()  # what is imported is not searched for garbage while others wait
        try:
            while True:
                end = self._run_epoch()
                missing = self._give_up(broken=end.kind == "lost a rank")
                if end.kind == "done":
                    return
                deadline = self._patience + self._connect_deadline
                if end.kind == "scales":
                    self._wait(self._membership.wait_for_epoch(deadline))
                else:
                    self._wait(self._membership.next_epoch(sorted({*missing, *end.missing}), deadline))
        finally:
            automatic.scales(None)
            if not frozen:
                gc.unfreeze()

    # ---- 2, 3, 4 ----
    def _run_epoch(self) -> _End:
        try:
            self._meet()
            self._begin()
            set_random_state(self._random)
            self._train(self._job())
            self._end()
            return _End("done")
        except Leave as leaving:
            _clear_frames(leaving)
            return _End("scales")
        except SystemExit as leaving:
            if leaving.code not in (None, 0) and not preemption.is_ending():
                saving.give_up()  # others do not end with this rank: a save that waited for them would
            raise
        except Exception as error:
            if not self._membership.served or not _comes_of_a_loss(error):
                raise
            say(f"rank {self._membership.rank} goes on after: {str(error).splitlines()[0][:300]}")
            self._left_at = time.monotonic()
            _clear_frames(error)
            met = self._fabric is not None  # then fabrics know the numbers that the launcher has
            return _End("lost a rank", () if met else tuple(getattr(error, "silent", ())))

    def _meet(self) -> None:
        membership = self._membership
        while True:
            self._fabric = fabric = membership.meet(self._connect_deadline, self._deadline)
            if membership.served:
                self._memory = self._find_memory(fabric)
                if membership.epoch > 0:
                    self._save_held(fabric, self._memory)
            if not membership.is_of_those_left or (ranks := self._largest(membership.ranks)) == membership.ranks:
                return
            if membership.rank == 0:
                membership.ask_for_ranks(ranks)
            _C.agree(fabric, "")  # nobody leaves before rank 0 has asked
            fabric.leave()
            self._fabric = None
            self._wait(membership.wait_for_epoch(self._patience + self._connect_deadline))

    def _find_memory(self, fabric: _C.Fabric) -> str:
        """Where the ranks keep their state: of this job alone, whoever is left of it knows it from the launcher."""
        membership, store = self._membership, fabric.watched_store("elastic/") or dist.HashStore()
        if membership.rank == 0:
            # A launcher that has just taken over may not have heard of it.
            folder = self._memory or membership.remembered("memory")
            if not folder:
                folder = tempfile.mkdtemp(prefix="tesserae-elastic-", dir=os.environ.get(SHARED, "/dev/shm"))
            membership.remember("memory", folder)
            store.set("memory", folder)
        return store.get("memory").decode()

    def _save_held(self, fabric: _C.Fabric, memory: str) -> None:
        try:
            _C.save_held(fabric, self._held, memory, keep=2)
        except _C.SaveFailed as error:  # on all ranks
            if self._membership.rank == 0:
                say(f"warning: what the ranks hold is not gone on from: {error}")
        self._held = None

    def _largest(self, left: int) -> int:
        for ranks in range(left, max(self._least, 1) - 1, -1):
            if not self._why_not(ranks):
                return ranks
        raise _C.InvalidArgument(
            f"[elastic] ranks were lost and not replaced, and the job can have none of {max(self._least, 1)} to {left} "
            f"ranks: {self._why_not(left)}"
        )

    def _why_not(self, ranks: int) -> str:
        settings = config.current()
        if self._global_batch is not None and self._global_batch % ranks != 0:
            return f"{ranks} ranks do not divide the {self._global_batch} samples of a step"
        try:
            if settings is not None:
                config.check_world(settings, ranks)
        except _C.InvalidArgument as error:
            return str(error)
        if self._can_have is not None and not self._can_have(ranks):
            return f"the script cannot have {ranks} ranks (can_have)"
        return ""

    def _begin(self) -> None:
        membership, fabric = self._membership, self._fabric
        assert fabric is not None
        rank, ranks = membership.rank, membership.ranks
        if why := self._why_not(ranks):
            raise _C.InvalidArgument(f"[elastic] {why}")
        if membership.served:
            local = fabric.host_ranks(fabric.rank)
            numbers = {"RANK": rank, "WORLD_SIZE": ranks}
            numbers |= {"LOCAL_RANK": local.index(fabric.rank), "LOCAL_WORLD_SIZE": len(local)}
            os.environ.update({name: str(number) for name, number in numbers.items()})
        store = fabric.watched_store("torch/") or dist.HashStore()
        hook = sys.excepthook
        dist.init_process_group(
            self._backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=self._deadline)
        )
        if membership.epoch > 0:
            self._agree_on_degrees(fabric, ranks)
        fabrics.heed_other_groups()
        sys.excepthook = hook  # torch puts another one around it each time

    def _agree_on_degrees(self, fabric: _C.Fabric, ranks: int) -> None:
        """Those of before the loss, which new processes do not know; what tsm.init was given, where these do not fit
        as many ranks."""
        text = ",".join(map(str, self._turned)) if self._turned is not None else ""
        told, self._turned = _C.agree(fabric, text), None
        if told is None:
            return
        parameters, gradients, optimizer = map(int, told[1].split(","))
        config.turn((parameters, gradients, optimizer))
        if self._why_not(ranks):
            config.turn_back()

    def _job(self) -> Job:
        assert self._fabric is not None
        return Job(
            rank=self._membership.rank,
            world_size=self._membership.ranks,
            epoch=self._membership.epoch,
            global_batch=self._global_batch,
            fabric=self._fabric,
            memory=self._memory,
            began=self._left_at,
            asked=lambda: self._asked[0] if self._asked is not None else None,
            ask=self._membership.ask_for_ranks,
            settled=self._tell,
        )

    # ---- 5 ----
    def _give_up(self, broken: bool) -> set[int]:
        """All that is of this epoch. Returns the ranks for which others waited to their deadline."""
        missing: set[int] = set()
        fabric, self._fabric = self._fabric, None
        if broken:
            missing.update(fabrics.give_up(), fabric.missing_ranks() if fabric is not None else ())
            if fabric is not None:
                fabric.give_up()
        self._held = saving.give_up(self._memory) or self._held
        self._turned = config.turned_to() or self._turned
        config.turn_back()
        preemption.end_epoch()
        automatic.end_epoch()
        watching.end_epoch()
        fabrics.leave()
        places.forget()
        forget_groups(broken)
        if fabric is not None and not broken:
            fabric.leave()
        del fabric
        gc.collect()  # models refer to themselves
        retire_meshes()
        return missing

    def _wait(self, begun: bool) -> None:
        """For the launcher's word: whether there is another epoch."""
        if not begun:
            say(f"rank {self._membership.rank} has no ranks to go on with: the launcher says why")
            if self._memory is not None and not shares_memory():
                shutil.rmtree(self._memory, ignore_errors=True)  # the job may go on elsewhere with one that is shared
            sys.exit(PEER_LOST)
        if not self._membership.has_place:
            sys.exit(0)

    # ---- 6: what the dial asks and is told ----
    def cannot_scale(self, ranks: int) -> str:
        fabric, now = self._fabric, self._membership.ranks
        if fabric is not None and fabric.hosts > 1 and ranks > now:
            return f"a job on several hosts gets no more ranks than the {now} that it has"
        return self._why_not(ranks)

    def scale(self, dial: _C.Dial, ranks: int, client: int) -> None:
        self._asked = ranks, client
        self._left_at = time.monotonic()
        self._server = dial.hand_over()
        self._scaling = {"event": "scaled", "from": self._membership.ranks, "to": ranks}

    def server(self) -> _C.DialServer | None:
        server, self._server = self._server, None
        return server

    def _tell(self, step: int, degrees: tuple[int, int, int]) -> None:
        """A model has its state: rank 0 tells who has asked for as many ranks."""
        asked, self._asked = self._asked, None
        if asked is None or self._server is None or self._membership.rank != 0:
            return
        event = {**self._scaling, "step": step, "degrees": degrees, "seconds": time.monotonic() - self._left_at}
        if asked[0] != self._membership.ranks:
            why = f"the job has {self._membership.ranks} ranks now, not {asked[0]}: the launcher's log says why"
            event = {"event": "error", "message": why}
        self._server.tell(asked[1], json.dumps(event))

    # ---- 8 ----
    def _end(self) -> None:
        assert self._fabric is not None
        saving.maybe_finalize_async_calls()
        _C.agree(self._fabric, "")
        if self._memory is not None and self._membership.rank == 0:
            shutil.rmtree(self._memory, ignore_errors=True)


def _comes_of_a_loss(error: BaseException | None) -> bool:
    """Itself, or what it was raised from, or while that was handled."""
    while error is not None:
        if is_of_communication(error) and not isinstance(error, _C.Mismatch):
            return True
        error = error.__cause__ or error.__context__
    return False


def _clear_frames(error: BaseException | None) -> None:
    """They hold the model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
