"""A Parameter that the user has put in the place of a sharded one, between steps (`module.weight = nn.Parameter(...)`).

As torch's FSDP has it, the unit takes its values, and from then on it is the one that shows this rank's part: an
optimizer that is made afterwards trains it, one that was made before trains it no more. Its gradient is not taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tesserae import _C
from tesserae.fsdp import parameters as faces
from tesserae.fsdp.instance import Instance
from tesserae.torch_compat.flat_parameters import mark_flattened


def take_replaced(instance: Instance) -> None:
    """Called between steps. Raises InvalidArgument, before anything is taken, if what was put there is not a Parameter
    of the old one's shape and dtype."""
    unit = instance._unit
    if not unit.has_replaced_entries():
        return
    shown = [(managed, faces.entry_now(managed)) for managed in instance._managed]
    replaced = [(managed, _checked(now, managed)) for managed, now in shown if now is not managed.parameter]
    for managed, new in replaced:
        _adopt(instance, managed, new)
    for flat in instance._flats:
        flat.take()
    unit.set_entries(faces.entries_of(instance._managed))
    unit.show_parameters(instance._local, keep_shapes=True)


def _checked(new: Any, managed: faces.Managed) -> nn.Parameter:
    old = managed.parameter
    fits = isinstance(new, nn.Parameter) and not new.is_meta
    if fits and new.shape == old.shape and new.dtype == old.dtype:
        return new
    found = f" ({new.dtype} of shape {list(new.shape)} on {new.device})" if isinstance(new, torch.Tensor) else ""
    raise _C.InvalidArgument(
        f"[FSDP] Cannot writeback: parameter {managed.names[0]} was replaced by a {type(new).__name__}{found}, and "
        f"this rank has {old.dtype} of shape {list(old.shape)} of it; replace whole parameters inside "
        "summon_full_params, or before FSDP(...)"
    )


@torch.no_grad()
def _adopt(instance: Instance, managed: faces.Managed, new: nn.Parameter) -> None:
    old = managed.parameter
    old.data.copy_(new.data)
    new.grad = None
    assert managed.compute is not None
    faces.move_hooks(new, managed.compute)
    mark_flattened(new)
    new._tesserae_managed = True
    managed.parameter = new
    for parameters in instance._local:
        parameters[:] = [new if parameter is old else parameter for parameter in parameters]
    for module, name in managed.entries:
        setattr(module, name, new)
