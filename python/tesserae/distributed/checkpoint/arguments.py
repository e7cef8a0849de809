"""The arguments that SMP v2's saver and loader share."""

from __future__ import annotations

import os
from typing import Any

from tesserae import _C


def folder_of(function: str, checkpoint_id: str | os.PathLike[str] | None, storage: Any) -> str:
    """Where `checkpoint_id`, or a reader or writer of torch's that has a path, points to."""
    chosen = checkpoint_id if checkpoint_id is not None else getattr(storage, "path", None)
    if chosen is None:
        raise _C.InvalidArgument(f"[{function}] checkpoint_id is missing: the folder of the checkpoint")
    if str(chosen).startswith("s3://"):
        raise _C.InvalidArgument(f"[{function}] {chosen}: only folders are supported; mount the bucket, or copy")
    return os.fspath(chosen)


def refuse(function: str, **arguments: Any) -> None:
    """InvalidArgument for arguments that have no meaning here, unless they are None."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise _C.InvalidArgument(f"[{function}] {', '.join(given)}: not supported; leave it out")
