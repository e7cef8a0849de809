"""tsm.init and tsm.uninstall: from when to when torch's FSDP is ours."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from tesserae import _C
from tesserae.dial import automatic
from tesserae.fsdp.fully_sharded import FullyShardedDataParallel
from tesserae.fsdp.install import install
from tesserae.fsdp.install import uninstall as uninstall_class
from tesserae.fully_shard import clipping, muon
from tesserae.fully_shard import install as function
from tesserae.job import activations, disk
from tesserae.job import config as configuration
from tesserae.job.state import state
from tesserae.monitor import watching
from tesserae.offload import optimizers


def init(config: str | os.PathLike[str] | dict[str, Any] | None) -> None:
    wanted = configuration.read(config)
    current = configuration.asked()
    if current is not None and current != wanted:
        raise _C.InvalidArgument(
            f"[tsm.init] initialised already, with another configuration: {current}; call tsm.uninstall() before"
        )
    if dist.is_initialized():
        configuration.check_world(wanted, dist.get_world_size())
    if current == wanted:
        return
    _C.use_reusable_host_blocks()
    if wanted.memory_limit is None:  # what one phase needed stays in the next
        _C.keep_freed_memory()
    install(FullyShardedDataParallel)
    function.install()
    muon.install()
    clipping.install()
    activations.install(wanted)
    optimizers.install(wanted)
    automatic.watch(wanted)
    watching.watch(wanted)
    configuration.set_current(wanted)


def uninstall() -> None:
    uninstall_class()
    function.uninstall()
    muon.uninstall()
    clipping.uninstall()
    activations.uninstall()
    optimizers.uninstall()
    disk.forget()
    configuration.set_current(None)
    automatic.forget()
    watching.forget()
    state.forget()
