"""What the dial turns: the outermost FSDP instance of a model, or the outermost state of its fully_shard calls."""

from __future__ import annotations

from torch import Tensor, nn

from tesserae import _C
from tesserae.fsdp.instance import Instance, instances_of
from tesserae.fully_shard.state import State, states_below

Root = Instance | State


def roots_of(model: nn.Module) -> list[Root]:
    """Outermost first. Collective for a model of fully_shard before its first forward: it gets its engine."""
    states = list(states_below([model]))
    for state in states:
        state.prepared()
    instances = instances_of(model)
    return [i for i in instances if i.check_is_root()] + [state for state in states if state.root is state]


def unit_of(root: Root) -> _C.Unit:
    return root._unit if isinstance(root, Instance) else root.prepared()


def module_of(root: Root) -> nn.Module:
    return root if isinstance(root, Instance) else root.modules[0]


def parameters_of(root: Root) -> list[Tensor]:
    """What optimizers hold."""
    if isinstance(root, Instance):
        return [p for part in instances_of(root) for local in part._local for p in local]
    return [managed.parameter for state in root.below for managed in state.parameters]
