"""The parameters of one fully_shard call.

Outside of a step a module's entry is a DTensor: this rank's rows, which an optimizer updates, in the engine's own
memory. Inside the module's forward and backward it is the compute parameter, a view of the gathered buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from tesserae import _C
from tesserae.fsdp.parameters import Entry, owner_of
from tesserae.fully_shard.places import Places
from tesserae.torch_compat.fsdp2 import dtensor, local_of
from tesserae.torch_compat.modules import own_parameters

PlacementFn = Callable[[nn.Parameter], Any]

_ORIGIN = "_tesserae_origin"


@dataclass
class Managed:
    """One parameter, under all names that it has in the modules of the call (tied parameters have several)."""

    parameter: nn.Parameter  # a DTensor
    placements: tuple[Placement, ...]
    origin: object  # the same for what was one parameter before
    entries: list[tuple[nn.Module, str]] = field(default_factory=list)
    compute: nn.Parameter | None = None  # while there is an engine

    @property
    def name(self) -> str:
        module, name = self.entries[0]
        return f"{type(module).__name__}.{name}"


def shard_parameters(
    modules: list[nn.Module], ignored: set[nn.Parameter], places: Places, placement_of: PlacementFn | None
) -> list[Managed]:
    """Puts a DTensor of this rank's rows in the place of each parameter of `modules` themselves."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter not in ignored:
                users.setdefault(parameter, []).append((module, name))
    return [_shard(parameter, entries, places, placement_of) for parameter, entries in users.items()]


@torch.no_grad()
def _shard(
    parameter: nn.Parameter,
    entries: list[tuple[nn.Module, str]],
    places: Places,
    placement_of: PlacementFn | None,
) -> Managed:
    name = f"{type(entries[0][0]).__name__}.{entries[0][1]}"
    if isinstance(parameter, DTensor):
        raise _C.InvalidArgument(
            f"[fully_shard] parameter {name} is a DTensor already, of mesh {parameter.device_mesh}: it was sharded "
            "before, or split by parallelize_module. Split layers by tsm.transform "
            '({"tensor_parallel_degree": T} in tsm.init) instead'
        )
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: {parameter.shape=} {parameter.stride()=}"
        )
    placement = _placement(name, parameter, placement_of)
    placements = places.placements(placement)
    degree = places.strategy.degrees[2]
    rows = parameter.detach().chunk(degree) if degree > 1 else (parameter.detach(),)
    index = places.fabric.rank % degree
    local = rows[index].clone() if index < len(rows) else parameter.detach()[:0].clone()
    sharded = nn.Parameter(
        dtensor(local, places.mesh, placements, parameter, requires_grad=False), requires_grad=parameter.requires_grad
    )
    for module, entry in entries:
        setattr(module, entry, sharded)
    return Managed(sharded, placements, parameter.__dict__.setdefault(_ORIGIN, object()), entries)


def _placement(name: str, parameter: nn.Parameter, placement_of: PlacementFn | None) -> Shard:
    asked = placement_of(parameter) if placement_of is not None else None
    if asked is None:
        return Shard(0)
    if not isinstance(asked, Shard):
        raise _C.InvalidArgument(
            f"[fully_shard] shard_placement_fn returned {asked!r} for parameter {name}; tesserae shards all "
            "parameters of a call over one mesh: return a Shard or None"
        )
    dim = asked.dim + parameter.ndim if asked.dim < 0 else asked.dim
    if dim != 0:
        raise _C.InvalidArgument(
            f"[fully_shard] shard_placement_fn returned {asked!r} for parameter {name} of shape "
            f"{list(parameter.shape)}: tesserae cuts rows, Shard(0); leave it out, or call tsm.uninstall()"
        )
    return Shard(0)


def make_compute(managed: Managed) -> nn.Parameter:
    """What the module will compute with; it has only a shape until the engine has it."""
    parameter = managed.parameter
    compute = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    managed.compute = nn.Parameter(compute, requires_grad=parameter.requires_grad)
    return managed.compute


def local_values(managed: Managed) -> torch.Tensor:
    """This rank's rows. Raises InvalidArgument if they are on the meta device."""
    local = local_of(managed.parameter)
    if local.is_meta:
        raise _C.InvalidArgument(
            f"[fully_shard] parameter {managed.name} is on the meta device: call to_empty(device=...) on the model and "
            "give parameters values before the first forward"
        )
    return local.detach()


def entries_of(parameters: list[Managed]) -> list[Entry]:
    """What to swap at the borders of a forward."""
    return [
        (owner_of(module), name, managed.compute, managed.parameter)
        for managed in parameters
        for module, name in managed.entries
    ]


def find_replaced(managed: Managed) -> bool:
    """Takes the parameter that the module has now for ours: load_state_dict(assign=True) puts its own there.

    True if it is another one than before.
    """
    module, name = managed.entries[0]
    now = own_parameters(module).get(name)
    if now is managed.parameter or now is managed.compute:
        return False
    before = managed.parameter
    if not isinstance(now, DTensor) or now.shape != before.shape or now.placements != before.placements:
        kind = f"{type(now).__name__} of shape {list(now.shape)}" if isinstance(now, torch.Tensor) else repr(now)
        raise _C.InvalidArgument(
            f"[fully_shard] parameter {managed.name} was replaced by a {kind}; put a DTensor of shape "
            f"{list(before.shape)} with placements {before.placements} there, or copy into the parameter"
        )
    managed.parameter = now
    for module, name in managed.entries:
        setattr(module, name, now)
    return True


@torch.no_grad()
def copy_values(source: torch.Tensor, target: torch.Tensor) -> None:
    """This rank's rows of one DTensor into another of the same placement."""
    local_of(target).copy_(local_of(source))


def names_in(module: nn.Module, parameters: list[Managed]) -> list[list[str]]:
    """The names of parameters, from `module` down; of those of a group's other modules the modules' class."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [names.get(m.parameter, [m.name]) for m in parameters]


def gradient_maker(mesh: DeviceMesh) -> Callable[[DTensor, torch.Tensor], DTensor]:
    """(parameter, what this rank has of its gradient) -> the gradient."""
    return lambda parameter, local: dtensor(local, mesh, parameter.placements, parameter, requires_grad=False)
