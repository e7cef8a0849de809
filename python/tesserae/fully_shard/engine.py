"""The states of a model -> units of one engine.

1. At the first forward (or unshard()) in a model: the outermost state is the root of all below it. Until then
   parameters are DTensors that anybody may move, convert or replace.
2. Each state becomes a unit, which takes the memory of its DTensors over: they show it from then on.
3. The root adopts the others, and the ranks compare what they have built.
4. At later steps, parameters that the script has replaced since are taken over.
"""

from __future__ import annotations

import functools
import logging
import weakref

import torch

from tesserae import _C
from tesserae.fsdp.layers import compute_gradients_in_place, require_dense_gradients
from tesserae.fully_shard import extensions
from tesserae.fully_shard import parameters as faces
from tesserae.fully_shard.places import Places
from tesserae.fully_shard.state import State, states_below
from tesserae.job import activations
from tesserae.torch_compat.fsdp2 import before_state_dicts, placed_as
from tesserae.torch_compat.parameters import hooks_after_accumulation


def prepare(state: State) -> None:
    """Called before a step of a root, before a forward of another state that is called by itself, and for any state
    without a unit. Collective at the first call of a model."""
    trains = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.no_grad():
        if state.root is None:
            _build(state.outermost)
        assert state.root is not None
        replaced = [each for each in (state.below if state.root is state else [state]) if _take_over(each, trains)]
        if replaced:
            _require_tied_before(state.root.below)


def _build(root: State) -> None:
    # 1.
    if len(root.modules) > 1:
        raise _C.InvalidArgument(
            f"[fully_shard] FSDP requires a single root module but got {len(root.modules)} in one group; call "
            "fully_shard on the module around them, too"
        )
    paths = states_below(root.modules[:1])
    for state, path in paths.items():
        if state.root is not None:
            raise _C.InvalidArgument(
                f"[fully_shard] module {path} has run a forward before fully_shard was called on the module around it: "
                "shard the whole model first"
            )
    if root.keeps_as_root:
        root.frees_after_forward = False
    _require_no_duplicates(paths)
    for state in paths:
        for managed in state.parameters:
            faces.find_replaced(managed)
    _join_tied(root, list(paths))
    _require_values(root, paths)
    # 2.
    for state in paths:
        _make_unit(state)
    # 3.
    assert root.unit is not None
    for state, path in paths.items():
        state.root = root
        if state is not root:
            assert state.unit is not None
            root.unit.adopt(state.unit, path)
    root.below = list(paths)
    for state in paths:
        state.apply_settings()
        state.apply_hooks()
    root.unit.require_agreement()
    if root.places.fabric.rank == 0:
        p, g, o = root.places.strategy.degrees
        logging.getLogger("tesserae").info(
            "[fully_shard] %d units of %s are trained by tesserae: parameters over %d ranks, gradients over %d, "
            "optimizer over %d (tsm.status(model) says more)",
            *(len(paths), type(root.modules[0]).__name__, p, g, o),
        )


def _join_tied(root: State, states: list[State]) -> None:
    """Weights that were tied after fully_shard are one parameter: of the state that had both, or of the root."""
    found: dict[torch.nn.Parameter, list[tuple[State, faces.Managed]]] = {}
    for state in states:
        for managed in state.parameters:
            found.setdefault(managed.parameter, []).append((state, managed))
    for (first, managed), *others in found.values():
        for state, other in others:
            managed.entries += [entry for entry in other.entries if entry not in managed.entries]
            state.parameters[:] = [each for each in state.parameters if each is not other]
        if any(state is not first for state, _ in others) and first is not root:
            if first.places.mesh != root.places.mesh:
                raise _C.InvalidArgument(
                    f"[fully_shard] parameter {managed.name} was tied to that of another module after fully_shard, and "
                    "the module around both is sharded over other ranks; tie them before"
                )
            first.parameters[:] = [each for each in first.parameters if each is not managed]
            root.parameters.append(managed)
            before_state_dicts({module for module, _ in managed.entries}, root.show_shards)


def _require_tied_before(states: list[State]) -> None:
    seen: dict[torch.nn.Parameter, str] = {}
    for state in states:
        for managed in state.parameters:
            name = managed.name
            if managed.parameter in seen:
                raise _C.InvalidArgument(
                    f"[fully_shard] parameter {name} was tied to that of {seen[managed.parameter]} after the "
                    "first step; tie them before it"
                )
            seen[managed.parameter] = name


def _make_unit(state: State) -> None:
    for managed in state.parameters:
        faces.require_rows(managed)
    values = [faces.local_values(managed) for managed in state.parameters]
    compute = [faces.make_compute(managed) for managed in state.parameters]
    names = faces.names_in(state.modules[0], state.parameters)
    for managed, (name, *_) in zip(state.parameters, names):
        if managed.parameter.requires_grad:
            require_dense_gradients("fully_shard", name, managed.entries)
    dims = [managed.placement.dim for managed in state.parameters]
    parts = [managed.part for managed in state.parameters if managed.part is not None]  # of all, or of none
    splits = [(part.split, list(part.whole)) for part in parts]
    state.unit = _C.Unit(state.places.fabric, state.options, names, compute, splits, values, dims)
    activations.attach(state.unit)
    for number, managed in enumerate(state.parameters):
        faces.show_split(managed, state.unit, number)
    others = {module for managed in extensions.attach(state) for module, _ in managed.entries}
    modules = {module: None for managed in state.parameters for module, _ in managed.entries if module not in others}
    compute_gradients_in_place(modules)
    _show(state)


def go_to(state: State, places: Places) -> None:
    """The engine has cut the state anew: its DTensors say so."""
    state.places = places
    for managed in state.parameters:
        faces.go_to(managed, places)
    state.apply_settings()
    state.apply_collectives()


def _show(state: State) -> None:
    unit = state.unit
    assert unit is not None
    by_buffer = [[state.parameters[number].parameter for number in numbers] for numbers in unit.flats]
    unit.show_dtensors(by_buffer, placed_as)
    unit.set_entries(faces.entries_of(state.parameters), while_gathered=True)


def _take_over(state: State, trains: bool) -> bool:
    """4. True: there were some. `trains`: in a forward with gradients. Without, what is frozen says nothing, and the
    backward of an earlier forward may follow."""
    replaced = False
    for managed in state.parameters:
        if trains:
            faces.follow(managed)
        before = managed.parameter
        if faces.find_replaced(managed):
            if managed.parameter.dtype != before.dtype:
                raise _C.InvalidArgument(
                    f"[fully_shard] parameter {managed.name} of {before.dtype} was replaced by one of "
                    f"{managed.parameter.dtype} after the first step; convert the model before it"
                )
            faces.require_rows(managed)
            faces.copy_values(managed.parameter, before)
            replaced = True
    if replaced:
        _show(state)
    hooked = any(hooks_after_accumulation(managed.parameter) for managed in state.parameters)
    if hooked != state.hooked:
        state.hooked = hooked
        # The unit must not keep the state alive: what C++ holds no collector sees.
        state.prepared().set_after_backward(functools.partial(_run_hooks, weakref.ref(state)) if hooked else None)
    return replaced


def _run_hooks(of: weakref.ref[State], numbers: list[int]) -> None:
    """Hooks on sharded parameters that had a gradient in this backward see what the optimizer will see."""
    state = of()
    for number in numbers if state is not None else ():
        parameter = state.parameters[number].parameter
        if parameter.grad is not None:
            for hook in hooks_after_accumulation(parameter):
                hook(parameter)


def _require_values(root: State, paths: dict[State, str]) -> None:
    names = {parameter: name for name, parameter in root.modules[0].named_parameters()}
    for state in paths:
        empty = [names.get(m.parameter, m.name) for m in state.parameters if faces.is_empty(m.parameter)]
        if not empty:
            continue
        raise _C.InvalidArgument(
            "[fully_shard] FSDP parameters should be materialized from meta device before training, but the following "
            f"were still on meta device: {empty}\nFor example, call module.to_empty(device) to materialize to device "
            "and call module.reset_parameters() on each module to initialize values."
        )


def _require_no_duplicates(paths: dict[State, str]) -> None:
    seen: set[object] = set()
    for state in paths:
        for managed in state.parameters:
            if managed.origin in seen:
                raise ValueError(
                    f"Parameter '{managed.name}' is shared with a parameter already managed by another FSDP group. For "
                    "shared/tied parameters, use fully_shard([module_a, module_b]) to place them in the same FSDP "
                    "group."
                )
            seen.add(managed.origin)
