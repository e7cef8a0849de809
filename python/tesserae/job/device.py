"""Where this rank computes."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """Its current CUDA device, else the CPU."""
    return with_index(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def with_index(device: torch.device) -> torch.device:
    """ "cuda" alone is the current CUDA device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
