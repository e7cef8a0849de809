"""model.state_dict() and model.load_state_dict() of sharded modules, in the three types of FSDP.

Saving, for each instance on the way down the modules (so only the units of one path are whole at a time):
 1. its own parameters are summoned; its module fills the dictionary, inner instances doing the same in turn;
 2. entries that share memory with its own parameters are copied: whole (FULL), as this rank's chunk along the first
    dimension (SHARDED), or not at all (LOCAL: the parts as they are, one entry for each flat buffer);
 3. buffers get the dtype back that they had before mixed precision.
Loading, as torch walks down the modules:
 4. an instance puts `_fsdp_wrapped_module.` into the keys below it, summons its own parameters and makes sharded values
    whole, one at a time;
 5. when its module has been filled, it writes back and takes its prefix out of the names that are reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp._common_utils import FSDP_PREFIX, clean_tensor_name

from tesserae import _C, install, swap
from tesserae.sharded_values import chunk, is_sharded, local_part, part_of, whole_of
from tesserae.summon import Summoned, Wish, instances_of
from tesserae.tensor_parallel.parts import marks

if TYPE_CHECKING:
    from tesserae.fsdp import FullyShardedDataParallel as Instance


class StateDicts:
    """The part of FSDP that is about the state dicts of modules."""

    _loading: Summoned | None = None
    _load_errors: list[str]

    @staticmethod
    def set_state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As torch's: what state_dict() and optim_state_dict() give from now on. Returns the settings before."""
        return install.original("set_state_dict_type")(module, *args, **kwargs)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """As torch's: the settings, which all instances in `module` share."""
        return install.original("get_state_dict_type")(module)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Generator[None]:
        """set_state_dict_type() within a context."""
        before = StateDicts.set_state_dict_type(module, *args, **kwargs)
        try:
            yield
        finally:
            StateDicts.set_state_dict_type(
                module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
            )

    @torch.no_grad()
    def state_dict(self: Instance, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state of the whole module by the names that it has without FSDP, of the type that was set. Collective."""
        destination, prefix, keep_vars = _arguments(*args, **kwargs)
        kind = _kind(self)
        full = kind == StateDictType.FULL_STATE_DICT
        config = self._state_dict_config
        wish = Wish(
            rank0_only=full and getattr(config, "rank0_only", False), offload_to_cpu=full and config.offload_to_cpu
        )
        for hook in self._state_dict_pre_hooks.values():
            hook(self, prefix, keep_vars)
        local = kind == StateDictType.LOCAL_STATE_DICT
        with contextlib.nullcontext() if local else Summoned(self, wish, "state_dict"):
            destination = self._fsdp_wrapped_module.state_dict(
                destination=destination, prefix=prefix, keep_vars=keep_vars
            )
            if local:
                _replace_by_parts(self, destination, prefix)
            else:
                _replace_whole(self, destination, prefix, None if full else self, drop=wish.rank0_only)
        _restore_buffers(self, destination, prefix, drop=wish.rank0_only and not self._keeps_whole())
        for hook in self._state_dict_hooks.values():
            result = hook(self, destination, prefix, destination._metadata.get(prefix[:-1], {}))
            destination = destination if result is None else result
        return destination

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's, for whole values and sharded ones, under names without FSDP. Collective."""
        try:
            return nn.Module.load_state_dict(self, *args, **kwargs)
        finally:
            for instance in instances_of(self):
                instance._forget_cut_load()

    def _load_from_state_dict(
        self: Instance,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        self._forget_cut_load()
        if local_metadata.get("assign_to_params_buffers"):
            raise _C.InvalidArgument(
                "[load_state_dict] assign=True would put other tensors in the place of sharded parameters; leave it out"
            )
        self._load_errors = errors
        inner = prefix + FSDP_PREFIX
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]:
            state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
        if _kind(self) == StateDictType.LOCAL_STATE_DICT:
            _take_parts(self, state_dict, inner)
        else:
            self._loading = Summoned(self, Wish(writeback=True), "load_state_dict").__enter__()
            _make_whole(self, state_dict, inner)
        nn.Module._load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _forget_cut_load(self: Instance) -> None:
        """After an exception in the middle of loading: parameters are sharded again."""
        loading, self._loading = self._loading, None
        if loading is not None and self._whole is loading:
            loading.leave()


def finish_loading(instance: Instance, keys: Any) -> None:
    """Hook for the end of load_state_dict of an instance and everything in it."""
    loading, instance._loading = instance._loading, None
    if loading is not None:
        loading.__exit__(None)
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = map(clean_tensor_name, names)
    instance._load_errors[:] = [text.replace(FSDP_PREFIX, "") for text in instance._load_errors]


def _kind(instance: Instance) -> StateDictType:
    """The type that counts: parameters that are not sharded have none but the full one."""
    kind = instance._state_dict_type
    if instance.sharding_strategy == ShardingStrategy.NO_SHARD:
        return StateDictType.FULL_STATE_DICT
    if kind == StateDictType.LOCAL_STATE_DICT and instance._device_mesh is not None:
        raise _C.InvalidArgument(
            "[state_dict] LOCAL_STATE_DICT with a device mesh: its entries can not be DTensors; use SHARDED_STATE_DICT"
        )
    return kind


def _arguments(*args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> tuple[Any, str, bool]:
    """nn.Module.state_dict still takes positions."""
    given = (destination, prefix, keep_vars)
    return (*args, *given[len(args) :])  # type: ignore[return-value]


# Saving.


def _storages(instance: Instance) -> set[int]:
    """Addresses of the memory that the instance's parameters show now."""
    shown = [m.parameter for m in instance._managed] + [p for parameters in instance._local for p in parameters]
    return {p.untyped_storage().data_ptr() for p in shown} - {0}


def _own_keys(instance: Instance, state: dict[str, Any], prefix: str) -> list[str]:
    """The keys of what shares memory with the instance's parameters: whatever name hooks and wrappers give it."""
    mine = _storages(instance)
    return [
        key
        for key, value in state.items()
        if key.startswith(prefix) and type(value) in (Tensor, nn.Parameter) and _storage_of(value) in mine
    ]


def _storage_of(value: Tensor) -> int:
    """Of a tensor that was put together from tensor-parallel parts: that of this rank's part."""
    mark = marks.get(value)
    return mark.storage if mark is not None else value.untyped_storage().data_ptr()


def _replace_whole(
    instance: Instance, state: dict[str, Any], prefix: str, sharded_by: Instance | None, drop: bool
) -> None:
    """Entries of the summoned parameters become copies; tied ones stay tied."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    offload = instance._state_dict_config.offload_to_cpu
    for key in _own_keys(instance, state, prefix):
        value = state[key]
        mark = marks.pop(value, None)  # put together already: a copy
        if drop and not instance._keeps_whole():
            del state[key]
            continue
        place = mark.place if mark is not None else (value.data_ptr(), value.shape)
        if place not in copies:
            if sharded_by is not None:
                copy = chunk(sharded_by, value)
            else:
                copy = value.detach().clone() if mark is None else value
            copies[place] = copy.cpu() if offload else copy
        state[key] = copies[place]


def _replace_by_parts(instance: Instance, state: dict[str, Any], prefix: str) -> None:
    """One entry for each flat buffer in the place of all: this rank's part, sharing its memory."""
    for key in _own_keys(instance, state, prefix):
        del state[key]
    for i, flat in enumerate(instance._flats):
        part = part_of(instance, flat)
        state[prefix + swap.flat_name(i)] = part.cpu() if instance._state_dict_config.offload_to_cpu else part


def _restore_buffers(instance: Instance, state: dict[str, Any], prefix: str, drop: bool) -> None:
    for name, dtype in instance._buffer_name_to_orig_dtype.items():
        key = prefix + name
        if key not in state:
            continue  # not persistent
        if drop:
            del state[key]
            continue
        if name not in instance._ignored_buffer_names:
            state[key] = state[key].to(dtype)
        if instance._state_dict_config.offload_to_cpu:
            state[key] = state[key].cpu()


# Loading.


def _own_entries(instance: Instance) -> Iterator[tuple[str, swap.Managed]]:
    """The names under which modules load the instance's parameters."""
    entries: dict[nn.Module, list[tuple[str, swap.Managed]]] = {}
    for m in instance._managed:
        for module, name in m.entries:
            entries.setdefault(module, []).append((name, m))

    def visit(part: nn.Module, path: str) -> Iterator[tuple[str, swap.Managed]]:
        for name, m in entries.get(part, ()):
            yield path + name, m
        for name, child in part._modules.items():
            if child is not None and not isinstance(child, StateDicts):
                yield from visit(child, path + ("" if name == "_checkpoint_wrapped_module" else name + "."))

    return visit(instance._fsdp_wrapped_module, "")


def _make_whole(instance: Instance, state: dict[str, Any], prefix: str) -> None:
    """Sharded values go to their place in the summoned parameters, one at a time."""
    for name, m in _own_entries(instance):
        value = state.get(prefix + name)
        if not is_sharded(value):
            continue
        whole, place = whole_of(instance, value), m.parameter.detach()
        if whole.shape == place.shape:
            place.copy_(whole)
            whole = place
        state[prefix + name] = whole  # of another shape: nn.Module says so


def _take_parts(instance: Instance, state: dict[str, Any], prefix: str) -> None:
    """Parts that _replace_by_parts saved, in the same layout."""
    for i, flat in enumerate(instance._flats):
        value = state.pop(prefix + swap.flat_name(i), None)
        if value is None:
            continue
        part = local_part(value)
        if part.shape != flat.part().shape:
            raise _C.InvalidArgument(
                f"[load_state_dict] LOCAL_STATE_DICT has {list(part.shape)} elements for this rank's part of unit "
                f"{instance._unit.name}, which has {list(flat.part().shape)}: it was saved with other degrees or on "
                "another number of ranks; save with SHARDED_STATE_DICT to load it elsewhere"
            )
        with torch.no_grad():
            flat.part().copy_(part)
        flat.publish()
    for name, parameter in _entries_between_steps(instance):
        state[prefix + name] = parameter.detach()


def _entries_between_steps(instance: Instance) -> Iterator[tuple[str, nn.Parameter]]:
    if instance._use_orig_params:
        yield from ((name, m.parameter) for name, m in _own_entries(instance))
    else:
        yield from ((swap.flat_name(i), local[0]) for i, local in enumerate(instance._local))
