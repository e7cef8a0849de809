"""The job's store, and values on their way to ranks and devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from tesserae import _C
from tesserae.torch_compat.checked import checked

with checked():
    from torch._C._distributed_c10d import _unregister_all_process_groups
    from torch.distributed.distributed_c10d import _get_default_store, _update_default_pg, _world
    from torch.distributed.utils import _cast_forward_inputs, _sync_params_and_buffers, _to_kwargs

_BUCKET_BYTES = 250 * 1024 * 1024


def default_store() -> dist.Store:
    """Through which the ranks of the default group met."""
    return _get_default_store()


def forget_groups(broken: bool) -> None:
    """Ends all process groups, also where torch failed while it made or ended one: the next job of this process begins
    as that of a new one. `broken`: what blocks in them is aborted. Never fails."""
    for group in list(_world.pg_map) if broken else ():
        with suppress(Exception):
            _C.abort_process_group(group)
    if dist.is_initialized():
        with suppress(Exception):
            dist.destroy_process_group()
    _update_default_pg(None)
    for table in (_world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config, _world.pg_to_tag):
        table.clear()
    _world.tags_to_pg.clear()
    _unregister_all_process_groups()
    _world.group_count = 0  # names of groups, and of what they keep in the store, are counted


def cast_inputs(dtype: torch.dtype, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Floating point tensors, wherever they are in the arguments, in that dtype."""
    return _cast_forward_inputs(dtype, *args, **kwargs)


def move_inputs(device: torch.device, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    moved, named = _to_kwargs(args, kwargs, device, False)
    return tuple(moved[0]), named[0]


def broadcast_from_first(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Collective, in place: all have what the first rank of the group has."""
    _sync_params_and_buffers(group, list(tensors), _BUCKET_BYTES, 0)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds for which an operation of the group may wait on that device; 0 where it does not say."""
    try:
        return group._get_backend(torch.device(device.type)).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):  # it has no backend there, or one of another make
        return 0.0


def backends() -> set[str]:
    """Of all groups of torch.distributed that this process has."""
    return {dist.get_backend(group) for group in _world.pg_map}
