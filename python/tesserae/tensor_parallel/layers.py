"""Linear layers and embeddings of which each tensor-parallel rank has a part.

Each class is derived from that of the layer that it was made of (nn.Linear, nn.Embedding, transformers' Conv1D), so
that what asks for the class, and what initialises by it, finds it; in_features and the like are those of the whole
layer. A column layer takes what is the same on all ranks and gives its own columns; a row layer takes those and gives
the sum over all ranks, which is the same on all again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tesserae import _C
from tesserae.tensor_parallel.parts import Change, SplitModule, SplitParameter, SplitWithoutReset, split_module
from tesserae.tensor_parallel.stream import Stream
from tesserae.torch_compat.modules import own_modules, own_parameters


class _Linear(SplitModule):
    """A weight [out, in], or, for a Conv1D, [in, out]."""

    _tesserae_transposed: bool
    _tesserae_together: Together | None = None

    def _matrix(self) -> Tensor:
        return self.weight.t() if self._tesserae_transposed else self.weight  # type: ignore[operator,return-value]


class Column(_Linear):
    """Cut by output features: y is this rank's."""

    def forward(self, x: Tensor) -> Tensor:
        if self._tesserae_together is not None:
            return self._tesserae_together.forward(self, x)
        return _C.column_linear(x, [self._matrix()], [self.bias], self._tesserae_parallel)[0]


class ColumnGather(_Linear):
    """The same, but y is put together: the same on all. The ranks need not divide the features."""

    def forward(self, x: Tensor) -> Tensor:
        y = _C.column_linear(x, [self._matrix()], [self.bias], self._tesserae_parallel)[0]
        whole = _C.gather_from(y, y.dim() - 1, self._tesserae_parallel)
        return whole.narrow(-1, 0, self._tesserae_splits["weight"].whole[int(self._tesserae_transposed)])


class Row(_Linear):
    """Cut by input features: x is this rank's, y is the same on all, or its piece where the sequence is cut."""

    _tesserae_stream: Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._tesserae_stream is not None and self._tesserae_stream.cut:
            return self._tesserae_stream.row_linear(x, self._matrix(), self.bias)
        return _C.row_linear(x, self._matrix(), self.bias, self._tesserae_parallel)


class RowScatter(Row):
    """The same for an x that is the same on all, of which it takes its own features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_C.scatter_to(x, x.dim() - 1, self._tesserae_parallel))


class Head(_Linear):
    """A linear layer to the vocabulary, cut by tokens. Logits are put together, unless the loss takes them as they are
    (loss.py)."""

    _tesserae_gathers: bool = True

    def forward(self, x: Tensor) -> Tensor:
        y = _C.column_linear(x, [self._matrix()], [self.bias], self._tesserae_parallel)[0]
        if not self._tesserae_gathers:
            return y
        whole = _C.gather_from(y, y.dim() - 1, self._tesserae_parallel)
        return whole.narrow(-1, 0, self._tesserae_splits["weight"].whole[0])  # without padding


class Vocabulary(SplitModule):
    """An embedding, cut by tokens: y is the same on all ranks."""

    def forward(self, tokens: Tensor) -> Tensor:
        whole = self._tesserae_splits["weight"].whole[0]
        y = _C.vocabulary_embedding(tokens, self.weight, self._tesserae_parallel, whole)
        if self.padding_idx is not None and torch.is_grad_enabled():
            # nn.Embedding never trains that row.
            y = torch.where((tokens == self.padding_idx).unsqueeze(-1), y.detach(), y)
        return y


class Features(SplitModule):
    """An embedding, cut by features: y is this rank's. Nothing is sent."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight, self.padding_idx)


class Divided(SplitWithoutReset):
    """A module of any kind, with this rank's part of parameters that its own forward reads (a number for each of the
    heads that it splits)."""


class Together:
    """Column layers of one module that read the same input: one operation, with one sum of gradients, for all of them.

    The first that is called computes all; the others find what is theirs, if they are called with the same tensor and
    are still the children of their module: a wrapper (FSDP, an adapter) around one of them parts it from the others.
    """

    def __init__(self, parent: nn.Module, names: tuple[str, ...]) -> None:
        self._children = own_modules(parent)
        self._layers: dict[str, Column] = {name: own_modules(parent)[name] for name in names}  # type: ignore[misc]
        self._x: Tensor | None = None
        self._found: dict[Column, Tensor] = {}
        for layer in self._layers.values():
            layer._tesserae_together = self

    def forward(self, layer: Column, x: Tensor) -> Tensor:
        if x is not self._x or layer not in self._found:
            layers = list(self._layers.values())
            if any(self._children.get(name) is not each for name, each in self._layers.items()):
                layers = [layer]
            outputs = _C.column_linear(
                x, [each._matrix() for each in layers], [each.bias for each in layers], layer._tesserae_parallel
            )
            self._x, self._found = x, dict(zip(layers, outputs))
        y = self._found.pop(layer)
        if not self._found:
            self._x = None
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _C.InvalidArgument("[tsm.transform] a transformed model cannot be copied; copy it, then transform both")


# ---- from a layer of the user's ----
@cache
def _derived(kind: type[SplitModule], base: type[nn.Module]) -> type[SplitModule]:
    return type(f"{kind.__name__}{base.__name__}", (kind, base), {"__module__": kind.__module__})


def _is_conv1d(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or _is_conv1d(layer)


def has_adapters(layer: nn.Module) -> bool:
    """Whether it is PEFT's wrapper of a layer, or of a parameter of one."""
    return hasattr(layer, "get_base_layer") and hasattr(layer, "base_layer")


def _linear(
    layer: nn.Module, kind: type[_Linear], name: str, parallel: _C.Parallel, by_rows: bool, blocks: int
) -> Change:
    """`by_rows`: of the matrix [out, in]."""
    if not is_linear(layer):
        adapted = has_adapters(layer)
        raise _C.InvalidArgument(
            f"[tsm.transform] {name} is a {type(layer).__name__}{' with adapters' if adapted else ''}; only nn.Linear "
            "and transformers' Conv1D can be cut by columns or rows. "
            + ("Train adapters of it with tensor_parallel_degree 1" if adapted else "Take it out of the plan")
        )
    transposed = _is_conv1d(layer)
    shape = tuple(layer.weight.shape)
    dim = int(by_rows == transposed)
    size = shape[dim]
    padded = kind in (Head, ColumnGather) and not transposed  # rows of a matrix, which gathering cuts off
    if not padded:
        _C.size_of_part(f"{'out' if by_rows else 'in'}_features of {name}:", size // blocks, parallel)
    if kind is Head and transposed:
        raise _C.InvalidArgument(f"[tsm.transform] the head {name} is a Conv1D; only nn.Linear can be one")
    splits = {"weight": SplitParameter(_C.Splits(parallel.split(dim, blocks)), shape)}
    if by_rows and layer.bias is not None:
        splits["bias"] = SplitParameter(_C.Splits(parallel.split(0, blocks)), (size,))

    def make() -> None:
        split_module(layer, _derived(kind, type(layer)), parallel, splits)
        layer._tesserae_transposed = transposed  # type: ignore[assignment]

    return Change(layer, splits, make)


def _embedding(layer: nn.Module, kind: type[SplitModule], name: str, parallel: _C.Parallel, dim: int) -> Change:
    if not isinstance(layer, nn.Embedding) or type(layer).forward is not nn.Embedding.forward:
        raise _C.InvalidArgument(
            f"[tsm.transform] {name} is a {type(layer).__name__}; only nn.Embedding can be cut so. Take it out of "
            "the plan"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(layer, option):
            raise _C.InvalidArgument(
                f"[tsm.transform] {name} is an embedding with {option}, which needs all of it on one rank; take it out "
                "of the plan"
            )
    shape = tuple(layer.weight.shape)
    if dim == 1:
        _C.size_of_part(f"features of {name}:", shape[1], parallel)
    splits = {"weight": SplitParameter(_C.Splits(parallel.split(dim)), shape)}
    return Change(layer, splits, lambda: split_module(layer, _derived(kind, type(layer)), parallel, splits))


def divided(
    module: nn.Module, name: str, parameters: list[str], numbers: dict[str, int], parallel: _C.Parallel
) -> Change:
    """`module` gets these numbers, and if it has parameters among what is divided it becomes a Divided. Raises
    InvalidArgument, naming the degrees that would do, unless the ranks divide the first dimension of these
    parameters."""
    wholes = {each: tuple(own_parameters(module)[each].shape) for each in parameters}  # type: ignore[union-attr]
    for each, whole in wholes.items():
        _C.size_of_part(f"{name}.{each}:", whole[0] if whole else 1, parallel)
    splits = {each: SplitParameter(_C.Splits(parallel.split(0)), whole) for each, whole in wholes.items()}

    def make() -> None:
        for each, number in numbers.items():
            setattr(module, each, number)
        if splits:
            split_module(module, _derived(Divided, type(module)), parallel, splits)

    return Change(module, splits, make)


# What a plan says of a layer -> what will make it so: (layer, name, parallel, blocks). They raise InvalidArgument for
# what cannot be.
KINDS: dict[str, Callable[[nn.Module, str, _C.Parallel, int], Change]] = {
    "column": lambda layer, name, parallel, blocks: _linear(layer, Column, name, parallel, True, blocks),
    "row": lambda layer, name, parallel, blocks: _linear(layer, Row, name, parallel, False, 1),
    "column_gather": lambda layer, name, parallel, blocks: _linear(layer, ColumnGather, name, parallel, True, 1),
    "row_scatter": lambda layer, name, parallel, blocks: _linear(layer, RowScatter, name, parallel, False, 1),
    "head": lambda layer, name, parallel, blocks: _linear(layer, Head, name, parallel, True, 1),
    "vocabulary": lambda layer, name, parallel, blocks: _embedding(layer, Vocabulary, name, parallel, 0),
    "features": lambda layer, name, parallel, blocks: _embedding(layer, Features, name, parallel, 1),
}
