"""tsm.metrics, and what watches a script's ranks.

1. At the first training forward of a model each rank makes its C++ Monitor, which does everything: it is attached to
   the engine, tells rank 0 of the rank, and writes RUN/monitor/.
2. What no engine sees is told from here: optimizers by torch's hooks around every step, batches by the iterators of
   DataLoader, tokens by the arguments of the model.
3. The end of the interpreter is the end of the job.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import weakref
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tesserae import _C
from tesserae.context.transformation import MARK as CUT
from tesserae.dial.roots import Root, module_of, unit_of
from tesserae.fsdp.forward import before_training_forward
from tesserae.job import config
from tesserae.job.fabrics import context_degree
from tesserae.job.state import state
from tesserae.monitor import frames
from tesserae.torch_compat import data
from tesserae.torch_compat.optimizers import state_bytes

TOKENS = "input_ids"  # as models of Hugging Face call them
WHOLE = (torch.int64, torch.int32)

_monitor: _C.Monitor | None = None
_watched: weakref.WeakSet[_C.Unit] = weakref.WeakSet()  # of roots
_degrees: tuple[int, int, int] | None = None
_page: _C.Page | None = None
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_hooks: list[RemovableHandle] = []


def watch(settings: config.Config) -> None:
    """For tsm.init: from now on, if the configuration asks for it."""
    if not settings.is_watched or _hooks:
        return
    _hooks.append(register_optimizer_step_pre_hook(_before_step))
    _hooks.append(register_optimizer_step_post_hook(_after_step))
    before_training_forward.append(_begin_forward)
    data.watch(_enter)
    atexit.register(_end)
    # Processes of multiprocessing run no atexit. Above 0: before their queues and pools end.
    Finalize(None, _end, exitpriority=100)


def forget() -> None:
    """For tsm.uninstall."""
    if not _hooks:
        return
    for hook in _hooks:
        hook.remove()
    _hooks.clear()
    before_training_forward.remove(_begin_forward)
    data.watch(None)
    atexit.unregister(_end)
    _end()


def end_epoch() -> None:
    """The job goes on with other connections: what is watched from the next forward on is told by another monitor."""
    _end("the ranks meet again")


def metrics() -> dict[str, Any]:
    """What is known of the job's last steps: on rank 0 of all ranks, elsewhere of this one alone. The fields are those
    of now.json (docs/monitor.md): "seconds" by rank and stage, "slow" ranks, "slow_link", "memory", "traffic", "load",
    "links", "step_seconds".

    No communication: ranks tell of themselves twice a second, beside training.

    Raises InvalidArgument where nothing is watched: tsm.init's configuration has neither a run folder ("run":
    {"folder": ...}) nor "monitor": {"enabled": true}, or no training forward has begun yet.
    """
    if _monitor is None:
        asked = config.asked()
        why = "no training forward has begun yet"
        if asked is None or not asked.is_watched:
            why = 'pass {"run": {"folder": ...}} or {"monitor": {"enabled": true}} to tsm.init'
        raise _C.InvalidArgument(f"[tsm.metrics] nothing is watched: {why}")
    return json.loads(_monitor.status())


def _begin_forward(root: Root, args: tuple, kwargs: dict[str, Any]) -> None:
    global _monitor, _degrees
    unit = unit_of(root)
    data.follow_this_thread()
    if unit not in _watched:
        if _monitor is None:
            _monitor = _make(unit)
            _serve_page()
        _monitor.watch(unit)
        _watched.add(unit)
    _monitor.next_forward_has(_tokens_of(root, args, kwargs))
    degrees = _C.unit_degrees(unit)
    if degrees != _degrees:
        _degrees = degrees
        _monitor.set_degrees(degrees)


def _tokens_of(root: Root, args: tuple, kwargs: dict[str, Any]) -> int:
    """How many tokens of this rank's own a forward takes in: elements of its first tensor of whole numbers [batch,
    tokens]. Those that an attention mask leaves out are none, if the host has it. 0 for a model of something else."""
    named = dict(kwargs)
    for value in args:
        named |= value if isinstance(value, Mapping) else {}
    values = [named.get(TOKENS), *args, *named.values()]
    found = next((x for x in values if isinstance(x, torch.Tensor) and x.dim() == 2 and x.dtype in WHOLE), None)
    if found is None:
        return 0
    count, mask = found.numel(), named.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == found.shape and mask.device.type == "cpu":
        count = int(mask.count_nonzero())
    degree = context_degree()
    # A model that cuts its sequences by itself is given whole ones.
    return count // degree if degree > 1 and any(hasattr(m, CUT) for m in module_of(root).modules()) else count


def _make(unit: _C.Unit) -> _C.Monitor:
    settings = config.current()
    assert settings is not None
    axes = {
        "tensor": settings.tensor_parallel_degree,
        "context": settings.context_parallel_degree,
        "expert": settings.expert_parallel_degree,
    }
    return _C.Monitor(
        unit=unit,
        folder=settings.run_folder or "",
        every_seconds=settings.monitor.every_seconds,
        job=json.dumps({"source": "python", "script": sys.argv[0], "steps": None, "axes": axes}),
        optimizer_bytes=_optimizer_bytes,
        stacks=frames.register(),
    )


def _serve_page() -> None:
    """On rank 0, where the configuration names a port. That it cannot be served is no reason not to train."""
    global _page
    settings = config.current()
    assert settings is not None
    asked = settings.monitor
    if asked.port is None or settings.run_folder is None or state.rank != 0:
        return
    log = logging.getLogger("tesserae")
    try:
        _page = _C.Page(folder=settings.run_folder, host=asked.host, port=asked.port, allow_control=asked.allow_control)
    except (_C.Error, ValueError) as error:
        log.warning("the run has no page (`tesserae watch` shows it): %s", error)
        return
    print(f"tesserae: page: {_page.url}", file=sys.stderr, flush=True)


def _enter(stage: str) -> None:
    if _monitor is not None:
        _monitor.enter(stage)


def _before_step(*_: Any) -> None:
    _enter("optimizer")


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if _monitor is not None:
        _optimizers.add(optimizer)
    _enter("between")


@torch.no_grad()
def _optimizer_bytes() -> float:
    return float(sum(map(state_bytes, _optimizers)))


def _end(why: str | None = None) -> None:
    global _monitor, _degrees, _page
    monitor, _monitor, _degrees = _monitor, None, None
    _page = None
    _watched.clear()
    _optimizers.clear()
    if monitor is not None:
        monitor.end(why or ("failed" if getattr(sys, "last_value", None) is not None else "done"))
