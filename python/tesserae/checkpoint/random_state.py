"""The random numbers of a process, as a value for `rank_extra`."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from tesserae.job.device import default_device


def random_state() -> dict[str, Any]:
    """The states of the global generators: Python's, torch's on the host and on the current accelerator if it is in
    use, and numpy's if the script has imported it. Each rank has its own: tsm.checkpoint.save(..., rank_extra=...)."""
    version, words, gauss = random.getstate()
    state = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "host": torch.get_rng_state(),
    }
    device = default_device()
    if device.type != "cpu" and torch.get_device_module(device).is_initialized():
        state[device.type] = torch.get_device_module(device).get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, words, position, has_gauss, gauss = numpy.random.get_state()
        words = torch.tensor(words.tolist())
        state["numpy"] = {"kind": kind, "words": words, "at": position, "has_gauss": has_gauss, "gauss": gauss}
    return state


def is_random_state(state: Any) -> bool:
    """Whether random_state() returned it, and not a script of its own."""
    return isinstance(state, dict) and isinstance(state.get("python"), dict) and "host" in state


def set_random_state(state: dict[str, Any]) -> None:
    """Puts the generators back to what random_state() returned, as far as they are here."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["host"])
    device = default_device()
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        saved = state["numpy"]
        words = numpy.array(saved["words"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((saved["kind"], words, saved["at"], saved["has_gauss"], saved["gauss"]))
