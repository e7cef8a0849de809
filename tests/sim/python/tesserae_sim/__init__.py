"""The simulated accelerator (tests/sim/device.h has its rules) as a device of torch, for tests in Python.

    import tesserae_sim                                  # PYTHONPATH=build/release/tests/sim/python
    torch.accelerator.set_device_index(local_rank)       # of tesserae_sim.device_count(), 8
    torch.distributed.init_process_group()               # "sim"; with tensors on the CPU, too: "cpu:gloo,sim:sim"
    model = FSDP(model, device_id=torch.accelerator.current_device_index())

The import makes `sim` a device type; torch.sim is its module, as torch.cuda is CUDA's, and `sim` the backend that
torch.distributed takes for it. Ranks are processes, each with simulated devices of its own; their collectives go by
NCCL's rules (tests/sim/process_group.h, processes.h). What a process did on a device: counters(). Other delays on the
streams: restart(seed), between steps.

Import it after a fork, not before: streams are threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tesserae_sim import _C
from tesserae_sim._C import CollectiveTimeout, Counters, DeviceFailure, NotEntered, OrderMismatch

__all__ = [
    "CollectiveTimeout", "Counters", "DeviceFailure", "NotEntered", "OrderMismatch", "counters", "restart",
]  # fmt: skip

NAME = "sim"


def counters(device: int | None = None) -> Counters:
    """What a device has done since the process began; of two readings the difference counts."""
    return _C.counters(_index(device))


def restart(seed: int = 0, longest_delay: float = 400e-6) -> None:
    """Waits for all devices of this process; from here on tasks are late by up to that many seconds, by `seed`."""
    _C.restart(seed, longest_delay)


# ---- torch.sim: what torch and its libraries ask of the module of a device ----
def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _C.device_count


def current_device() -> int:
    return _C.current_device()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False) -> torch.Event:
        return torch.Event(NAME, enable_timing=enable_timing)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Work of the block goes to that stream."""
    if stream is None:
        yield
        return
    with stream:
        yield


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """The block runs on that device."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def memory_allocated(device: Any = None) -> int:
    return _C.used_bytes(_index(device))


def manual_seed(seed: int) -> None:
    _C.manual_seed(seed, current_device())


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _C.manual_seed(seed, index)


def initial_seed() -> int:
    return _C.initial_seed(current_device())


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _C.rng_state(_index(device))


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    _C.set_rng_state(new_state, _index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def _make_process_group(options: Any, _: object = None) -> Any:
    return _C.make_process_group(
        options.store, options.group_id, options.group_rank, options.group_size, options.timeout.total_seconds()
    )


def _install() -> None:
    import sys

    _C.install()
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(NAME, _make_process_group, extended_api=True, devices=[NAME])


if not hasattr(torch, NAME):
    _install()
