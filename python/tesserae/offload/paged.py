"""Tensors on a disk, as torch's code and scripts see them (tesserae/offload/paged_tensor.h)."""

from __future__ import annotations

from typing import Any

import torch
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

    Its address is of no use without that: what reads memory by it (numpy, pickle, deepcopy) gets a copy, and of
    its storage, which can be copied and no more (_storage_copy).
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

    def share_memory_(self) -> Tensor:
        raise _C.InvalidArgument(
            f"[offload] share_memory_() of optimizer state of shape {tuple(self.shape)} that lies on a disk: it cannot "
            "lie in shared memory, too; share a copy (tensor.clone())"
        )

    __torch_function__ = NO_TORCH_FUNCTION


def page(disk: _C.Disk, tensor: Tensor) -> PagedTensor:
    """A copy of `tensor` (on the host, contiguous) on the disk."""
    flat = disk.tensor(tensor.numel(), tensor.dtype)
    flat.untyped_storage()._tesserae_paged = True  # type: ignore[attr-defined]
    torch.UntypedStorage.copy_ = _storage_copy  # type: ignore[method-assign]
    _C.copy_paged(flat, tensor)
    return as_class(PagedTensor, flat.view(tensor.shape))


_torch_storage_copy = torch.UntypedStorage.copy_


def _storage_copy(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
    """torch.UntypedStorage.copy_, once there are paged tensors: code that copies what they lie in, whatever the class
    of the tensor, gets their bytes. DCP's stager (dcp.async_save) does; it also keeps what it copied to, by the
    identity of the storage, so untyped_storage() cannot return that of a copy."""
    if getattr(source, "_tesserae_paged", False) and self.nbytes() == source.nbytes():
        _C.copy_paged(_bytes_of(self), _bytes_of(source))
        return self
    return _torch_storage_copy(self, source, non_blocking)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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
