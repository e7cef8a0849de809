"""Models that get their values while FSDP wraps them, by SMP v2's path."""

from tesserae.smp.delayed_param import DelayedParamIniter

__all__ = ["DelayedParamIniter"]
