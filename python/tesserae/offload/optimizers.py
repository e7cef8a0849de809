"""The state of torch's optimizers, on a disk while no step works on it.

A step:
 1. the closure, if there is one, runs;
 2. the optimizer's own step runs over a few parameters after the other. Their state is in memory meanwhile, and that of
    the next ones is being read;
 3. state that the step has made, or that was loaded, moves to the disk;
 4. what the whole process needed of its memory says how much state may stay in memory until the next step.

Numbers are those of a step over all parameters: torch's optimizers treat each by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tesserae import _C
from tesserae.job import config as configuration
from tesserae.job.disk import open_disk
from tesserae.offload.paged import PagedTensor, page
from tesserae.torch_compat.fsdp2 import local_of, placed_as
from tesserae.torch_compat.optimizer_steps import Step, on_new_optimizer, replace_step, works_element_by_element

SMALLEST = 1 << 20  # bytes of a state tensor; smaller ones stay in memory
TOGETHER = 8 << 20  # bytes of parameters of which a step has the state in memory at a time, or one parameter

_log = logging.getLogger("tesserae")
_end: Callable[[], None] | None = None


def install(settings: configuration.Config) -> None:
    """For tsm.init: optimizers that are made from now on have their state on the disk, if that is configured."""
    global _end
    if settings.optimizer_on_disk and _end is None:
        _end = on_new_optimizer(lambda optimizer: _attach(optimizer, settings))


def uninstall() -> None:
    """Optimizers that were made keep their state where it is."""
    global _end
    if _end is not None:
        _end()
        _end = None


def _attach(optimizer: Optimizer, settings: configuration.Config) -> None:
    if hasattr(optimizer, "_tesserae_in_parts"):  # torch calls again when a state dict is loaded
        return
    if not works_element_by_element(optimizer):
        _log.warning(
            "the state of %s stays in memory: only torch's optimizers that treat each element by itself can have it on "
            "a disk",
            type(optimizer).__name__,
        )
        return
    disk = open_disk(settings)
    optimizer._tesserae_in_parts = True  # type: ignore[attr-defined]
    replace_step(optimizer, lambda step: _in_parts(step, disk))
    optimizer.register_load_state_dict_post_hook(lambda loaded: _page_all(loaded, disk))


def _in_parts(step: Step, disk: _C.Disk) -> Step:
    def steps(self: Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:  # 1.
            with torch.enable_grad():
                loss = closure()
        for group, parameters in _ahead(self):  # 2.
            _step_over(self, step, group, parameters, kwargs)
            for parameter in parameters:  # 3.
                _page_state(self, parameter, disk)
        if disk.after_step():  # 4.
            _log.warning(
                "the memory limit cannot be held: %s is a rank's part of it, and a step needed more for parameters, "
                "gradients, activations, the program itself and the state that a step works on",
                f"{disk.limit:,} bytes",
            )
        return loss

    steps.__name__, steps.__qualname__, steps.__doc__ = step.__name__, step.__qualname__, step.__doc__
    return steps


def _step_over(
    optimizer: Optimizer, step: Step, group: dict[str, Any], parameters: list[Tensor], kwargs: dict[str, Any]
) -> None:
    groups, members = optimizer.param_groups, group["params"]
    try:
        optimizer.param_groups, group["params"] = [group], parameters
        with _C.Use(list(_paged_state(optimizer, parameters)), changes=True):
            step(optimizer, **kwargs)
    finally:
        optimizer.param_groups, group["params"] = groups, members


def _ahead(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """The parts of a step; the state of the next one is being read when one is handed out."""
    parts = [(group, part) for group in optimizer.param_groups for part in _parts(group["params"])]
    following: list[list[Tensor]] = [part for _, part in parts[1:]] + [[]]
    for (group, part), after in zip(parts, following, strict=True):
        _C.prefetch(list(_paged_state(optimizer, part)))
        _C.prefetch(list(_paged_state(optimizer, after)))
        yield group, part


def _parts(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    total = 0
    for parameter in parameters:
        size = local_of(parameter).nbytes if isinstance(parameter, DTensor) else parameter.nbytes
        if part and total + size > TOGETHER:
            yield part
            part, total = [], 0
        part.append(parameter)
        total += size
    yield part  # of a group without parameters, too


def _paged_state(optimizer: Optimizer, parameters: list[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            local = local_of(value) if isinstance(value, DTensor) else value
            if isinstance(local, PagedTensor):
                yield local


def _page_all(optimizer: Optimizer, disk: _C.Disk) -> None:
    for parameter in list(optimizer.state):
        if isinstance(parameter, Tensor):
            _page_state(optimizer, parameter, disk)


def _page_state(optimizer: Optimizer, parameter: Tensor, disk: _C.Disk) -> None:
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        local = local_of(value) if isinstance(value, DTensor) else value
        if isinstance(local, PagedTensor) or local.nbytes < SMALLEST or not _can_be_paged(local, parameter, name):
            continue
        paged = page(disk, local)
        state[name] = placed_as(value, paged) if isinstance(value, DTensor) else paged


def _can_be_paged(local: Tensor, parameter: Tensor, name: str) -> bool:
    if local.device.type == "cpu":
        return local.layout == torch.strided and local.is_contiguous()
    raise _C.InvalidArgument(
        f"[offload] offload.optimizer is disk, but {name} of a parameter of shape {tuple(parameter.shape)} is on "
        f"{local.device}: let FSDP keep parameters on the host (CPUOffloadPolicy(), CPUOffload(offload_params=True)), "
        "where optimizers then work"
    )
