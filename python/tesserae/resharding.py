"""tsm.reshard: another sharding degree while training runs.

1. Ranks tell each other what the optimizers' state is made of; what can not move is an error of all ranks.
2. The engine moves everything to its new owners (tesserae/shard/reshard.cpp), unit by unit: it asks for the state of
   one flat buffer at a time, joined to one tensor a kind, and gives back tensors whose slices become the new state.
3. A rank that has elements of a parameter for the first time takes over the scalars of its state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.optim import Optimizer

from tesserae import _C, config, dial
from tesserae.optim_contents import Like, Purpose, agree, kinds_of
from tesserae.optim_keys import Keys
from tesserae.state import state
from tesserae.summon import instances_of

if TYPE_CHECKING:
    from tesserae.fsdp import FullyShardedDataParallel as Instance

Resharding = _C.Resharding
_PURPOSE = Purpose("tsm.reshard", "can move to another degree. Save a checkpoint, and start again at that degree")


@torch.no_grad()
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
    several; None if there is none) keep their values bit by bit; tensors that the optimizer holds stay the same objects
    and have another size. Step counters, schedulers, data loaders are not touched. Collective.

    Returns what it took on this rank. Raises, with nothing changed: InvalidArgument for degrees that do not divide the
    ranks (the text names the nearest that do) and for optimizer state that has neither one element for each of the
    parameter's nor is a scalar; Mismatch if ranks ask for different degrees; OutOfMemory (with several roots in
    `model`, those before the one that does not fit have changed). An error of communication while state moves ends the
    job, which goes on from its last checkpoint.
    """
    wanted = _degrees(hybrid_shard_degree, degrees)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or [])
    instances = instances_of(model)
    roots = [instance for instance in instances if instance.check_is_root()]
    if not roots:
        raise _C.InvalidArgument("[tsm.reshard] there is no FSDP instance of tesserae in the model; wrap it first")
    for instance in instances:
        if instance._whole is not None:
            raise _C.InvalidArgument("[tsm.reshard] called inside summon_full_params; leave that context first")
        instance._unit.require_between_steps("tsm.reshard")
    _wait_for_saves()
    # 1. Of all roots, before anything of one moves.
    movings = [_Moving(root, optimizers) for root in roots]
    results = []
    for root, moving in zip(roots, movings):
        # 2.
        moving.forget_what_stood_still()
        results.append(_C.reshard(root._unit, wanted, moving))
        # 3.
        moving.complete()
        for instance in instances_of(root):
            instance.sharding_strategy = _strategy_of(instance.sharding_strategy, wanted, instance.world_size)
        dial.tell(root, results[-1])
    config.turn(wanted)
    state.forget_replicas()
    return results[0]


class _Moving:
    """The optimizers' state of one root's parameters, for the engine: see shard::Companion. Making it is collective."""

    def __init__(self, root: Instance, optimizers: list[Optimizer]) -> None:
        keys = Keys.of_instances(root)
        mine = {p: each.state[p] for each in optimizers for p in keys.places if p in each.state}
        self._owner = {p: each for each in optimizers for group in each.param_groups for p in group["params"]}
        self._group = {p: group for each in optimizers for group in each.param_groups for p in group["params"]}
        self._empty = [p for p, place in keys.places.items() if place.numel == 0 and p in self._owner]
        self._contents = agree(keys, mine, root._everyone, _PURPOSE)
        self._buffers: dict[int, tuple[_C.FlatBuffer, list[nn.Parameter]]] = {}
        self._kinds: dict[int, list[tuple[str, Like]]] = {}
        for instance in instances_of(root):
            for flat, members in zip(instance._flats, instance._local):
                if flat.shard is not None:
                    self._buffers[flat.shard] = flat, members
                    self._kinds[flat.shard] = kinds_of(members, self._contents)

    def forget_what_stood_still(self) -> None:
        """What is left of a time when there were elements here: its counters have not moved since."""
        for parameter in self._empty:
            self._owner[parameter].state.pop(parameter, None)

    def complete(self) -> None:
        """Scalars where a rank has elements of a parameter for the first time."""
        for parameter, content in self._contents.items():
            if parameter not in self._owner or parameter.numel() == 0:
                continue
            now = self._owner[parameter].state[parameter]
            for name, value in content.items():
                if name not in now and not isinstance(value, Like):
                    now[name] = self._scalar(parameter, value)

    def _scalar(self, parameter: nn.Parameter, value: Any) -> Any:
        """A copy, where the optimizer has it: kernels that are fused or captured read counters on the device."""
        group = self._group[parameter]
        if isinstance(value, Tensor) and (group.get("fused") or group.get("capturable")):
            return value.to(parameter.device, copy=True)
        return copy.deepcopy(value)

    def dtypes(self, shard: int) -> list[torch.dtype]:
        return [like.dtype for _, like in self._kinds[shard]]

    def take(self, shard: int) -> list[Tensor]:
        flat, members = self._buffers[shard]
        joined = []
        for name, like in self._kinds[shard]:
            slices = [self._take(member, name, like) for member in members]
            joined.append(flat.join(slices, like.dtype))
        return joined

    def put(self, shard: int, tensors: list[Tensor]) -> None:
        flat, members = self._buffers[shard]
        for (name, like), tensor in zip(self._kinds[shard], tensors):
            for member, part in zip(members, flat.split(tensor)):
                content = self._contents.get(member, {})
                if content.get(name) != like or member not in self._owner:
                    continue
                if part.numel() == 0:
                    self._owner[member].state.pop(member, None)
                    continue
                now = self._owner[member].state[member]
                for before, value in content.items():  # in the order that the optimizer gave them
                    if before == name:
                        break
                    if not isinstance(value, Like):
                        now.setdefault(before, self._scalar(member, value))
                now[name] = part

    def _take(self, member: nn.Parameter, name: str, like: Like) -> Tensor | None:
        """What moves is held once: the optimizer lets go of it. The name keeps its place among the others."""
        if member.numel() == 0 or member not in self._owner or self._contents.get(member, {}).get(name) != like:
            return None
        now = self._owner[member].state.get(member, {})
        tensor = now.get(name)
        if tensor is not None:
            now[name] = None
        return tensor


def _degrees(hybrid: int | None, degrees: dict[str, int] | tuple[int, int, int] | None) -> tuple[int, int, int]:
    if (hybrid is None) == (degrees is None):
        raise _C.InvalidArgument("[tsm.reshard] pass either hybrid_shard_degree or degrees")
    if hybrid is not None:
        return hybrid, hybrid, hybrid
    names = ("parameters", "gradients", "optimizer")
    if isinstance(degrees, dict):
        if set(degrees) != set(names):
            raise _C.InvalidArgument(f"[tsm.reshard] degrees has the keys {sorted(degrees)}; it takes {list(names)}")
        return tuple(degrees[name] for name in names)  # type: ignore[return-value]
    first, second, third = degrees  # type: ignore[misc]
    return first, second, third


def _strategy_of(before: ShardingStrategy, wanted: tuple[int, int, int], ranks: int) -> ShardingStrategy:
    """What comes closest among FSDP's names, for those who read the attribute."""
    keeps = before in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
    if wanted[2] == 1:
        return ShardingStrategy.NO_SHARD
    if wanted[0] == ranks:
        return ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
    return ShardingStrategy._HYBRID_SHARD_ZERO2 if keeps else ShardingStrategy.HYBRID_SHARD


def _wait_for_saves() -> None:
    """What an asynchronous save still copies must not move."""
    from tesserae.checkpoint.saving import wait_copied

    wait_copied()
