"""Checkpoints that load at any layout and world size, and do not stop training.

    tsm.checkpoint.async_save("run/checkpoints", model, optimizer, extra={"epoch": epoch}, step=step, keep=3)
    ...
    found = tsm.checkpoint.load("run/checkpoints", model, optimizer)      # None: there are none yet
    tsm.checkpoint.maybe_finalize_async_calls()                           # at the end: the last save is committed

For models sharded by FSDP and for any other torch module, with or without torch.distributed. docs/format.md describes
the files, docs/python.md the rules.
"""

from tesserae._C import Damaged, SaveFailed
from tesserae.checkpoint.dcp import from_dcp, to_dcp
from tesserae.checkpoint.loading import Loaded, load
from tesserae.checkpoint.random_state import random_state, set_random_state
from tesserae.checkpoint.saving import async_save, maybe_finalize_async_calls, save, wait_copied

__all__ = [
    "Damaged",
    "Loaded",
    "SaveFailed",
    "async_save",
    "from_dcp",
    "load",
    "maybe_finalize_async_calls",
    "random_state",
    "save",
    "set_random_state",
    "to_dcp",
    "wait_copied",
]
