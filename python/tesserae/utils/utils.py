"""Timing, by SMP v2's path."""

from tesserae.smp.small import timeit

__all__ = ["timeit"]
