"""Tensors of a module on a device, by SMP v2's path."""

from tesserae.smp.module_utils import empty_module_params, move_buffers_to_device

__all__ = ["empty_module_params", "move_buffers_to_device"]
