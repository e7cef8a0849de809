"""Tesserae: sharded data parallel training that takes the place of PyTorch FSDP in an unchanged script.

    import tesserae as tsm
    tsm.init({"hybrid_shard_degree": 2})

After that, FullyShardedDataParallel and fully_shard of torch.distributed.fsdp are ours. docs/python.md says what is
supported.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch  # first: the extension uses its libraries

from tesserae._build import TORCH_VERSION, VERSION

if str(torch.__version__) != TORCH_VERSION:
    raise ImportError(
        f"[import tesserae] this tesserae {VERSION} was built against torch {TORCH_VERSION}, but torch "
        f"{torch.__version__} is installed here; build it again with `pip install .` in this environment"
    )

from tesserae._C import (
    CommError,
    Corruption,
    Error,
    InvalidArgument,
    IoError,
    Mismatch,
    OutOfMemory,
    PeerLost,
    Timeout,
)
from tesserae.job import backend as _backend
from tesserae.job import config as _config
from tesserae.job.bad_steps import BadNumbers, bad_steps
from tesserae.job.preemption import preemption
from tesserae.job.state import state
from tesserae.smp.transformation import transform

if TYPE_CHECKING:
    from tesserae import checkpoint, data
    from tesserae.context.scope import context_parallel
    from tesserae.dial.replicas import ReplicasDiffer, compare_replicas
    from tesserae.dial.turning import reshard
    from tesserae.elasticity.loop import elastic
    from tesserae.fully_shard.whole_matrices import on_whole_matrices
    from tesserae.monitor.watching import metrics
    from tesserae.planning.planned import plan
    from tesserae.recovery.watcher import RecoveryFailed, with_recovery
    from tesserae.smp.status import status

__version__ = VERSION
# Where find_package(Tesserae) of CMake finds the libraries and headers of an installed package.
cmake_prefix_path = os.path.dirname(os.path.abspath(__file__))
__all__ = [
    "BadNumbers",
    "CommError",
    "Corruption",
    "Error",
    "InvalidArgument",
    "IoError",
    "Mismatch",
    "OutOfMemory",
    "PeerLost",
    "RecoveryFailed",
    "ReplicasDiffer",
    "Timeout",
    "bad_steps",
    "checkpoint",
    "compare_replicas",
    "context_parallel",
    "data",
    "elastic",
    "init",
    "is_initialized",
    "metrics",
    "on_whole_matrices",
    "plan",
    "preemption",
    "reshard",
    "state",
    "status",
    "transform",
    "uninstall",
    "with_recovery",
]


_backend.register()


# Names that need parts of torch which take a second to import: at their first use. So does tsm.init.
_LATER = {
    "RecoveryFailed": "tesserae.recovery.watcher",
    "ReplicasDiffer": "tesserae.dial.replicas",
    "compare_replicas": "tesserae.dial.replicas",
    "context_parallel": "tesserae.context.scope",
    "elastic": "tesserae.elasticity.loop",
    "metrics": "tesserae.monitor.watching",
    "on_whole_matrices": "tesserae.fully_shard.whole_matrices",
    "plan": "tesserae.planning.planned",
    "reshard": "tesserae.dial.turning",
    "status": "tesserae.smp.status",
    "with_recovery": "tesserae.recovery.watcher",
}


if not TYPE_CHECKING:  # which would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in ("checkpoint", "data"):
            return importlib.import_module(f"tesserae.{name}")
        if name in _LATER:
            return getattr(importlib.import_module(_LATER[name]), name)
        raise AttributeError(f"module 'tesserae' has no attribute {name!r}")


def init(config: str | os.PathLike[str] | dict[str, Any] | None = None) -> None:
    """FullyShardedDataParallel and fully_shard of torch.distributed.fsdp are Tesserae's from now on.

    `config`: the path of a JSON file or a dict (docs/configuration.md has the keys); None takes the file that
    $TESSERAE_CONFIG names, else the defaults. Every rank calls it with the same configuration, before it wraps a model;
    before or after init_process_group(). Again with the same configuration it does nothing.

    Raises InvalidArgument (a ValueError) for a configuration that cannot work and for another one than before.
    """
    importlib.import_module("tesserae.smp.init").init(config)


def is_initialized() -> bool:
    """Whether tsm.init was called (and tsm.uninstall was not)."""
    return _config.current() is not None


def uninstall() -> None:
    """FullyShardedDataParallel and fully_shard are torch's own again, and tsm.init may be called anew.

    Models that are wrapped already stay on Tesserae and keep working.
    """
    importlib.import_module("tesserae.smp.init").uninstall()
