"""Tensors on a disk, as torch's code and scripts see them (tesserae/offload/paged_tensor.h)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tesserae import _C
from tesserae.torch_compat.subclasses import (
    NO_TORCH_FUNCTION,
    as_class,
    makes_views,
    tree_leaves,
    tree_map_only,
    writes,
)


class PagedTensor(Tensor):
    """A tensor whose memory lies on a disk while nothing works on it. Every operator of torch brings what it works on
    into memory, and lets go of it when it returns; views are paged too, and all other results are in memory.

    Its address is of no use without that: what reads memory by it (numpy, pickle, deepcopy) gets a copy.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        everything = (args, kwargs or {})
        paged = [leaf for leaf in tree_leaves(everything) if isinstance(leaf, PagedTensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            return _communicate(func, everything)
        plain = {id(tensor): _C.alias_of(tensor) for tensor in paged}
        plain_args, plain_kwargs = tree_map_only(PagedTensor, lambda tensor: plain[id(tensor)], everything)
        if makes_views(func):
            return _paged_again(func(*plain_args, **plain_kwargs), {})
        with _C.Use(list(plain.values()), changes=writes(func)):
            result = func(*plain_args, **plain_kwargs)
        return _paged_again(result, {id(plain[id(tensor)]): tensor for tensor in paged})

    def in_memory(self) -> Tensor:
        """A copy that is an ordinary tensor."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.in_memory().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.in_memory())

    def numpy(self, *, force: bool = False) -> Any:
        return self.in_memory().numpy(force=force)

    def tolist(self) -> Any:
        return self.in_memory().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.in_memory().__array__(dtype)

    __torch_function__ = NO_TORCH_FUNCTION


def page(disk: _C.Disk, tensor: Tensor) -> PagedTensor:
    """A copy of `tensor` (on the host, contiguous) on the disk."""
    flat = disk.tensor(tensor.numel(), tensor.dtype)
    _C.copy_paged(flat, tensor)
    return as_class(PagedTensor, flat.view(tensor.shape))


def _paged_again(result: Any, originals: dict[int, PagedTensor]) -> Any:
    """Results that an operator was given are those that its caller knows; views are paged, too."""

    def wrap(tensor: Tensor) -> Tensor:
        if id(tensor) in originals:
            return originals[id(tensor)]
        return as_class(PagedTensor, tensor) if _C.is_paged(tensor) else tensor

    return tree_map_only(Tensor, wrap, result)


def _communicate(func: Any, everything: Any) -> Any:
    """What may still be on its way when the operator returns travels from a copy."""
    if func.namespace == "c10d" or writes(func):
        raise _C.InvalidArgument(
            f"[offload] {func} reads or writes optimizer state that lies on a disk when it may have left memory; pass "
            "a copy (tensor.clone()), and copy the result back"
        )
    args, kwargs = tree_map_only(PagedTensor, PagedTensor.in_memory, everything)
    return func(*args, **kwargs)
