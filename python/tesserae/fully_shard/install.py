"""torch.distributed.fsdp.fully_shard -> ours, for every script that holds the name.

Scripts and libraries import the function before tsm.init, so the function itself is changed: the body of what torch's
@contract wraps. The wrapper stays: it makes the state, refuses a module that was sharded before, and checks names.
`uninstall` puts torch's body back; models that are sharded already stay what they are.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

from tesserae.torch_compat.fsdp2 import function

_body: CodeType | None = None  # torch's, while ours is there


def install() -> None:
    """torch's name means ours from now on. A second call does nothing."""
    global _body
    if _body is None:
        _body = function.__code__
        function.__code__ = _ours.__code__


def uninstall() -> None:
    global _body
    if _body is not None:
        function.__code__ = _body
        _body = None


def _ours(*args: Any, **kwargs: Any) -> Any:
    # Runs with the globals of torch's module.
    from tesserae.fully_shard.function import fully_shard

    return fully_shard(*args, **kwargs)
