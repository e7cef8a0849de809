"""The logger of the package, by SMP v2's path."""

from tesserae.smp.small import get_logger

__all__ = ["get_logger"]
