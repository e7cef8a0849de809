"""Names and keys of the parameters that an optimizer holds, as FSDP1 finds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tesserae import _C
from tesserae.torch_compat.checked import checked

with checked():
    from torch.distributed.fsdp._common_utils import _get_param_to_fqns
    from torch.distributed.fsdp._optim_utils import (
        _get_flat_param_to_fqn,
        _get_param_id_to_param_from_optim_input,
        _get_param_key_to_param,
        _is_named_optimizer,
    )

Key = int | str
Names = dict[nn.Parameter, list[str]]
OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


def state_bytes(optimizer: Optimizer) -> int:
    """What this rank holds of its state, but for what lies on a disk."""
    total = 0
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, DTensor):
                value = value.to_local()
            total += value.nbytes if isinstance(value, Tensor) and not _C.is_paged(value) else 0
    return total


def names_of_parameters(model: nn.Module) -> Names:
    """The names of each, in the order of the model; of a flat parameter by slot."""
    return _get_param_to_fqns(model)


def names_of_flat_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """Of flat parameters themselves."""
    return _get_flat_param_to_fqn(model)


def has_names_as_keys(state: dict[str, Any]) -> bool:
    """Whether an optimizer's state dict names parameters instead of numbering them."""
    return _is_named_optimizer(state)


def parameters_by_key(
    optimizer: Optimizer, model: nn.Module, named: bool, names: Names, flat_names: dict[nn.Parameter, str]
) -> dict[Key, nn.Parameter]:
    return _get_param_key_to_param(optimizer, model, named, names, flat_names)


def parameters_of_input(model: nn.Module, optim_input: OptimInput) -> dict[Key, nn.Parameter]:
    """The same from what an optimizer was made of; None: from model.parameters()."""
    return _get_param_id_to_param_from_optim_input(model, optim_input)
