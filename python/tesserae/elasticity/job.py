"""What tsm.elastic gives train(): the ranks as they are now, and the steps of a loop that others can take up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from tesserae import _C
from tesserae.checkpoint import loading, saving
from tesserae.checkpoint.holding import HeldStep, Holder
from tesserae.checkpoint.random_state import is_random_state, random_state, set_random_state
from tesserae.dial import automatic
from tesserae.dial.replicas import ReplicasDiffer, compare_replicas
from tesserae.dial.roots import roots_of, unit_of
from tesserae.elasticity.updates import Updates
from tesserae.job import fabrics
from tesserae.recovery.watcher import say

SHARED = "TESSERAE_SHARED"


def shares_memory() -> bool:
    """Whether what the ranks keep for each other is in a folder of several hosts."""
    return SHARED in os.environ


class Stateful(Protocol):
    """What a script has besides model and optimizer, the same on all ranks: a scheduler, a sampler's place."""

    def state_dict(self) -> dict[str, Any]:
        """Its state after a step, as `extra` of tsm.checkpoint.save takes it: None, bool, int, float, str, lists,
        tuples, dictionaries, collections.Counter and tensors that are not sharded. Nothing is pickled."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Goes on from what state_dict() returned, in this process or another."""


class Leave(BaseException):
    """The step is saved: the job is to have so many ranks from here on."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.ranks = ranks


@dataclass
class Job:
    """The job from one meeting of its ranks to the next. Made by tsm.elastic, for one call of train()."""

    rank: int
    world_size: int
    epoch: int  # how often ranks have met before
    global_batch: int | None
    fabric: _C.Fabric = field(repr=False)
    memory: str | None = field(repr=False)  # a folder there; None: nobody would go on from it
    began: float = field(repr=False)  # when this process left the last epoch, by time.monotonic()
    asked: Callable[[], int | None] = field(repr=False)  # so many ranks are wanted; the same on all ranks
    ask: Callable[[int], None] = field(repr=False)  # the launcher for them; rank 0's
    settled: Callable[[int, tuple[int, int, int]], None] = field(repr=False)  # the step and the degrees of a start
    _warned: bool = field(default=False, repr=False)
    _saves: _C.Fabric | None = field(default=None, repr=False)  # the ranks of the last save
    _agreed: int = field(default=0, repr=False)  # the last step after which replicas were compared, and equal

    @property
    def samples(self) -> range:
        """Those of a step's global batch that this rank takes: the same samples in all, whatever the number of ranks.

        Raises InvalidArgument where tsm.elastic was given no global_batch."""
        if self.global_batch is None:
            raise _C.InvalidArgument("[Job.samples] how many a step has is not known: tsm.elastic(..., global_batch=N)")
        each = self.global_batch // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def steps(
        self,
        model: nn.Module,
        optimizer: Any,
        until: int,
        *,
        folder: saving.Folder | None = None,
        every: int = 0,
        keep: int = 2,
        memory_every: int | None = None,
        others: Sequence[Stateful] = (),
        check_replicas_every: int = 0,
    ) -> Iterator[int]:
        """Yields the numbers of the steps that are left, up to `until` (exclusive), after it has filled model,
        optimizer, `others` (schedulers and the like, the same on all ranks) and the generators of random numbers with
        the newest state: that of the ranks' memory, or the newest checkpoint in `folder`; else it begins at 0.

        After every `memory_every` steps (0: never; by default 1, or 0 where `tesserae run --shared` names a folder in
        place of memory) it saves to memory, beside the next forward and backward; after every `every` (0: never) and
        the last one to `folder`, of which `keep` checkpoints stay (0: all). A loss costs no step while the ranks that
        are left hold everything together, between a step and the next one's optimizer; else the steps since those
        saves. Whoever changes parameters there by other means than an optimizer of torch's calls
        tsm.checkpoint.wait_copied() first. Collective: all ranks take the same steps, and leave the loop at the same
        one. A script that breaks off saves by itself (save()).

        A step in which no optimizer changes the parameters (a micro-batch of an accumulation, whose gradients nobody
        saves) is no place to go on from: what is due after it waits for the next one that ends with an update, and a
        loss costs the steps since the last that did.

        After every `check_replicas_every` steps (0: never) replicas are compared (tsm.compare_replicas), before
        anything is saved. Where a majority says which bytes are right the others' ranks raise ReplicasDiffer, which
        loses them: new processes get the bytes of the rest. Where nothing says so, all ranks raise it.

        Raises what tsm.checkpoint.load and async_save raise, ReplicasDiffer, and InvalidArgument where replicas are to
        be compared of a model that Tesserae has not sharded. That memory is full is a warning.
        """
        if memory_every is None:
            memory_every = 0 if shares_memory() else 1
        roots = roots_of(model)
        if check_replicas_every > 0 and not roots:
            raise _C.InvalidArgument(
                "[Job.steps] check_replicas_every: there is no module in the model that tesserae has sharded"
            )
        first = self._load(model, optimizer, folder, others)
        automatic.go_on_from(first)
        self.settled(first, _C.unit_degrees(unit_of(roots[0])) if roots else (1, 1, 1))
        if self.epoch > 0 and self.rank == 0:
            seconds = time.monotonic() - self.began
            say(f"{self.world_size} ranks go on from step {first}, {seconds:.1f} s after they left the epoch before")
        holder, updates = Holder(model, optimizer), Updates(model)
        if folder is not None and first > 0 and self._is_owed(folder, first, until, every):
            self._save(self._hold(holder, others, first), folder, keep)
        kept = stored = False  # a save to memory, or to the folder, is due
        for step in range(first, until):
            yield step
            done = step + 1
            updated = updates.any()
            fabrics.heed_other_groups()
            ranks = self.asked()
            if self.memory is not None:
                kept = kept or ranks is not None or (memory_every > 0 and done % memory_every == 0)
            if folder is not None:
                stored = stored or done == until or (every > 0 and done % every == 0)
            checked = check_replicas_every > 0 and done % check_replicas_every == 0
            if self.memory is not None or stored or checked:
                held = None
                if done == until or self._is_updated(updated):
                    held = self._hold(holder, others, done)
                if checked:
                    self._check_replicas(model, optimizer, done)
                if held is not None and kept:
                    self._save(held, self.memory, 2)
                if held is not None and stored:
                    self._save(held, folder, keep)
                if held is None:
                    ranks = None  # they leave after the next update
                else:
                    kept = stored = False
                del held  # what the process holds is let go of in time
            if ranks is not None:
                self._leave(ranks)
        self._finish()
        saving.maybe_finalize_async_calls()  # also what the script saves by itself

    def save(
        self, folder: saving.Folder, model: nn.Module, optimizer: Any, *, step: int, others: Sequence[Stateful] = ()
    ) -> None:
        """Saves to `folder` now, as steps() does: what it goes on from, after `step` steps. Collective. Raises what
        tsm.checkpoint.save raises."""
        extra = {"others": [each.state_dict() for each in others]} if others else None
        saving.save(folder, model, optimizer, extra, step=step, rank_extra=random_state())

    def _check_replicas(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """What differs is nobody's to go on from: those that are left hold the same step."""
        reports = compare_replicas(model, optimizer)
        # Not all ranks need have parts of the same roots.
        undecided = self._told_by_any([report.text for report in reports if not report.decided])
        differs = self._told_by_any([report.text for report in reports if report.here])
        what = f"[Job.steps] after step {step} the state of replicas differs: {undecided or differs}"
        if undecided:
            agreed = f"after step {self._agreed}" if self._agreed else "at the last meeting"
            raise ReplicasDiffer(
                f"{what}. Nothing says which are right. They agreed {agreed}: begin again from what was saved before"
            )
        if any(report.here for report in reports):
            raise ReplicasDiffer(f"{what}. Look at this rank's memory and device")
        if differs:
            lost = _C.PeerLost(what)
            lost.ranks = tuple(rank for report in reports for rank in report.suspects)
            raise lost
        self._agreed = step

    def _told_by_any(self, texts: list[str]) -> str:
        told = _C.agree(self.fabric, "; ".join(texts))
        return "" if told is None else told[1]

    def _load(self, model: nn.Module, optimizer: Any, folder: saving.Folder | None, others: Sequence[Stateful]) -> int:
        found = None
        for place in self._newest_first(folder):
            found = found or loading.load(place, model, optimizer)
        if found is None:
            return 0
        states = found.extra.get("others") if isinstance(found.extra, dict) else None
        count = len(states) if isinstance(states, list) else 0
        if others and count != len(others):
            raise _C.InvalidArgument(
                f"[Job.steps] {found.path} has the state of {count or 'none'} of the {len(others)} others: a script "
                "that saves by itself calls job.save(...) with them, or loads them itself and gives steps() none"
            )
        for each, state in zip(others, states or (), strict=False):
            each.load_state_dict(state)
        if is_random_state(found.rank_extra):
            set_random_state(found.rank_extra)
        return found.step

    def _newest_first(self, folder: saving.Folder | None) -> list[saving.Folder]:
        """Memory and the folder, as far as there are any; as rank 0 sees them, the one with the later step first.
        Collective."""
        places = [place for place in (self.memory, folder) if place is not None]
        if len(places) < 2:
            return places
        later = ""
        if self.rank == 0:
            memory, stored = (max(_C.list_checkpoints(str(place)), default=(-1, "")) for place in places)
            later = "the folder" if stored[0] > memory[0] else ""
        return places[::-1] if _C.agree(self.fabric, later) is not None else places

    def _is_owed(self, folder: saving.Folder, first: int, until: int, every: int) -> bool:
        """Whether the ranks go on from memory, and were lost before a checkpoint that was due by then. Collective."""
        text = ""
        if self.rank == 0:
            newest = max((step for step, _ in _C.list_checkpoints(str(folder))), default=0)
            is_due = first == until or (every > 0 and first // every > newest // every)
            text = "it is" if is_due and newest < first else ""
        return _C.agree(self.fabric, text) is not None

    def _is_updated(self, here: bool) -> bool:
        """Whether an optimizer has changed the parameters in this step; one rank may have none. Collective."""
        return _C.agree(self.fabric, "it is" if here else "") is not None

    def _hold(self, holder: Holder, others: Sequence[Stateful], step: int) -> HeldStep:
        extra = {"others": [each.state_dict() for each in others]} if others else None
        return holder.hold(extra, step=step, rank_extra=random_state())

    def _save(self, held: HeldStep, folder: saving.Folder | None, keep: int) -> None:
        """Begins to. What became of the last save is said first: it may have been to the other place."""
        assert folder is not None
        self._finish()
        self._saves = held.fabric
        try:
            held.async_save(folder, keep)
        except _C.SaveFailed as error:  # on all ranks
            self._heed(error, folder)

    def _finish(self) -> None:
        if self._saves is None:
            return
        try:
            saving.finish(self._saves)
        except _C.SaveFailed as error:  # on all ranks
            self._heed(error, saving.last_folder(self._saves))

    def _heed(self, error: _C.SaveFailed, folder: saving.Folder) -> None:
        """Without a step in memory a loss costs more; without a checkpoint the job may be for nothing."""
        if self.memory is None or os.path.abspath(folder) != os.path.abspath(self.memory):
            raise error
        if not self._warned and self.rank == 0:
            say(f"warning: a loss will cost the steps since the last checkpoint: {error}")
        self._warned = True

    def _leave(self, ranks: int) -> None:
        """The state is in memory: whoever comes finds it there."""
        self._finish()
        saving.maybe_finalize_async_calls()
        if self.rank == 0:
            self.ask(ranks)
        _C.agree(self.fabric, "")  # nobody leaves before rank 0 has asked
        raise Leave(ranks)
