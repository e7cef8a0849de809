"""The logger of the package, by SMP v2's name for it."""

from __future__ import annotations

import logging


def get_logger() -> logging.Logger:
    """logging.getLogger("tesserae"): its level and handlers are the script's to choose."""
    return logging.getLogger("tesserae")
