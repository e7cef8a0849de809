"""Parameters that were split before they are sharded: DTensors on another mesh than that of the shards, as
parallelize_module makes them for tensor parallelism, or on a mesh of all axes, some of which are of data parallelism
(dp_mesh_dims), as distribute_module makes them.

What the ranks of the mesh share out is each rank's part. Modules compute with a DTensor of the gathered part; its
gradient, placed as the parameter was on the axes that are not of data parallelism, goes to the engine.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from tesserae import _C
from tesserae.fully_shard.places import AllAxes, Places
from tesserae.torch_compat.fsdp2 import dtensor, local_of, shard_within, with_axis


@dataclass(frozen=True)
class Split:
    """`mesh` and `placements` are of what modules compute with."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    axes: AllAxes | None = None  # of a mesh of all axes

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, places: Places) -> Split | None:
        """How the parameter is split; None if it is not."""
        if places.axes is not None:
            return cls._on_all_axes(name, parameter, places.axes)
        if not isinstance(parameter, DTensor):
            return None
        mesh = places.mesh
        names = set(mesh.mesh_dim_names or ()) & set(parameter.device_mesh.mesh_dim_names or ())
        if parameter.device_mesh == mesh or names:
            raise _C.InvalidArgument(
                f"[fully_shard] parameter {name} is a DTensor of {parameter.device_mesh} already, on the mesh over "
                f"which it would be sharded ({mesh}): it was sharded before. Call fully_shard once for each parameter, "
                "with the data-parallel dimension of the mesh; if the model was distributed on a mesh of all axes, "
                "pass that mesh and dp_mesh_dims"
            )
        return cls(parameter.device_mesh, tuple(parameter.placements))

    @classmethod
    def _on_all_axes(cls, name: str, parameter: nn.Parameter, axes: AllAxes) -> Split:
        # Texts in front are torch's.
        if not isinstance(parameter, DTensor):
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
                f"distribute_module). Got plain tensor for parameter '{name}'."
            )
        if parameter.device_mesh is not axes.mesh:
            raise ValueError(
                "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh "
                f"objects for parameter '{name}'"
            )
        for index in axes.data:
            if not parameter.placements[index].is_replicate():
                raise ValueError(
                    f"Expected Replicate() on DP dim '{axes.names[index]}' (index {index}) of parameter '{name}' but "
                    f"got {parameter.placements[index]}"
                )
        return cls(axes.mesh, tuple(parameter.placements), axes)

    def place(self, places: Places, placement: Shard) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Of the shards: the mesh of `places` with the axes that split the parameter before."""
        if self.axes is None:
            return with_axis(places.mesh, places.placements(placement), self.mesh, self.placements)
        shard = self.axes.shard
        if places.mesh == places.given and len(shard) <= 1:  # the script's mesh, as it is
            placements = list(self.placements)
            for index in shard if places.shards else ():
                placements[index] = shard_within(
                    placement, self.mesh, self.placements, range(index + 1, self.mesh.ndim)
                )
            return self.mesh, tuple(placements)
        rest = [index for index in range(self.mesh.ndim) if index not in self.axes.data]
        if not rest:
            return places.mesh, places.placements(placement)
        inner = self.mesh[tuple(self.axes.names[index] for index in rest)]
        return with_axis(places.mesh, places.placements(placement), inner, tuple(self.placements[i] for i in rest))

    def make(self, compute: nn.Parameter, like: DTensor, unit: _C.Unit, number: int) -> nn.Parameter:
        """The DTensor of a gathered part; `number`: of the parameter in the unit."""
        part = dtensor(compute.detach(), self.mesh, self.placements, like, requires_grad=False)
        shown = nn.Parameter(part, requires_grad=False)
        to = weakref.ref(unit)  # which has this parameter: what C++ holds no collector sees

        def give_gradient(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:  # autograd calls this, but drops gradients of what is frozen now
                raise _C.InvalidArgument(
                    f"[fully_shard] a split parameter of shape {tuple(parameter.shape)} was frozen (requires_grad) "
                    "between a forward and its backward, while its module showed it gathered: freeze it between steps, "
                    "or call model.reshard() before"
                )
            placements = self._placements_of_gradient(gradient)
            if gradient.placements != placements:
                gradient = gradient.redistribute(placements=placements)
            owner = to()
            assert owner is not None
            owner.add_gradient(number, local_of(gradient))

        shown.requires_grad_()  # only such a tensor takes hooks; it may be unfrozen later
        shown.register_post_accumulate_grad_hook(give_gradient)
        return shown.requires_grad_(like.requires_grad)

    def _placements_of_gradient(self, gradient: DTensor) -> tuple[Placement, ...]:
        """What data-parallel ranks contribute is added up by the engine."""
        data = self.axes.data if self.axes is not None else ()
        return tuple(gradient.placements[i] if i in data else p for i, p in enumerate(self.placements))
