"""A change of degrees while training runs.

1. Ranks tell each other what the optimizers' state is made of; what cannot move is an error of all ranks.
2. The engine moves everything to its new owners (tesserae/shard/reshard.cpp), unit by unit: it asks for the state of
   one flat buffer at a time, joined to one tensor a kind, and gives back tensors whose slices become the new state.
3. A rank that has elements of a parameter for the first time takes over the scalars of its state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from tesserae import _C
from tesserae.checkpoint.saving import wait_copied
from tesserae.dial.moving import Moving
from tesserae.fsdp.instance import Instance, instances_of
from tesserae.job import config
from tesserae.job.state import state
from tesserae.torch_compat.instance import strategy_named

Degrees = tuple[int, int, int]


@torch.no_grad()
def change(
    model: nn.Module,
    optimizers: list[Optimizer],
    wanted: Degrees,
    changed: Callable[[Instance, _C.Resharding], None],
) -> None:
    """Tells `changed` of each root in `model` that has changed, and what it took on this rank. Collective; tsm.reshard
    says what it raises."""
    instances = instances_of(model)
    roots = [instance for instance in instances if instance.check_is_root()]
    if not roots:
        raise _C.InvalidArgument("[tsm.reshard] there is no FSDP instance of tesserae in the model; wrap it first")
    for instance in instances:
        if instance._whole is not None:
            raise _C.InvalidArgument("[tsm.reshard] called inside summon_full_params; leave that context first")
        instance._unit.require_between_steps("tsm.reshard")
    wait_copied()  # what an asynchronous save still copies must not move
    # 1. Of all roots, before anything of one moves.
    movings = [Moving(root, optimizers) for root in roots]
    for root, moving in zip(roots, movings):
        # 2.
        moving.forget_what_stood_still()
        made = _C.reshard(root._unit, wanted, moving)
        # 3.
        moving.complete()
        for instance in instances_of(root):
            instance.sharding_strategy = strategy_named(instance._unit.strategy, instance.world_size)
        changed(root, made)
    config.turn(wanted)
    state.forget_replicas()
