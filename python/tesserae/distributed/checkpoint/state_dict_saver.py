"""SMP v2's functions that save state dicts."""

from tesserae.checkpoint.saving import maybe_finalize_async_calls
from tesserae.smp.state_dicts import async_save, save

__all__ = ["async_save", "maybe_finalize_async_calls", "save"]
