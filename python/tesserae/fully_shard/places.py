"""A mesh and the configuration -> a fabric, a strategy, and how the DTensors of parameters are placed."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tesserae import _C
from tesserae.fsdp.groups import connect
from tesserae.job.fabrics import expert_degree, mesh_of
from tesserae.torch_compat.fsdp2 import concatenated, device_of, flattened, reshaped, shard_within
from tesserae.torch_compat.instance import HYBRID


@dataclass(frozen=True)
class AllAxes:
    """A mesh of all axes of parallelism, and which of its dimensions are of data parallelism."""

    mesh: DeviceMesh
    names: tuple[str, ...]
    shard: tuple[int, ...]
    replicate: tuple[int, ...]

    @property
    def data(self) -> tuple[int, ...]:
        return (*self.replicate, *self.shard)

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dims: Any) -> AllAxes:
        """`dims`: DataParallelMeshDims."""
        if not hasattr(dims, "shard_names"):
            raise _C.InvalidArgument(
                f"[fully_shard] dp_mesh_dims is {dims!r}, a {type(dims).__name__}; pass a DataParallelMeshDims"
            )
        if mesh is None or mesh.mesh_dim_names is None:
            raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
        names = tuple(mesh.mesh_dim_names)
        for name in (*dims.shard_names, *dims.replicate_names):
            if name not in names:
                raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
        return cls(
            mesh, names, tuple(map(names.index, dims.shard_names)), tuple(map(names.index, dims.replicate_names))
        )

    def data_mesh(self) -> DeviceMesh:
        """One dimension, or two: replicas, shards. Collective at the first call."""
        meshes = [
            flattened(self.mesh, tuple(self.names[i] for i in dims)) for dims in (self.replicate, self.shard) if dims
        ]
        return meshes[0] if len(meshes) == 1 else concatenated(*meshes)


@dataclass(frozen=True)
class Places:
    """Where the state of one fully_shard call lies."""

    fabric: _C.Fabric
    strategy: _C.Strategy  # of the ranks of the job, also where fewer of them share out rows
    device: torch.device
    given: DeviceMesh  # the script's
    mesh: DeviceMesh  # of the DTensors: the script's, unless another degree was asked for since
    replicates: bool  # the mesh has two dimensions: replicas, shards
    axes: AllAxes | None = None  # where the script's mesh has other axes, too; `given` is then its data-parallel part
    # Of experts that ranks share out: the fabric is of those that hold the same, and the mesh has three dimensions:
    # replicas, shards, experts.
    of_experts: bool = False

    @property
    def degree(self) -> int:
        """Over how many ranks rows are shared out."""
        return math.gcd(self.strategy.degrees[2], self.fabric.size)

    @property
    def shards(self) -> bool:
        """Whether a dimension of the mesh is for shards, if only of one rank; else all of it is for replicas."""
        return self.degree == self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """One dimension: the ranks that share rows out with this one."""
        if self.mesh.ndim == 1 and self.shards:
            return self.mesh
        mesh = self.mesh if self.mesh.ndim > 1 else _mesh_of_degree(self.given, 1)
        assert mesh.mesh_dim_names is not None
        return mesh["shard" if "shard" in mesh.mesh_dim_names else mesh.mesh_dim_names[-1]]

    def placements(self, placement: Shard) -> tuple[Placement, ...]:
        if self.of_experts:
            experts = (Replicate(), Replicate(), Shard(0))
            rows = shard_within(placement, self.mesh, experts, [2]) if self.degree > 1 else Replicate()
            return Replicate(), rows, Shard(0)
        if not self.shards:
            return (Replicate(),)
        return (Replicate(), placement) if self.replicates else (placement,)

    def under(self, strategy: _C.Strategy) -> Places:
        """The same with other degrees. Collective over the ranks at the first call for a degree.

        Raises InvalidArgument for degrees under which rows are not in the order of ranks.
        """
        if self.of_experts:
            return _experts(self.given, self.fabric, strategy, self.device)
        return replace(_place(self.given, self.fabric, strategy, self.device), axes=self.axes)

    def for_experts(self) -> Places:
        """Where the state of the experts of a module lies whose own lies here. Collective at the first call.

        Raises InvalidArgument unless the mesh is of all ranks of the job.
        """
        job = mesh_of(self.device)
        if self.axes is not None or self.fabric is not job.over("state"):
            raise _C.InvalidArgument(
                f"[fully_shard] the model's experts are shared out by expert_parallel_degree {expert_degree()}, and "
                f"the mesh has {self.fabric.size} of {job.job.size} ranks, or other axes: leave it out"
            )
        return _experts(self.given, job.over("expert_state"), self.strategy, self.device)


@dataclass(frozen=True)
class Sharing:
    """Which ranks share out the rows of a DTensor: neighbours of the fabric, `degree` of them."""

    fabric: _C.Fabric
    degree: int


def shard_group(mesh: DeviceMesh, use: str) -> dist.ProcessGroup:
    """A group of its own, for that use, of the ranks of a mesh of one dimension. Collective at the first call."""
    ranks = tuple(mesh.mesh.tolist())
    key = (dist.group.WORLD, ranks, mesh.device_type, use)
    if key not in _shard_groups:
        _shard_groups[key] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _shard_groups[key]


_shard_groups: dict[Any, dist.ProcessGroup] = {}

# By the default group, for a script may end its job and start another; then by the mesh of DTensors.
_fabrics: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[DeviceMesh, _C.Fabric]] = weakref.WeakKeyDictionary()


def sharing_of(tensor: DTensor) -> Sharing | None:
    """None for a tensor of another mesh than those of sharded models, and for one whose rows were split before."""
    mesh = tensor.device_mesh
    fabric = _fabrics.get(dist.group.WORLD, {}).get(mesh) if dist.is_initialized() else None
    if fabric is None:
        return None
    *outer, last = tensor.placements
    if not all(placement.is_replicate() for placement in outer):
        return None
    if last.is_replicate():
        return Sharing(fabric, 1)
    return Sharing(fabric, mesh.size(mesh.ndim - 1)) if isinstance(last, Shard) else None


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()  # as torch's does
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))


def find_places(mesh: DeviceMesh | None, frees_after_forward: bool, axes: AllAxes | None = None) -> Places:
    """Collective over the mesh at the first call for it."""
    if axes is not None:
        mesh = axes.data_mesh()
    elif mesh is None:
        mesh = _default_mesh()
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    device = device_of(mesh)
    replicated = axes is not None and not axes.shard
    named = ShardingStrategy.NO_SHARD if replicated else _named(mesh, frees_after_forward)
    return replace(_place(mesh, *connect(named, None, mesh, device), device), axes=axes)


def _place(mesh: DeviceMesh, fabric: _C.Fabric, strategy: _C.Strategy, device: torch.device) -> Places:
    places = _places(mesh, fabric, strategy, device)
    _fabrics.setdefault(dist.group.WORLD, {})[places.mesh] = fabric
    return places


def _places(mesh: DeviceMesh, fabric: _C.Fabric, strategy: _C.Strategy, device: torch.device) -> Places:
    degree = strategy.degrees[2]
    _require_rows_in_order(fabric, strategy.degrees)
    if degree == mesh.size(mesh.ndim - 1):
        return Places(fabric, strategy, device, mesh, mesh, mesh.ndim == 2)
    if degree in (1, fabric.size):
        return Places(fabric, strategy, device, mesh, _flat(mesh), replicates=False)
    return Places(fabric, strategy, device, mesh, _mesh_of_degree(mesh, degree), replicates=True)


def _experts(mesh: DeviceMesh, fabric: _C.Fabric, strategy: _C.Strategy, device: torch.device) -> Places:
    p, g, o = (math.gcd(degree, fabric.size) for degree in strategy.degrees)
    _require_chunks_in_order(fabric, (p, g, o))
    shape = (fabric.size // o, o, mesh.size() // fabric.size)
    whole = _made(mesh, shape, ("replicate", "shard", "expert"))
    return Places(fabric, strategy, device, mesh, whole, replicates=True, of_experts=True)


def _named(mesh: DeviceMesh, frees_after_forward: bool) -> ShardingStrategy:
    if mesh.ndim == 2:
        return HYBRID[0] if frees_after_forward else HYBRID[1]
    return ShardingStrategy.FULL_SHARD if frees_after_forward else ShardingStrategy.SHARD_GRAD_OP


def _require_rows_in_order(fabric: _C.Fabric, degrees: tuple[int, int, int]) -> None:
    """Rank r of a shard group has the r-th rows: what Shard(0) of a DTensor means."""
    _require_chunks_in_order(fabric, degrees)
    ranks = range(fabric.size)
    if [fabric.joined_rank(rank) for rank in ranks] != list(ranks):
        raise _C.InvalidArgument(
            "[fully_shard] the ranks of the mesh were not started host by host; give neighbouring ranks the same "
            "host, as torchrun does"
        )


def _require_chunks_in_order(fabric: _C.Fabric, degrees: tuple[int, int, int]) -> None:
    ranks = range(fabric.size)
    if any(_C.chunk(fabric.size, degrees, rank) != rank % degrees[2] for rank in ranks):
        p, g, o = degrees
        raise _C.InvalidArgument(
            f"[fully_shard] with degrees of {p} (parameters), {g} (gradients) and {o} (optimizer) ranks do not hold "
            f"rows in their order, which DTensors need; use degrees that are 1 or {o}, or FullyShardedDataParallel"
        )


_meshes: dict[Any, DeviceMesh] = {}


def forget() -> None:
    """What belongs to groups that have ended."""
    _meshes.clear()
    _shard_groups.clear()
    _fabrics.clear()


def _flat(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    return _made(mesh, (mesh.size(),), None)


def _mesh_of_degree(mesh: DeviceMesh, degree: int) -> DeviceMesh:
    return _made(mesh, (mesh.size() // degree, degree), ("replicate", "shard"))


def _made(mesh: DeviceMesh, shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    """The ranks of a mesh in another shape. Collective at the first call; of a part of a mesh, among all its ranks."""
    ranks = mesh.mesh.flatten()
    key = (dist.group.WORLD, tuple(ranks.tolist()), mesh.device_type, shape)
    if key not in _meshes:
        _meshes[key] = reshaped(mesh, shape, names)
    return _meshes[key]
