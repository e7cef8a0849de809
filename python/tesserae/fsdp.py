"""The class that takes the place of torch.distributed.fsdp.FullyShardedDataParallel.

An instance is one unit: the parameters below its module that belong to no instance further in. It is made inside out,
as the constructors of FSDP are called, and each constructor adopts the units inside it; the outermost one is the root.

Constructor:
 1. what is left out; where to compute; who takes part (arguments.py);
 2. wrap the modules that the policy names, with the same arguments;
 3. give parameters on the meta device values, move what must be moved, take rank 0's values if asked to;
 4. hand the parameters to the engine; modules show this rank's slices from then on (swap.py);
 5. adopt the units inside, and, if nobody is around, compare with the other ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    _init_utils,
    _wrap_utils,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.utils import _cast_forward_inputs, _sync_params_and_buffers, _to_kwargs

from tesserae import _C, arguments, config, dial, install, swap
from tesserae.emulate import FlatHandle, mark_flat_parameter
from tesserae.logger import get_logger
from tesserae.optim_state_dict import OptimStateDicts
from tesserae.retired import retire
from tesserae.state_dict import StateDicts, finish_loading
from tesserae.summon import WholeParameters
from tesserae.tensor_parallel.parts import split_of

_BROADCAST_BUCKET_BYTES = 250 * 1024 * 1024


class _Construction(threading.local):
    """The outermost constructor that runs on this thread."""

    root: nn.Module | None = None
    uses: Counter[int] = Counter()  # how many entries of modules show a parameter, by id


_construction = _Construction()


class FullyShardedDataParallel(WholeParameters, StateDicts, OptimStateDicts, TorchFSDP):
    """FSDP on the engine of tesserae. Arguments are those of torch's class, and SMP v2's post_param_init_fn: called
    with the module of each unit when its parameters have values and before they are sharded.

    Errors: InvalidArgument for what can not work, Mismatch if ranks build different models; all say what to do.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
        post_param_init_fn: Callable[[nn.Module], None] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        # What inherited methods and other parts of torch read; torch's own constructor is not run.
        self.training_state = TrainingState.IDLE
        self._is_root: bool | None = None
        self._handle: FlatHandle | None = None
        self._comm_hook: Callable | None = None
        self._comm_hook_state: object = None
        self._fsdp_extension = None
        # 1.
        _init_utils._init_ignored_module_states(self, module, ignored_modules, ignored_states)
        device = arguments.compute_device(module, device_id)
        strategy = _strategy(sharding_strategy)
        fabric, degrees = arguments.connect(strategy, process_group, device_mesh, device)
        self.sharding_strategy = strategy
        self.compute_device = device
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.cpu_offload = cpu_offload or CPUOffload()
        self.process_group, self._everyone = arguments.groups_of(process_group, device_mesh)
        self.rank, self.world_size = fabric.rank, fabric.size
        self._device_mesh = device_mesh
        self._use_orig_params = use_orig_params
        self._buffers_cast = False
        self._pool_misses = 0  # that were warned of

        with _construct(module) as outermost:
            # 2.
            if auto_wrap_policy is not None:
                shared = {
                    "process_group": process_group,
                    "sharding_strategy": sharding_strategy,
                    "cpu_offload": cpu_offload,
                    "backward_prefetch": backward_prefetch,
                    "mixed_precision": mixed_precision,
                    "param_init_fn": param_init_fn,
                    "device_id": device_id,
                    "sync_module_states": sync_module_states,
                    "forward_prefetch": forward_prefetch,
                    "limit_all_gathers": limit_all_gathers,
                    "use_orig_params": use_orig_params,
                    "ignored_states": self._ignored_params,
                    "device_mesh": device_mesh,
                    "post_param_init_fn": post_param_init_fn,
                }
                _wrap_utils._auto_wrap(
                    module, auto_wrap_policy, self._ignored_modules, self._ignored_params, shared, type(self)
                )
            # 3.
            self._fsdp_wrapped_module = module
            self._give_values(module, param_init_fn)
            _init_utils._init_buffer_state(self, module)
            inner = _instances_below(module)
            managed = self._find_parameters(module, inner)
            if sync_module_states:
                self._sync_from_rank_zero(module, managed)
            if post_param_init_fn is not None:
                post_param_init_fn(module)
            # 4.
            self._managed = managed
            options = arguments.options(
                strategy,
                degrees,
                mixed_precision,
                cpu_offload,
                backward_prefetch,
                forward_prefetch,
                limit_all_gathers,
                device,
            )
            self._shard(module, fabric, options)
            _init_utils._init_state_dict_state(self)
            self.register_load_state_dict_post_hook(finish_loading)
            # 5.
            for path, child in inner.items():
                if child._unit.is_root:
                    self._unit.adopt(child._unit, path)
            if outermost:
                self._unit.require_agreement()

    # Construction.

    def _give_values(self, module: nn.Module, param_init_fn: Callable[[nn.Module], None] | None) -> None:
        is_meta, _ = _init_utils._need_to_materialize_module(module, self._ignored_params, self._ignored_modules)
        if is_meta and param_init_fn is not None:
            _init_utils._materialize_with_param_init_fn(module, param_init_fn, self._ignored_modules)
        elif is_meta:
            _init_utils._materialize_meta_module(module, self.compute_device, self._ignored_modules, None)
        if self.compute_device.type != "cpu":
            ignored = {buffer for part in self._ignored_modules for buffer in part.buffers()}
            _init_utils._move_module_to_device(module, self._ignored_params, ignored, self.compute_device)

    def _find_parameters(self, module: nn.Module, inner: dict[str, FullyShardedDataParallel]) -> list[swap.Managed]:
        managed = swap.find_parameters(module, {*inner.values(), *self._ignored_modules}, self._ignored_params)
        managed = [m for m in managed if _is_ours_alone(m)]
        for m in managed:
            if getattr(m.parameter, "_tesserae_managed", False):
                raise _C.InvalidArgument(
                    f"[FSDP] parameter {m.names[0]} belongs to an FSDP instance already: its module was wrapped twice, "
                    "or it is tied to a parameter inside another instance. Wrap each module once, and let one instance "
                    "enclose all modules that share a parameter"
                )
        devices = {m.parameter.device for m in managed}
        if len(devices) > 1:
            raise _C.InvalidArgument(
                f"[FSDP] parameters of one module are on several devices ({', '.join(sorted(map(str, devices)))}); "
                "move the module to one device first, or pass device_id"
            )
        return managed

    def _sync_from_rank_zero(self, module: nn.Module, managed: list[swap.Managed]) -> None:
        states = [m.parameter.detach() for m in managed]
        for buffer in module.buffers():
            if not getattr(buffer, _init_utils.FSDP_SYNCED, False):
                setattr(buffer, _init_utils.FSDP_SYNCED, True)
                states.append(buffer.detach())
        group = self.process_group or dist.group.WORLD
        _sync_params_and_buffers(group, states, _BROADCAST_BUCKET_BYTES, 0)

    def _shard(self, module: nn.Module, fabric: _C.Fabric, options: _C.Options) -> None:
        managed = self._managed
        compute = [swap.make_compute(m, as_parameter=self._use_orig_params) for m in managed]
        self._unit = _C.Unit(fabric, options, [m.names for m in managed], compute, self._splits())
        self._flats = _C.flat_buffers(self._unit)
        if self._use_orig_params:
            local = [[managed[i].parameter for i in order] for order in self._unit.flats]
            self._unit.set_entries(swap.entries_of(managed))
        else:
            local = [[nn.Parameter(torch.empty(0), requires_grad=flat.trainable)] for flat in self._flats]
            swap.replace_by_tensors(managed)
            self._flat_entries = (
                module._parameters
            )  # of this module, also when a checkpoint_wrapper goes around it later
            for i, (parameter,) in enumerate(local):
                order = [managed[k] for k in self._unit.flats[i]]
                mark_flat_parameter(parameter, [m.names[0] for m in order], self._flats[i].shapes)
                self._flat_entries[swap.flat_name(i)] = parameter
            retire(m.parameter for m in managed)
        self._unit.show_parameters(local)
        for parameters in local:
            for parameter in parameters:
                parameter._tesserae_managed = True
        self._local = local
        if local:
            self._handle = FlatHandle(self, local[0][0])

    def _splits(self) -> list[tuple[_C.Split, list[int]]]:
        """How each parameter is cut among tensor-parallel ranks, and the shape of the whole."""
        splits = [split_of(m.entries) for m in self._managed]
        if not any(splits):
            return []
        arguments.require_one_tensor_index(self._everyone)
        return [(s.split, list(s.whole)) if s is not None else (_C.Split(), []) for s in splits]

    # Steps.

    @torch._dynamo.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers the unit's parameters, calls the module, frees them as the strategy says."""
        if self._whole is not None:
            return self._whole.forward(*args, **kwargs)
        unit = self._unit
        is_root = unit.is_root
        if is_root:
            args, kwargs = self._begin_step(args, kwargs)
        if self.mixed_precision.param_dtype is not None and self._casts_inputs(is_root):
            args, kwargs = _cast_forward_inputs(self.mixed_precision.param_dtype, *args, **kwargs)
        if unit.has_frozen:
            unit.watch_inputs((args, kwargs))
        unit.enter()
        try:
            output = self._fsdp_wrapped_module(*args, **kwargs)
        finally:
            unit.leave()
        unit.finish(output)
        return output

    def _begin_step(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if torch.is_grad_enabled():
            dial.begin_step(self)
        self._warn_of_pool_misses()
        if not self._buffers_cast:
            for instance in self._all_instances():
                instance._cast_buffers()
        if self.compute_device.type != "cpu":
            moved, named = _to_kwargs(args, kwargs, self.compute_device, False)
            args, kwargs = tuple(moved[0]), named[0]
        return args, kwargs

    def _warn_of_pool_misses(self) -> None:
        settings = config.current()
        if settings is None or not settings.fsdp_cache_flush_warnings:
            return
        misses = self._unit.statistics().pool_misses
        if misses > self._pool_misses:
            get_logger().warning(
                "[FSDP] %d times since the last step the memory planned for gathered parameters did not suffice, and "
                "more was allocated: units ran in another order than in the first step, or several at once "
                '("fsdp_cache_flush_warnings": false in tsm.init silences this)',
                misses - self._pool_misses,
            )
            self._pool_misses = misses

    def _casts_inputs(self, is_root: bool) -> bool:
        precision = self.mixed_precision
        return (precision.cast_forward_inputs and bool(self._managed)) or (
            is_root and precision.cast_root_forward_inputs
        )

    def _cast_buffers(self) -> None:
        """Buffers compute in their own dtype of the mixed precision, as the root's first forward in FSDP does it."""
        self._buffers_cast = True
        dtype = self.mixed_precision.buffer_dtype
        below = {part for child in _instances_below(self._fsdp_wrapped_module).values() for part in child.modules()}
        for part in self.modules():
            if part in below or part in self._ignored_modules:
                continue
            for name, buffer in part._buffers.items():
                if buffer is None:
                    continue
                target = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                part._buffers[name] = buffer.to(self.compute_device, target)

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Gradients of backwards in this context stay on the rank, whole; the first backward after it takes them
        along."""
        self._require_root("no_sync")
        before = self._unit.boundary()
        self._unit.set_boundary(False)
        try:
            yield
        finally:
            self._unit.set_boundary(before)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scales gradients to this norm at most, over all parameters and ranks; returns the norm that they had, a
        scalar in the dtype of the gradients. Collective."""
        self._require_root("clip_grad_norm_")
        norm = _C.clip_gradients(self._unit, float(max_norm), float(norm_type))
        gradients = [p.grad.dtype for p in self.parameters() if p.grad is not None]
        dtype = gradients[0] if gradients else torch.float32
        for other in gradients[1:]:
            dtype = torch.promote_types(dtype, other)
        return torch.tensor(norm, dtype=dtype, device=self.compute_device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients, also those that no_sync() has kept. An optimizer's zero_grad leaves the latter."""
        super().zero_grad(set_to_none)
        if not self._unit.is_root:
            return
        if set_to_none:
            self._unit.zero_grad()
        else:
            self._unit.discard_accumulated()

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """`hook(state, gradients)` (NO_SHARD) or `hook(state, gradients, mine)` reduces in place of the engine: flat
        buffers of one unit in the reduce dtype. It runs on the thread of the engine's reductions."""
        self._require_root("register_comm_hook")
        for instance in self._all_instances():
            if instance._comm_hook is not None:
                raise _C.InvalidArgument("[register_comm_hook] a hook is registered already; a model has one at most")
            if instance.sharding_strategy in arguments.HYBRID:
                raise _C.InvalidArgument(
                    f"[register_comm_hook] {instance.sharding_strategy} reduces in two steps, which one hook can not "
                    "stand for; use NO_SHARD, SHARD_GRAD_OP or FULL_SHARD"
                )
        for instance in self._all_instances():
            instance._comm_hook, instance._comm_hook_state = hook, state
            instance._unit.set_reduce_hook(lambda *tensors: hook(state, *tensors))

    # What torch's class offers.

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[TorchFSDP]:
        """The FSDP instances in `module`, itself included; with `root_only` those that no other encloses."""
        found = install.original("fsdp_modules")(module)
        return [part for part in found if part.check_is_root()] if root_only else found

    def check_is_root(self) -> bool:
        """Whether no other instance encloses this one."""
        return self._unit.is_root

    @property
    def _has_params(self) -> bool:
        return bool(self._managed)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return self._handle.flat_param if self._handle is not None else None

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        # What it replaces (another dtype or device) is noticed, and named, at the next forward.
        return nn.Module._apply(self, *args, **kwargs)

    def _all_instances(self) -> list[FullyShardedDataParallel]:
        return [part for part in self.modules() if isinstance(part, FullyShardedDataParallel)]

    def _require_root(self, function: str) -> None:
        if not self._unit.is_root:
            raise _C.InvalidArgument(
                f"[{function}] called on the inner unit {self._unit.name}; call it on the outermost FSDP instance"
            )


@contextlib.contextmanager
def _construct(module: nn.Module) -> Generator[bool]:
    """True if no other constructor is running around this one."""
    outermost = _construction.root is None
    if outermost:
        _construction.root = module
        _construction.uses = Counter(
            id(parameter)
            for part in module.modules()
            for parameter in part._parameters.values()
            if parameter is not None
        )
    try:
        yield outermost
    finally:
        if outermost:
            _construction.root, _construction.uses = None, Counter()


def _is_ours_alone(managed: swap.Managed) -> bool:
    """False for a parameter that is also used outside of the unit: the instance that encloses all of its users owns
    it."""
    return _construction.uses[id(managed.parameter)] <= len(managed.entries)


def _instances_below(module: nn.Module) -> dict[str, FullyShardedDataParallel]:
    """The instances below `module`, itself included unless it is one, by the path that names of parameters have."""
    found: dict[str, FullyShardedDataParallel] = {}

    def visit(part: nn.Module, path: str) -> None:
        for name, child in part._modules.items():
            if child is None:
                continue
            place = path + swap.step_name(part, name)
            if isinstance(child, FullyShardedDataParallel):
                found[place.removesuffix(".")] = child
            visit(child, place)

    if isinstance(module, FullyShardedDataParallel):
        found[""] = module
    visit(module, "")
    return found


def _strategy(asked: ShardingStrategy | None) -> ShardingStrategy:
    """What the script asks for, unless the configuration has a degree, which is stronger."""
    strategy = asked or ShardingStrategy.FULL_SHARD
    settings = config.current()
    degree = settings.hybrid_shard_degree if settings is not None else 0
    if degree == 1:
        return ShardingStrategy.NO_SHARD
    if degree > 1 and strategy != ShardingStrategy._HYBRID_SHARD_ZERO2:
        return ShardingStrategy.HYBRID_SHARD
    return strategy
