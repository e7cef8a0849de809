"""What a model of a script consists of, computes and keeps, for tesserae/cost/traced.h.

1. The model is made of fake tensors; the script's batch is cut, or repeated, to one row, and to two.
2. A forward and its backward are traced for each, with units that keep their activations and with ones that run again.
3. What one row and two rows take gives what is fixed and what each row adds.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tesserae import _C
from tesserae.planning.batches import call, fake, loss_of, rows_of
from tesserae.torch_compat import tracing

FORMAT = 1  # of tesserae/cost/traced.cpp
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trace(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    units: Iterable[str | type[nn.Module]] | None = None,
    dtype: str = "bf16",
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The facts. `batch`: a dict, tuple or tensor, as the model takes it; its tensors' first dimension are rows.
    `loss`: of what the model returns; by default that has one, or is one. `units`: classes, or their names; by default
    what lies in ModuleLists. Raises InvalidArgument for what cannot be traced. `tell`: progress, a line each."""
    if dtype not in DTYPES:
        raise _C.InvalidArgument(f"[tsm.plan] dtype {dtype!r}: known are {', '.join(DTYPES)}")
    kinds = None if units is None else set(units)
    passes: dict[bool, list[_Pass]] = {}
    for recomputes in (False, True):
        for rows in (1, 2):
            if tell is not None:
                tell(f"a step of {rows} row{'s' * (rows > 1)}, units {'run again' if recomputes else 'keep'}")
            passes.setdefault(recomputes, []).append(
                _Pass(model_fn, rows_of(batch, rows), loss, kinds, dtype, recomputes)
            )
    first = passes[False][0]
    return {
        "traced": FORMAT,
        "name": first.name,
        "dtype": dtype,
        **first.sizes,
        "process": _anonymous_memory(),
        "kept": _line_through(*passes[False]),
        "recomputed": _line_through(*passes[True]),
    }


class _Pass:
    """A forward and its backward."""

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        batch: Any,
        loss: Callable[[Any], Tensor] | None,
        kinds: set[str | type[nn.Module]] | None,
        dtype: str,
        recomputes: bool,
    ) -> None:
        try:
            with tracing.fake_tensors():
                self._run(_made(model_fn, DTYPES[dtype]), batch, loss, kinds, DTYPES[dtype], recomputes)
        except tracing.NEEDS_VALUES as error:
            raise _C.InvalidArgument(
                f"[tsm.plan] the model's code looks at values of tensors, which are not there when it is traced: "
                f"{str(error).splitlines()[0]} at {_where(error)}. Give a batch without what leads there (an "
                "attention_mask, often), or plan by --parameters"
            ) from error

    def _run(
        self,
        model: nn.Module,
        batch: Any,
        loss: Callable[[Any], Tensor] | None,
        kinds: set[str | type[nn.Module]] | None,
        dtype: torch.dtype,
        recomputes: bool,
    ) -> None:
        self.name = type(model).__name__
        parameters = list(model.parameters())
        units = _units_of(model, kinds)
        self.sizes = _sizes(model, units)
        if recomputes:
            for unit in units:
                tracing.recomputed(unit)
        inputs = fake(batch, parameters[0].device, dtype)
        recorder = tracing.Recorder([*parameters, *model.buffers(), *tracing.tensors_of(inputs)])
        gradients: set[int] = set()

        def reduce(parameter: Tensor) -> None:
            """As the engine does at once: a gradient takes a buffer that other formulas count."""
            assert parameter.grad is not None
            gradients.add(recorder.number(parameter.grad))
            parameter.grad = None

        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(reduce)
        events, marks = recorder.record.events, _Marks(units, lambda: len(recorder.record.events))
        with _nothing_is_packed(), recorder:
            value = loss_of(call(model, inputs), loss)
            end = len(events)
            value.backward()
            del value
        gc.collect()
        levels = recorder.record.levels(without=gradients)
        self.peak = max(levels)
        self.blocks = sum(levels[after] - levels[before] for before, after in marks.spans if after <= end)
        self.products, self.attention = recorder.record.products, recorder.record.attention


class _Marks:
    """Where units begin and end, by what `now` counts; of units in units, the outer ones."""

    def __init__(self, units: list[nn.Module], now: Callable[[], int]) -> None:
        self.spans: list[tuple[int, int]] = []
        self._now, self._depth, self._begin = now, 0, 0
        for unit in units:
            unit.register_forward_pre_hook(self._enter)
            unit.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        if self._depth == 0:
            self._begin = self._now()
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.spans.append((self._begin, self._now()))


def _made(model_fn: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise _C.InvalidArgument(f"[tsm.plan] model_fn() returned a {type(model).__name__}, not an nn.Module")
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise _C.InvalidArgument(f"[tsm.plan] {type(model).__name__} has no parameter that is trained")
    if not all(map(tracing.is_fake, parameters)):
        raise _C.InvalidArgument(
            "[tsm.plan] model_fn() returned a model that was there before: make it in the call, where it takes no "
            "memory"
        )
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.train()


def _units_of(model: nn.Module, kinds: set[str | type[nn.Module]] | None) -> list[nn.Module]:
    if kinds is not None:
        found = [m for m in model.modules() if m is not model and (type(m) in kinds or type(m).__name__ in kinds)]
        if not found:
            names = sorted(kind if isinstance(kind, str) else kind.__name__ for kind in kinds)
            raise _C.InvalidArgument(f"[tsm.plan] {type(model).__name__} has no module of class {', '.join(names)}")
        return found
    units: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            for child in module:
                if any(True for _ in child.parameters()):
                    units[child] = None
                    inside.update(child.modules())
    return list(units)


def _sizes(model: nn.Module, units: list[nn.Module]) -> dict[str, Any]:
    """Elements; a parameter belongs to the innermost unit that has it, one of several units to the first."""
    owner: dict[Tensor, nn.Module] = {}
    for unit in sorted(units, key=lambda unit: sum(1 for _ in unit.modules())):
        for parameter in unit.parameters():
            owner.setdefault(parameter, unit)
    elements: Counter[nn.Module] = Counter()
    for parameter in model.parameters():
        elements[owner.get(parameter, model)] += parameter.numel()
    return {
        "parameters": elements.total(),
        "trained": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "root": elements[model],
        "units": [elements[unit] for unit in units],
    }


@contextmanager
def _nothing_is_packed() -> Iterator[None]:
    """transformers takes sequences for packed, and computes a mask, where it cannot look at position ids."""
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if masks is None or not hasattr(masks, name):
        yield
        return
    found = getattr(masks, name)
    setattr(masks, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masks, name, found)


def _line_through(one: _Pass, two: _Pass) -> dict[str, Any]:
    def linear(first: int, second: int) -> dict[str, int]:
        row = max(0, second - first)
        return {"fixed": max(0, first - row), "row": row}

    products: Counter[tuple[int, bool]] = Counter()
    for product, times in one.products.items():
        products[product.multiplications, product.batched] += times * product.count
    attention: Counter[int] = Counter()
    for each, times in one.attention.items():
        attention[each.tokens] += times * each.operations
    return {
        "peak": linear(one.peak, two.peak),
        "blocks": linear(one.blocks, two.blocks),
        "products": [
            {"multiplications": size, "calls": calls, "batched": batched} for (size, batched), calls in products.items()
        ],
        "attention": [{"tokens": tokens, "operations": count} for tokens, count in attention.items()],
    }


def _anonymous_memory() -> int:
    """Bytes of this process that no other one shares: about what a rank takes beside its model."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


def _where(error: BaseException) -> str:
    """The innermost line of code that is neither torch's nor ours."""
    place, trace_ = "?", error.__traceback__
    while trace_ is not None:
        name = trace_.tb_frame.f_code.co_filename
        if "/torch/" not in name and "/tesserae/" not in name and not name.startswith("<"):
            place = f"{name}:{trace_.tb_lineno}"
        trace_ = trace_.tb_next
    return place
