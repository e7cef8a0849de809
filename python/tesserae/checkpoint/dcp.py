"""Checkpoints of torch.distributed.checkpoint (DCP) -> ours, and back. One process, one tensor in memory at a time.

What DCP calls "model" and "optimizer" (or "optim") becomes what tsm.checkpoint.load() fills a model and an optimizer
from; nested.py has the rule. A checkpoint of a bare model.state_dict() counts as a model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tesserae import _C
from tesserae.checkpoint import extra as extra_state
from tesserae.checkpoint import nested, tree
from tesserae.checkpoint.optimizer_state import as_tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

Folder = str | os.PathLike[str]
_SMALL = 16 << 20  # bytes of a tensor that all ranks of a load may read as a part of `extra`
Announced = tuple[str, torch.dtype, list[int], Callable[[], torch.Tensor]]


def from_dcp(dcp: Folder, folder: Folder, *, step: int = 0) -> Path:
    """Makes a checkpoint of ours in `folder` from what dcp.save() or dcp.async_save() wrote to the directory `dcp`.
    Returns the new checkpoint.

    What is neither of a model nor of an optimizer is load()'s `extra`, but for tensors of more than 16 MiB: they are
    there as "state/PATH".

    DCP's files are pickles: convert only what you trust. Raises InvalidArgument if `dcp` has no complete checkpoint, or
    has values that are neither tensors nor JSON.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not os.path.exists(os.path.join(dcp, ".metadata")):
        raise _C.InvalidArgument(f"[from_dcp] {os.fspath(dcp)} has no .metadata: it is no complete checkpoint of DCP")
    reader, metadata = _open(dcp)
    tensors: list[Announced] = []
    values: dict[tuple[str | int, ...], Any] = {}
    numbers: dict[str, str] = {}
    for fqn, path in _paths(metadata).items():
        name = nested.names_of(tuple(map(str, path)))[0]
        stored = metadata.state_dict_metadata[fqn]
        if isinstance(stored, TensorStorageMetadata):
            dtype, size = stored.properties.dtype, list(stored.size)
            read = functools.partial(_read_tensor, reader, fqn, size, dtype)
            if name.startswith("state/") and stored.size.numel() * dtype.itemsize <= _SMALL:
                values[path] = read()  # a generator's state, say, which belongs to the values beside it
            else:
                tensors.append((name, dtype, size, read))
            continue
        value = _read(reader, fqn, None)
        if name.startswith("optimizer/"):
            value = as_tensor(name.split("/")[1], value, numbers)
        if isinstance(value, torch.Tensor):
            tensors.append(_announce(name, value))
        else:
            values[path] = value
    others = _nested(values)
    described = nested.describe_groups(nested.groups_in(others))
    training = {"optimizer": {"param_groups": described, "numbers": numbers}} if described is not None else {}
    if others:
        tensors += [_announce(*entry) for entry in extra_state.tensors_of("extra", others, os.fspath(dcp)).items()]
    return Path(_C.write_checkpoint(os.path.abspath(folder), step, json.dumps(training), tensors))


def to_dcp(path: Folder, dcp: Folder) -> None:
    """Writes a checkpoint (or the newest of a folder) as dcp.load() reads it: {"model": {NAME: ...}, "optimizer":
    {"state": {NAME: {STATE: ...}}, "param_groups": [...]}} and what `extra` has; tied parameters under all of their
    names. What belongs to single ranks is left out.

    Raises Damaged if the checkpoint is not what was written, and InvalidArgument where `dcp` has a checkpoint already.
    """
    from torch.distributed import checkpoint as torch_checkpoint

    if os.path.exists(os.path.join(dcp, ".metadata")):
        raise _C.InvalidArgument(f"[to_dcp] {os.fspath(dcp)} has a checkpoint already: name another folder")

    checkpoint = _C.Checkpoint.open(_chosen(path))
    training = json.loads(checkpoint.training)
    state: dict[str, Any] = {}
    names: dict[str, str] = {}
    stored = checkpoint.tensors()
    places = [(name, place) for name in stored if (place := _place_of(name)) is not None]
    places += [(f"model/{one}", ("model", other)) for other, one in training.get("aliases", {}).items()]
    for name, place in places:
        if name in stored:
            shape, dtype = stored[name]
            names[".".join(place)] = name
            nested.put(state, place, torch.empty(shape, dtype=dtype, device="meta"))
    if f"extra/{extra_state.TEXT}" in stored:
        extra = extra_state.value_of(checkpoint.read(f"extra/{extra_state.TEXT}"), checkpoint.read)
        for key, value in (extra if isinstance(extra, dict) else {"extra": extra}).items():
            state[str(key)] = _joined(state.get(str(key)), value)
    groups = training.get("optimizer", {}).get("param_groups")
    if groups is not None and nested.get(state, ("optimizer", "param_groups")) is None:
        # With what torch's optimizers look for, as they have it unless told otherwise.
        how = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
        nested.put(state, ("optimizer", "param_groups"), [{**how, **tree.decode(group)} for group in groups])

    class Streamed(torch_checkpoint.DefaultSavePlanner):
        """Knows only shapes; reads a tensor when its turn to be written comes."""

        def resolve_data(self, write_item: Any) -> Any:
            name = names.get(write_item.index.fqn)
            return super().resolve_data(write_item) if name is None else checkpoint.read(name)

    writer = torch_checkpoint.FileSystemWriter(os.fspath(dcp), thread_count=1)
    with _quiet():
        torch_checkpoint.save(state, storage_writer=writer, planner=Streamed(), no_dist=True)


def _chosen(path: Folder) -> str:
    inside = _C.list_checkpoints(os.fspath(path))
    return inside[-1][1] if inside else os.fspath(path)


def _place_of(name: str) -> tuple[str, ...] | None:
    """Where a tensor of ours goes in a state dict; None for what belongs to a rank or to `extra`."""
    kind, _, rest = name.partition("/")
    if kind in ("model", "buffer"):
        return "model", rest
    if kind == "optimizer":
        key, _, parameter = rest.partition("/")
        return "optimizer", "state", parameter, key
    return (rest,) if kind == "state" else None


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {**other, **{key: _joined(value, other.get(key)) for key, value in one.items()}}
    return other if one is None else one


def _open(dcp: Folder) -> tuple[FileSystemReader, Metadata]:
    from torch.distributed.checkpoint import FileSystemReader

    reader = FileSystemReader(os.fspath(dcp))
    metadata = reader.read_metadata()
    # Every load of one tensor would read it again.
    reader.read_metadata = lambda *args, **kwargs: metadata  # type: ignore[method-assign]
    return reader, metadata


def _paths(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    """Where in its state dict each entry was: keys of dictionaries as text, indices of lists as numbers."""
    known = metadata.planner_data or {}
    paths = {fqn: tuple(known.get(fqn, (fqn,))) for fqn in metadata.state_dict_metadata}
    if all(len(path) == 1 for path in paths.values()):
        return {fqn: ("model", *path) for fqn, path in paths.items()}
    return paths


def _nested(values: dict[tuple[str | int, ...], Any]) -> Any:
    """The dictionaries and lists that these paths lead through."""
    if () in values:
        return values[()]
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in values.items():
        below.setdefault(path[0], {})[path[1:]] = value
    if below and all(isinstance(key, int) for key in below):
        return [_nested(below[key]) for key in sorted(below)]
    return {key: _nested(part) for key, part in below.items()}


def _read(reader: FileSystemReader, fqn: str, target: Any) -> Any:
    from torch.distributed import checkpoint as torch_checkpoint

    state = {fqn: target}
    with _quiet():
        torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state[fqn]


def _read_tensor(reader: FileSystemReader, fqn: str, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return _read(reader, fqn, torch.empty(size, dtype=dtype))


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """DCP warns that one process is taken for all, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _announce(name: str, tensor: torch.Tensor) -> Announced:
    return name, tensor.dtype, list(tensor.shape), lambda: tensor
