"""Saving, in step with training or beside it.

 1. Every rank collects its pieces: views of live memory, no bytes move. Ranks tell each other if that failed on one.
 2. The saver (tesserae/checkpoint/saver.h) finishes the last save, and begins this one.
 3. Beside training: what forward changes is copied before the call returns, the rest while the next forward and
    backward run. A hook before every torch optimizer's step waits for the copy to be complete. A thread writes.
 4. A failure is raised on all ranks by the next save, by maybe_finalize_async_calls(), or at exit.

One saver for each set of ranks that saves together, kept until the process ends: it keeps the host memory of the
copies.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import operator
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tesserae import _C
from tesserae.checkpoint import extra as extra_state
from tesserae.checkpoint.model_state import ModelState
from tesserae.checkpoint.optimizer_state import OptimizerState
from tesserae.checkpoint.pieces import Pieces
from tesserae.job import fabrics

Folder = str | os.PathLike[str]


class _Job:
    """The ranks that save together, as this one sees them."""

    def __init__(self, fabric: _C.Fabric) -> None:
        self.fabric = fabric
        self.saver = _C.Saver(fabric)
        self.folder = ""  # to which it has saved last
        self.calls: list[int] = []  # asynchronous saves that nobody was told of: all but the last are committed

    def finish(self, blocking: bool) -> list[int]:
        if not self.calls:
            return []
        done = True
        with self.told_of_failure():
            if blocking:
                self.saver.finish()
            else:
                done = self.saver.finish_if_done()
        finished, self.calls = (self.calls, []) if done else (self.calls[:-1], self.calls[-1:])
        return finished

    @contextlib.contextmanager
    def told_of_failure(self) -> Generator[None]:
        try:
            yield
        except _C.SaveFailed:
            self.calls = self.calls[:-1]
            raise


_jobs: dict[_C.Fabric, _Job] = {}
_count = 0  # of asynchronous saves
_held: _C.HeldState | None = None  # as long as it is what the memory has
holders: weakref.WeakSet[Any] = weakref.WeakSet()  # have a forget(), for who moves the training state
_hooked = False  # whether steps of optimizers wait for copies


def save(
    folder: Folder,
    model: nn.Module | None = None,
    optimizer: Any = None,
    extra: Any = None,
    *,
    step: int,
    rank_extra: Any = None,
    keep: int = 0,
    read_back: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Saves to `folder`/step-N, and returns when it is committed: complete, on disk, and found by load().

    `model`: any module, sharded by FSDP or not. `optimizer`: a torch.optim.Optimizer over its parameters, or a list of
    them. `extra`: what else is the same on all ranks (rank 0's is saved); `rank_extra`: what differs, such as
    random_state(). Both are made of None, bool, int, float, str, lists, tuples, dictionaries and tensors that are not
    sharded. `keep`: how many checkpoints stay in the folder; 0: all. `read_back`: each rank reads back what it wrote,
    from the medium where the system lets it, and compares checksums, before the checkpoint is committed.
    `process_group`: the ranks that save together; the model's own group if FSDP has it, else the default group.

    Collective. Without torch.distributed it saves from one process. Raises InvalidArgument for what cannot be saved,
    SaveFailed (an IoError) on all ranks if a rank could not write: older checkpoints are then as they were.
    """
    _save(folder, model, optimizer, extra, rank_extra, step, keep, read_back, process_group, asynchronous=False)


def async_save(
    folder: Folder,
    model: nn.Module | None = None,
    optimizer: Any = None,
    extra: Any = None,
    *,
    step: int,
    rank_extra: Any = None,
    keep: int = 0,
    read_back: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """As save(), but returns at once: the values saved are those at the call. They are copied to host memory beside the
    next forward and backward, and written by a thread. The next step() of any torch optimizer waits for the copy; call
    wait_copied() before changing parameters otherwise. The last save is waited for first.

    Collective. Raises what save() raises, SaveFailed also for the last save.
    """
    _save(folder, model, optimizer, extra, rank_extra, step, keep, read_back, process_group, asynchronous=True)


def wait_copied() -> None:
    """Returns when parameters and the optimizer's state may change again: what is being saved of them is copied, and
    what hold() has is held no longer. Not collective; never fails."""
    global _held
    _held = None
    for each in _jobs.values():
        each.saver.wait_copied()


def maybe_finalize_async_calls(blocking: bool = True, process_group: dist.ProcessGroup | None = None) -> list[int]:
    """Waits until what async_save() began is committed; with blocking=False it looks whether it is, on all ranks.

    Returns the numbers of the asynchronous saves that are done (the first in the process is 0). Collective, over the
    ranks of `process_group`, or of everything that this process saves. Raises SaveFailed on all ranks.
    """
    jobs = list(_jobs.values())
    if process_group is not None:
        jobs = [each for each in jobs if fabrics.is_of(each.fabric, process_group)]
    return [number for each in jobs for number in each.finish(blocking)]


def finish(fabric: _C.Fabric) -> None:
    """Waits for what these ranks save, as their next save would. Raises SaveFailed, of a save to last_folder()."""
    if fabric in _jobs:
        with _jobs[fabric].told_of_failure():
            _jobs[fabric].saver.finish()


def last_folder(fabric: _C.Fabric) -> str:
    """To which these ranks have saved last, whatever came of it."""
    return _jobs[fabric].folder


def _save(
    folder: Folder,
    model: nn.Module | None,
    optimizer: Any,
    extra: Any,
    rank_extra: Any,
    step: int,
    keep: int,
    read_back: bool,
    process_group: dist.ProcessGroup | None,
    asynchronous: bool,
) -> None:
    content = Content(model, optimizer, process_group)

    def collect() -> tuple[Pieces, dict[str, Any]]:
        _require_count("step", step, 63, "the number of the step")
        _require_count("keep", keep, 31, "how many checkpoints stay (0: all)")
        pieces = Pieces()
        content.add_tensors(pieces)
        training = content.add_values(pieces, extra)
        if rank_extra is not None:
            extra_state.save(pieces, f"rank/{content.fabric.rank}", rank_extra, "rank_extra")
        return pieces, training

    pieces, training = together(content.fabric, "save", collect)
    state = content.state(step, pieces.pieces, training)
    save_state(content.fabric, folder, state, keep=keep, read_back=read_back, asynchronous=asynchronous)


def _require_count(name: str, value: Any, bits: int, what: str) -> None:
    try:
        fits = 0 <= operator.index(value) < 2**bits
    except TypeError:
        fits = False
    if not fits:
        raise _C.InvalidArgument(
            f"[checkpoint.save] {name} is {value!r}; pass {what}, an integer from 0 to {2**bits - 1:,}"
        )


class Content:
    """What of a script's training state this rank has. Collective at the first time for a group."""

    def __init__(self, model: nn.Module | None, optimizer: Any, process_group: dist.ProcessGroup | None) -> None:
        self._model = ModelState(model) if model is not None else None
        self.fabric = fabric_for(self._model, process_group)
        if self._model is None and optimizer is not None:
            raise _C.InvalidArgument("[checkpoint] an optimizer without its model: parameters have their names there")
        self._of_optimizer = optimizer
        self._optimizer: OptimizerState | None = None
        self._numbers: list[dict[str, str]] = []

    def add_tensors(self, pieces: Pieces) -> None:
        """Parameters, buffers, and the optimizer's state. Once. No collective."""
        if self._model is None:
            return
        self._model.find_plain(self.fabric)
        self._model.add_to(pieces, self.fabric.rank)
        if self._of_optimizer is not None:
            self._optimizer = OptimizerState(self._of_optimizer, self._model)
            self._numbers = self._optimizer.save(pieces)

    def add_values(self, pieces: Pieces, extra: Any) -> dict[str, Any]:
        """What is no tensor of these, after add_tensors(); what goes to the manifest is returned. No collective."""
        training: dict[str, Any] = {}
        first = self.fabric.rank == 0
        if self._model is not None:
            if aliases := self._model.aliases():
                training["aliases"] = aliases
            if (first or pieces.all_held) and (modules := self._model.extra_state()):
                extra_state.save(pieces, "modules", modules, "get_extra_state()", written=first)
        if self._optimizer is not None:
            training["optimizer"] = self._optimizer.describe(self._numbers)
        if extra is not None and (first or pieces.all_held):
            extra_state.save(pieces, "extra", extra, "extra", written=first)
        return training

    def state(self, step: int, pieces: list[_C.Piece], training: dict[str, Any]) -> _C.State:
        model = self._model
        return _C.State(
            self.fabric,
            step=step,
            degrees=model.degrees if model is not None else (1, 1, 1),
            tensor=self.fabric.size // model.fabric.size if model is not None and model.fabric is not None else 1,
            expert=model.expert_degree if model is not None else 1,
            pieces=pieces,
            training=json.dumps(training),
        )


def save_pieces(
    fabric: _C.Fabric, folder: Folder, collect: Callable[[], tuple[Pieces, dict[str, Any]]], *, asynchronous: bool
) -> None:
    """Saves, as step 0 and alone in its folder, what collect() returns: the pieces and the manifest's "training"."""
    pieces, training = together(fabric, "save", collect)
    state = _C.State(
        fabric, step=0, degrees=(1, 1, 1), tensor=1, expert=1, pieces=pieces.pieces, training=json.dumps(training)
    )
    save_state(fabric, folder, state, keep=1, asynchronous=asynchronous)


def save_state(
    fabric: _C.Fabric, folder: Folder, state: _C.State, *, keep: int, asynchronous: bool, read_back: bool = False
) -> None:
    """What all savers do."""
    global _count
    _heed_steps()
    if fabric not in _jobs:
        _jobs[fabric] = _Job(fabric)
    target = _jobs[fabric]
    with target.told_of_failure():
        target.saver.save(os.path.abspath(folder), keep, read_back, state, asynchronous)
    target.folder = os.path.abspath(folder)
    if asynchronous:
        target.calls.append(_count)
        _count += 1


def hold(state: _C.HeldState) -> None:
    """Keeps it until wait_copied() or give_up()."""
    global _held
    _heed_steps()
    _held = state


def _heed_steps() -> None:
    """From now on, what an optimizer is about to change is copied first, and held no longer."""
    global _hooked
    if not _hooked:
        register_optimizer_step_pre_hook(lambda *_: wait_copied())
        _hooked = True


def let_go() -> None:
    """As wait_copied(), before the training state has other memory."""
    wait_copied()
    for each in holders:
        each.forget()


def together(fabric: _C.Fabric, function: str, call: Callable[[], Any]) -> Any:
    """call() on all ranks. If it raises on one it raises on all: no rank goes on to wait for another in vain."""
    failure, result = None, None
    try:
        result = call()
    except Exception as error:
        failure = error
    first = _C.agree(fabric, "" if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    if first is not None:
        raise _C.InvalidArgument(f"[checkpoint.{function}] failed on rank {first[0]}: {first[1]}")
    return result


def fabric_for(model: ModelState | None, process_group: dist.ProcessGroup | None) -> _C.Fabric:
    """The ranks that save or load together. Collective at the first call for a group."""
    if model is not None and model.fabric is not None:
        fabric = fabrics.whole_fabric(model.fabric)  # all tensor indices save, and load, together
        if process_group is not None and not fabrics.is_of(fabric, process_group):
            raise _C.InvalidArgument(
                f"[checkpoint] process_group has ranks {dist.get_process_group_ranks(process_group)}, and the model is "
                f"sharded over {fabric.size} others; leave process_group out"
            )
        return fabric
    if dist.is_initialized():
        return fabrics.fabric_of(process_group, model.device if model is not None else torch.device("cpu"))
    return fabrics.alone()


def give_up(to_the_end: Folder | None = None) -> _C.HeldState | None:
    """Ends what is being saved without committing it, in a process that goes on without these ranks; but what goes to
    that folder is written to the end, since the others may have done that. Returns what hold() has, if that is still
    what the memory has; the memory is given back with it."""
    global _held
    for each in _jobs.values():
        if to_the_end is not None and each.folder == os.path.abspath(to_the_end):
            each.saver.leave()
    _jobs.clear()
    held, _held = _held, None
    return held


_of_the_parent: list[tuple[dict[_C.Fabric, _Job], _C.HeldState | None]] = []


def _forget_in_child() -> None:
    """In a child that is forked (a worker that loads data) there is nothing to finish, and nothing to let go of: saves,
    and the threads that write them, are the parent's."""
    global _held
    _of_the_parent.append((dict(_jobs), _held))
    _held = None
    _jobs.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register  # runs before that of fabrics.py, which ends the connections
def _finish_at_exit() -> None:
    try:
        with contextlib.ExitStack() as ends:
            ends.callback(_jobs.clear)
            if getattr(sys, "last_value", None) is None:  # after an exception others may not come: the save is given up
                for each in _jobs.values():
                    ends.callback(each.finish, blocking=True)
    except Exception:
        # A script whose last save was lost must not end like one whose was not; Python itself would exit with 0 now.
        traceback.print_exc()
        fabrics.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
