"""All-gather extensions of FSDP2: parameters that say themselves what travels and what is computed with, by
`fsdp_pre_all_gather` and `fsdp_post_all_gather` of the tensor that holds this rank's rows.

1. When a unit is made: attach() tells the engine of those parameters.
2. Each gather: the tensor's own inputs travel; what it makes of the outputs takes the module's entry. The first time
   that is a new parameter, later the same one in the same memory, which comes and goes.
3. Its gradient, as a dense tensor, goes to the engine.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tesserae import _C
from tesserae.fully_shard import parameters as faces
from tesserae.fully_shard.places import Places
from tesserae.torch_compat.fsdp2 import keep_version, local_of

if TYPE_CHECKING:
    from tesserae.fully_shard.state import State

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def attach(state: State) -> list[faces.Managed]:
    """1.: the parameters that extend their gathers."""
    extended = []
    for number, managed in enumerate(state.parameters):
        if not _extends(managed):
            continue
        _require_possible(managed)
        extended.append(managed)
        assert state.unit is not None
        _C.extend_gather(state.unit, number, _Extension(state, number))
    return extended


def require_recut(state: State) -> None:
    """Before the dial turns: raises InvalidArgument where a parameter has values that the engine does not move."""
    for managed in state.parameters:
        inner = faces.inner_tensors(local_of(managed.parameter))
        if len(inner) > 1:
            raise _C.InvalidArgument(
                f"[tsm.reshard] parameter {managed.name} holds {len(inner)} tensors ({', '.join(inner)}), of which the "
                "engine has the first: degrees cannot change. Train it at the degrees of its first step"
            )


class _Extension:
    """Of one parameter; C++ calls inputs() and make(). It must not keep the state alive: what C++ holds no collector
    sees."""

    def __init__(self, state: State, number: int) -> None:
        self._state = weakref.ref(state)
        self._number = number
        self._metadata: Any = None
        self._mesh: tuple[Places, DeviceMesh] | None = None
        self._hooked = False  # what is shown gives its gradient away

    @torch.no_grad()
    def inputs(self) -> list[Tensor]:
        state, managed = self._owner()
        local = local_of(managed.parameter)
        if local.device != state.places.device:
            local = local.to(state.places.device)
        call = getattr(local, _PRE)
        mesh = self._shard_mesh(state)
        if len(inspect.signature(call).parameters) == 1:
            inputs, self._metadata = call(mesh)
        else:
            shape, stride = managed.parameter.shape, managed.parameter.stride()
            inputs, self._metadata = call(mesh, shape, stride, managed.entries[0][0], state.policy)
            _require_padded(managed, local, inputs, mesh.size())
        return [_as_dense(tensor) for tensor in inputs]

    @torch.no_grad()
    def make(self, outputs: list[Tensor], first: bool) -> list[Tensor]:
        state, managed = self._owner()
        metadata, self._metadata = self._metadata, None
        call = getattr(local_of(managed.parameter), _POST)
        dtype = state.policy.param_dtype or managed.parameter.dtype
        if not first:
            assert managed.shown is not None
            self._follow(managed, managed.shown)
            with keep_version(managed.shown):
                call(tuple(outputs), metadata, dtype, out=managed.shown)
            return []
        made = call(tuple(outputs), metadata, dtype)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], Tensor):
            raise _C.InvalidArgument(
                f"[fully_shard] {_POST} of parameter {managed.name} returned {type(made).__name__}; return (the whole "
                "tensor, the tensors that hold its memory) where `out` is None"
            )
        whole, inner = made
        self._show(state, managed, whole)
        return list(inner)

    def _show(self, state: State, managed: faces.Managed, whole: Tensor) -> None:
        """2., the first time; outputs may have rows of padding."""
        parameter, unit = managed.parameter, state.unit
        assert unit is not None
        whole = torch.as_strided(whole, parameter.shape, parameter.stride(), 0)
        managed.shown = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        self._hooked = False
        self._follow(managed, managed.shown)
        unit.set_entries(faces.entries_of(state.parameters), while_gathered=True)

    def _follow(self, managed: faces.Managed, shown: nn.Parameter) -> None:
        """The script may freeze the parameter, and unfreeze it."""
        wanted = managed.parameter.requires_grad
        if shown.requires_grad != wanted and not _C.in_backward():
            shown.requires_grad_(wanted)
        if shown.requires_grad and not self._hooked:
            shown.register_post_accumulate_grad_hook(_giver(self._state, self._number))
            self._hooked = True

    def _shard_mesh(self, state: State) -> DeviceMesh:
        if self._mesh is None or self._mesh[0] is not state.places:
            self._mesh = state.places, state.places.shard_mesh
        return self._mesh[1]

    def _owner(self) -> tuple[State, faces.Managed]:
        state = self._state()
        assert state is not None
        return state, state.parameters[self._number]


def _giver(of: weakref.ref[State], number: int) -> Callable[[Tensor], None]:
    """3. Autograd's graph keeps it, and may outlive the model."""

    @torch.no_grad()
    def give_gradient(shown: Tensor) -> None:
        gradient, shown.grad = shown.grad, None
        state = of()
        if state is None or state.unit is None or state.parameters[number].shown is not shown:
            raise _C.InvalidArgument(
                "[fully_shard] the backward of a forward whose model is gone, or from before a change of degrees, has "
                "reached a parameter that extends its all-gather: such a graph ends there. Call backward() before"
            )
        assert gradient is not None
        state.unit.add_gradient(number, _as_dense(gradient))

    return give_gradient


def _extends(managed: faces.Managed) -> bool:
    tensor = local_of(managed.parameter)
    has = [name for name in (_PRE, _POST) if hasattr(tensor, name)]
    if len(has) == 1:
        missing = _POST if has == [_PRE] else _PRE
        raise _C.InvalidArgument(
            f"[fully_shard] parameter {managed.name}, a {type(tensor).__name__}, has {has[0]} and no {missing}: define "
            "both, or neither"
        )
    return bool(has)


def _require_possible(managed: faces.Managed) -> None:
    if managed.split is not None or managed.part is not None:
        what, advice = "was split over other axes before", "shard it without tensor or expert parallelism"
    elif managed.placement.dim != 0:
        what, advice = f"is sharded by dimension {managed.placement.dim}", "leave it out of shard_placement_fn"
    else:
        return
    kind = type(local_of(managed.parameter)).__name__
    raise _C.InvalidArgument(
        f"[fully_shard] parameter {managed.name}, a {kind}, extends its all-gather ({_PRE}) and {what}; {advice}"
    )


def _require_padded(managed: faces.Managed, local: Tensor, inputs: Any, ranks: int) -> None:
    """Ranks with fewer rows bring as many as the others: the all-gather is of equal parts."""
    shape = managed.parameter.shape
    padded = torch.Size((math.ceil(shape[0] / ranks), *shape[1:]))
    sizes = [tensor.size() for tensor in inputs]
    if local.size() != padded and any(size != padded for size in sizes):
        raise _C.InvalidArgument(
            f"[fully_shard] parameter {managed.name} of shape {list(shape)} is sharded unevenly over {ranks} ranks, "
            f"and {_PRE} returned {[list(size) for size in sizes]}; return the padded size on all, {list(padded)}"
        )


def _as_dense(tensor: Tensor) -> Tensor:
    """A tensor of torch's own class with the same values."""
    if isinstance(tensor, DTensor):
        tensor = local_of(tensor)
    if type(tensor) is Tensor:
        return tensor
    dense = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    dense.copy_(tensor)
    return dense
