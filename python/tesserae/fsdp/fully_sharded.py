"""The class that takes the place of torch.distributed.fsdp.FullyShardedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from tesserae import _C
from tesserae.fsdp import state_loading, whole
from tesserae.fsdp.arguments import Arguments
from tesserae.fsdp.construction import construct
from tesserae.fsdp.flat_parameters import flat_parameters
from tesserae.fsdp.forward import begin_step, cast
from tesserae.fsdp.install import original
from tesserae.fsdp.instance import instances_of, require_root
from tesserae.fsdp.optim_state_dicts import OptimStateDicts
from tesserae.fsdp.state_dicts import StateDicts
from tesserae.torch_compat.instance import HYBRID, TorchFSDP, has_comm_hook, set_comm_hook, wrapped


class FullyShardedDataParallel(OptimStateDicts, StateDicts):
    """FSDP on the engine of tesserae: an instance is one unit, the parameters below its module that belong to no
    instance further in. Arguments are those of torch's class, and SMP v2's post_param_init_fn: called with the module
    of each unit when its parameters have values and before they are sharded.

    Errors: InvalidArgument for what cannot work, Mismatch if ranks build different models; all say what to do.
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
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
        post_param_init_fn: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().__init__(module, ignored_modules, ignored_states, device_mesh, use_orig_params)
        arguments = Arguments(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            device_mesh=device_mesh,
            post_param_init_fn=post_param_init_fn,
        )
        construct(self, module, arguments, auto_wrap_policy)
        self.register_load_state_dict_post_hook(state_loading.finish)

    # ---- a step ----
    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers the unit's parameters, calls the module, frees them as the strategy says."""
        if self._whole is not None:
            return self._whole.forward(*args, **kwargs)
        unit = self._unit
        if unit.is_root:
            args, kwargs = begin_step(self, args, kwargs)
        args, kwargs = cast(self, args, kwargs)
        unit.enter((args, kwargs))
        # Autocast keeps what it has cast of leaves until its outermost context ends: of all units at once, and past an
        # update where the context is around the loop. What torch's class computes with are no leaves.
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            output = wrapped(self)(*args, **kwargs)
        except BaseException:
            unit.cancel()
            raise
        finally:
            torch.set_autocast_cache_enabled(caches)
        unit.finish(output)
        return output

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Gradients of backwards in this context stay on the rank, whole; the first backward after it takes them
        along."""
        require_root(self, "no_sync")
        before = self._unit.boundary()
        self._unit.set_boundary(False)
        try:
            yield
        finally:
            self._unit.set_boundary(before)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scales gradients to this norm at most, over all parameters and ranks; returns the norm that they had, a
        scalar in the dtype of the gradients. Each rank counts its own of ignored parameters, too, as
        torch does. Collective."""
        require_root(self, "clip_grad_norm_")
        others = [p.grad for p in self.parameters() if p.grad is not None and not hasattr(p, "_tesserae_managed")]
        norm = _C.clip_gradients(self._unit, float(max_norm), float(norm_type), others)
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
        require_root(self, "register_comm_hook")
        for instance in instances_of(self):
            if instance._holds_experts:
                raise _C.InvalidArgument(
                    "[register_comm_hook] the model has experts that ranks share out, which are reduced over fewer "
                    "ranks than all else: one hook cannot stand for both; leave it out, or use expert_parallel_degree 1"
                )
            if has_comm_hook(instance):
                raise _C.InvalidArgument("[register_comm_hook] a hook is registered already; a model has one at most")
            if instance.sharding_strategy in HYBRID:
                raise _C.InvalidArgument(
                    f"[register_comm_hook] {instance.sharding_strategy} reduces in two steps, which one hook cannot "
                    "stand for; use NO_SHARD, SHARD_GRAD_OP or FULL_SHARD"
                )
        for instance in instances_of(self):
            set_comm_hook(instance, state, hook)
            instance._unit.set_reduce_hook(lambda *tensors: hook(state, *tensors))

    # ---- between steps ----
    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Within this context the parameters below `module` are whole: of their own shape and in their own dtype.

        `recurse=False`: those of `module` itself, without the units in it. `writeback`: each rank keeps what it writes
        to its own part. `rank0_only`: the others keep their shards. `with_grads`: `.grad` too. Collective.
        """
        return whole.summon(module, recurse, whole.SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads))

    def apply(self, fn: Callable[[nn.Module], None]) -> nn.Module:
        """`fn(module)` for each module below and this one, with the parameters of its unit whole. Collective; not
        within summon_full_params."""
        if self._whole is not None:
            raise _C.InvalidArgument(
                f"[apply] expected to be in states [IDLE], but the parameters of unit {self._unit.name} have been "
                "summoned; leave summon_full_params first, or call the module's own apply()"
            )
        with whole.Summoned(self, whole.SummonOptions(writeback=True), "apply"):
            return nn.Module.apply(self, fn)

    @property
    def params(self) -> list[nn.Parameter]:
        """The unit's flat parameters. Reading their sizes, dtypes and values is all that they are good for."""
        return flat_parameters(self)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[TorchFSDP]:
        """The FSDP instances in `module`, itself included; with `root_only` those that no other encloses."""
        found = original("fsdp_modules")(module)
        return [part for part in found if part.check_is_root()] if root_only else found

    def check_is_root(self) -> bool:
        """Whether no other instance encloses this one."""
        return self._unit.is_root
