"""A change of degrees while training runs.

1. Ranks tell each other what the optimizers' state is made of; what cannot move is an error of all ranks.
2. The engine moves everything to its new owners (tesserae/shard/reshard.cpp), unit by unit: it asks for the state of
   one flat buffer at a time, joined to one tensor a kind, and gives back tensors whose slices become the new state.
3. A rank that has elements of a parameter for the first time takes over the scalars of its state; DTensors say how they
   are placed now.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from tesserae import _C
from tesserae.checkpoint.saving import let_go
from tesserae.dial.moving import Moving
from tesserae.dial.moving_dtensors import MovingDTensors
from tesserae.dial.roots import Root, roots_of, unit_of
from tesserae.fsdp.instance import Instance, instances_of
from tesserae.fully_shard.engine import go_to
from tesserae.fully_shard.extensions import require_recut
from tesserae.fully_shard.state import State
from tesserae.job import config
from tesserae.job.state import state
from tesserae.torch_compat.instance import strategy_named

Degrees = tuple[int, int, int]


@torch.no_grad()
def change(
    model: nn.Module,
    optimizers: list[Optimizer],
    wanted: Degrees,
    changed: Callable[[Root, _C.Resharding], None],
) -> None:
    """Tells `changed` of each root in `model` that has changed, and what it took on this rank. Collective; tsm.reshard
    says what it raises."""
    roots = roots_of(model)
    if not roots:
        raise _C.InvalidArgument(
            "[tsm.reshard] there is no module in the model that tesserae has sharded; wrap it in "
            "FullyShardedDataParallel, or call fully_shard on it, first"
        )
    for root in roots:
        _require_between_steps(root)
    let_go()  # what an asynchronous save still copies must not move
    # 1. Of all roots, before anything of one moves.
    turns = [
        _turn_instance(r, optimizers, wanted) if isinstance(r, Instance) else _turn_state(r, optimizers, wanted)
        for r in roots
    ]
    for root, turn in zip(roots, turns):
        changed(root, turn())
    config.turn(wanted)
    state.forget_replicas()


def _require_between_steps(root: Root) -> None:
    parts = instances_of(root) if isinstance(root, Instance) else root.below
    for part in parts:
        if isinstance(part, Instance) and part._whole is not None:
            raise _C.InvalidArgument("[tsm.reshard] called inside summon_full_params; leave that context first")
        unit_of(part).require_between_steps("tsm.reshard")


Turn = Callable[[], _C.Resharding]


def _turn_instance(root: Instance, optimizers: list[Optimizer], wanted: Degrees) -> Turn:
    moving = Moving(root, optimizers)

    def turn() -> _C.Resharding:
        # 2.
        moving.forget_what_stood_still()
        made = _C.reshard(root._unit, wanted, moving)
        # 3.
        moving.complete()
        for instance in instances_of(root):
            around = root if instance._holds_experts else instance  # what is asked for; experts have what of it divides
            instance.sharding_strategy = strategy_named(around._unit.strategy, instance.world_size)
        return made

    return turn


def _turn_state(root: State, optimizers: list[Optimizer], wanted: Degrees) -> Turn:
    ranks = root.places.fabric.size
    for each in root.below:
        require_recut(each)
    places = {each: each.places.under(_C.Strategy("FULL_SHARD", ranks, degrees=wanted)) for each in root.below}
    moving = MovingDTensors(root, optimizers, places)

    def turn() -> _C.Resharding:
        made = _C.reshard(root.prepared(), wanted, moving)
        for each in root.below:
            go_to(each, places[each])
        return made

    return turn
