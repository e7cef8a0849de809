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
from tesserae.tensor_parallel.parts import Change, SplitModule, check_ties
from tesserae.torch_compat.modules import own_parameters

Plan = Mapping[str, str]


def check(plan: Plan, model: nn.Module, parallel: _C.Parallel, every: bool = True) -> list[Change]:
    """What becomes of the modules that the plan names; nothing is changed yet.

    `every`: each pattern must match. Raises InvalidArgument that lists the patterns that did not and the linear layers
    that are in no pattern; with the degrees that would do, for what cannot be divided; and for parameters that are tied
    and not cut alike.
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
    changes = []
    for module, (_, kind) in chosen.items():
        if isinstance(module, SplitModule):
            raise _C.InvalidArgument(f"[tsm.transform] {names[module]} has been split already; transform a model once")
        what, _, argument = kind.partition(":")
        if what == "divide":
            changes.append(_divide(module, names[module], argument.split(","), parallel))
        elif what == "summed":
            changes.append(_sum(module, names[module], chosen, parallel))
        else:
            changes.append(KINDS[what](module, names[module], parallel, int(argument or 1)))
    check_ties(model, {change.module: change.splits for change in changes})
    return changes


def apply(changes: list[Change]) -> list[SplitModule]:
    """Makes the changes of check(). Returns the layers that are split now; their parameters are still whole."""
    for change in changes:
        change.make()
    return [change.module for change in changes if change.splits]  # type: ignore[misc]


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


def _divide(module: nn.Module, name: str, attributes: list[str], parallel: _C.Parallel) -> Change:
    parameters = [attribute for attribute in attributes if own_parameters(module).get(attribute) is not None]
    numbers = {}
    for attribute in attributes:
        if attribute in parameters:
            continue
        size = getattr(module, attribute, None)
        if not isinstance(size, int):
            raise _C.InvalidArgument(
                f"[tsm.transform] {name} is to divide {attribute!r}, which is {size!r}; it must be a whole number or a "
                "parameter"
            )
        numbers[attribute] = _C.size_of_part(f"{name}.{attribute}:", size, parallel)
    return divided(module, name, parameters, numbers, parallel)


def _sum(module: nn.Module, name: str, chosen: Mapping[nn.Module, tuple[str, str]], parallel: _C.Parallel) -> Change:
    """Only parameters of its own are summed. Without any it must be one of several that a pattern matches, and those
    further in must be in the plan, too. `chosen`: by the plan, with the pattern and the kind."""
    if not summed.parameters_of(module):
        inside = module.named_modules(prefix=name)
        left = [path for path, part in inside if summed.parameters_of(part) and part not in chosen]
        alike = [other for other, why in chosen.items() if why == chosen[module]]
        if left or not any(summed.parameters_of(other) for other in alike):
            raise _C.InvalidArgument(
                f"[tsm.transform] the plan says summed of {name!r}, a {type(module).__name__} without parameters of "
                f"its own; modules inside it that have some: {_shown(left) if left else 'none'}. Name the modules that "
                "have the parameters"
            )
    return Change(module, {}, lambda: summed.wrap(module, parallel))


def _shown(names: list[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
