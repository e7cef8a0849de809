"""tsm.compare_replicas: whether ranks that hold the same part of the training state still have the same bytes.

The engine does it (tesserae/shard/replica_check.cpp), and asks for the optimizers' state as for a turn of the dial;
here it only looks at it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tesserae import _C
from tesserae.dial.moving import Moving
from tesserae.dial.moving_dtensors import MovingDTensors
from tesserae.dial.roots import Root, roots_of, unit_of
from tesserae.fsdp.instance import Instance
from tesserae.fsdp.optim_contents import State, held_here
from tesserae.fsdp.optim_keys import Keys

ReplicaReport = _C.ReplicaReport
NAME = "tsm.compare_replicas"


class ReplicasDiffer(_C.Error):
    """Ranks that hold the same part of the training state have different bytes: hardware has changed some of them."""


@torch.no_grad()
def compare_replicas(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None) -> list[ReplicaReport]:
    """Compares parameters and the tensors in the state of `optimizer` (one or several; None if there is none) between
    the ranks that hold the same part of them, which are equal to the bit after any number of steps. One report for each
    root of FSDP in `model` in which something differs: `suspects`, the ranks (of that root) whose bytes are not those
    that most of them have, and `here`, whether this rank is one; `decided`, whether there was such a majority (three
    replicas vote, of two nobody knows which is right); `text`, the parameters. Empty: all are equal, or no part of the
    state has a replica.

    Reads the state once, in memory for one flat buffer's besides; ranks tell each other 8 bytes a buffer. Between two
    steps. Collective. State of another shape than its parameter's (counters) is not compared. Raises InvalidArgument
    where no module in `model` is sharded by Tesserae.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or [])
    roots = roots_of(model)
    if not roots:
        raise _C.InvalidArgument(f"[{NAME}] there is no module in the model that tesserae has sharded")
    for root in roots:
        unit_of(root).require_between_steps(NAME)
    found = [_C.compare_replicas(unit_of(root), _shown(root, optimizers)) for root in roots]
    return [report for report in found if report.suspects]


def _shown(root: Root, optimizers: list[Optimizer]) -> Moving | MovingDTensors:
    if isinstance(root, Instance):
        return _Shown(root, optimizers)
    return _ShownDTensors(root, optimizers, {each: each.places for each in root.below})


class _Shown(Moving):
    """What is taken stays where it is. Ranks that hold the same have the same kinds of state, so nothing is told."""

    _gives_away = False

    def _agree(self, keys: Keys, mine: dict[nn.Parameter, State], root: Instance) -> dict[nn.Parameter, State]:
        return held_here(keys, mine)

    def put(self, shard: int, tensors: list[Tensor]) -> None:
        """Nothing has gone."""


class _ShownDTensors(MovingDTensors):
    """take() copies. What is not of its parameter's shape is left out."""

    def _check(self, shard: int) -> None:
        managed, state = self._buffers[shard][1], self._state[shard]
        shape = managed.parameter.shape
        self._state[shard] = {n: v for n, v in state.items() if isinstance(v, DTensor) and v.shape == shape}

    def put(self, shard: int, tensors: list[Tensor]) -> None:
        """Nothing has gone."""
