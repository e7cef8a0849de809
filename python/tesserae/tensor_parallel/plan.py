"""Which layers of a model are split, and how: patterns of module names, as of a shell -> kinds.

   {"*.q_proj": "column", "*.o_proj": "row", "*.attention": "divide:num_heads"}

- "column", "row"            nn.Linear or Conv1D, by output or input features (layers.py)
- "column_gather"            a column layer whose output is put together: what follows is not split
- "row_scatter"              a row layer whose input is not split: it takes its own features
- "column:3"                 the same for three matrices in one, side by side: each is cut by itself
- "head"                     the linear layer to the vocabulary
- "vocabulary", "features"   nn.Embedding, by its rows or by its columns
- "divide:num_heads,sinks"   attributes of a module, which its forward reads: numbers are divided, parameters cut along
                             their first dimension
- "summed"                   a module that stays whole and works on what is split (a norm of single heads): gradients of
                             its parameters are summed (summed.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from tesserae import _C
from tesserae.tensor_parallel import summed
from tesserae.tensor_parallel.layers import KINDS, divided, is_linear
from tesserae.tensor_parallel.parts import SplitModule
from tesserae.torch_compat.modules import own_parameters

Plan = Mapping[str, str]


def apply(plan: Plan, model: nn.Module, parallel: _C.Parallel, every: bool = True) -> list[SplitModule]:
    """Splits the layers that the plan names; their parameters are still whole. Returns them.

    `every`: each pattern must match. Raises InvalidArgument that lists the patterns that did not and the linear layers
    that are in no pattern; and, with the degrees that would do, for what cannot be divided.
    """
    _check_kinds(plan)
    names = {module: name for name, module in model.named_modules()}
    chosen: dict[nn.Module, tuple[str, str]] = {}  # pattern and kind; the first that matches
    matched = set()
    for pattern, kind in plan.items():
        for module, name in names.items():
            if fnmatchcase(name, pattern):
                matched.add(pattern)
                chosen.setdefault(module, (pattern, kind))
    unmatched = [pattern for pattern in plan if pattern not in matched]
    if every and unmatched:
        left = [name for module, name in names.items() if is_linear(module) and module not in chosen]
        raise _C.InvalidArgument(
            f"[tsm.transform] no module matches {_shown(unmatched)} of the plan; linear layers that no pattern "
            f"matches: {_shown(left) if left else 'none'}"
        )
    layers = []
    for module, (_, kind) in chosen.items():
        if isinstance(module, SplitModule):
            raise _C.InvalidArgument(f"[tsm.transform] {names[module]} has been split already; transform a model once")
        what, _, argument = kind.partition(":")
        if what == "divide":
            layers += _divide(module, names[module], argument.split(","), parallel)
        elif what == "summed":
            summed.wrap(module, parallel)
        else:
            KINDS[what](module, names[module], parallel, int(argument or 1))
            layers.append(module)
    return layers  # type: ignore[return-value]


def _check_kinds(plan: Plan) -> None:
    for pattern, kind in plan.items():
        what, colon, argument = str(kind).partition(":")
        good = what in (*KINDS, "summed") and (
            not colon or (what == "column" and argument.isdigit() and int(argument) > 0)
        )
        if not good and not (what == "divide" and argument):
            raise _C.InvalidArgument(
                f"[tsm.transform] the plan says {kind!r} of {pattern!r}; it takes {', '.join(KINDS)}, summed, "
                "column:BLOCKS and divide:ATTRIBUTE,..."
            )


def _divide(module: nn.Module, name: str, attributes: list[str], parallel: _C.Parallel) -> list[SplitModule]:
    """The module, if it has parameters among them."""
    parameters = [attribute for attribute in attributes if own_parameters(module).get(attribute) is not None]
    for attribute in attributes:
        if attribute in parameters:
            continue
        size = getattr(module, attribute, None)
        if not isinstance(size, int):
            raise _C.InvalidArgument(
                f"[tsm.transform] {name} is to divide {attribute!r}, which is {size!r}; it must be a whole number or a "
                "parameter"
            )
        setattr(module, attribute, _C.size_of_part(f"{name}.{attribute}:", size, parallel))
    return [divided(module, name, parameters, parallel)] if parameters else []


def _shown(names: list[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
