"""FSDP1's class without its constructor: attributes that its inherited methods and the rest of torch read.

The class has no name that torch's class has not: an FSDP instance passes names that it lacks on to the user's module.
What it keeps under private names is read by functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from tesserae import _C
from tesserae.torch_compat.checked import checked
from tesserae.torch_compat.flat_parameters import FlatHandle

with checked():
    from torch.distributed.fsdp._common_utils import FSDP_PREFIX, TrainingState, clean_tensor_name
    from torch.distributed.fsdp._init_utils import (
        _init_buffer_state,
        _init_ignored_module_states,
        _init_state_dict_state,
    )

    HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

__all__ = ["FSDP_PREFIX", "HYBRID", "TorchFSDP", "TorchInstance", "clean_tensor_name"]


def strategy_named(strategy: _C.Strategy, ranks: int) -> ShardingStrategy:
    """What comes closest among torch's names, for those who read the attribute `sharding_strategy`."""
    name = strategy.closest_preset(ranks)
    return ShardingStrategy["_HYBRID_SHARD_ZERO2" if name == "HYBRID_SHARD_ZERO2" else name]


class TorchInstance(TorchFSDP):
    """What torch knows of an instance. Its parts are made in the order in which torch's constructor makes them."""

    def __init__(
        self,
        module: nn.Module,
        ignored_modules: Iterable[nn.Module] | None,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
        device_mesh: Any,
        use_orig_params: bool,
    ) -> None:
        nn.Module.__init__(self)
        self._device_mesh = device_mesh
        self._use_orig_params = use_orig_params
        self.training_state = TrainingState.IDLE
        self._is_root: bool | None = None
        self._handle: FlatHandle | None = None
        self._comm_hook: Callable | None = None
        self._comm_hook_state: object = None
        self._fsdp_extension = None
        _init_ignored_module_states(self, module, ignored_modules, ignored_states)

    @property
    def _has_params(self) -> bool:
        return self._handle is not None

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return self._handle.flat_param if self._handle is not None else None

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        # What it replaces (another dtype or device) is noticed, and named, at the next forward.
        return nn.Module._apply(self, *args, **kwargs)


class StateDictSettings(NamedTuple):
    kind: StateDictType
    config: Any  # of the state dicts of modules


def wrap(instance: TorchInstance, module: nn.Module) -> None:
    """The instance stands for `module`."""
    instance._fsdp_wrapped_module = module


def remember_buffers(instance: TorchInstance, module: nn.Module) -> None:
    """In which dtype they are, before mixed precision."""
    _init_buffer_state(instance, module)


def begin_state_dicts(instance: TorchInstance) -> None:
    _init_state_dict_state(instance)


def make_handle(
    instance: TorchInstance, flat_param: nn.Parameter, names: list[str], set_master_dtype: Callable[[torch.dtype], None]
) -> None:
    instance._handle = FlatHandle(instance, flat_param, names, set_master_dtype)


def set_comm_hook(instance: TorchInstance, state: object, hook: Callable) -> None:
    instance._comm_hook, instance._comm_hook_state = hook, state


def has_comm_hook(instance: TorchInstance) -> bool:
    return instance._comm_hook is not None


def set_summoned(instance: TorchInstance, summoned: bool) -> None:
    """Whether the instance's parameters are whole in a context of summon_full_params."""
    instance.training_state = TrainingState.SUMMON_FULL_PARAMS if summoned else TrainingState.IDLE


def wrapped(instance: TorchInstance) -> nn.Module:
    """The user's module, with what activation checkpointing has put around it."""
    return instance._fsdp_wrapped_module


def device_mesh(instance: TorchInstance) -> Any:
    """That of the script; None if it gave none."""
    return instance._device_mesh


def uses_orig_params(instance: TorchInstance) -> bool:
    return instance._use_orig_params


def ignored_modules(instance: TorchInstance) -> set[nn.Module]:
    return instance._ignored_modules


def ignored_parameters(instance: TorchInstance) -> set[nn.Parameter]:
    return instance._ignored_params


def ignored_buffers(instance: TorchInstance) -> set[str]:
    """By name."""
    return instance._ignored_buffer_names


def buffer_dtypes(instance: TorchInstance) -> dict[str, torch.dtype]:
    """By name, before mixed precision."""
    return instance._buffer_name_to_orig_dtype


def state_dict_settings(instance: TorchInstance) -> StateDictSettings:
    return StateDictSettings(instance._state_dict_type, instance._state_dict_config)
