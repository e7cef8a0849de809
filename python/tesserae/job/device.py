"""Where this rank computes: any accelerator that torch knows, else the CPU. No kind of device is named here."""

from __future__ import annotations

import torch

from tesserae import _C


def default_device() -> torch.device:
    """The current device of the machine's accelerator, else the CPU."""
    return with_index(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))


def with_index(device: torch.device) -> torch.device:
    """A device of a kind that has several, without an index, is the current one."""
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def indexed(index: int) -> torch.device:
    """The accelerator's device of that index. Raises InvalidArgument on a machine without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise _C.InvalidArgument(
            f"[FSDP] device_id={index}, but torch finds no accelerator on this machine; leave device_id out to train "
            "on the CPU, or look why torch.accelerator.is_available() is False"
        )
    return torch.device(accelerator.type, index)


def count(device: torch.device) -> int:
    """How many devices of its kind this process sees."""
    return 1 if device.type == "cpu" else torch.get_device_module(device).device_count()
