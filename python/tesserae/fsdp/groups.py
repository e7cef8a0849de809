"""Process groups and meshes of the script -> a fabric of the engine, and over how many ranks it shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy

from tesserae import _C
from tesserae.job import config
from tesserae.job.fabrics import fabric_of, job_mesh, state_fabric, tensor_degree
from tesserae.job.state import state
from tesserae.torch_compat.instance import HYBRID

Degrees = tuple[int, int, int]


def connect(
    named: ShardingStrategy, process_group: Any, mesh: Any, device: torch.device
) -> tuple[_C.Fabric, _C.Strategy]:
    """The fabric and the strategy that the configuration, the name that the script gives and its groups come to."""
    group, degree, shard_ranks = _group_and_degree(process_group, mesh)
    settings = config.current()
    wanted = settings.hybrid_shard_degree if settings is not None else 0
    degrees = config.degrees_of(settings) if settings is not None and wanted == 0 else None
    if degree is not None and named not in HYBRID and wanted == 0:
        raise _C.InvalidArgument(
            f"[FSDP] {named} with two process groups (or a two-dimensional device mesh): these are for "
            "ShardingStrategy.HYBRID_SHARD and _HYBRID_SHARD_ZERO2"
        )
    fabric = state_fabric(device) if process_group is None and mesh is None else fabric_of(group, device)
    if named in HYBRID and degrees is None and wanted == 0:
        wanted = degree or _ranks_of_host(named, fabric)
    strategy = _C.Strategy(named.name, fabric.size, hybrid_shard_degree=wanted, degrees=degrees)
    if shard_ranks is not None and degree == strategy.degrees[0]:
        _check_neighbours(fabric, strategy.degrees, group, shard_ranks)
    return fabric, strategy


def _group_and_degree(process_group: Any, mesh: Any) -> tuple[dist.ProcessGroup | None, int | None, list[int] | None]:
    """(all ranks that train, degree that the groups ask for, ranks with which this one shards); the last two for
    hybrids."""
    if mesh is not None:
        if process_group is not None:
            raise _C.InvalidArgument("[FSDP] both process_group and device_mesh were given; pass one of them")
        if mesh.ndim == 1:
            return mesh.get_group(), None, None
        if mesh.ndim != 2:
            raise _C.InvalidArgument(
                f"[FSDP] a device mesh of {mesh.ndim} dimensions; 1 (shard) or 2 (replicate, shard)"
            )
        return _group_of(mesh), mesh.size(1), dist.get_process_group_ranks(mesh.get_group(1))
    if isinstance(process_group, (tuple, list)):
        shard, replicate = process_group
        if shard.size() * replicate.size() != dist.get_world_size():
            raise _C.InvalidArgument(
                f"[FSDP] groups of {shard.size()} (shard) and {replicate.size()} (replicate) ranks do not make up the "
                f"{dist.get_world_size()} ranks of the job"
            )
        return None, shard.size(), dist.get_process_group_ranks(shard)
    return process_group, None, None


_groups: dict[Any, dist.ProcessGroup] = {}


def _group_of(mesh: Any) -> dist.ProcessGroup | None:
    """All ranks of a mesh; None: those of the job."""
    if mesh.size() == dist.get_world_size():
        return None
    ranks = sorted(mesh.mesh.flatten().tolist())
    key = (dist.group.WORLD, tuple(ranks))
    if key not in _groups:
        _groups[key] = dist.new_group(ranks, use_local_synchronization=True)
    return _groups[key]


def groups_of(process_group: Any, mesh: Any) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group over which the script shards, and that of all ranks that train; None for the default group."""
    if mesh is not None:
        return mesh.get_group(mesh.ndim - 1), mesh.get_group() if mesh.ndim == 1 else None
    if isinstance(process_group, (tuple, list)):
        return process_group[0], None
    if process_group is None and tensor_degree() > 1:
        process_group = state.dp_process_group
    return process_group, process_group


def require_one_tensor_index(group: dist.ProcessGroup | None) -> None:
    """Ranks that shard split parameters together hold the same parts of them."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if {job_mesh().index("tensor", rank) for rank in ranks} != {state.tp_rank}:
        raise _C.InvalidArgument(
            f"[FSDP] the model is split over {state.tp_size} tensor-parallel ranks, and process_group (or device_mesh) "
            f"has the ranks {ranks}, which hold different parts of it: leave it out, or pass "
            "tsm.state.dp_process_group"
        )


def require_whole_job(group: dist.ProcessGroup | None) -> None:
    """Experts are shared out among the ranks of the job, so all of them (of a tensor index) shard the model."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if len(ranks) < job_mesh().degree("state"):
        raise _C.InvalidArgument(
            f"[FSDP] the model's experts are shared out by expert_parallel_degree {state.ep_size}, and process_group "
            f"(or device_mesh) has the ranks {ranks} of {dist.get_world_size()}: leave it out"
        )


def _ranks_of_host(named: ShardingStrategy, fabric: _C.Fabric) -> int:
    sizes = {len(fabric.host_ranks(rank)) for rank in range(fabric.size)}
    if len(sizes) > 1:
        raise _C.InvalidArgument(
            f"[FSDP] {named} shards over the ranks of a host, but hosts have {sorted(sizes)} ranks; set "
            "hybrid_shard_degree in tsm.init, or pass device_mesh"
        )
    return sizes.pop()


def _check_neighbours(fabric: _C.Fabric, degrees: Degrees, group: Any, shard_ranks: list[int]) -> None:
    """The engine shards over ranks that are neighbours in the order of hosts; the script's groups must say the same."""
    members = dist.get_process_group_ranks(group)
    ours = [members[fabric.joined_rank(r)] for r in _C.parameter_group(fabric.size, degrees, fabric.rank)]
    if sorted(ours) != sorted(shard_ranks):
        raise _C.InvalidArgument(
            f"[FSDP, fully_shard] the script shards over ranks {sorted(shard_ranks)}, but a degree of {degrees[0]} "
            f"shards over neighbours on a host: ranks {sorted(ours)}. Order the device mesh so, or leave it out"
        )
