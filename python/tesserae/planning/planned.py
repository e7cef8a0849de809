"""tsm.plan: memory and time of a script's model at every layout, before there is a machine for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from tesserae import _C
from tesserae.planning.program import run_plan
from tesserae.planning.tracing import trace


class Plan:
    """What was planned; `print(plan)` shows the table of `tesserae plan`."""

    #: What was traced: json.dump() it for `tesserae plan --traced FILE`.
    facts: dict[str, Any]
    #: Whether a layout fits.
    fits: bool

    def __init__(self, facts: dict[str, Any], options: list[str]) -> None:
        self.facts = facts
        self._options = options
        status, output = run_plan(facts, ["--json", "--all", *options])
        self._document = json.loads(output)
        self.fits = status == 0

    @property
    def layouts(self) -> list[dict[str, Any]]:
        """All of them, the best first, in bytes and seconds, as `tesserae plan --json` has them."""
        return self._document["layouts"]

    @cached_property
    def text(self) -> str:
        """What `tesserae plan` prints."""
        return run_plan(self.facts, self._options)[1]

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        first, document = self.layouts[0], self._document
        degrees = f"P={first['parameters']} G={first['gradients']} O={first['optimizer']}"
        fitting = f"{document['layouts_fitting']} of {document['layouts_total']} layouts fit"
        return f"Plan({fitting}; first {degrees})"


def plan(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    units: Iterable[str | type[nn.Module]] | None = None,
    dtype: str = "bf16",
    **options: Any,
) -> Plan:
    """Memory, traffic and time of a step of the model at every (P, G, O), from a trace that needs neither its memory
    nor a device. In any process; it needs no job and no tsm.init().

        plan = tsm.plan(lambda: LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, devices=64)
        print(plan)

    `model_fn` makes the model (and must make it: memory that is there already does not count); `batch` is what the
    model is called with, a dict, tuple or tensor, whose values do not matter and whose tensors' first dimension are
    rows. `loss`: of what the model returns, where that neither is nor has a loss. `units`: classes of modules, or their
    names, that are sharded as units; by default what lies in ModuleLists. `dtype`: "fp32", "bf16" or "fp16", of
    parameters and activations.

    `options`: those of `tesserae plan` with underscores, True for a flag (docs/plan.md): `devices`, `per_host`,
    `machine`, `memory`, `headroom`, `micro_batch`, `optimizer`, `keep_activations` and so on; its --batch, the rows of
    a step over all devices, is `step_batch` here. One that is None is not given.

    Raises InvalidArgument for a model that cannot be traced, and for options that the program refuses."""
    words = [_word(name, value) for name, value in options.items() if value is not None]
    return Plan(trace(model_fn, batch, loss=loss, units=units, dtype=dtype), words)


def _word(name: str, value: Any) -> str:
    """The option as the command line has it, in one word: a value may begin with a dash."""
    option = "--" + {"step_batch": "batch"}.get(name, name).replace("_", "-")
    if option in ("--help", "--json", "--traced", "--script", "--units", "--model", "--dtype"):
        raise _C.InvalidArgument(f"[tsm.plan] {option} is no option here")
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{option}={value}"
