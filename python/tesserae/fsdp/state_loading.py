"""model.load_state_dict() of a sharded module, for whole values and sharded ones, under names without FSDP. As torch
walks down the modules:

 1. An instance puts `_fsdp_wrapped_module.` into the keys below it, summons its own parameters and makes sharded values
    whole, one at a time.
 2. When its module has been filled, it writes back and takes its prefix out of the names that are reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType

from tesserae import _C
from tesserae.fsdp.instance import Instance
from tesserae.fsdp.parameters import Managed, flat_name
from tesserae.fsdp.sharded_values import local_part, whole_of
from tesserae.fsdp.state_saving import kind_of
from tesserae.fsdp.whole import Summoned, SummonOptions
from tesserae.torch_compat.instance import FSDP_PREFIX, clean_tensor_name, uses_orig_params, wrapped
from tesserae.torch_compat.modules import own_modules, step_key
from tesserae.torch_compat.sharded_tensors import is_sharded


def begin(instance: Instance, state: dict[str, Any], prefix: str, metadata: dict[str, Any], errors: list[str]) -> None:
    """1."""
    if metadata.get("assign_to_params_buffers"):
        raise _C.InvalidArgument(
            "[load_state_dict] assign=True would put other tensors in the place of sharded parameters; leave it out"
        )
    instance._load_errors = errors
    inner = prefix + FSDP_PREFIX
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
        state[inner + key[len(prefix) :]] = state.pop(key)
    if kind_of(instance) == StateDictType.LOCAL_STATE_DICT:
        _take_parts(instance, state, inner)
    else:
        Summoned(instance, SummonOptions(writeback=True), "load_state_dict", for_loading=True).__enter__()
        _make_whole(instance, state, inner)


def finish(instance: Instance, keys: Any) -> None:
    """2. A hook for the end of load_state_dict of an instance and everything in it."""
    if instance._whole is not None and instance._whole.for_loading:
        instance._whole.__exit__(None)
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = map(clean_tensor_name, names)
    instance._load_errors[:] = [text.replace(FSDP_PREFIX, "") for text in instance._load_errors]


def _own_entries(instance: Instance) -> Iterator[tuple[str, Managed]]:
    """The names under which modules load the instance's parameters."""
    entries: dict[nn.Module, list[tuple[str, Managed]]] = {}
    for m in instance._managed:
        for module, name in m.entries:
            entries.setdefault(module, []).append((name, m))

    def visit(part: nn.Module, path: str) -> Iterator[tuple[str, Managed]]:
        for name, m in entries.get(part, ()):
            yield path + name, m
        for name, child in own_modules(part).items():
            if child is not None:  # an instance has not put its prefix in yet
                yield from visit(wrapped(child) if isinstance(child, Instance) else child, path + step_key(name))

    return visit(wrapped(instance), "")


def _make_whole(instance: Instance, state: dict[str, Any], prefix: str) -> None:
    """Sharded values go to their place in the summoned parameters, one at a time."""
    for name, m in _own_entries(instance):
        value = state.get(prefix + name)
        if not is_sharded(value):
            continue
        whole, place = whole_of(instance, value), m.parameter.detach()
        if whole.shape == place.shape:
            place.copy_(whole)
            whole = place
        state[prefix + name] = whole  # of another shape: nn.Module says so


def _take_parts(instance: Instance, state: dict[str, Any], prefix: str) -> None:
    """Parts that _replace_by_parts saved, in the same layout."""
    for i, flat in enumerate(instance._flats):
        value = state.pop(prefix + flat_name(i), None)
        if value is None:
            continue
        part = local_part(value)
        if part.shape != flat.local().shape:
            raise _C.InvalidArgument(
                f"[load_state_dict] LOCAL_STATE_DICT has {list(part.shape)} elements for this rank's part of unit "
                f"{instance._unit.name}, which has {list(flat.local().shape)}: it was saved with other degrees or on "
                "another number of ranks; save with SHARDED_STATE_DICT to load it elsewhere"
            )
        with torch.no_grad():
            flat.local().copy_(part)
        flat.publish()
    for name, parameter in _entries_between_steps(instance):
        state[prefix + name] = parameter.detach()


def _entries_between_steps(instance: Instance) -> Iterator[tuple[str, nn.Parameter]]:
    if uses_orig_params(instance):
        yield from ((name, m.parameter) for name, m in _own_entries(instance))
    else:
        yield from ((flat_name(i), local[0]) for i, local in enumerate(instance._local))
