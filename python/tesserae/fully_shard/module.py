"""FSDPModule: the methods of a module that fully_shard has sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import UnshardHandle

from tesserae import _C
from tesserae.fully_shard.state import State, ours
from tesserae.torch_compat.fsdp2 import TorchFSDPModule


class FSDPModule(TorchFSDPModule):
    """torch's FSDPModule on the engine of tesserae. Methods are torch's; settings hold from the next step on and are
    the same on all ranks."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Containers make others of their class of what is indexed: those are not sharded.
        plain = next(c for c in cls.__mro__[1:] if not issubclass(c, TorchFSDPModule))
        made = plain.__new__(plain)
        made.__init__(*args, **kwargs)
        return made

    # ---- parameters ----
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters ahead of the forward. Collective."""
        unit = _state(self).prepared()
        unit.gather()
        handle = _Handle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees what is gathered. Nothing inside the module's forward or backward."""
        state = _state(self)
        if state.unit is not None:
            state.unit.release()

    def reset_iter_state(self) -> None:
        """After an exception in a forward or backward: forgets the step, its gradients and what was accumulated."""
        state = _state(self)
        if state.root is not None and state.root is not state:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        for each in state.below:
            each.forget_step()
        if state.unit is not None:
            state.unit.discard_accumulated()

    # ---- settings ----
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: gradients of the next backwards stay on the rank, whole; the first backward after it is True again
        takes them along."""
        for state in _states(self, recurse):
            state.syncs = state.all_reduces = requires_gradient_sync
            state.apply_settings()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: with replicas, gradients of the next backwards stay on the rank as shards; without, nothing."""
        for state in _states(self, recurse):
            state.all_reduces = requires_all_reduce
            state.apply_settings()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing: every backward ends with its reductions done."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for state in _states(self, recurse):
            state.keeps_as_root = False
            state.frees_after_forward = reshard_after_forward
            state.rest_ranks = 0
            state.apply_settings()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        for state in _states(self, recurse):
            state.frees_after_backward = reshard_after_backward
            state.apply_settings()

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Nothing: the engine gathers ahead by the order of the last step."""
        _require_sharded(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Nothing: the engine gathers ahead by the order of the last step."""
        _require_sharded(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sums of gradients are divided by this instead of by the number of ranks."""
        state = _state(self)
        state.divisor = factor
        state.apply_settings()

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing: the engine always sums."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing: a backward that is announced gathers."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Nothing: the engine bounds its reductions itself."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Nothing: reductions have groups of their own."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Nothing: the engine's groups choose their memory."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Nothing: the engine's groups choose their memory."""

    def set_post_optim_event(self, event: torch.Event) -> None:
        """What gathers next comes after `event`."""
        event.wait()

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: parameters without a gradient count as zeros, so that ranks may use different ones. The reductions of
        these modules wait for the end of the backward."""
        for state in _states(self, recurse):
            state.reduces_unused = reduce_scatter_unused_params
            state.apply_settings()

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None) -> None:
        """hook(average) of this module's gradients, in a thread of the engine, before they are added to `.grad`: once
        for each parameter (torch: once for all of them, in one tensor). It may change them in place. None: no hook."""
        state = _state(self)
        if stream is not None and state.places.replicates:
            raise ValueError("stream cannot be set when using native HSDP")
        if hook is not None and stream is not None:
            hook = functools.partial(_run_on, torch.get_device_module(state.places.device), stream, hook)
        state.average_hook = hook
        state.apply_hooks()

    def set_custom_all_gather(self, comm: Any) -> None:
        """comm(output_tensor, input_tensor, group) gathers this module's parameters in place of the engine, in memory
        of comm.allocate(), in a thread of the engine; `group`: one of its own, of the ranks that shard them. Also what
        extensions of the all-gather bring; a call for each dtype. Before the first forward. None: the engine again."""
        _set_collective(_state(self), "gatherer", _checked("set_custom_all_gather", comm))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """The same for the sum of this module's gradients over the ranks that shard them: comm(output_tensor,
        input_tensor, group, op), with op SUM, which the engine divides."""
        _set_collective(_state(self), "scatterer", _checked("set_custom_reduce_scatter", comm))


class _Handle(UnshardHandle):
    def __init__(self, unit: _C.Unit) -> None:
        self._unit: _C.Unit | None = unit

    def wait(self) -> None:
        if self._unit is not None:
            self._unit.finish_gather()
            self._unit = None


def _state(module: Any) -> State:
    state = ours(module)
    if state is None:
        raise AssertionError(f"No FSDP state found on {module}")
    return state


def _states(module: Any, recurse: bool) -> Iterator[State]:
    for part in module.modules() if recurse else [module]:
        state = ours(part)
        if state is not None:
            yield state


def _run_on(device: Any, stream: Any, hook: Callable[[torch.Tensor], None], average: torch.Tensor) -> None:
    """`device`: the module of its kind, as torch.cuda."""
    current = device.current_stream()
    stream.wait_stream(current)
    with device.stream(stream):
        hook(average)
    current.wait_stream(stream)


def _require_sharded(modules: list[Any]) -> None:
    for module in modules:
        if not isinstance(module, TorchFSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")


def _set_collective(state: State, kind: str, comm: Any) -> None:
    before = getattr(state, kind)
    setattr(state, kind, comm)
    try:
        state.apply_collectives()
    except Exception:
        setattr(state, kind, before)  # what is applied again at each change of degrees
        raise


def _checked(method: str, comm: Any) -> Any:
    if comm is None or (callable(comm) and callable(getattr(comm, "allocate", None))):
        return comm
    raise _C.InvalidArgument(
        f"[FSDPModule.{method}] comm is a {type(comm).__name__}; pass an object that can be called and has allocate(), "
        "as those of torch.distributed.fsdp._fully_shard._fsdp_api, or None"
    )
