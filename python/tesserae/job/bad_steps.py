"""tsm.bad_steps: a script hears of steps whose numbers are bad, on all ranks alike, before it updates anything."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from tesserae import _C
from tesserae.job.fabrics import alone, fabric_of


class BadNumbers(_C.Error):
    """More bad steps in a row than the script allows."""


class BadSteps:
    """Made by tsm.bad_steps(). Its state is the same on all ranks: pass it in `others` to job.steps() of tsm.elastic,
    or save it with the checkpoint."""

    def __init__(self, loss_spike: float | None, limit: int) -> None:
        if loss_spike is not None and not loss_spike > 1:
            raise _C.InvalidArgument(f"[tsm.bad_steps] loss_spike is {loss_spike}: it must be above 1")
        if limit < 1:
            raise _C.InvalidArgument(f"[tsm.bad_steps] limit is {limit}: it must be at least 1")
        self._limit = limit
        self._steps = _C.BadSteps(loss_spike)

    def judge(
        self, loss: torch.Tensor | float, norm: torch.Tensor | float = 0.0, *, overflow_expected: bool = False
    ) -> str:
        """Why this step is bad, the same text on all ranks; "" for a good one. Between backward and optimizer.step():

            norm = model.clip_grad_norm_(1.0)
            if why := bad.judge(loss, norm):
                optimizer.zero_grad()
                continue
            optimizer.step()

        `loss`: of this rank's data; its mean over the ranks counts. `norm`: of the gradients, before they were clipped.
        `overflow_expected`: a loss scaler is still above its lowest scale, so gradients that are not finite say
        nothing. Collective over torch's default group: one all-reduce of 16 bytes; it waits for the loss. Raises
        BadNumbers on all ranks after `limit` bad steps in a row.
        """
        values = float(loss), float(norm)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            fabric = fabric_of(None, torch.device("cpu"))
        else:
            fabric = alone()
        why = self._steps.judge(fabric, *values, overflow_expected)
        if self._steps.in_a_row >= self._limit:
            raise BadNumbers(f"[tsm.bad_steps] {why}; that makes {self._limit} bad steps in a row, which is the limit")
        return why

    @property
    def in_a_row(self) -> int:
        """Bad steps since the last good one."""
        return self._steps.in_a_row

    def state_dict(self) -> dict[str, Any]:
        """What it knows of earlier steps."""
        return json.loads(self._steps.description)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Judges from here on as the one of which this is the state. Raises ValueError for something else."""
        self._steps.take_over(json.dumps(state))


def bad_steps(*, loss_spike: float | None = None, limit: int = 20) -> BadSteps:
    """Judges steps: bad are those whose mean loss or norm of the gradients is not finite, and with `loss_spike` those
    whose loss is above so many times the median of the last 32 good steps, once there are 8. Once in a script, on every
    rank. What becomes of a bad step is the script's to choose: leave it out (continue), go back (load the newest
    checkpoint or what is in memory, and go on with the next data), or end; after `limit` in a row it ends by itself.

    Raises InvalidArgument.
    """
    return BadSteps(loss_spike, limit)
