"""The state of a torch optimizer -> "optimizer/STATE/NAME" for each parameter, and back.

- A state tensor of its parameter's shape is cut as the parameter is: sharded, replicated, or both under one name.
- A state of one number ("step") is saved once for each parameter, so that it also counts where parameters are joined
  otherwise. Parameters that share a flat parameter must agree on it when it is loaded.
- Anything else (a factored moment, say) is saved whole, which only works for parameters that are not sharded.
- Options of the parameter groups are in the manifest, with the names of the parameters that they are for. How a step is
  computed (foreach, fused, capturable, differentiable) is the running optimizer's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tesserae import _C
from tesserae.checkpoint import tree
from tesserae.checkpoint.model_state import Held, ModelState, Slot
from tesserae.checkpoint.pieces import Pieces, whole

OWN_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
NUMBERS: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float}


class OptimizerState:
    """An optimizer over the parameters of a model, or several, each over some of them. No collective."""

    def __init__(self, optimizer: Any, model: ModelState) -> None:
        self._optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._held = {id(held.parameter): held for held in model.held}
        for each in self._optimizers:
            _require_state_here(each)
            for parameter in (p for group in each.param_groups for p in group["params"]):
                if id(parameter) not in self._held:
                    raise _C.InvalidArgument(
                        f"[checkpoint] the optimizer has a parameter of shape {tuple(parameter.shape)} that the model "
                        "does not have; make the optimizer after the model is wrapped, from model.parameters()"
                    )

    def groups(self) -> Iterator[tuple[Any, dict[str, Any], list[Held]]]:
        """(optimizer, options, parameters) for each group."""
        for each in self._optimizers:
            for group in each.param_groups:
                yield each, group, [self._held[id(parameter)] for parameter in group["params"]]

    # Saving.

    def save(self, pieces: Pieces) -> list[dict[str, str]]:
        """Adds this rank's part, and returns of what kind the numbers are in it, group by group, for describe()."""
        numbers: list[dict[str, str]] = []
        for optimizer, _, held_ones in self.groups():
            numbers.append({})
            for held in held_ones:
                if not any(slot.cuts for slot in held.slots):
                    continue
                for key, value in optimizer.state.get(held.parameter, {}).items():
                    if value is not None:  # as good as missing to torch's optimizers
                        _save_value(pieces, held, key, value, numbers[-1])
        return numbers

    def describe(self, kinds_of_numbers: list[dict[str, str]]) -> dict[str, Any]:
        """What goes to the manifest."""
        numbers = {key: kind for group in kinds_of_numbers for key, kind in group.items()}
        described, kinds = [], []
        for optimizer, group, held_ones in self.groups():
            kinds.append(type(optimizer).__name__)
            names = [slot.names[0] for held in held_ones for slot in held.slots]
            described.append({**encode_options(group), "params": names})
        found = {"param_groups": described, "kinds": kinds, "numbers": numbers}
        if any(group != numbers for group in kinds_of_numbers):
            found["numbers_of_groups"] = kinds_of_numbers
        return found

    # Loading.

    def load(self, pieces: Pieces, description: dict[str, Any], strict: bool) -> Loading:
        """Adds what is to be filled. Nothing of the optimizer changes but state tensors that it has already."""
        assert pieces.stored is not None
        by_name: dict[str, list[str]] = {}
        for stored in pieces.stored:
            if stored.startswith("optimizer/"):
                _, key, name = stored.split("/", 2)
                by_name.setdefault(name, []).append(key)
        if strict and not by_name and not description:
            raise _C.InvalidArgument(
                "[checkpoint.load] the checkpoint has nothing of an optimizer: load the model alone, or pass "
                "strict=False if the optimizer is to begin anew"
            )
        loading = Loading(self, description, strict)
        for optimizer, group, held_ones in self.groups():
            for held in held_ones:
                present = _with_state(held)
                keys = dict.fromkeys(key for slot in present for name in slot.names for key in by_name.get(name, ()))
                live = optimizer.state.get(held.parameter, {})
                state = {key: self._load_value(loading, pieces, held, group, key, live.get(key)) for key in keys}
                loading.values.append((optimizer.state, held, state))
        return loading

    def _load_value(
        self, loading: Loading, pieces: Pieces, held: Held, group: dict[str, Any], key: str, live: Any
    ) -> Callable[[], Any]:
        parameter = held.parameter
        slots = _with_state(held)
        names = {id(slot): [f"optimizer/{key}/{name}" for name in slot.names] for slot in slots}
        stored = {id(s): next((pieces.stored[n] for n in names[id(s)] if n in pieces.stored), None) for s in slots}
        shape, dtype = next(entry for entry in stored.values() if entry is not None)
        first = next(slot for slot in slots if stored[id(slot)] is not None)
        if shape == list(first.shape) and not (key == "step" and shape == []):
            tensor = live
            if not isinstance(live, torch.Tensor) or live.shape != parameter.shape:
                tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            for slot in slots:
                pieces.add(names[id(slot)], slot.shape, slot.cuts, tensor, split=slot.split, optional=True)
            return lambda: tensor
        if shape == []:
            counts = torch.zeros(len(slots), dtype=dtype)
            for i, slot in enumerate(slots):
                pieces.add(names[id(slot)], [], [(0, 1, i)], counts, optional=True)
            loading.require_equal(counts, [names[id(slot)][0] for slot in slots])
            kind = loading.kind_of_number(key, first)
            return lambda: _number(counts[0], kind, key, parameter, group, live)
        if held.flat or isinstance(parameter, DTensor):
            raise _C.InvalidArgument(
                f"[checkpoint.load] {names[id(first)][0]} has shape {shape} and its parameter {list(first.shape)}: "
                "such a state cannot be cut as the parameter is"
            )
        tensor = torch.zeros(shape, dtype=dtype, device=parameter.device)
        pieces.add(names[id(first)], shape, whole(tensor), tensor)
        return lambda: tensor


class Loading:
    """An optimizer's state while it is loaded."""

    def __init__(self, target: OptimizerState, description: dict[str, Any], strict: bool) -> None:
        self.values: list[tuple[Any, Held, dict[str, Callable[[], Any]]]] = []
        self._numbers: dict[str, str] = description.get("numbers", {})
        self._numbers_of: dict[str, dict[str, str]] = {}  # by parameter, where groups have other kinds
        groups = description.get("param_groups", [])
        for group, numbers in zip(groups, description.get("numbers_of_groups", []), strict=False):
            self._numbers_of |= dict.fromkeys(group["params"], numbers)
        self._target = target
        self._options = _find_options(target, description, strict)
        self._equal: list[tuple[torch.Tensor, list[str]]] = []

    def kind_of_number(self, key: str, slot: Slot) -> str | None:
        """Of Python; None: a tensor."""
        numbers = next((self._numbers_of[name] for name in slot.names if name in self._numbers_of), self._numbers)
        return numbers.get(key)

    def require_equal(self, counts: torch.Tensor, names: list[str]) -> None:
        self._equal.append((counts, names))

    def check(self) -> None:
        """When all is filled, on each rank: InvalidArgument if it does not fit together."""
        for counts, names in self._equal:
            for name, count in zip(names, counts.tolist(), strict=True):
                if count != counts[0].item():
                    raise _C.InvalidArgument(
                        f"[checkpoint.load] {name} is {count} and {names[0]} is {counts[0].item()}, but the parameters "
                        "share a flat parameter here: load with use_orig_params=True"
                    )

    def apply(self) -> None:
        """The optimizer has what was loaded. State that the checkpoint lacks is gone: it starts anew."""
        for states, held, values in self.values:
            states.pop(held.parameter, None)
            if values:
                states[held.parameter] = {key: value() for key, value in values.items()}
        for (_, group, _), options in zip(self._target.groups(), self._options, strict=True):
            for key, value in options.items():
                group[key] = _filled(group.get(key), value)


def _require_state_here(optimizer: Any) -> None:
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise _C.InvalidArgument(
            "[checkpoint] a ZeroRedundancyOptimizer keeps its state in an optimizer of its own, of which a checkpoint "
            "would have nothing: let Tesserae shard the state (FullyShardedDataParallel with SHARD_GRAD_OP, say), or "
            "pass what its consolidate_state_dict() and state_dict() give in extra"
        )


def _with_state(held: Held) -> list[Slot]:
    """Those of which this rank has state: of a DTensor it has also where it has no rows, as torch's optimizers do."""
    return [slot for slot in held.slots if slot.cuts or isinstance(held.parameter, DTensor)]


def _save_value(pieces: Pieces, held: Held, key: str, value: Any, numbers: dict[str, str]) -> None:
    parameter = held.parameter
    value = as_tensor(key, value, numbers)
    if not isinstance(value, torch.Tensor):
        raise _C.InvalidArgument(
            f"[checkpoint.save] the optimizer's state {key!r} of {held.slots[0].names[0]} is a "
            f"{type(value).__qualname__}; tensors and numbers can be saved"
        )
    for slot in held.slots:
        name = f"optimizer/{key}/{slot.names[0]}"
        if value.shape == parameter.shape:
            pieces.add([name], slot.shape, slot.cuts, value, split=slot.split, written=slot.written)
        elif value.dim() == 0:
            # Who has the parameter's first element writes it.
            pieces.add([name], [], [(0, 1, 0)], value, written=slot.written and _has_first(slot))
        elif held.flat or isinstance(parameter, DTensor):
            raise _C.InvalidArgument(
                f"[checkpoint.save] the optimizer's state {key!r} of {slot.names[0]} has shape {tuple(value.shape)}, "
                f"its parameter has {tuple(parameter.shape)} on this rank: such a state cannot be cut as the "
                "parameter is"
            )
        else:
            pieces.add([name], value.shape, whole(value), value, written=slot.written)


def as_tensor(key: str, value: Any, numbers: dict[str, str]) -> Any:
    """A number of Python as a tensor, and in `numbers` of what kind it was."""
    kind = next((name for name, convert in NUMBERS.items() if type(value) is convert), None)
    if kind is None:
        return value
    numbers[key] = kind
    return torch.tensor(value, dtype=torch.float64 if kind == "float" else None)


def _has_first(slot: Slot) -> bool:
    return any(begin == 0 for begin, _, _ in slot.cuts) and (slot.split is None or slot.split.begins(list(slot.shape)))


def _number(
    value: torch.Tensor, kind: str | None, key: str, parameter: torch.Tensor, group: dict[str, Any], live: Any
) -> Any:
    """A state of one number, of the kind and at the place where torch's optimizers have it."""
    if isinstance(live, torch.Tensor):
        return live.copy_(value)
    if kind is not None:
        return NUMBERS[kind](value.item())
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return value.clone().to("cpu" if on_host else parameter.device)


def encode_options(group: dict[str, Any]) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        if key not in OWN_OPTIONS:
            options[key] = tree.encode(_without_tensors(value), f"option {key!r} of the optimizer")
    return options


def _without_tensors(value: Any) -> Any:
    """Tensors of one number, also in a tuple (betas), as numbers."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    return tuple(map(_without_tensors, value)) if type(value) is tuple else value


def _filled(live: Any, value: Any) -> Any:
    """`value`, in the tensors that an option has already."""
    if isinstance(live, torch.Tensor):
        return live.fill_(value)
    if type(live) is tuple and type(value) is tuple and len(live) == len(value):
        return tuple(map(_filled, live, value))
    return value


def _find_options(target: OptimizerState, description: dict[str, Any], strict: bool) -> list[dict[str, Any]]:
    """For each group of the optimizer the options of the group that its parameters were in."""
    described = description.get("param_groups")
    if described is None:  # not saved by Python: options stay as they are
        return [{} for _ in target.groups()]
    kinds = description.get("kinds", [None] * len(described))
    group_of = {name: i for i, options in enumerate(described) for name in options["params"]}
    found = []
    for index, (optimizer, _, held_ones) in enumerate(target.groups()):
        names = [next((n for n in s.names if n in group_of), s.names[0]) for held in held_ones for s in held.slots]
        missing = [name for name in names if name not in group_of]
        if missing and strict:
            raise _C.InvalidArgument(
                f"[checkpoint.load] the optimizer's group {index} has {missing[0]}, which no saved group had"
            )
        groups = sorted({group_of[name] for name in names if name in group_of})
        if not names and index < len(described) and not described[index]["params"]:
            groups = [index]  # still empty
        kind = type(optimizer).__name__
        others = [kinds[i] for i in groups if kinds[i] not in (kind, None)]
        if others and strict:
            raise _C.InvalidArgument(
                f"[checkpoint.load] the optimizer is {kind} and was {others[0]}; if their states mean the same, pass "
                "strict=False"
            )
        options = [{key: value for key, value in described[i].items() if key != "params"} for i in groups]
        if any(other != options[0] for other in options):
            raise _C.InvalidArgument(
                f"[checkpoint.load] the parameters of the optimizer's group {index} were in groups with different "
                "options; make the groups as they were when it was saved"
            )
        found.append({key: tree.decode(value) for key, value in options[0].items()} if options else {})
    return found
