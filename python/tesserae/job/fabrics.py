"""Process groups of the script -> connections of the engine.

The engine makes its own groups, over any ranks that its degrees ask for; of the script's group it uses the members and
the store through which they met. One fabric for each set of ranks and device, kept until the process ends.

With a tensor-, context- or expert-parallel degree above 1 the ranks of the job are a mesh (_C.Mesh): those that shard
state have a fabric of their own, those of a tensor group the group of their split layers, those of a context group that
of their sequences, and those of an expert group that of the tokens that they send each other.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tesserae import _C
from tesserae.job import config
from tesserae.torch_compat.distributed import backends, default_store, timeout_of

# What carries the bytes of CPU tensors: "shm", which is Gloo between hosts, or "gloo" everywhere.
HOST_BACKEND = "shm"

_Key = tuple[tuple[int, ...], str]  # ranks and device
_Degrees = tuple[int, int, int]  # of the tensor, context and expert axes

_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, _C.Fabric]] = weakref.WeakKeyDictionary()
_counts: dict[tuple[int, ...], int] = {}
# By the fabric of all ranks, and the degrees of the axes.
_meshes: dict[tuple[_C.Fabric, _Degrees], _C.MeshFabric] = {}
_parallels: dict[tuple[_C.Fabric, _Degrees], _C.Parallel] = {}
_contexts: dict[tuple[_C.Fabric, _Degrees, str], _C.ContextParallel] = {}
_connected: list[tuple[_C.Fabric, tuple[int, ...]]] = []  # all, with their ranks, also when their group is gone
_unmet: set[int] = set()  # ranks that did not come when one of them was made


@functools.cache
def alone() -> _C.Fabric:
    """The fabric of a script without torch.distributed: one process."""
    return _C.Fabric.null(0, 1, torch.device("cpu"))


def fabric_of(group: dist.ProcessGroup | None, device: torch.device) -> _C.Fabric:
    """The fabric of the ranks of `group` (None: of the default group), which compute on `device`.

    Collective over the group at the first call for it. Raises InvalidArgument before torch.distributed is initialised.
    """
    if not dist.is_initialized():
        raise _C.InvalidArgument(
            "[FSDP] torch.distributed is not initialised; call torch.distributed.init_process_group() before FSDP(...)"
        )
    # A script may end its job and start another: connections belong to a default group, and not to its address or name.
    fabrics = _jobs.setdefault(dist.group.WORLD, {})
    group = group if group is not None else dist.group.WORLD
    key = (tuple(dist.get_process_group_ranks(group)), str(device))
    if key not in fabrics:
        fabrics[key] = _connect(group, key[0], device)
        _connected.append((fabrics[key], key[0]))
    return fabrics[key]


def is_of(fabric: _C.Fabric, group: dist.ProcessGroup) -> bool:
    """Whether `fabric` was made for the ranks of `group`. Groups of as many ranks may share one of them."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return any(known is fabric for (of, _), known in _jobs.get(dist.group.WORLD, {}).items() if of == ranks)


def tensor_degree() -> int:
    """Over how many ranks layers are split; 1 before tsm.init."""
    settings = config.current()
    return settings.tensor_parallel_degree if settings is not None else 1


def context_degree() -> int:
    """Over how many ranks sequences are cut; 1 before tsm.init."""
    settings = config.current()
    return settings.context_parallel_degree if settings is not None else 1


def expert_degree() -> int:
    """Over how many ranks the experts of a layer are shared out; 1 before tsm.init."""
    settings = config.current()
    return settings.expert_parallel_degree if settings is not None else 1


def has_parts() -> bool:
    """Whether parameters of a model may be parts of larger tensors."""
    return tensor_degree() > 1 or expert_degree() > 1


def _degrees() -> _Degrees:
    return tensor_degree(), context_degree(), expert_degree()


def _axes(ranks: int) -> _C.Mesh:
    return _C.Mesh(ranks, tensor=tensor_degree(), context=context_degree(), expert=expert_degree())


def job_mesh() -> _C.Mesh:
    """The axes of the job's ranks, as torch numbers them."""
    return _axes(dist.get_world_size())


def writes_unsplit() -> bool:
    """What no split cuts is the same on all ranks of a tensor group: this one counts, sends or writes it."""
    return job_mesh().writes_unsplit(dist.get_rank())


def is_first_of_same_experts() -> bool:
    """Of the ranks that hold the same experts, this one speaks for them."""
    return job_mesh().index("expert_state", dist.get_rank()) == 0


def mesh_of(device: torch.device) -> _C.MeshFabric:
    """The job by axes, on `device`. Collective over the job at the first call.

    Raises InvalidArgument for a degree that does not divide the ranks.
    """
    whole = fabric_of(None, device)
    key = (whole, _degrees())
    if key not in _meshes:
        _require_neighbours(whole)
        _meshes[key] = _C.MeshFabric(whole, _axes(whole.size))
    return _meshes[key]


def state_fabric(device: torch.device) -> _C.Fabric:
    """The fabric of the ranks that shard state with this one; collective as mesh_of is."""
    return mesh_of(device).over("state")


def whole_fabric(fabric: _C.Fabric) -> _C.Fabric:
    """The job's fabric, of which state_fabric() has made this one; any other as it is."""
    return next((mesh.job for mesh in _meshes.values() if mesh.over("state") is fabric), fabric)


def around_experts(fabric: _C.Fabric) -> _C.Fabric:
    """For the fabric that shards the state of experts that of all else in the model; any other as it is."""
    for mesh in _meshes.values():
        if mesh.mesh.degree("expert") > 1 and mesh.over("expert_state") is fabric:
            return mesh.over("state")
    return fabric


def parallel_of(device: torch.device) -> _C.Parallel:
    """The ranks among which layers are split, on `device`. Collective over the job at the first call."""
    mesh = mesh_of(device)
    key = (mesh.job, _degrees())
    if key not in _parallels:
        _parallels[key] = _C.Parallel(mesh)
    return _parallels[key]


def context_of(device: torch.device, method: str | None = None) -> _C.ContextParallel:
    """The ranks that share out positions, on `device`, and how keys and values travel (None: as configured).
    Collective over the job at the first call."""
    mesh = mesh_of(device)
    settings = config.current()
    method = method or (settings.context_parallel_method if settings is not None else "auto")
    key = (mesh.job, _degrees(), method)
    if key not in _contexts:
        _contexts[key] = _C.ContextParallel(mesh, method)
    return _contexts[key]


def _require_neighbours(whole: _C.Fabric) -> None:
    """tsm.state counts torch's ranks, the engine ranks in the order of hosts: they must be the same."""
    order = [whole.joined_rank(rank) for rank in range(whole.size)]
    keys = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
    for key, degree in zip(keys, _degrees(), strict=True):
        if degree > 1 and order != sorted(order):
            raise _C.InvalidArgument(
                f"[tsm.init] {key} = {degree}, but ranks were not started host by host: in the order of hosts they "
                f"are {order}. Give neighbouring ranks the same host, as torchrun does"
            )


def _connect(group: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device) -> _C.Fabric:
    me = ranks.index(dist.get_rank())
    if "fake" in dist.get_backend(group):
        return _C.Fabric.null(me, len(ranks), device)
    heed_other_groups()
    count = _counts[ranks] = _counts.get(ranks, 0) + 1
    store = default_store()
    name = "-".join(map(str, ranks)) if len(ranks) < dist.get_world_size() else "all"
    try:
        return _C.Fabric.join(
            dist.PrefixStore(f"tesserae/{name}/{device.type}/{count}", store),
            me,
            len(ranks),
            served=outlives_rank_zero(store) or ranks[0] != 0,
            device=device,
            **_transport(ranks, device),
            connect_deadline=_deadline("connect_deadline_seconds", 60.0, group, device),
            deadline=_deadline("deadline_seconds", 300.0, group, device),
        )
    except _C.Timeout as error:
        _unmet.update(ranks[each] for each in error.silent)
        raise


def _deadline(key: str, default: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """What the configuration says; where it is silent, no less than a script's group would wait: one that lets rank 0
    load or save for minutes counts on that."""
    settings = config.current()
    if settings is not None and key in settings.given:
        return getattr(settings, key)
    return min(max(default, timeout_of(group, device)), config.FOR_EVER)


def _transport(ranks: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"backend": HOST_BACKEND}
    return {"backend": "auto", "make_group": functools.partial(_make_group, ranks, device)}


def _make_group(ranks: tuple[int, ...], device: torch.device, members: list[int], deadline: float) -> dist.ProcessGroup:
    """A group of torch's for the engine, of these of `ranks`, on whichever backend torch's registry has for the device:
    where C++ does not know it (comm/device_transport.h)."""
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError as error:
        raise _C.InvalidArgument(
            f"[FSDP] torch.distributed has no backend for {device.type}; the package that makes it a device of torch "
            "registers one (torch.distributed.Backend.register_backend)"
        ) from error
    # Backends take the current device for theirs.
    with torch.accelerator.device_index(device.index):
        return dist.new_group(
            [ranks[member] for member in members],
            timeout=timedelta(seconds=deadline),
            backend=backend,
            use_local_synchronization=True,
            sort_ranks=False,
        )


def outlives_rank_zero(store: dist.Store) -> bool:
    """Whether the store is served by somebody else than rank 0 of the script."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return not isinstance(store, dist.TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@atexit.register
def leave() -> None:
    """Says goodbye, so that the ranks that still run do not take this one for lost."""
    for fabric, _ in _connected:
        fabric.leave()
    _forget()


def give_up() -> list[int]:
    """After an operation failed, for a process that goes on: nothing blocks in any of them any more, and the next ones
    are made as by a new process. Returns the ranks of the job for which others waited to their deadline."""
    missing = {*_C.missing_in_process_groups(), *_unmet}
    missing.update(ranks[each] for fabric, ranks in _connected for each in fabric.missing_ranks())
    for fabric, _ in _connected:
        fabric.give_up()
    _forget()
    return sorted(missing)


def heed_other_groups() -> None:
    """Who waits in a group of another backend is not seen to wait: no other rank may take it for absent."""
    if backends() - {"tesserae"}:
        _C.waits_unseen()


def _forget() -> None:
    _counts.clear()
    _parallels.clear()
    _contexts.clear()
    _meshes.clear()
    _jobs.clear()
    _connected.clear()
    _unmet.clear()
