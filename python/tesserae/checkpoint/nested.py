"""Nested dictionaries with sharded tensors in them: what state_dict() and FSDP.optim_state_dict() return, and what
PyTorch's distributed checkpoint (DCP) and SMP v2 save.

Tensors get the names that tsm.checkpoint.save() gives them, so that either loads what the other has saved:

    ("model", NAME)                                   model/NAME
    ("optimizer" or "optim", "state", NAME, STATE)    optimizer/STATE/NAME; also where it is flat: "state.NAME.STATE"
    anything else                                     state/PATH, joined with dots

A list of tensors of which some are sharded counts as a dictionary with the keys 0, 1, ... Other values are `extra`,
nested as they were; what parameter groups say is in the manifest too if it is by names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tesserae import _C
from tesserae.checkpoint import extra as extra_state
from tesserae.checkpoint import tree
from tesserae.checkpoint.optimizer_state import encode_options
from tesserae.checkpoint.pieces import Cut, Pieces, cuts_of_block, cuts_of_dtensor, whole
from tesserae.checkpoint.saving import Folder, fabric_for, save_pieces, together, wait_copied
from tesserae.torch_compat.sharded_tensors import ShardedTensor, local_blocks

OPTIMIZERS = ("optimizer", "optim")
Path = tuple[str, ...]
MISSING = object()
# This rank's memory of a tensor, or one shard of it, and of which split of the whole it is.
Part = tuple[list[Cut], torch.Tensor, _C.Split | None]


def names_of(path: Path) -> list[str]:
    """What a tensor at `path` is called in a checkpoint; the first is the name that it is saved under."""
    if path[0] == "model" and len(path) > 1:
        return [f"{kind}/{'.'.join(path[1:])}" for kind in ("model", "buffer")]
    if path[0] in OPTIMIZERS and len(path) > 3 and path[1] == "state":
        return [f"optimizer/{path[-1]}/{'.'.join(path[2:-1])}"]
    if path[0] in OPTIMIZERS and len(path) == 2 and path[1].startswith("state."):
        name, _, state = path[1].removeprefix("state.").rpartition(".")
        return [f"optimizer/{state}/{name}", f"state/{'.'.join(path)}"]  # the latter: in checkpoints of old
    return [f"state/{'.'.join(path)}"]


def known_names_of(path: Path, aliases: dict[str, str]) -> list[str]:
    """names_of(), and what a tied parameter is saved under."""
    names = names_of(path)
    return names + [f"model/{aliases[n]}" for n in (names[0].removeprefix("model/"),) if n in aliases]


def groups_in(state: Any) -> Any:
    """The parameter groups of a state dict, also of one that StateDictOptions(flatten_optimizer_state_dict=True) made,
    which has "param_groups.NAME.OPTION" for each parameter; None if it has none."""
    for key in OPTIMIZERS:
        optimizer = state.get(key) if isinstance(state, dict) else None
        if not isinstance(optimizer, dict):
            continue
        if "param_groups" in optimizer:
            return optimizer["param_groups"]
        options: dict[str, dict[str, Any]] = {}
        for flat, value in optimizer.items():
            if isinstance(flat, str) and flat.startswith("param_groups."):
                name, _, option = flat.removeprefix("param_groups.").rpartition(".")
                options.setdefault(name, {})[option] = value
        groups: dict[str, dict[str, Any]] = {}
        for name, own in options.items():
            group = groups.setdefault(json.dumps(encode_options(own), sort_keys=True), {**own, "params": []})
            group["params"].append(name)
        if groups:
            return list(groups.values())
    return None


def describe_groups(groups: Any) -> list[dict[str, Any]] | None:
    """Parameter groups as the manifest has them; None if they are not by names."""
    if not isinstance(groups, list):
        return None
    for group in groups:
        if not isinstance(group, dict) or not all(isinstance(name, str) for name in group.get("params", [0])):
            return None
    return [{**encode_options(group), "params": list(group["params"])} for group in groups]


def save(state: dict[str, Any], folder: Folder, process_group: dist.ProcessGroup | None, *, asynchronous: bool) -> None:
    """Saves a nested dictionary as the one checkpoint of `folder`. Collective. Of ranks that have the same elements of
    a tensor the lowest writes them; values that are no tensors are those of rank 0."""
    fabric = fabric_for(None, process_group)

    def collect() -> tuple[list[tuple[list[str], list[int], Part]], dict[str, Any], dict[str, Any]]:
        parts, others = [], {}
        for path, value in _leaves(state, _has_parts):
            if isinstance(value, torch.Tensor):
                parts += [(names_of(path), list(value.shape), part) for part in _parts(path, value, fabric.size)]
            elif fabric.rank == 0:
                put(others, path, value)
        groups = describe_groups(groups_in(others))
        return parts, others, {"optimizer": {"param_groups": groups}} if groups is not None else {}

    parts, others, training = together(fabric, "save", collect)
    held = [
        (names[0], cuts[0][0], cuts[-1][1], len(cuts), split and (split.dim, split.parts, split.index))
        for names, _, (cuts, _, split) in parts
    ]
    mine = _elect(held, process_group)

    def add() -> tuple[Pieces, dict[str, Any]]:
        pieces = Pieces()
        for (names, shape, (cuts, tensor, split)), written in zip(parts, mine, strict=True):
            # State dicts have copies of what is sharded; what is whole may be a buffer, which forward changes.
            alive = split is None and cuts == whole(tensor)
            columns = split and _C.Splits(split)
            pieces.add(names, shape, cuts, tensor, split=columns, written=written, changes_in_forward=alive)
        if fabric.rank == 0:
            extra_state.save(pieces, "extra", others, "state_dict")
        return pieces, training

    save_pieces(fabric, folder, add, asynchronous=asynchronous)


def load(state: dict[str, Any], path: Folder, process_group: dist.ProcessGroup | None, *, strict: bool) -> None:
    """Fills the tensors of a nested dictionary in place, and replaces its other values. Collective. What the checkpoint
    lacks is an InvalidArgument, or, if not `strict`, stays as it is."""
    if os.path.exists(os.path.join(path, ".metadata")):
        raise _C.InvalidArgument(
            f"[load] {path} was written by torch.distributed.checkpoint; tsm.checkpoint.from_dcp() makes one of ours "
            "of it"
        )
    wait_copied()
    fabric = fabric_for(None, process_group)
    leaves: list[tuple[Path, Any]] = []
    pieces = Pieces()
    others: Callable[[], Any] = dict
    described: list[dict[str, Any]] | None = None
    values: dict[Path, Any] = {}

    def collect(checkpoint: _C.Checkpoint) -> list[_C.Piece]:
        nonlocal leaves, pieces, others, described
        stored = checkpoint.tensors()
        pieces = Pieces(stored)
        training = json.loads(checkpoint.training)

        def is_in_place(path: Path, tensors: list[torch.Tensor]) -> bool:
            return _has_parts(path, tensors) or names_of((*path, "0"))[0] in stored

        leaves = list(_leaves(state, is_in_place))
        for place, value in leaves:
            if isinstance(value, torch.Tensor):
                for cuts, tensor, split in _parts(place, value, fabric.size):
                    # The last is that of a list in which no tensor was sharded.
                    names = [*known_names_of(place, training.get("aliases", {})), f"extra/{'.'.join(place)}"]
                    columns = split and _C.Splits(split)
                    pieces.add(names, list(value.shape), cuts, tensor, split=columns, optional=not strict)
        others = extra_state.load(pieces, "extra")
        described = training.get("optimizer", {}).get("param_groups")
        return pieces.pieces

    def check() -> None:
        found = others()
        for place, value in leaves:
            if isinstance(value, torch.Tensor):
                continue
            saved = get(found, place, MISSING)
            if saved is MISSING and place[0] in OPTIMIZERS and place[1:] == ("param_groups",) and described is not None:
                saved = [{**before, **tree.decode(group)} for before, group in zip(value, described, strict=False)]
            if saved is not MISSING:
                values[place] = saved
            elif strict:
                raise _C.InvalidArgument(f"[load] the checkpoint has no value for {'.'.join(place)}")

    if _C.load_checkpoint(fabric, str(path), collect, check) is None:
        raise _C.InvalidArgument(f"[load] there is no checkpoint in {path}")
    pieces.filled()
    for place, value in values.items():
        put(state, place, value)


def _leaves(
    state: dict[Any, Any], in_place: Callable[[Path, list[torch.Tensor]], bool], path: Path = ()
) -> Iterator[tuple[Path, Any]]:
    """What is no dictionary, nor a list of nothing but tensors of which in_place(path, list) says that it counts as
    one."""
    for key, value in state.items():
        place = (*path, str(key))
        if isinstance(value, dict):
            yield from _leaves(value, in_place, place)
        elif type(value) is list and all(isinstance(v, torch.Tensor) for v in value) and in_place(place, value):
            yield from (((*place, str(i)), tensor) for i, tensor in enumerate(value))
        else:
            yield place, value


def _has_parts(_: Path, tensors: list[torch.Tensor]) -> bool:
    return any(map(extra_state.is_part, tensors))


def _parts(path: Path, tensor: torch.Tensor, ranks: int) -> list[Part]:
    """What this rank has of a tensor; several shards, or none, for a ShardedTensor."""
    parts: list[Part]
    if isinstance(tensor, ShardedTensor):
        blocks = local_blocks(tensor)
        parts = [(cuts_of_block(tensor.shape, offsets, sizes), block, None) for block, offsets, sizes in blocks]
    elif isinstance(tensor, DTensor):
        cuts, _, split = cuts_of_dtensor(".".join(path), tensor, ranks)
        parts = [(cuts, tensor.to_local(), split)]
    else:
        parts = [(whole(tensor), tensor, None)]
    return [part for part in parts if part[0]]


def _elect(mine: list[tuple[Any, ...]], process_group: dist.ProcessGroup | None) -> list[bool]:
    """Which of these this rank writes. Collective: groups of ranks that hold copies may be of any make."""
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return [True] * len(mine)
    everyone: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, mine, process_group)
    before = {part for parts in everyone[: dist.get_rank(process_group)] for part in parts}
    return [part not in before for part in mine]


def get(nested: Any, path: Path, default: Any = None) -> Any:
    for key in path:
        if not isinstance(nested, dict) or _own_key(nested, key) not in nested:
            return default
        nested = nested[_own_key(nested, key)]
    return nested


def put(nested: dict[Any, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(_own_key(nested, key), {})
    nested[_own_key(nested, path[-1])] = value


def _own_key(nested: dict[Any, Any], key: str) -> Any:
    """The key whose text is `key`: optimizers without names number their parameters."""
    return int(key) if key.isdecimal() and int(key) in nested else key
