"""What else a script wants to keep, as tensors of the checkpoint: PREFIX/state.json, and PREFIX/... for tensors in it.

"extra" is that of rank 0, "rank/R" that of rank R, "modules" what modules return from get_extra_state().
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tesserae import _C
from tesserae.checkpoint import tree
from tesserae.checkpoint.pieces import Pieces, whole
from tesserae.torch_compat.sharded_tensors import ShardedTensor

TEXT = "state.json"


def tensors_of(prefix: str, value: Any, where: str) -> dict[str, torch.Tensor]:
    """`value` as tensors by their names in a checkpoint. Raises InvalidArgument for what is neither JSON nor a tensor
    of which this rank has all."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(path: tree.Path, tensor: torch.Tensor) -> str:
        if is_part(tensor):
            raise tree.refusal(
                where,
                path,
                f"is a {type(tensor).__name__} of shape {tuple(tensor.shape)}, of which each rank has a part; pass the "
                f"whole tensor{' (full_tensor())' if isinstance(tensor, DTensor) else ''}, or save what it belongs to "
                "as a model of its own, in a folder of its own",
            )
        stem = f"{prefix}/{'.'.join(re.sub(r'[^A-Za-z0-9_-]', '_', str(key)) for key in path) or 'value'}"
        name, count = stem, 0
        while name in tensors or name == f"{prefix}/{TEXT}":
            count += 1
            name = f"{stem}.{count}"
        tensors[name] = tensor
        return name

    text = json.dumps(tree.encode(value, where, keep)).encode()
    return {f"{prefix}/{TEXT}": torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors}


def is_part(tensor: torch.Tensor) -> bool:
    """Whether other ranks have other elements of it, or other terms of its sum."""
    if not isinstance(tensor, DTensor):
        return isinstance(tensor, ShardedTensor)
    mesh = tensor.device_mesh
    return any(mesh.size(axis) > 1 and not placed.is_replicate() for axis, placed in enumerate(tensor.placements))


def save(pieces: Pieces, prefix: str, value: Any, where: str, written: bool = True) -> None:
    """Adds `value` to what this rank holds. Copied at the call: nobody knows when the script changes it."""
    for name, tensor in tensors_of(prefix, value, where).items():
        pieces.add([name], tensor.shape, whole(tensor), tensor, written=written, changes_in_forward=True)


def load(pieces: Pieces, prefix: str) -> Callable[[], Any]:
    """Adds what is to be filled, and returns what gives the value when it is; None if there is none."""
    assert pieces.stored is not None
    name = f"{prefix}/{TEXT}"
    if name not in pieces.stored:
        return lambda: None
    text = pieces.fill(name)
    # Which tensors belong to it is in the text, which is not there yet: all under the prefix are read.
    tensors = {n: pieces.fill(n) for n in pieces.stored if n.startswith(prefix + "/") and n != name}

    return lambda: value_of(text, tensors.__getitem__)


def value_of(text: torch.Tensor, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value whose PREFIX/state.json is `text`."""
    try:
        return tree.decode(json.loads(bytes(text.tolist())), tensor)
    except (ValueError, KeyError) as error:
        raise _C.Corruption(f"[checkpoint.load] extra state is not what was written: {error!r}") from error
