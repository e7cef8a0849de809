"""The job's store, and values on their way to ranks and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tesserae.torch_compat.checked import checked

with checked():
    from torch.distributed.distributed_c10d import _get_default_store
    from torch.distributed.utils import _cast_forward_inputs, _sync_params_and_buffers, _to_kwargs

_BUCKET_BYTES = 250 * 1024 * 1024


def default_store() -> dist.Store:
    """Through which the ranks of the default group met."""
    return _get_default_store()


def cast_inputs(dtype: torch.dtype, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Floating point tensors, wherever they are in the arguments, in that dtype."""
    return _cast_forward_inputs(dtype, *args, **kwargs)


def move_inputs(device: torch.device, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    moved, named = _to_kwargs(args, kwargs, device, False)
    return tuple(moved[0]), named[0]


def broadcast_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Collective, in place: all have what the first rank of the group has."""
    _sync_params_and_buffers(group, list(tensors), _BUCKET_BYTES, 0)
