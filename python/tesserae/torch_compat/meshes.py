"""Meshes of groups that have ended."""

from __future__ import annotations

import gc
import itertools

from torch.distributed.device_mesh import DeviceMesh

from tesserae.torch_compat.checked import checked

with checked():
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_retired = itertools.count(-1, -1)


def retire_meshes() -> None:
    """After the default group has ended: no mesh of before counts as one of the next job.

    Meshes of as many ranks are equal, and what torch keeps of DTensors by their mesh has the old one in it, where this
    process may have had another place."""
    for thing in gc.get_objects():
        if type(thing) is DeviceMesh:
            thing._thread_id = next(_retired)  # a part of what makes two of them equal
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
