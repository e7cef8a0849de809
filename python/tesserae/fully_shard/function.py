"""fully_shard of tesserae."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from tesserae import _C
from tesserae.fsdp.instance import Instance
from tesserae.fully_shard.engine import prepare
from tesserae.fully_shard.module import FSDPModule
from tesserae.fully_shard.parameters import shard_parameters
from tesserae.fully_shard.places import AllAxes, find_places
from tesserae.fully_shard.state import State, frees_after_forward, ours, states_below
from tesserae.job.fabrics import tensor_degree
from tesserae.tensor_parallel.parts import SplitModule, holds_experts
from tesserae.torch_compat.fsdp2 import (
    add_hooks,
    before_state_dicts,
    change_class,
    managed_modules,
    mark_for_compiler,
    move_states,
    new_state,
    root_modules,
    state_of,
    torch_fully_shard,
)
from tesserae.torch_compat.instance import TorchFSDP

_AS_IT_IS, _ON_THE_DEVICE = MixedPrecisionPolicy(), OffloadPolicy()


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _AS_IT_IS,
    offload_policy: OffloadPolicy = _ON_THE_DEVICE,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> nn.Module | list[nn.Module]:
    """torch.distributed.fsdp.fully_shard on the engine of tesserae; the arguments are torch's.

    The parameters of `module` (one, or a group that is gathered together) that no call further in has become DTensors
    of this rank's rows. Collective over the mesh at the first call for it.

    Errors: InvalidArgument, or what torch raises, for what cannot work; all say what to do.
    """
    modules = root_modules(module)
    _require_types(modules, mesh, mp_policy, offload_policy)
    for each in modules:
        _require_plain(each)
        _require_no_tensor_parts(each)
    axes = AllAxes.of(mesh, dp_mesh_dims) if dp_mesh_dims is not None else None
    if axes is not None and _is_number(reshard_after_forward):
        raise NotImplementedError("reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)")
    places = find_places(mesh, frees_after_forward(reshard_after_forward), axes)
    _require_group(reshard_after_forward, places.given.size(places.given.ndim - 1))
    ignored = ignored_params if ignored_params is not None else set()
    if any(holds_experts(each) for each in modules):
        _require_alone(modules)
        places = places.for_experts()
    # A call of their own, since fewer ranks share out what they have. The layer around casts what goes in.
    inside = replace(mp_policy, cast_forward_inputs=False, output_dtype=None)
    for experts in _experts_below(modules, ignored):
        torch_fully_shard(
            experts,
            mesh=mesh,
            reshard_after_forward=frees_after_forward(reshard_after_forward),
            shard_placement_fn=shard_placement_fn,
            mp_policy=inside,
            offload_policy=offload_policy,
            ignored_params=ignored_params,
            dp_mesh_dims=dp_mesh_dims,
        )
    managed = managed_modules(modules, ignored_params)
    move_states(managed, ignored, places.device)
    offloads = isinstance(offload_policy, CPUOffloadPolicy)
    parameters = shard_parameters(managed, ignored, places, shard_placement_fn, offloads)
    state = new_state(modules[0], State)
    state.begin(modules, places, parameters, mp_policy, offloads, reshard_after_forward)
    state.prepare = prepare
    for inner in states_below(modules):
        inner.outermost = state
    before_state_dicts({m for p in parameters for m, _ in p.entries}, state.show_shards)
    add_hooks(state, modules, state.before_forward, state._post_forward, state._after_any_forward)
    mark_for_compiler(managed)
    for each in modules:
        change_class(each, FSDPModule)
    return module


def _require_types(modules: tuple[nn.Module, ...], mesh: Any, mp_policy: Any, offload_policy: Any) -> None:
    if not modules:
        raise _C.InvalidArgument("[fully_shard] an empty list of modules; pass a module, or those of a group")
    wanted = (
        ("mesh", mesh, (DeviceMesh, type(None)), "DeviceMesh (init_device_mesh makes one) or None"),
        ("mp_policy", mp_policy, MixedPrecisionPolicy, "MixedPrecisionPolicy"),
        ("offload_policy", offload_policy, (OffloadPolicy, type(None)), "OffloadPolicy or None"),
    )
    for name, value, types, text in wanted:
        if not isinstance(value, types):
            raise _C.InvalidArgument(f"[fully_shard] {name} is {value!r}, a {type(value).__name__}; pass a {text}")


def _require_plain(module: nn.Module) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
    for path, part in module.named_modules():
        if isinstance(part, Instance):
            raise _C.InvalidArgument(
                f"[fully_shard] {path or 'the module'} is wrapped by FullyShardedDataParallel; use one of the two for "
                "the whole model"
            )
        if isinstance(part, TorchFSDP) or (state_of(part) is not None and ours(part) is None):
            raise _C.InvalidArgument(
                f"[fully_shard] {path or 'the module'} was sharded by torch's own FSDP, from before tsm.init(): half "
                "of the model would train on one engine, half on another. Call tsm.init() before the model is sharded"
            )


def _require_no_tensor_parts(module: nn.Module) -> None:
    """The ranks of a mesh have different ones, which they would take for rows of the same."""
    for path, part in module.named_modules() if tensor_degree() > 1 else ():
        if isinstance(part, SplitModule) and not all(split.repeated for split in part._tesserae_splits.values()):
            raise _C.InvalidArgument(
                f"[fully_shard] {path or 'the module'}, a {type(part).__name__}, is split over tensor-parallel ranks "
                "by tsm.transform: wrap the model by FullyShardedDataParallel, or split layers by torch's "
                "parallelize_module"
            )


def _require_alone(modules: tuple[nn.Module, ...]) -> None:
    if len(modules) > 1:
        raise _C.InvalidArgument(
            f"[fully_shard] a group of {len(modules)} modules with experts that ranks share out: these are gathered "
            "from other ranks; call fully_shard on them by themselves"
        )


def _experts_below(modules: tuple[nn.Module, ...], ignored: set[nn.Parameter]) -> list[nn.Module]:
    """What no call has sharded yet."""
    below = dict.fromkeys(part for each in modules for part in each.modules() if part not in modules)
    return [
        part
        for part in below
        if holds_experts(part) and state_of(part) is None and not all(p in ignored for p in part.parameters())
    ]


def _is_number(reshard_after_forward: Any) -> bool:
    return isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)


def _require_group(reshard_after_forward: Any, ranks: int) -> None:
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return
    if not isinstance(reshard_after_forward, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
            f"{reshard_after_forward}"
        )
    if reshard_after_forward < 1 or ranks % reshard_after_forward != 0:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {ranks}, not {reshard_after_forward}"
        )
