"""The dial of a script: its configuration's schedule, requests through dial.sock, and the automatic choice.

1. The root of a model asks at the beginning of each training forward. Where a backward outside no_sync() has ended
   since the last time, that is a step edge, on all ranks alike: the engine counts them.
2. The first edge makes the C++ Dial, which decides; every rank gets the same answer.
3. Degrees are changed as tsm.reshard() does it, with all optimizers that were made for parameters of the model. What
   cannot be done is told to people and to whoever asked; training goes on as before.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from tesserae import _C
from tesserae.dial.resharding import change
from tesserae.dial.roots import Root, module_of, parameters_of, unit_of
from tesserae.fsdp.forward import before_training_forward
from tesserae.job import config
from tesserae.torch_compat.optimizer_steps import on_new_optimizer


class Scaler(Protocol):
    """Who changes the number of the job's ranks."""

    def cannot_scale(self, ranks: int) -> str:
        """On rank 0: why the job cannot have so many; empty: it can."""

    def scale(self, dial: _C.Dial, ranks: int, client: int) -> None:
        """On all ranks, at a step edge: so many are asked for, by this client of rank 0's server."""

    def server(self) -> _C.DialServer | None:
        """Of the dial of another epoch, on rank 0: the next dial goes on with it."""


_dials: weakref.WeakKeyDictionary[Root, Dial] = weakref.WeakKeyDictionary()
_scaler: Scaler | None = None
_steps_before = 0  # of the job, when models were made
_hook: RemovableHandle | None = None
# Made since the configuration asked for a dial, in an order that is the same on all ranks.
_made: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
_forget_new: Callable[[], None] | None = None


def watch(settings: config.Config) -> None:
    """For tsm.init: hears of steps, and sees which optimizers make them, if the configuration asks for a dial."""
    global _hook, _forget_new
    if settings.has_dial and _hook is None:
        _hook = register_optimizer_step_post_hook(_stepped)
        _forget_new = on_new_optimizer(lambda optimizer: _made.setdefault(optimizer))
        before_training_forward.append(begin_step)


def forget() -> None:
    """For tsm.uninstall."""
    global _hook
    _dials.clear()
    if _hook is not None:
        _hook.remove()
        _hook = None
        if _forget_new is not None:
            _forget_new()
        _made.clear()
        before_training_forward.remove(begin_step)


def scales(scaler: Scaler | None) -> None:
    """Who is told from now on that another number of ranks is asked for. None: nobody, and it is refused."""
    global _scaler
    _scaler = scaler


def end_epoch() -> None:
    """The job goes on with other connections, and models of its own."""
    _dials.clear()


def go_on_from(step: int) -> None:
    """Schedules count from the beginning of the job, of which a model that is made now takes up that step."""
    global _steps_before
    _steps_before = step


def begin_step(root: Root, *_: Any) -> None:
    """A training forward of this root begins. Collective at a step edge."""
    settings = config.current()
    if settings is None or not settings.has_dial:
        return
    if root not in _dials:
        _dials[root] = Dial(root, settings)
    _dials[root].begin_step()


def tell(root: Root, change: _C.Resharding) -> None:
    """The script itself has turned the dial of this root."""
    dial = _dials.get(root)
    if dial is not None:
        dial.changed(change)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for dial in list(_dials.values()):
        dial.stepped(optimizer)


class Dial:
    """That of one root, on this rank."""

    def __init__(self, root: Root, settings: config.Config) -> None:
        self._root = weakref.ref(root)
        self._settings = settings
        self._parameters = {id(p) for p in parameters_of(root)}
        self._optimizers: list[Optimizer] = []
        self._dial: _C.Dial | None = None
        self._steps = unit_of(root).statistics().steps
        self._first_step = self._steps
        self._begun: float | None = None
        self._ended = 0.0

    def stepped(self, optimizer: Optimizer) -> None:
        self._ended = time.perf_counter()
        if not self._knows(optimizer) and self._has_parameters_of(optimizer):
            self._optimizers.append(optimizer)

    def _knows(self, optimizer: Optimizer) -> bool:
        return any(optimizer is other for other in self._optimizers)

    def _has_parameters_of(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])

    def _all_optimizers(self) -> list[Optimizer]:
        """Where several have a parameter the last one's state counts: one that has stepped, else the one made last."""
        others = [each for each in list(_made) if not self._knows(each) and self._has_parameters_of(each)]
        return others + self._optimizers

    def begin_step(self) -> None:
        root = self._root()
        if root is None:
            return
        steps = unit_of(root).statistics().steps
        if self._begun is not None and steps > self._steps:
            self._at_edge(root, steps)
            self._begun = None
        self._steps = steps
        if self._begun is None:
            self._begun = time.perf_counter()

    def changed(self, change: _C.Resharding) -> None:
        if self._dial is not None:
            self._dial.changed(change)

    def _at_edge(self, root: Root, steps: int) -> None:
        begun = self._begun or 0.0
        # What a script does between its steps (evaluation, saving) is no part of them.
        seconds = (self._ended if self._ended > begun else time.perf_counter()) - begun
        if self._dial is None:
            self._dial = self._make(root, first=not any(dial._dial is not None for dial in _dials.values()))
        wanted = self._dial.at_step_edge(_steps_before + steps - self._first_step, seconds)
        if _scaler is not None and (scaling := self._dial.scaling) is not None:
            _scaler.scale(self._dial, *scaling)
        if wanted is None:
            return
        if not self._optimizers:
            # It may have been made before the configuration asked for a dial: its state would be left behind.
            self._dial.refused("no optimizer has stepped a parameter of this model in this process yet")
            return
        try:
            change(module_of(root), self._all_optimizers(), wanted, lambda _, made: self.changed(made))
        except (_C.InvalidArgument, _C.OutOfMemory) as error:
            self._dial.refused(str(error))

    def _make(self, root: Root, first: bool) -> _C.Dial:
        """The first of the process listens in the run folder: one socket cannot mean two models."""
        return _C.Dial(
            unit=unit_of(root),
            schedule=list(self._settings.schedule),
            automatic=self._settings.automatic,
            headroom=self._settings.headroom,
            planned_steps=self._settings.planned_steps,
            folder=(self._settings.run_folder or "") if first else "",
            state_per_master=self._state_per_master(),
            cannot_scale=_scaler.cannot_scale if _scaler is not None else None,
            server=_scaler.server() if _scaler is not None and first else None,
        )

    def _state_per_master(self) -> float:
        """Bytes of optimizer state for each byte of a parameter, by this rank's slices."""
        masters = state = 0
        for optimizer in self._optimizers:
            for parameter, values in optimizer.state.items():
                masters += parameter.nbytes
                state += sum(v.nbytes for v in values.values() if hasattr(v, "nbytes") and v.dim() > 0)
        return state / masters if masters else 2.0
