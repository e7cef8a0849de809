"""tsm.reshard: the script itself turns the dial."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tesserae import _C
from tesserae.dial import automatic
from tesserae.dial.resharding import change
from tesserae.dial.roots import Root

Resharding = _C.Resharding


def reshard(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    *,
    hybrid_shard_degree: int | None = None,
    degrees: dict[str, int] | tuple[int, int, int] | None = None,
) -> Resharding:
    """Turns the dial: from now on the FSDP units in `model` are sharded over `hybrid_shard_degree` ranks (1: everything
    on every rank), or by three `degrees`: (parameters, gradients, optimizer), or a dict of these names.

    Between two steps, or in the middle of an accumulation. Parameters, gradients and the state of `optimizer` (one or
    several; None if there is none) keep their values to the bit; tensors that the optimizer holds stay the same objects
    and have another size. Step counters, schedulers, data loaders are not touched. Collective.

    Returns what it took on this rank. Raises, with nothing changed: InvalidArgument for degrees that do not divide the
    ranks (the text names the nearest that do) and for optimizer state that has neither one element for each of the
    parameter's nor is a scalar; Mismatch if ranks ask for different degrees; OutOfMemory (with several roots in
    `model`, those before the one that does not fit have changed). An error of communication while state moves ends the
    job, which goes on from its last checkpoint.
    """
    wanted = _degrees(hybrid_shard_degree, degrees)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or [])
    changes: list[Resharding] = []

    def changed(root: Root, made: Resharding) -> None:
        changes.append(made)
        automatic.tell(root, made)

    change(model, optimizers, wanted, changed)
    return changes[0]


def _degrees(hybrid: int | None, degrees: dict[str, int] | tuple[int, int, int] | None) -> tuple[int, int, int]:
    if (hybrid is None) == (degrees is None):
        raise _C.InvalidArgument("[tsm.reshard] pass either hybrid_shard_degree or degrees")
    if hybrid is not None:
        return _require_integers((hybrid, hybrid, hybrid))
    names = ("parameters", "gradients", "optimizer")
    if isinstance(degrees, dict):
        if set(degrees) != set(names):
            raise _C.InvalidArgument(f"[tsm.reshard] degrees has the keys {sorted(degrees)}; it takes {list(names)}")
        return _require_integers(tuple(degrees[name] for name in names))
    return _require_integers(degrees)


def _require_integers(degrees: Any) -> tuple[int, int, int]:
    try:
        first, second, third = (operator.index(degree) for degree in degrees)
    except (TypeError, ValueError):
        raise _C.InvalidArgument(
            f"[tsm.reshard] the degrees are {degrees!r}; they are three integers: parameters, gradients, optimizer"
        ) from None
    return first, second, third
