"""The training state of the last step, held where it lives, for those that go on when other ranks are lost.

1. After a step every rank names all that it holds (tesserae/checkpoint/held_state.h), and gets the random numbers of
   the rank before it. Which tensors these are is found out once, and again when they are other objects, lie elsewhere,
   or had to be copied.
2. It is held until an optimizer begins to change it, or whoever else (saving.wait_copied), or another layout comes
   (saving.let_go).
3. A rank is lost: saving.give_up() returns what is held, and _C.save_held() makes a checkpoint of it when those that
   are left have met.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tesserae import _C
from tesserae.checkpoint import extra as extra_state
from tesserae.checkpoint import saving
from tesserae.checkpoint.pieces import Pieces
from tesserae.torch_compat.fsdp2 import local_of


@dataclass(frozen=True)
class HeldStep:
    """What Holder.hold() returns."""

    fabric: _C.Fabric
    state: _C.HeldState

    def async_save(self, folder: saving.Folder, keep: int) -> None:
        """As saving.async_save()."""
        saving.save_state(self.fabric, folder, self.state.state, keep=keep, asynchronous=True)


class Holder:
    """Of one model and its optimizer, or optimizers, for the steps of a loop."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._content: saving.Content | None = None
        self._tensors: list[_C.Piece] = []
        self._made_of: list[Any] = []
        saving.holders.add(self)

    def forget(self) -> None:
        """Other memory becomes the training state: what was made of the one before lets go of it."""
        self._content, self._tensors, self._made_of = None, [], []

    def hold(self, extra: Any, *, step: int, rank_extra: Any) -> HeldStep:
        """What this rank would save after `step`, and what it holds beside. Collective. Raises InvalidArgument for what
        cannot be saved."""
        content = self._content or saving.Content(self._model, self._optimizer, None)
        own = Pieces()

        def collect() -> tuple[list[_C.Piece], dict[str, Any]]:
            nonlocal content
            made_of = list(_identities(self._model, self._optimizer))
            if self._content is not None and made_of != self._made_of:
                self.forget()
                content = saving.Content(self._model, self._optimizer, None)
            tensors, values = Pieces(all_held=True), Pieces(all_held=True)
            if self._content is None:
                content.add_tensors(tensors)
                if not tensors.copied:
                    self._content, self._tensors, self._made_of = content, tensors.pieces, made_of
            training = content.add_values(values, extra)
            extra_state.save(own, f"rank/{content.fabric.rank}", rank_extra, "rank_extra")
            return (tensors.pieces or self._tensors) + values.pieces, training

        pieces, training = saving.together(content.fabric, "hold", collect)
        held = _C.HeldState(content.fabric, content.state(step, pieces, training), own.pieces)
        saving.hold(held)
        return HeldStep(content.fabric, held)


def _identities(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    """What changes when other memory becomes the training state, or a number in it that is no tensor."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield _identity(tensor)
    for each in optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,):
        for group in each.param_groups:
            for parameter in group["params"]:
                yield id(parameter)
                for key, value in each.state.get(parameter, {}).items():
                    yield key
                    yield _identity(value) if isinstance(value, torch.Tensor) else value


def _identity(tensor: torch.Tensor) -> tuple[int, int, int]:
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return id(tensor), local.data_ptr() if local.layout == torch.strided else 0, local.numel()
