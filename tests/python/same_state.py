"""Whether two state dicts, nested as they like, say the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor


def differences(ours: Any, theirs: Any, tolerance: float = 0.0, path: str = "state") -> list[str]:
    """What differs, in words. `tolerance`: max |a - b| / max |b| of a tensor."""
    if type(ours) is not type(theirs) and not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [f"{path} is a {type(ours).__name__}, not a {type(theirs).__name__}"]
    if isinstance(theirs, dict):
        if set(ours) != set(theirs):
            return [
                f"{path} has {sorted(set(ours) - set(theirs), key=str)} and not "
                f"{sorted(set(theirs) - set(ours), key=str)}"
            ]
        return [text for key in theirs for text in differences(ours[key], theirs[key], tolerance, f"{path}[{key!r}]")]
    if isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{path} has {len(ours)} entries, not {len(theirs)}"]
        pairs = enumerate(zip(ours, theirs))
        return [text for i, pair in pairs for text in differences(*pair, tolerance, f"{path}[{i}]")]
    if isinstance(theirs, ShardedTensor):
        if ours.metadata() != theirs.metadata():
            return [f"{path} is {ours.metadata()}, not {theirs.metadata()}"]
        shards = zip(ours.local_shards(), theirs.local_shards(), strict=True)
        return [text for a, b in shards for text in differences(a.tensor, b.tensor, tolerance, path)]
    if isinstance(theirs, DTensor):
        if (ours.placements, ours.device_mesh, ours.shape) != (theirs.placements, theirs.device_mesh, theirs.shape):
            return [f"{path} is {ours}, not {theirs}"]
        return differences(ours.to_local(), theirs.to_local(), tolerance, path)
    if isinstance(theirs, Tensor):
        return _tensors(ours, theirs, tolerance, path)
    return [] if ours == theirs else [f"{path} is {ours!r}, not {theirs!r}"]


def _tensors(ours: Tensor, theirs: Tensor, tolerance: float, path: str) -> list[str]:
    if (ours.shape, ours.dtype, ours.device) != (theirs.shape, theirs.dtype, theirs.device):
        return [
            f"{path} is {ours.dtype} {list(ours.shape)} on {ours.device}, not "
            f"{theirs.dtype} {list(theirs.shape)} on {theirs.device}"
        ]
    if theirs.numel() == 0 or torch.equal(ours, theirs):
        return []
    away = ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)).item()
    return [f"{path} is {away:.1e} away"] if not away <= tolerance else []
