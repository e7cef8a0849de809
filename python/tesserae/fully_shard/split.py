"""Parameters that were split before they are sharded: DTensors on another mesh than that of the shards, as
parallelize_module makes them for tensor parallelism.

What the ranks of the mesh share out is each rank's part. Modules compute with a DTensor of the gathered part; its
gradient, placed as the parameter was, goes to the engine.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from tesserae import _C
from tesserae.torch_compat.fsdp2 import dtensor, local_of


@dataclass(frozen=True)
class Split:
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> Split | None:
        """How the parameter is split; None if it is not."""
        if not isinstance(parameter, DTensor):
            return None
        names = set(mesh.mesh_dim_names or ()) & set(parameter.device_mesh.mesh_dim_names or ())
        if parameter.device_mesh == mesh or names:
            raise _C.InvalidArgument(
                f"[fully_shard] parameter {name} is a DTensor of {parameter.device_mesh} already, on the mesh over "
                f"which it would be sharded ({mesh}): it was sharded before. Call fully_shard once for each parameter, "
                "with the data-parallel dimension of the mesh"
            )
        return cls(parameter.device_mesh, tuple(parameter.placements))

    def make(self, compute: nn.Parameter, like: DTensor, unit: _C.Unit, number: int) -> nn.Parameter:
        """The DTensor of a gathered part; `number`: of the parameter in the unit."""
        part = dtensor(compute.detach(), self.mesh, self.placements, like, requires_grad=False)
        shown = nn.Parameter(part, requires_grad=like.requires_grad)

        to = weakref.ref(unit)  # which has this parameter: what C++ holds no collector sees

        def give_gradient(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient.placements != self.placements:
                gradient = gradient.redistribute(placements=self.placements)
            owner = to()
            assert owner is not None
            owner.add_gradient(number, local_of(gradient))

        if like.requires_grad:
            shown.register_post_accumulate_grad_hook(give_gradient)
        return shown
