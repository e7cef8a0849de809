"""One fully_shard call: a unit of the engine, and what happens around the forward of its modules.

1. Before the forward: the outermost state of the model begins a step; inputs are cast; parameters are gathered.
2. After it: outputs are watched for the beginning of the backward, parameters are freed as the lifetime says, outputs
   are cast. Those of a group of modules are freed after the last of them, or at the end of the outermost forward; of
   one that is called outside of that, after each.
3. A forward that is recomputed in a backward only gathers: its end may never come.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tesserae import _C
from tesserae.fsdp.arguments import engine_options
from tesserae.fsdp.forward import before_training_forward
from tesserae.fully_shard.parameters import Managed
from tesserae.fully_shard.places import Places, shard_group
from tesserae.torch_compat.distributed import move_inputs
from tesserae.torch_compat.fsdp2 import FSDPState, cast_tensors, state_of


class State(FSDPState):
    """torch's state, found where torch looks for it, without torch's engine."""

    modules: tuple[nn.Module, ...]
    places: Places
    parameters: list[Managed]
    policy: MixedPrecisionPolicy
    keeps_as_root: bool  # reshard_after_forward was left open: the outermost state keeps its parameters
    frees_after_forward: bool
    rest_ranks: int  # over how many ranks parameters rest until the backward; 0: all that shard them
    frees_after_backward: bool
    hooked: bool
    syncs: bool  # what the script says of the next backwards
    all_reduces: bool
    reduces_unused: bool
    divisor: float | None
    average_hook: Callable[[torch.Tensor], None] | None  # of set_all_reduce_hook
    gatherer: Any  # of set_custom_all_gather and set_custom_reduce_scatter
    scatterer: Any
    options: _C.Options
    unit: _C.Unit | None
    outermost: State  # the last call around this one so far
    root: State | None
    below: list[State]  # of a root: all states of its model, itself first
    prepare: Callable[[State], None]

    def begin(
        self,
        modules: tuple[nn.Module, ...],
        places: Places,
        parameters: list[Managed],
        policy: MixedPrecisionPolicy,
        offloads: bool,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules, self.places, self.parameters, self.policy = modules, places, parameters, policy
        self.keeps_as_root = reshard_after_forward is None
        self.frees_after_forward = frees_after_forward(reshard_after_forward)
        self.rest_ranks = rest_ranks(reshard_after_forward)
        self.gatherer = self.scatterer = None
        self.frees_after_backward = True
        self.syncs = self.all_reduces = True
        self.reduces_unused = False
        self.hooked = False  # the unit calls hooks that the script has put on sharded parameters
        self.divisor, self.average_hook, self.unit, self.root = None, None, None, None
        self.options = engine_options(  # as the configuration is at the call
            places.device,
            strategy=places.strategy,
            parameters=policy.param_dtype,
            reduce=policy.reduce_dtype,
            limit_all_gathers=2,
            offload=offloads,
            by_rows=True,
        )
        self.outermost = self
        self.below: list[State] = []
        self._inside = False
        self._to_run: set[nn.Module] = set()  # of a group, in the forward that runs
        # Of which a forward has begun and not ended, the innermost last; of one that torch calls by name, its frame.
        self._running: list[tuple[nn.Module, FrameType | None]] = []
        self._hooked: list[int] = []  # of calls by hooks: how many were running before

    def apply_settings(self) -> None:
        """What the script has set goes to the unit."""
        if self.unit is None:
            return
        self.unit.set_lifetimes(
            free_after_forward=self.frees_after_forward, free_after_backward=self.frees_after_backward
        )
        self.unit.set_rest_ranks(self.rest_ranks if self.frees_after_forward else 0)
        # Without replicas there is no all-reduce to leave out.
        replicas = self.places.fabric.size > self.places.degree
        keeps_pieces = self.syncs and not self.all_reduces and replicas
        self.unit.set_reduces_gradients(self.syncs and not keeps_pieces)
        self.unit.set_keeps_pieces(keeps_pieces)
        self.unit.set_reduces_unused(self.reduces_unused)
        if self.divisor is not None:
            self.unit.set_gradient_divisor(self.divisor)

    def apply_hooks(self) -> None:
        """The same for the user's code, which stays with the unit whatever else is set."""
        if self.unit is not None:
            self.unit.set_average_hook(self.average_hook)
        self.apply_collectives()

    def apply_collectives(self) -> None:
        """The user's, with groups of their own: gathers and reductions run beside each other."""
        if self.unit is None:
            return
        for comm, setter, use in (
            (self.gatherer, _C.set_gatherer, "gather"),
            (self.scatterer, _C.set_scatterer, "reduce"),
        ):
            setter(self.unit, comm, shard_group(self.places.shard_mesh, use) if comm is not None else None)

    def prepared(self) -> _C.Unit:
        """The unit; where there is none yet, the model below this state gets its engine."""
        if self.unit is None:
            self.prepare(self)
        assert self.unit is not None
        return self.unit

    def show_shards(self) -> None:
        """Modules have DTensors as entries, unless they compute."""
        if self.unit is not None:
            self.unit.show_shards()

    def _lazy_init(self) -> None:  # torch's name for it
        self.prepared()

    # ---- hooks; torch's register_fsdp_forward_method calls those of its names, too ----
    @torch.compiler.disable
    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self._forget_thrown()
        self._hooked.append(len(self._running))
        return self._enter(module, None, args, kwargs)

    @torch.compiler.disable
    def _pre_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self._forget_thrown()
        return self._enter(module, caller(), args, kwargs)

    def _enter(
        self, module: nn.Module, frame: FrameType | None, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        unit = self.prepared()
        if _C.in_backward():  # 3.
            unit.enter_again()
            return self._cast_inputs(args, kwargs)
        # 1.
        self._running.append((module, frame))
        if not self._inside:
            assert self.root is not None
            if self.root is self:
                args, kwargs = self._begin_step(args, kwargs)
            elif not self.root._inside:
                args, kwargs = self._begin_alone(args, kwargs)
            args, kwargs = self._cast_inputs(args, kwargs)
            unit.enter((args, kwargs))
            self._inside = True
            self._to_run = set(self.modules)
            return args, kwargs
        return self._cast_inputs(args, kwargs)

    @torch.compiler.disable
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        unit = self.prepared()
        if _C.in_backward():
            unit.watch_outputs(output)
            return self.cast_output(output)
        # 2.
        self._forget_thrown()
        if self._running and self._running[-1][0] is module:
            self._running.pop()
        if not self._inside:  # the end of a call around one that has left
            return self.cast_output(output)
        if self._runs(module):  # it has called itself
            unit.watch_outputs(output)
            return self.cast_output(output)
        self._to_run.discard(module)
        assert self.root is not None
        if self._to_run and self.root._inside:
            unit.watch_outputs(output)
            return self.cast_output(output)
        if self.root is self:
            for state in reversed(self.below):
                if state is not self and state._inside:
                    state._leave(output)
        self._leave(output)
        return self.cast_output(output)

    @torch.compiler.disable
    def _after_any_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also after a forward that threw, which has not come to _post_forward."""
        before = self._hooked.pop() if self._hooked else 0
        threw = len(self._running) > before
        del self._running[before:]
        if threw:
            self._cancel()

    def _runs(self, module: nn.Module) -> bool:
        return any(each is module for each, _ in self._running)

    def _cancel(self) -> None:
        if self._inside and not self._running:
            self._inside = False
            if self.unit is not None:
                self.unit.cancel()

    def _forget_thrown(self) -> None:
        """Of calls by name that threw nobody tells."""
        while self._running and (frame := self._running[-1][1]) is not None and not is_running(frame):
            self._running.pop()
            self._cancel()

    def _leave(self, output: Any) -> None:
        self._inside = False
        assert self.unit is not None
        self.unit.finish(output)

    def _begin_step(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.prepare(self)  # parameters that were replaced
        if torch.is_grad_enabled():
            for call in before_training_forward:
                call(self, args, kwargs)
        for state in self.below:
            if state._inside:
                state.forget_step()
        return self._moved(args, kwargs)

    def _begin_alone(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Called by itself, outside of the outermost forward."""
        self.prepare(self)
        return self._moved(args, kwargs)

    def _moved(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self.places.device.type != "cpu":
            return move_inputs(self.places.device, args, kwargs)
        return args, kwargs

    def forget_step(self) -> None:
        """A forward or backward threw."""
        self._inside = False
        self._running.clear()
        self._hooked.clear()
        if self.unit is not None:
            self.unit.forget_step()

    def _cast_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return cast_tensors(dtype, args), cast_tensors(dtype, kwargs)

    def cast_output(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_tensors(dtype, output)


def caller() -> FrameType | None:
    """Who called the function that calls this, torch's compiler aside."""
    frame = sys._getframe(2)
    while frame is not None and "_dynamo" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame


def is_running(frame: FrameType) -> bool:
    """Whether this thread is in it, or in what it has called."""
    now: FrameType | None = sys._getframe(1)
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None


def frees_after_forward(reshard_after_forward: bool | int | None) -> bool:
    """Also where an integer asks for a smaller group to rest on (rest_ranks)."""
    return reshard_after_forward is True or reshard_after_forward not in (False, 1)


def rest_ranks(reshard_after_forward: bool | int | None) -> int:
    """Over how many ranks parameters rest after the forward; 0: as before it."""
    return 0 if reshard_after_forward is None or isinstance(reshard_after_forward, bool) else reshard_after_forward


def ours(module: nn.Module) -> State | None:
    """The state of a module that fully_shard of tesserae has sharded."""
    state = state_of(module)
    return state if isinstance(state, State) else None


def states_below(modules: Iterable[nn.Module]) -> dict[State, str]:
    """The states of `modules` and of what is below them, outermost first, with the path of their first module."""
    found: dict[State, str] = {}
    for module in modules:
        for path, part in module.named_modules():
            state = ours(part)
            if state is not None:
                found.setdefault(state, path)
    return found
