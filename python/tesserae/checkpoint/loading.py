"""Loading, at any layout and world size."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from tesserae import _C
from tesserae.checkpoint import extra as extra_state
from tesserae.checkpoint.model_state import ModelState
from tesserae.checkpoint.optimizer_state import Loading, OptimizerState
from tesserae.checkpoint.pieces import Pieces
from tesserae.checkpoint.saving import Folder, fabric_for, wait_copied


@dataclass
class Loaded:
    """What load() found."""

    path: Path  # of the checkpoint
    step: int
    extra: Any  # what was saved as such, tensors on the host; None if nothing was
    rank_extra: Any  # of the same rank; None if the job had fewer ranks


def load(
    path: Folder,
    model: nn.Module | None = None,
    optimizer: Any = None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded | None:
    """Fills `model` and `optimizer` in place, from a checkpoint of any layout, world size and wrapper.

    `path`: a folder of checkpoints: the newest one that can be loaded on all ranks, with a warning for each that cannot
    ; None is returned if there are none. Or one checkpoint ("step-N" or any directory with a manifest): that one, or an
    error.
    `strict`: the model must have what the checkpoint has, and the reverse; otherwise what is missing stays as it is.

    Every byte is checked against its checksum before it counts. Each rank reads its own part. Collective; a failure on
    one rank is raised on all: InvalidArgument if the checkpoint is of something else, Damaged (a Corruption; it names
    file, tensor and offset), IoError. Model and optimizer then hold anything.
    """
    wait_copied()
    state = ModelState(model) if model is not None else None
    fabric = fabric_for(state, process_group)
    if state is not None:
        state.find_plain(fabric)
    reading: _Reading | None = None

    def collect(checkpoint: _C.Checkpoint) -> list[_C.Piece]:
        nonlocal reading
        reading = _Reading(checkpoint, state, optimizer, fabric.rank, strict)
        return reading.pieces.pieces

    def check() -> None:
        assert reading is not None
        reading.check()

    checkpoint = _C.load_checkpoint(fabric, str(path), collect, check)
    if checkpoint is None:
        return None
    assert reading is not None
    return reading.apply(checkpoint)


class _Reading:
    """One attempt at one checkpoint."""

    def __init__(
        self, checkpoint: _C.Checkpoint, model: ModelState | None, optimizer: Any, rank: int, strict: bool
    ) -> None:
        self.pieces = Pieces(checkpoint.tensors())
        self._model = model
        self._strict = strict
        self._optimizer: Loading | None = None
        self._values: dict[str, Any] = {}
        if model is not None:
            model.add_to(self.pieces, rank, strict)
            if strict:
                model.require_known(self.pieces)
        if optimizer is not None:
            if model is None:
                raise _C.InvalidArgument(
                    "[checkpoint] an optimizer without its model: parameters have their names there"
                )
            description = json.loads(checkpoint.training).get("optimizer", {})
            self._optimizer = OptimizerState(optimizer, model).load(self.pieces, description, strict)
        self._deferred: dict[str, Callable[[], Any]] = {
            name: extra_state.load(self.pieces, prefix)
            for name, prefix in {"extra": "extra", "rank_extra": f"rank/{rank}", "modules": "modules"}.items()
        }

    def check(self) -> None:
        if self._optimizer is not None:
            self._optimizer.check()
        self._values = {name: value() for name, value in self._deferred.items()}
        if self._model is not None and self._strict:
            self._model.require_extra_state(self._values["modules"] or {})

    def apply(self, checkpoint: _C.Checkpoint) -> Loaded:
        self.pieces.filled()
        if self._model is not None:
            self._model.publish()
            self._model.set_extra_state(self._values["modules"] or {})
        if self._optimizer is not None:
            self._optimizer.apply()
        return Loaded(Path(checkpoint.path), checkpoint.step, self._values["extra"], self._values["rank_extra"])
