"""What torch's offload_wrapper offloads in units of ours: to the store of _C.Activations, and back ahead of its use.

The wrapper may be around units, as in SMP v2's scripts (the whole model), or in them. Where a tensor goes is decided
when it is saved:
  1. in the forward of a unit: to the store, with the tensors that the unit saves meanwhile. What is no activation, or
     small, stays as it is: gathered parameters come and go by themselves.
  2. else, and where a forward is recomputed in a backward: to host memory, as torch does it.
Scripts that use torch.autograd.graph.save_on_cpu themselves, or their own hooks, get what they say.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tesserae import _C
from tesserae.job import config as configuration
from tesserae.job.device import default_device
from tesserae.torch_compat.offload import halves_of, save_on_cpu, saved_tensors_hooks, set_saving, version_of

_store: _C.Activations | None = None


def install(config: configuration.Config) -> None:
    """offload_wrapper means ours from now on, unless sm_activation_offloading is false."""
    global _store
    if config.sm_activation_offloading:
        _store = _C.Activations(
            horizon=config.activation_loading_horizon, folder=config.scratch_folder, smallest=config.activation_size
        )
        set_saving(_Saving)


def uninstall() -> None:
    global _store
    _store = None
    set_saving(save_on_cpu)


def current() -> _C.Activations | None:
    return _store


def attach(unit: _C.Unit) -> None:
    """Of a unit that is new: what is saved in its forwards may go to the store."""
    if _store is not None:
        unit.offload_activations(_store)


class _Kept(NamedTuple):
    """What stays as it is. torch does not see by itself whether a tensor that a hook has taken was changed since."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kept:
        # Detached: a node that saves its own output would keep itself alive.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return cls(kept, version_of(tensor))

    def take(self) -> torch.Tensor:
        now = version_of(self.tensor)
        if now != self.version:
            raise RuntimeError(
                f"[backward] a tensor of {list(self.tensor.shape)} in {self.tensor.dtype} that autograd had saved for "
                f"this backward was changed in place since (version {self.version}, now {now}): use an operation that "
                "makes a new tensor"
            )
        return self.tensor


class _Saving(saved_tensors_hooks):
    """In place of torch's save_on_cpu."""

    def __init__(self, pin_memory: bool = False, device_type: str | None = None) -> None:
        store = _store
        if device_type is None:
            device_type = default_device().type
            pin_memory = pin_memory and device_type != "cpu"  # nothing would copy from there
        pack_on_cpu, unpack_from_cpu = halves_of(save_on_cpu(pin_memory, device_type))

        def pack(tensor: torch.Tensor) -> Any:
            if store is None or not store.inside:
                return pack_on_cpu(tensor)
            saved = store.put(tensor)
            return _Kept.of(tensor) if saved is None else saved

        def unpack(saved: Any) -> torch.Tensor:
            return saved.take() if isinstance(saved, _C.Saved | _Kept) else unpack_from_cpu(saved)

        super().__init__(pack, unpack)
