"""FSDP2 without its engine: the state that torch hangs on a module, the module's new class, and DTensors made of what
a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

from tesserae.torch_compat.checked import checked, require
from tesserae.torch_compat.moving import can_move_in_place, replace_tensors

with checked():
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter
    from torch.distributed._composable_state import _insert_module_state
    from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
    from torch.distributed.fsdp._fully_shard._fsdp_init import (
        _get_device_from_mesh,
        _get_managed_modules,
        _get_managed_states,
        _move_states_to_device,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import (
        FSDPState,
        _get_module_fsdp_state,
    )
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.distributed.utils import _apply_to_tensors, _get_root_modules

require(torch_fully_shard, "__wrapped__", "state")
require(TorchFSDPModule, "_get_fsdp_state", "_apply")

__all__ = ["FSDPState", "TorchFSDPModule", "torch_fully_shard"]

# What @contract wraps: the wrapper checks that names stay, and makes a state.
function = torch_fully_shard.__wrapped__

_classes: dict[tuple[type, type], type] = {}


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of the fully_shard call that the module was an argument of."""
    return _get_module_fsdp_state(module)


def new_state(module: nn.Module, cls: type[FSDPState]) -> Any:
    """The state that @contract has made for the call that runs, as one of `cls`."""
    state = torch_fully_shard.state(module)
    state.__class__ = cls
    return state


def root_modules(module: nn.Module | Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    return (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))


def managed_modules(modules: tuple[nn.Module, ...], ignored: set[nn.Parameter] | None) -> list[nn.Module]:
    """The modules below, without what a fully_shard call further in has, and what another composable API has."""
    return _get_managed_modules(modules, ignored)


def move_states(modules: list[nn.Module], ignored: set[nn.Parameter] | None, device: torch.device) -> None:
    """Moves parameters and buffers to where ranks compute; refuses parameters without dimensions."""
    parameters, buffers = _get_managed_states(modules, ignored)
    if not can_move_in_place(device):
        elsewhere = {tensor for tensor in (*parameters, *buffers) if tensor.device.type not in (device.type, "meta")}
        replace_tensors(modules, device, elsewhere.__contains__)
        parameters, buffers = _get_managed_states(modules, ignored)
    _move_states_to_device(parameters, buffers, device)


def device_of(mesh: DeviceMesh) -> torch.device:
    return _get_device_from_mesh(mesh)


def add_hooks(
    state: Any, modules: tuple[nn.Module, ...], before: Callable, after: Callable, after_any: Callable
) -> None:
    """`before` and `after` around the forward of each of the modules, which have the state; `after_any` behind `after`,
    and where the forward threw."""
    for module in modules:
        _insert_module_state(module, state)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, prepend=False)
        module.register_forward_hook(after_any, prepend=False, always_call=True)


def mark_for_compiler(modules: Iterable[nn.Module], use_orig_params: bool = True) -> None:
    """torch.compile treats their parameters as those of FSDP, and so do libraries."""
    for module in modules:
        module._is_fsdp_managed_module = True
        module._fsdp_use_orig_params = use_orig_params


def before_state_dicts(modules: Iterable[nn.Module], call: Callable[[], None]) -> None:
    """`call` runs before the modules' entries are saved or loaded."""
    for module in modules:
        module.register_state_dict_pre_hook(lambda *_: call())
        module.register_load_state_dict_pre_hook(lambda *_: call())


def change_class(module: nn.Module, first: type) -> None:
    """The module's class derives from `first`, and then from what it was."""
    was = type(module)
    key = (was, first)
    if key not in _classes:
        _classes[key] = type(f"FSDP{was.__name__}", (first, was), {"__deepcopy__": _no_deepcopy})
    module.__class__ = _classes[key]


def _no_deepcopy(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def cast_tensors(dtype: torch.dtype, value: Any) -> Any:
    """Floating point tensors, wherever they are in what a forward takes or returns, in that dtype."""
    return _apply_to_tensors(lambda tensor: _cast_fp_tensor(dtype, tensor), value)


def dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], like: torch.Tensor, requires_grad: bool
) -> DTensor:
    """The DTensor of `like`'s shape whose part on this rank is `local`: no copy, no check, no communication."""
    meta = TensorMeta(like.size(), like.stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=requires_grad)


def placed_as(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """The DTensor of which this rank has `local`, placed as `parameter` is. They share a description, as in torch's
    FSDP2: to make one takes longer than all else that a unit does in Python."""
    spec = parameter._spec
    if spec.tensor_meta.dtype == local.dtype:
        # What __init__ adds is a guard against the compiler.
        return DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return dtensor(local, spec.mesh, spec.placements, parameter, requires_grad=False)


def set_place(parameter: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """The DTensor is placed otherwise; its local tensor has changed already."""
    parameter._spec = DTensorSpec(mesh, placements, tensor_meta=parameter._spec.tensor_meta)


def with_axis(
    mesh: DeviceMesh, placements: tuple[Placement, ...], inner: DeviceMesh, inner_placements: tuple[Placement, ...]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """`inner` as further dimensions of `mesh`: what that cuts are the parts of the inner placements, also where both
    cut one dimension."""
    dims = range(inner.ndim)
    outer = (shard_within(p, inner, inner_placements, dims) if isinstance(p, Shard) else p for p in placements)
    return DeviceMesh._concatenate([mesh, inner]), (*outer, *inner_placements)


def shard_within(
    placement: Shard, mesh: DeviceMesh, placements: tuple[Placement, ...], dims: Iterable[int]
) -> Placement:
    """`placement` of what `dims` of the mesh have cut before."""
    parts = math.prod(mesh.size(i) for i in dims if placements[i].is_shard(placement.dim))
    return _StridedShard(placement.dim, split_factor=parts) if parts > 1 else placement


def flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """These dimensions of a mesh as one. Collective at the first call."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def reshaped(mesh: DeviceMesh, shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    """The ranks of a mesh in another shape, of dimensions of these names. Of a part of a mesh it stays a part, to which
    others can be joined."""
    if mesh._get_root_mesh() is mesh or mesh.mesh_dim_names is None:
        return DeviceMesh(mesh.device_type, mesh.mesh.flatten().view(shape), mesh_dim_names=names)
    name = "_".join(mesh.mesh_dim_names)
    line = mesh if mesh.ndim == 1 else mesh._flatten(name)
    if len(shape) == 1:
        return line
    assert names is not None
    return line._unflatten(0, shape, tuple(f"{name}_{each}" for each in names))


def concatenated(*meshes: DeviceMesh) -> DeviceMesh:
    return DeviceMesh._concatenate(list(meshes))


def keep_version(tensor: torch.Tensor) -> Any:
    """Inside, what is written to the tensor is no change to autograd: it gets the values that it had."""
    return _unsafe_preserve_version_counter(tensor)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor: the tensor itself."""
    return parameter._local_tensor
