"""What a computation allocates and multiplies, seen on fake tensors: these have shapes and no values, so a model of any
size is traced in the memory of its Python objects."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

# What tracing raises where code needs values.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)

# Attention in one kernel: forward and, by name, backward. Each has query, key and value among its first four tensors.
_ATTENTION = "_scaled_dot_product_"


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made within have shapes alone; those from outside are taken as such."""
    with FakeTensorMode(allow_non_fake_inputs=True), _conversions_replace():
        yield


@contextmanager
def _conversions_replace() -> Iterator[None]:
    """module.to(), half(), to_empty() and the like put new parameters in the places of fake ones, which torch would
    swap, and cannot where something has a weak reference to them. Tied ones stay tied."""
    own = nn.Module._apply
    done: dict[tuple[int, int], tuple[Any, ...]] = {}  # with what the ids are of, which therefore stays theirs

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in module.children():
                child._apply(function)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = id(parameter), id(function)
            if key not in done:
                with torch.no_grad():
                    made = nn.Parameter(function(parameter), parameter.requires_grad)
                done[key] = made, parameter, function
            module._parameters[name] = done[key][0]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else function(buffer)
        return module

    nn.Module._apply = apply
    try:
        yield
    finally:
        nn.Module._apply = own


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with each of its tensors replaced, in lists, tuples, dicts and what else torch looks into."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Product:
    """A matrix product, or a convolution: `multiplications` of each of `count` that are done in one call."""

    multiplications: int
    batched: bool
    count: int = 1


@dataclass(frozen=True)
class Attention:
    tokens: int  # of a sequence of queries
    operations: int  # additions and multiplications


@dataclass
class Record:
    """`events`: (number of a block of memory, bytes that it takes or, below 0, gives back) in the order of time."""

    events: list[tuple[int, int]] = field(default_factory=list)
    products: Counter[Product] = field(default_factory=Counter)
    attention: Counter[Attention] = field(default_factory=Counter)

    def levels(self, without: Iterable[int] = ()) -> list[int]:
        """Bytes that are alive before each event and after the last, but for those blocks."""
        hidden, alive, levels = set(without), 0, [0]
        for number, change in self.events:
            alive += 0 if number in hidden else change
            levels.append(alive)
        return levels


class Recorder(TorchDispatchMode):
    """Records what is computed within. `known`: tensors whose memory does not count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.record = Record()
        self._numbers: dict[int, int] = {}  # by id of a storage that lives
        self._watched: list[weakref.ref[Any]] = []
        self._last = 0
        for tensor in known:
            self.number(tensor, counts=False)

    def number(self, tensor: Tensor, counts: bool = True) -> int:
        """Of the block of memory that the tensor lies in."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if (known := self._numbers.get(key)) is not None:
            return known
        self._last += 1
        number, size = self._last, storage.nbytes()
        self._numbers[key] = number
        if counts:
            self.record.events.append((number, size))

        def gone(_: Any) -> None:
            self._numbers.pop(key, None)
            if counts:
                self.record.events.append((number, -size))

        self._watched.append(weakref.ref(storage, gone))
        return number

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        self._count(function, args, kwargs, out)
        for tensor in tensors_of(out):
            self.number(tensor)
        return out

    def _count(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = function.overloadpacket
        name = packet.__name__
        if name.startswith(_ATTENTION):
            self.record.attention[_attention(name, args, kwargs)] += 1
        elif packet in flop_registry:
            operations = flop_registry[packet](*args, **kwargs, out_val=out)
            batched = name in ("bmm", "baddbmm")
            count = tensors_of(args)[-1].shape[0] if batched else 1
            self.record.products[Product(operations // 2 // max(1, count), batched, count)] += 1


def _attention(name: str, args: Any, kwargs: Any) -> Attention:
    backward = name.endswith("_backward")
    query, key, value = tensors_of(args)[1:4] if backward else tensors_of(args)[:3]
    batch, heads, tokens, width = query.shape
    operations = 2 * batch * heads * tokens * key.shape[2] * (width + value.shape[3])
    if _is_causal(args, kwargs):
        operations //= 2
    return Attention(tokens, operations * 2 if backward else operations)


def _is_causal(args: Any, kwargs: Any) -> bool:
    """Of the kernels' flags: compute_log_sumexp, where there is one, is given as an option without a default."""
    return bool(kwargs.get("is_causal", any(argument is True for argument in args)))


def recomputed(module: nn.Module) -> None:
    """From now on its forward keeps its inputs alone, and runs again in the backward."""
    forward = module.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none", **kwargs
        )

    module.forward = again  # type: ignore[method-assign]
