"""The flat parameters of a unit, as torch's class has them in `params`."""

from __future__ import annotations

import torch
from torch import nn

from tesserae.fsdp.instance import Instance
from tesserae.torch_compat.flat_parameters import mark_flat_parameter
from tesserae.torch_compat.instance import uses_orig_params


def flat_parameters(instance: Instance) -> list[nn.Parameter]:
    """One for each flat buffer: what an optimizer holds (use_orig_params=False), or this rank's part of the buffer.
    While parameters are whole: copies of them, one after the other, in the order of the module."""
    is_whole = instance._whole is not None and instance._whole.here
    found = []
    for flat, local, numbers in zip(instance._flats, instance._local, instance._unit.flats):
        managed = [instance._managed[number] for number in (sorted(numbers) if is_whole else numbers)]
        if is_whole:
            shapes = [list(m.parameter.shape) for m in managed]
            values = torch.cat([m.parameter.detach().flatten() for m in managed])
        elif uses_orig_params(instance):
            shapes, values = flat.shapes, flat.local().detach()
        else:
            found.append(local[0])
            continue
        parameter = nn.Parameter(values, requires_grad=flat.trainable)
        mark_flat_parameter(parameter, [m.names[0] for m in managed], shapes)
        found.append(parameter)
    return found
