"""The constructor of an FSDP instance. Instances are made inside out: each constructor adopts the units inside it, and
the outermost one is the root.

 1. What is left out; where to compute; who takes part.
 2. The modules that the policy names are wrapped, with the same arguments; and experts that ranks share out, which are
    sharded over fewer ranks than what is around them.
 3. Parameters on the meta device get values; what must be moved is moved; rank 0's values go to all if asked for.
 4. The engine gets the parameters; modules show this rank's slices from then on (parameters.py).
 5. The units inside are adopted. If nobody is around, the ranks compare what they have built.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from tesserae import _C
from tesserae.fsdp import parameters as faces
from tesserae.fsdp.arguments import Arguments
from tesserae.fsdp.groups import connect, groups_of, require_one_tensor_index, require_whole_job
from tesserae.fsdp.instance import Instance, instances_below
from tesserae.fsdp.layers import compute_gradients_in_place, require_dense_gradients
from tesserae.fsdp.retired import retire
from tesserae.job import activations, config
from tesserae.job.state import state
from tesserae.tensor_parallel import adapters
from tesserae.tensor_parallel.parts import cutting, holds_experts, split_of
from tesserae.torch_compat import construction as torch_construction
from tesserae.torch_compat.distributed import broadcast_from_first
from tesserae.torch_compat.flat_parameters import mark_flat_parameter, mark_flattened
from tesserae.torch_compat.fsdp2 import mark_for_compiler, state_of
from tesserae.torch_compat.instance import (
    TorchFSDP,
    begin_state_dicts,
    ignored_modules,
    ignored_parameters,
    make_handle,
    remember_buffers,
    strategy_named,
    uses_orig_params,
    wrap,
)
from tesserae.torch_compat.modules import own_modules, own_parameters
from tesserae.torch_compat.parameters import steps_in_backward


class _Construction(threading.local):
    """The outermost constructor that runs on this thread."""

    root: nn.Module | None = None
    # How many entries of modules show a parameter. Weak: parameters that are replaced meanwhile go.
    uses = WeakIdKeyDictionary()


_construction = _Construction()


def construct(instance: Instance, module: nn.Module, arguments: Arguments, auto_wrap_policy: Any) -> None:
    # 1.
    _require_unsharded(module)
    adapters.require_none(module)
    device = arguments.device(module)
    named = arguments.sharding_strategy or ShardingStrategy.FULL_SHARD
    fabric, strategy = connect(named, arguments.process_group, arguments.device_mesh, device)
    instance.sharding_strategy = named if config.leaves_degrees() else strategy_named(strategy, fabric.size)
    instance.compute_device = device
    instance.mixed_precision = arguments.mixed_precision or MixedPrecision()
    instance.cpu_offload = arguments.cpu_offload or CPUOffload()
    group, instance._everyone = groups_of(arguments.process_group, arguments.device_mesh)
    instance.process_group = group if group is not None else dist.group.WORLD
    instance.rank, instance.world_size = fabric.rank, fabric.size
    with _construct(module) as outermost:
        # 2.
        shared = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
        shared["ignored_states"] = ignored_parameters(instance)
        if auto_wrap_policy is not None:
            torch_construction.auto_wrap(instance, module, auto_wrap_policy, shared)
        _wrap_experts(instance, module, shared)
        left_alone = ignored_modules(instance)
        # Libraries ask for it, too: ranks generate for as long as the slowest, and leave out no layers.
        mark_for_compiler((m for m in module.modules() if m not in left_alone), arguments.use_orig_params)
        # 3.
        wrap(instance, module)
        torch_construction.materialize(instance, module, device, cutting(arguments.param_init_fn))
        remember_buffers(instance, module)
        inner = instances_below(module)
        instance._managed = _find_parameters(instance, module, inner)
        instance._computes = bool(instance._managed) or _has_left_some(instance, module, inner)
        instance._holds_experts = any(holds_experts(part) for m in instance._managed for part, _ in m.entries)
        if arguments.sync_module_states:
            _sync_from_rank_zero(instance, module)
        if arguments.post_param_init_fn is not None:
            arguments.post_param_init_fn(module)
        # 4.
        _shard(instance, module, fabric, arguments.options(strategy, device))
        begin_state_dicts(instance)
        # 5.
        for path, child in inner.items():
            if child._unit.is_root:
                instance._unit.adopt(child._unit, path)
        if outermost:
            instance._unit.require_agreement()


def _wrap_experts(instance: Instance, module: nn.Module, shared: dict[str, Any]) -> None:
    """What a policy has wrapped stays as it is. Inputs come in the dtype in which the router and the layer around
    compute, and are not cast again: weights of choices may be fp32 beside activations in bf16."""
    ignored = ignored_modules(instance)
    precision = dataclasses.replace(instance.mixed_precision, cast_forward_inputs=False)
    made: dict[nn.Module, nn.Module] = {}
    for part in list(module.modules()):
        for name, child in list(own_modules(part).items()):
            if isinstance(part, Instance) or child is None or child in ignored or not holds_experts(child):
                continue
            if child not in made:
                made[child] = type(instance)(child, **shared | {"mixed_precision": precision})
            setattr(part, name, made[child])


def _require_unsharded(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, TorchFSDP) and not isinstance(part, Instance):
            raise _C.InvalidArgument(
                f"[FSDP] {path} is wrapped by torch's own FSDP, from before tsm.init(): half of the model would train "
                "on one engine, half on another. Call tsm.init() before the model is wrapped"
            )
        if state_of(part) is not None:
            raise _C.InvalidArgument(
                f"[FSDP] {path or 'the module'} was sharded by fully_shard; use one of the two for the whole model"
            )


@contextmanager
def _construct(module: nn.Module) -> Generator[bool]:
    """True if no other constructor is running around this one."""
    outermost = _construction.root is None
    if outermost:
        _construction.root = module
        _construction.uses = _uses_in(module)
    try:
        yield outermost
    finally:
        if outermost:
            _construction.root, _construction.uses = None, WeakIdKeyDictionary()


def _uses_in(module: nn.Module) -> WeakIdKeyDictionary:
    uses = WeakIdKeyDictionary()
    for part in module.modules():
        for parameter in own_parameters(part).values():
            if parameter is not None:
                uses[parameter] = uses.get(parameter, 0) + 1
    return uses


def _find_parameters(instance: Instance, module: nn.Module, inner: dict[str, Instance]) -> list[faces.Managed]:
    instances = {instance, *inner.values()}
    skip = {part for each in instances for part in ignored_modules(each)}
    ignored = {parameter for each in instances for parameter in ignored_parameters(each)}
    managed = [m for m in faces.find_parameters(module, skip, ignored, {*inner.values()}) if _is_ours_alone(m)]
    for m in managed:
        if isinstance(m.parameter, DTensor):
            raise _C.InvalidArgument(
                f"[FSDP] parameter {m.names[0]} is a DTensor, as torch's parallelize_module makes it: FSDP cannot "
                "shard it further here. Use fully_shard, or let tsm.transform split the layers (tensor_parallel_degree)"
            )
        if faces.is_managed(m.parameter):
            raise _C.InvalidArgument(
                f"[FSDP] parameter {m.names[0]} belongs to an FSDP instance already: its module was wrapped twice, or "
                "it is tied to a parameter inside another instance. Wrap each module once, and let one instance "
                "enclose all modules that share a parameter"
            )
    devices = {m.parameter.device for m in managed}
    if len(devices) > 1:
        raise _C.InvalidArgument(
            f"[FSDP] parameters of one module are on several devices ({', '.join(sorted(map(str, devices)))}); move "
            "the module to one device first, or pass device_id"
        )
    return managed


def _has_left_some(instance: Instance, module: nn.Module, inner: dict[str, Instance]) -> bool:
    """It computes with parameters of which an instance around it will have all."""
    skip = {*inner.values(), *ignored_modules(instance)}
    return bool(faces.find_parameters(module, skip, ignored_parameters(instance)))


def _is_ours_alone(managed: faces.Managed) -> bool:
    """False for a parameter that is also used outside of the unit: the instance that encloses all of its users owns
    it."""
    uses = _construction.uses.get(managed.parameter, 0)  # 0: made since then, by param_init_fn
    return uses <= len(managed.entries)


def _sync_from_rank_zero(instance: Instance, module: nn.Module) -> None:
    states = [m.parameter.detach() for m in instance._managed]
    states += torch_construction.buffers_to_synchronise(module)
    if instance._holds_experts and any(getattr(part, "_tesserae_own_values", False) for part in module.modules()):
        raise _C.InvalidArgument(
            "[FSDP] sync_module_states=True: other ranks have other experts than rank 0, and nobody has given them "
            "rank 0's values; pass load_state_dict_from_rank0=True to tsm.transform, or leave sync_module_states out "
            "if every rank has loaded the same values"
        )
    everyone = state.exp_dp_process_group if instance._holds_experts else instance._everyone
    broadcast_from_first(states, everyone or dist.group.WORLD)


def _shard(instance: Instance, module: nn.Module, fabric: _C.Fabric, options: _C.Options) -> None:
    managed = instance._managed
    for m in managed:
        if m.parameter.requires_grad:
            require_dense_gradients("FSDP", m.names[0], m.entries)
        if steps_in_backward(m.parameter):
            raise _C.InvalidArgument(
                f"[FSDP] parameter {m.names[0]} has an optimizer that steps in the backward "
                "(_apply_optimizer_in_backward), before gradients are reduced: give the optimizer the parameters of "
                "the wrapped model, and call its step()"
            )
    compute = [faces.make_compute(m, as_parameter=uses_orig_params(instance)) for m in managed]
    instance._unit = unit = _C.Unit(fabric, options, [m.names for m in managed], compute, _splits(instance))
    activations.attach(unit)
    instance._flats = _C.flat_buffers(unit)
    if uses_orig_params(instance):
        local = [[managed[i].parameter for i in order] for order in unit.flats]
        unit.set_entries(faces.entries_of(managed))
        for m in managed:
            mark_flattened(m.parameter)
    else:
        local = [[nn.Parameter(torch.empty(0), requires_grad=flat.trainable)] for flat in instance._flats]
        faces.replace_by_tensors(managed)
        # Of this module, also when a checkpoint_wrapper goes around it later.
        instance._flat_entries = own_parameters(module)
        for i, (parameter,) in enumerate(local):
            order = [managed[k] for k in unit.flats[i]]
            mark_flat_parameter(parameter, [m.names[0] for m in order], instance._flats[i].shapes)
            instance._flat_entries[faces.flat_name(i)] = parameter
        for m in managed:
            m.parameter.data = m.parameter.data.new_empty(0)
            m.parameter._tesserae_managed = True
        retire((m.parameter for m in managed), "FSDP(..., use_orig_params=False)", ", or pass use_orig_params=True")
    unit.show_parameters(local, keep_shapes=uses_orig_params(instance))
    for parameters in local:
        for parameter in parameters:
            parameter._tesserae_managed = True
    instance._local = local
    compute_gradients_in_place(part for m in managed for part, _ in m.entries)
    if local:
        names = [m.names[0] for m in managed]
        make_handle(instance, local[0][0], names, unit.set_master_dtype)


def _splits(instance: Instance) -> list[tuple[_C.Splits, list[int]]]:
    """How each parameter is cut among tensor- or expert-parallel ranks, and the shape of the whole."""
    splits = [split_of(m.entries) for m in instance._managed]
    if not any(splits):
        return []
    require_one_tensor_index(instance._everyone)
    if instance._holds_experts:
        require_whole_job(instance._everyone)
    return [(s.split, list(s.whole)) if s is not None else (_C.Splits(), []) for s in splits]
