"""The state of an optimizer by the names of whole parameters.

1. Ranks tell each other what they have: for a slice without elements an optimizer has nothing.
2. For each flat buffer and each kind of state tensor: the parts are gathered, and each parameter gets a copy of its
   own.
3. What is split over tensor- or expert-parallel ranks is put together from them.
4. Keys become names: one for each parameter, the first of tied ones.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from tesserae import _C
from tesserae.fsdp.instance import Instance, is_first_rank
from tesserae.fsdp.optim_contents import Purpose, State, agree, kinds_of
from tesserae.fsdp.optim_keys import Keys
from tesserae.fsdp.sharded_values import chunk
from tesserae.fsdp.whole import views_of
from tesserae.job.fabrics import parallel_of, tensor_degree, writes_unsplit
from tesserae.tensor_parallel.parts import SplitParameter
from tesserae.torch_compat.optimizers import Key

_PURPOSE = Purpose("optim_state_dict", "can be saved by name. Save optimizer.state_dict() on each rank")


@torch.no_grad()
def save(
    keys: Keys,
    saved: dict[str, Any],
    *,
    rank0_only: bool,
    sharded: bool,
    to_cpu: bool,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """`saved`: the optimizer's own state dict. `rank0_only`: other ranks of `group` than the first get {}. `sharded`:
    tensors become chunks. Collective."""
    return _Saving(keys, saved, rank0_only, sharded, to_cpu, group).run()


class _Saving:
    """A state dict on its way."""

    def __init__(
        self,
        keys: Keys,
        saved: dict[str, Any],
        rank0_only: bool,
        sharded: bool,
        to_cpu: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        if group is None or tensor_degree() > 1:
            group = keys.instances[0]._everyone
        self._group = group
        self._keys = keys
        self._saved = saved
        self._sharded = sharded
        self._to_cpu = to_cpu
        self._everybody = not rank0_only or sharded
        self._first = dist.get_rank(group) == 0
        self._keep = self._everybody or (self._first and writes_unsplit())
        self._mine = {p: saved["state"][key] for key, p in keys.parameters.items() if key in saved["state"]}
        self._contents = agree(keys, self._mine, group, _PURPOSE)
        self._by_name: dict[str, State] = {}

    def run(self) -> dict[str, Any]:
        order = self._order()
        for instance in self._keys.instances:
            for flat, members in zip(instance._flats, instance._local):
                self._gather(instance, flat, members)
        if not self._keep:
            return {}
        state: dict[Key, Any] = {}
        key_of = {parameter: key for key, parameter in self._keys.parameters.items()}
        for parameter in order:
            key = key_of.get(parameter)
            names = self._keys.names[parameter]
            if parameter in self._keys.held:
                state.update((name, self._by_name[name]) for name in names if name in self._by_name)
            elif key in self._saved["state"]:
                state[names[0]] = {name: self._settle(value) for name, value in self._saved["state"][key].items()}
        for key, value in self._saved["state"].items():
            if key not in self._keys.parameters:
                warnings.warn(f"the optimizer's own state {key!r} is saved as this rank has it", stacklevel=4)
                state[key] = value
        return {"state": state} | self._groups()

    def _order(self) -> list[nn.Parameter]:
        """Of the first rank's optimizer, on all ranks: who walks over sharded state with collectives meets the others.
        Collective."""
        held = list(self._keys.held)
        number = {parameter: i for i, parameter in enumerate(held)}
        told: list[Any] = [[number[p] for p in self._keys.parameters.values() if p in number]]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        first = [held[i] for i in told[0]]
        known = set(first)
        return first + [p for p in self._keys.parameters.values() if p not in known]

    def _groups(self) -> dict[str, Any]:
        if "param_groups" not in self._saved:
            return {}
        groups = []
        for group in self._saved["param_groups"]:
            parameters = [self._keys.parameters[key] for key in group["params"]]
            names = [name for parameter in parameters for name in self._keys.names_in_module(parameter)]
            groups.append(copy.deepcopy(group) | {"params": names})
        return {"param_groups": groups}

    def _settle(self, value: Any) -> Any:
        return value.cpu() if self._to_cpu and isinstance(value, Tensor) else value

    def _gather(self, instance: Instance, flat: _C.FlatBuffer, members: list[nn.Parameter]) -> None:
        """Adds the state of all parameters in a flat buffer. Collective."""
        contents = {member: self._contents.get(member, {}) for member in members}
        slots = [  # (name, whose state it is)
            (name, member) for member in members for name in self._keys.names[member] if member in self._contents
        ]
        gathers = self._everybody or (is_first_rank(instance) if instance._holds_experts else self._first)
        if gathers:
            # In the optimizer's order; the tensors are put in below.
            self._by_name.update((name, copy.deepcopy(contents[owner])) for name, owner in slots)
        views_by_name = [name for member in members for name in self._keys.names[member]]
        for kind, described in kinds_of(members, contents):
            having = {member for member in members if contents[member].get(kind) == described}
            parts = [
                self._mine[m].get(kind) if m in having and m in self._mine and m.numel() > 0 else None for m in members
            ]
            whole = flat.whole_values(flat.join(parts, described.dtype))
            if not gathers:
                continue
            views = dict(zip(views_by_name, views_of(flat, whole)))
            for name, owner in slots:
                if owner in having:
                    split = self._keys.held[owner].splits[views_by_name.index(name)]
                    self._by_name[name][kind] = self._copy(instance, views[name], split)

    def _copy(self, instance: Instance, view: Tensor, split: SplitParameter | None) -> Tensor:
        if split is not None:
            view = parallel_of(instance.compute_device).whole_of(view, split.split, list(split.whole))
        if self._sharded and instance.sharding_strategy != ShardingStrategy.NO_SHARD:
            return self._settle(chunk(instance, view))
        return view.to("cpu" if self._to_cpu else view.device, copy=True)
