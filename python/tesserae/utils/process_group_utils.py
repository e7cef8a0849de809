"""Process groups, by SMP v2's path."""

from tesserae.smp.small import get_global_ranks

__all__ = ["get_global_ranks"]
