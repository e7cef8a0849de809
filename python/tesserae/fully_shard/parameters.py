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
from tesserae.fsdp.retired import retire
from tesserae.fully_shard.places import Places
from tesserae.fully_shard.split import Split
from tesserae.tensor_parallel.parts import SplitParameter, split_of
from tesserae.torch_compat.fsdp2 import dtensor, local_of, placed_as, set_place
from tesserae.torch_compat.modules import own_parameters

PlacementFn = Callable[[nn.Parameter], Any]

_ORIGIN = "_tesserae_origin"


@dataclass
class Managed:
    """One parameter, under all names that it has in the modules of the call (tied parameters have several)."""

    parameter: nn.Parameter  # a DTensor
    placement: Shard  # of the shards
    origin: object  # the same for what was one parameter before
    shape: torch.Size  # of what the ranks of the mesh share out: less than the parameter's where that was split before
    split: Split | None = None
    part: SplitParameter | None = None  # of which stack of all experts it has this rank's
    entries: list[tuple[nn.Module, str]] = field(default_factory=list)
    compute: nn.Parameter | None = None  # what the engine gathers, while there is one
    shown: nn.Parameter | None = None  # what modules compute with: the same, or a DTensor of it

    @property
    def name(self) -> str:
        module, name = self.entries[0]
        return f"{type(module).__name__}.{name}"


def shard_parameters(
    modules: list[nn.Module],
    ignored: set[nn.Parameter],
    places: Places,
    placement_of: PlacementFn | None,
    offloads: bool,
) -> list[Managed]:
    """Puts a DTensor of this rank's rows in the place of each parameter of `modules` themselves; on the host, if they
    are offloaded."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter not in ignored:
                users.setdefault(parameter, []).append((module, name))
    parameters = [_shard(p, entries, places, placement_of, offloads) for p, entries in users.items()]
    retire(users, "fully_shard(...)")
    return parameters


@torch.no_grad()
def _shard(
    parameter: nn.Parameter,
    entries: list[tuple[nn.Module, str]],
    places: Places,
    placement_of: PlacementFn | None,
    offloads: bool,
) -> Managed:
    name = f"{type(entries[0][0]).__name__}.{entries[0][1]}"
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: {parameter.shape=} {parameter.stride()=}"
        )
    part = split_of(entries) if places.of_experts else None
    split = Split.of(name, parameter, places)
    whole = local_of(parameter) if split is not None else parameter.detach()
    degree = places.degree
    placement = _placement(name, whole, placement_of(parameter) if placement_of is not None else None, degree)
    mesh, placements = _place_of(places, placement, split)
    rows = whole.chunk(degree, placement.dim)
    index = places.fabric.rank % degree
    local = (rows[index] if index < len(rows) else whole.narrow(placement.dim, 0, 0)).clone()
    if offloads and not local.is_meta:
        local = local.cpu()
    like = parameter if part is None else torch.empty(part.whole, dtype=parameter.dtype, device="meta")
    sharded = nn.Parameter(
        dtensor(local, mesh, placements, like, requires_grad=False), requires_grad=parameter.requires_grad
    )
    for module, entry in entries:
        setattr(module, entry, sharded)
    origin = parameter.__dict__.setdefault(_ORIGIN, object())
    return Managed(sharded, placement, origin, whole.shape, split, part, entries)


def _place_of(places: Places, placement: Shard, split: Split | None) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    return (places.mesh, places.placements(placement)) if split is None else split.place(places, placement)


def at_places(managed: Managed, places: Places, local: torch.Tensor) -> DTensor:
    """A DTensor like the parameter of which this rank has `local`, placed as the parameter is at `places`."""
    mesh, placements = _place_of(places, managed.placement, managed.split)
    return dtensor(local, mesh, placements, managed.parameter, requires_grad=False)


def go_to(managed: Managed, places: Places) -> None:
    """The engine has cut the parameter anew, and shows its rows and its gradient: they say so from now on."""
    parameter = managed.parameter
    set_place(parameter, *_place_of(places, managed.placement, managed.split))
    if parameter.grad is not None:
        parameter.grad = placed_as(parameter, local_of(parameter.grad))


def _placement(name: str, whole: torch.Tensor, asked: Any, degree: int) -> Shard:
    if asked is None:
        return Shard(0)
    if not isinstance(asked, Shard):
        raise _C.InvalidArgument(
            f"[fully_shard] shard_placement_fn returned {asked!r} for parameter {name}; tesserae shards all "
            "parameters of a call over one mesh: return a Shard or None"
        )
    dim = asked.dim + whole.ndim if asked.dim < 0 else asked.dim
    if not 0 <= dim < whole.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {whole.ndim}D tensor: {whole.shape}")
    if dim > 0 and whole.size(dim) % degree != 0:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {whole.size()} (world size: {degree})"
        )
    return Shard(dim)


def make_compute(managed: Managed) -> nn.Parameter:
    """What the engine will gather; it has only a shape until then."""
    parameter = managed.parameter
    compute = torch.empty(managed.shape, dtype=parameter.dtype, device="meta")
    managed.compute = managed.shown = nn.Parameter(compute, requires_grad=parameter.requires_grad)
    return managed.compute


def show_split(managed: Managed, unit: _C.Unit, number: int) -> None:
    """Once the engine has the compute parameter: modules see what the mesh of a split parameter makes of it."""
    if managed.split is not None:
        assert managed.compute is not None
        managed.shown = managed.split.make(managed.compute, managed.parameter, unit, number)


def follow(managed: Managed) -> None:
    """The script may freeze a parameter, and unfreeze it; of one that is not split the engine sees to that."""
    shown, wanted = managed.shown, managed.parameter.requires_grad
    if managed.split is not None and shown is not None and shown.requires_grad != wanted:
        shown.requires_grad_(wanted)


def inner_tensors(tensor: torch.Tensor) -> list[str]:
    """Of what attributes a tensor of a class of its own (__torch_dispatch__) is made; [] for one that is dense."""
    return list(tensor.__tensor_flatten__()[0]) if hasattr(tensor, "__tensor_flatten__") else []


def dense_of(tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor has its values: those of a class of its own are in its first inner tensor."""
    inner = inner_tensors(tensor)
    return getattr(tensor, inner[0]) if inner else tensor


def require_rows(managed: Managed) -> None:
    """The engine keeps, updates and moves a parameter's values where dense_of() finds them."""
    local = local_of(managed.parameter)
    values = dense_of(local)
    same = values.shape == local.shape and values.dtype == local.dtype and not inner_tensors(values)
    if not same:
        raise _C.InvalidArgument(
            f"[fully_shard] parameter {managed.name}, a {type(local).__name__} of shape {list(local.shape)} and "
            f"{local.dtype}, keeps a {type(values).__name__} of shape {list(values.shape)} and {values.dtype} as its "
            f"first inner tensor ({inner_tensors(local)[0]}); tesserae trains what is there: let __tensor_flatten__ "
            "name a plain tensor with the parameter's own values first, of its shape and dtype, or pass the parameter "
            "in ignored_params"
        )


def is_empty(parameter: torch.Tensor) -> bool:
    """A sharded parameter on the meta device: it has no values yet."""
    return isinstance(parameter, DTensor) and local_of(parameter).is_meta


def local_values(managed: Managed) -> torch.Tensor:
    """This rank's rows."""
    return dense_of(local_of(managed.parameter).detach())


def entries_of(parameters: list[Managed]) -> list[Entry]:
    """What to swap at the borders of a forward."""
    return [
        (owner_of(module), name, managed.shown, managed.parameter)
        for managed in parameters
        for module, name in managed.entries
    ]


def find_replaced(managed: Managed) -> bool:
    """Takes the parameter that the module has now for ours: load_state_dict(assign=True) puts its own there.

    True if it is another one than before.
    """
    module, name = managed.entries[0]
    now = own_parameters(module).get(name)
    if now is managed.parameter or now is managed.shown:
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
