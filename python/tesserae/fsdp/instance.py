"""What the parts of FSDP know of an instance: one unit of the engine, and the module that it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tesserae import _C
from tesserae.fsdp.parameters import Managed
from tesserae.job.fabrics import is_first_of_same_experts, writes_unsplit
from tesserae.torch_compat.instance import TorchInstance
from tesserae.torch_compat.modules import own_modules, step_name


class Instance(TorchInstance):
    """Like TorchInstance it adds no name without an underscore: those are the user's module's."""

    compute_device: torch.device
    _unit: _C.Unit
    _managed: list[Managed]  # the parameters of the unit
    _computes: bool  # with these, or with some that belong to an instance around it
    _holds_experts: bool  # that ranks share out: its state is sharded over those that have the same
    _flats: list[_C.FlatBuffer]
    _local: list[list[nn.Parameter]]  # what an optimizer holds, by flat buffer: a parameter for each slot, or one
    _flat_entries: dict[str, nn.Parameter | None]  # where flat parameters are entries (use_orig_params=False)
    _everyone: dist.ProcessGroup | None  # the ranks that train; None: the default group
    _buffers_cast: bool = False  # mixed precision has cast its buffers
    _below: list[Instance] | None = None  # inside a root, from its first forward on; itself would be a cycle
    _pool_misses: int = 0  # that were warned of
    _load_errors: list[str]  # of the load_state_dict that runs
    _whole: Any = None  # the context (whole.py) in which the parameters are whole


def instances_of(module: nn.Module) -> list[Instance]:
    """The FSDP instances in `module`, itself included, outermost first."""
    return [part for part in module.modules() if isinstance(part, Instance)]


def instances_below(module: nn.Module) -> dict[str, Instance]:
    """The same by the path that names of parameters have; "": `module` is one itself."""
    found = {"": module} if isinstance(module, Instance) else {}
    found.update((path.removesuffix("."), part) for path, part in _below(module, "") if isinstance(part, Instance))
    return found


def _below(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in own_modules(module).items():
        if child is not None:
            inner = path + step_name(name)
            yield inner, child
            yield from _below(child, inner)


def require_root(instance: Instance, function: str) -> None:
    if not instance._unit.is_root:
        raise _C.InvalidArgument(
            f"[{function}] should only be called on the root FSDP instance, and {instance._unit.name} is inside of one"
        )


def is_first_rank(instance: Instance) -> bool:
    """The first of those that shard the instance's state: with tensor parallelism one of each tensor index, of experts
    one of each expert index."""
    return is_first_of_same_experts() if instance._holds_experts else dist.get_rank(instance._everyone) == 0


def keeps_whole(instance: Instance) -> bool:
    """The one rank that has a state dict with rank0_only=True."""
    return dist.get_rank(instance._everyone) == 0 and writes_unsplit()
