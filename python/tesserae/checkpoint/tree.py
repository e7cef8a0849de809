"""State that is no model -> JSON and tensors, and back; no pickle.

What JSON has no word for is a dictionary with one key that begins with a dollar sign:

    {"$tensor": name}             a tensor of the checkpoint
    {"$tuple": [...]}
    {"$float": "inf"}             also "-inf" and "nan"
    {"$int": "18446744073709551616"}    beyond 64 bits
    {"$dict": [[key, value], ...]}      a dictionary whose keys are not all plain strings
    {"$counter": [[key, value], ...]}   collections.Counter, which some schedulers of torch keep
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import torch

from tesserae import _C

DEEPEST = 64  # levels of nesting: a structure that contains itself ends here

Path = tuple[Any, ...]


def encode(value: Any, where: str, keep: Callable[[Path, torch.Tensor], str] | None = None, path: Path = ()) -> Any:
    """`value` as what json.dumps takes. keep(path, tensor) stores a tensor and returns its name in the checkpoint;
    without it tensors are refused. `where` names the value in errors. Raises InvalidArgument for any other type."""

    def below(key: Any, part: Any) -> Any:
        return encode(part, where, keep, (*path, key))

    if len(path) > DEEPEST:
        raise refusal(where, path[:4], f"is nested deeper than {DEEPEST} levels; does it contain itself?")
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else {"$int": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor) and keep is not None:
        return {"$tensor": keep(path, value)}
    if isinstance(value, list):
        return [below(i, part) for i, part in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"$tuple": [below(i, part) for i, part in enumerate(value)]}
    if isinstance(value, collections.Counter):
        return {"$counter": [[below("key", key), below(key, part)] for key, part in value.items()]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): below(key, part) for key, part in value.items()}
        return {"$dict": [[below("key", key), below(key, part)] for key, part in value.items()]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise refusal(
        where,
        path,
        f"is a {kind}; None, bool, int, float, str, lists, tuples, dictionaries"
        f"{' and tensors' if keep is not None else ''} can be saved: save what it is made of (its state_dict(), say)",
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """What encode() was given. tensor(name) returns a tensor of the checkpoint."""
    if isinstance(value, list):
        return [decode(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value)) if len(value) == 1 else ""
    if not key.startswith("$"):
        return {name: decode(part, tensor) for name, part in value.items()}
    content = value[key]
    if key == "$tensor" and tensor is not None:
        return tensor(content)
    if key == "$tuple":
        return tuple(decode(content, tensor))
    if key in ("$dict", "$counter"):
        pairs = {decode(name, tensor): decode(part, tensor) for name, part in content}
        return collections.Counter(pairs) if key == "$counter" else pairs
    if key == "$float":
        return float(content)
    if key == "$int":
        return int(content)
    raise _C.Corruption(f"[checkpoint] extra state has {key}, which this version does not know")


def refusal(where: str, path: Path, what: str) -> _C.InvalidArgument:
    """For the part at `path` of the value that `where` names."""
    return _C.InvalidArgument(f"[checkpoint] {where}{''.join(f'[{key!r}]' for key in path)} {what}")
