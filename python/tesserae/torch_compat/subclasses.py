"""Tensors of another class over the same memory."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from tesserae.torch_compat.checked import checked, require

with checked():
    from torch.utils._pytree import tree_leaves, tree_map_only

require(torch.Tensor, "_make_subclass")
require(torch.ops.aten.clone.default, "_schema")

__all__ = ["tree_leaves", "tree_map_only"]

# For a class whose operators are __torch_dispatch__'s.
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl

T = TypeVar("T", bound=torch.Tensor)


def as_class(cls: type[T], tensor: torch.Tensor) -> T:
    """Without gradients."""
    return torch.Tensor._make_subclass(cls, tensor)  # type: ignore[arg-type]


def writes(operator: Any) -> bool:
    """Whether the operator changes some of its arguments."""
    return operator._schema.is_mutable


def makes_views(operator: Any) -> bool:
    """Whether what it returns is a view of what it was given, and nothing is read."""
    return not writes(operator) and any(value.alias_info is not None for value in operator._schema.returns)
