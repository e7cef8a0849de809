"""What a model of a script consists of, computes and keeps, for tesserae/cost/traced.h.

1. The model is made of fake tensors; the script's batch is cut, or repeated, to one row, and to two (two and three for
   a model that normalises over its batch).
2. A forward and its backward are traced for each, with units that keep their activations and with ones that run again.
3. What the fewer and the more rows take gives what is fixed and what each row adds. Of memory at each moment, since
   which one is the fullest depends on the rows: with few it may be the end of the backward, with many the loss.
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

FORMAT = 3  # of tesserae/cost/traced.cpp
_MANY = (64, 128)  # rows
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

    def run(rows: int, recomputes: bool) -> _Pass:
        if tell is not None:
            tell(f"a step of {rows} row{'s' * (rows > 1)}, units {'run again' if recomputes else 'keep'}")
        return _Pass(model_fn, rows_of(batch, rows), rows, loss, kinds, dtype, recomputes)

    few = 1
    try:
        first = run(few, False)
    except ValueError as error:  # of a BatchNorm
        if "more than 1 value per channel" not in str(error):
            raise
        few = 2
        first = run(few, False)
    passes = {False: [first, run(few + 1, False)], True: [run(few, True), run(few + 1, True)]}
    for recomputes, pair in passes.items():
        if len(pair[0].levels) != len(pair[1].levels):  # no moment of one is a moment of the other
            pair += [run(rows, recomputes) for rows in _MANY]
    return {
        "traced": FORMAT,
        "name": first.name,
        "dtype": dtype,
        **first.sizes,
        "process": _anonymous_memory(),
        "kept": _facts(passes[False]),
        "recomputed": _facts(passes[True]),
    }


class _Pass:
    """A forward and its backward."""

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        batch: Any,
        rows: int,
        loss: Callable[[Any], Tensor] | None,
        kinds: set[str | type[nn.Module]] | None,
        dtype: str,
        recomputes: bool,
    ) -> None:
        self.rows = rows
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
        self.levels = levels = recorder.record.levels(without=gradients)
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
    trained: Counter[nn.Module] = Counter()
    for parameter in model.parameters():
        unit = owner.get(parameter, model)
        elements[unit] += parameter.numel()
        trained[unit] += parameter.numel() if parameter.requires_grad else 0
    return {
        "parameters": elements.total(),
        "trained": trained.total(),
        "root": elements[model],
        "trained_root": trained[model],
        "units": [elements[unit] for unit in units],
        "trained_units": [trained[unit] for unit in units],
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


Line = tuple[int, int]  # bytes that are fixed, and that each row adds


def _line(few: _Pass, more: _Pass, first: int, second: int) -> Line:
    row = max(0, (second - first) // (more.rows - few.rows))
    return max(0, first - few.rows * row), row


def _fullest(passes: list[_Pass]) -> list[Line]:
    """The lines that are the highest somewhere, from the flattest to the steepest."""
    few, more = passes[:2]
    if len(passes) == 2:
        lines = {_line(few, more, *pair) for pair in zip(few.levels, more.levels, strict=True)}
    else:
        pairs = (passes[:2], passes[2:])
        lines = {_line(one, two, max(one.levels), max(two.levels)) for one, two in pairs}
    found: list[Line] = []
    for line in sorted(lines, key=lambda line: (line[1], line[0])):
        # One that is not higher at one row never is beside a steeper one; what lies below two others is left out too.
        while found and (_at(line, 1) >= _at(found[-1], 1) or (len(found) > 1 and _hides(found[-2], line, found[-1]))):
            found.pop()
        found.append(line)
    return found


def _at(line: Line, rows: float) -> float:
    return line[0] + line[1] * rows


def _hides(flatter: Line, steeper: Line, between: Line) -> bool:
    crossing = (flatter[0] - steeper[0]) / (steeper[1] - flatter[1])
    return _at(between, crossing) <= _at(flatter, crossing)


def _facts(passes: list[_Pass]) -> dict[str, Any]:
    one, two = passes[:2]
    products: Counter[tuple[int, bool]] = Counter()
    for product, times in one.products.items():
        size = product.multiplications if product.batched else product.multiplications // one.rows
        products[size, product.batched] += times * product.count // (one.rows if product.batched else 1)
    attention: Counter[int] = Counter()
    for each, times in one.attention.items():
        attention[each.tokens] += times * each.operations // one.rows
    blocks = _line(one, two, one.blocks, two.blocks)
    return {
        "peak": [{"fixed": fixed, "row": row} for fixed, row in _fullest(passes)],
        "blocks": {"fixed": blocks[0], "row": blocks[1]},
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
