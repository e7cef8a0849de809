"""The hidden states between the split layers of one stack, of which each tensor-parallel rank has a piece of the
sequence while it trains: sequence.py says when."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tesserae import _C

SEQUENCE_DIM = 1  # of hidden states [batch, time, width]


class Stream:
    """The hidden states of one stack of blocks."""

    def __init__(self, parallel: _C.Parallel) -> None:
        self.parallel = parallel
        self._length: int | None = None  # of the sequence that is cut; None: nothing is
        self._paused = False  # an evaluation is between a forward and its backward, or after both
        self._entered: set[int] = set()  # lengths of forwards whose backwards have not begun
        self._backward_began = False

    @property
    def cut(self) -> bool:
        # Where gradients are on, it is activations of before the evaluation that are computed again.
        return self._length is not None and not (self._paused and not torch.is_grad_enabled())

    def enter(self, hidden: Tensor, training: bool) -> Tensor:
        self._paused = not training and not torch.is_grad_enabled()
        if self._paused:
            return hidden
        self._length = hidden.shape[SEQUENCE_DIM] if training else None
        if not training:
            return hidden
        if hidden.requires_grad:  # also where a reentrant checkpoint has switched gradients off; else no backward comes
            self._remember(hidden.shape[SEQUENCE_DIM])
        piece = self.piece_of(hidden)
        if piece.requires_grad:
            piece.register_hook(self._begin_backward)
        return piece

    def put_together(self, piece: Tensor) -> Tensor:
        whole = _C.gather_from(piece, SEQUENCE_DIM, self.parallel)
        self._check(whole.shape[SEQUENCE_DIM])
        return whole.narrow(SEQUENCE_DIM, 0, self._length).contiguous()  # routers view it as rows

    def row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _C.row_linear(self._pad(x), weight, bias, self.parallel, SEQUENCE_DIM)

    def piece_of(self, whole: Tensor) -> Tensor:
        return _C.scatter_to(self._pad(whole), SEQUENCE_DIM, self.parallel)

    def piece_of_sum(self, partial: Tensor) -> Tensor:
        return _C.reduce_scatter_sequence(self._pad(partial), SEQUENCE_DIM, self.parallel)

    def _remember(self, length: int) -> None:
        if _C.in_backward():
            return
        if self._backward_began:
            self._entered.clear()
            self._backward_began = False
        self._entered.add(length)

    def _begin_backward(self, _: Tensor) -> None:
        self._backward_began = True

    def _check(self, padded: int) -> None:
        """What a backward computes again has the length of its own forward, which need not be the last one."""

        def fits(length: int) -> bool:
            return length <= padded < length + self.parallel.size

        assert self._length is not None
        others: set[int] = set()
        if _C.in_backward():
            self._backward_began = True
            others = {length for length in self._entered if fits(length)} - {self._length}
        if fits(self._length) and not others:
            return
        raise _C.InvalidArgument(
            f"[tsm.transform] sequence parallelism: activations of {padded} tokens (with padding) are computed again "
            f"after forwards of {', '.join(map(str, sorted(self._entered | {self._length})))} tokens; call backward of "
            "a batch before the forward of another one, take use_reentrant=False, or do without activation "
            "checkpointing"
        )

    def _pad(self, x: Tensor) -> Tensor:
        more = -x.shape[SEQUENCE_DIM] % self.parallel.size
        return nn.functional.pad(x, [0, 0] * (x.dim() - 1 - SEQUENCE_DIM) + [0, more]) if more else x
