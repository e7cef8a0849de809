"""With which torch the private names were checked, and what is said where one is missing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from tesserae import _C

# 2.13: all tests ran with it. 2.12, 2.14 and 2.15: some of them (tools/other_torch.sh). 2.11: every name is there, and
# takes the same arguments.
CHECKED = ("2.11", "2.12", "2.13", "2.14", "2.15")


class UnsupportedTorch(_C.Error, ImportError):
    """The installed torch lacks something private that Tesserae uses."""


@contextmanager
def checked() -> Generator[None]:
    """Around imports of private names: what is missing is an UnsupportedTorch that names it."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise _missing(str(error)) from error


def require(owner: object, *names: str) -> None:
    """Raises UnsupportedTorch for the first of the attributes that `owner` lacks."""
    for name in names:
        if not hasattr(owner, name):
            kind = owner if isinstance(owner, type) else type(owner)
            raise _missing(f"{kind.__module__}.{kind.__qualname__} has no {name}")


def _missing(what: str) -> UnsupportedTorch:
    newest = CHECKED[-1]
    return UnsupportedTorch(
        f"[import tesserae] torch {torch.__version__} lacks a private name that tesserae uses: {what}. It was checked "
        f"with torch {', '.join(CHECKED)}: install one of these (pip install 'torch=={newest}.*') and build "
        "tesserae again"
    )
