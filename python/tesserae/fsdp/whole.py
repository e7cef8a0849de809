"""Whole parameters between steps: FSDP.summon_full_params, and what state dicts do to one unit at a time.

The life of a Summoned unit:
 1. What the user did to values and gradients since the last step is taken over.
 2. Each flat buffer is gathered, in the dtype of the masters; every rank takes part.
 3. The user's parameters become views of it, under their own names in their modules. A forward just calls the module.
 4. At the end, with writeback, each rank takes its own part of what the parameters hold. They show that part again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter

from tesserae import _C
from tesserae.fsdp import parameters as faces
from tesserae.fsdp.instance import Instance, instances_of, is_first_rank
from tesserae.fsdp.replaced import take_replaced
from tesserae.torch_compat.instance import set_summoned, uses_orig_params, wrapped


@dataclass(frozen=True)
class SummonOptions:
    """What a caller wants of whole parameters; names and meaning are those of FSDP.summon_full_params."""

    writeback: bool = False
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def granted_by(self, other: SummonOptions) -> bool:
        """Whether parameters that were summoned by the other will do."""
        return (
            (other.writeback or not self.writeback)
            and (other.with_grads or not self.with_grads)
            and (self.rank0_only or not other.rank0_only)
        )


@dataclass
class _Buffer:
    """A flat buffer, gathered."""

    flat: _C.FlatBuffer
    parameters: list[faces.Managed]  # by slot
    values: Tensor
    gradients: Tensor | None
    views: list[Tensor] = field(init=False)
    gradient_views: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.views = views_of(self.flat, self.values)
        self.gradient_views = views_of(self.flat, self.gradients) if self.gradients is not None else []


def views_of(flat: _C.FlatBuffer, whole: Tensor) -> list[Tensor]:
    """The parameters in a whole buffer, by slot."""
    return [
        whole[begin : begin + torch.Size(shape).numel()].view(shape) for begin, shape in zip(flat.begins, flat.shapes)
    ]


class Summoned:
    """One instance's own parameters, whole, as a context. Within another one for the same instance it does nothing."""

    def __init__(
        self,
        instance: Instance,
        options: SummonOptions,
        function: str = "summon_full_params",
        for_loading: bool = False,
    ) -> None:
        self.for_loading = for_loading  # entered and left by hooks: give_up_loading() if something came between
        self._instance = instance
        self._options = options
        self._function = function
        self._buffers: list[_Buffer] = []
        self.here = not options.rank0_only or is_first_rank(instance)  # this rank has whole parameters
        self._registered: dict[str, nn.Parameter] = {}  # flat parameters, by the name of their entry

    def __enter__(self) -> Summoned:
        instance = self._instance
        outer = instance._whole
        if outer is not None:
            if self._options.granted_by(outer._options):
                return self
            raise _C.InvalidArgument(
                f"[{self._function}] parameters of unit {instance._unit.name} have been summoned already, with "
                f"{outer._options}, which does not do for {self._options}; leave that context first"
            )
        instance._unit.require_between_steps(self._function)
        take_replaced(instance)
        for flat in instance._flats:
            flat.take()
        buffers = [self._gather(*both) for both in zip(instance._flats, instance._unit.flats)]
        instance._whole = self
        set_summoned(instance, True)
        if self.here:
            self._buffers = buffers
            self._show()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        instance = self._instance
        if instance._whole is not self:
            return
        try:
            if self.here and self._options.writeback:
                self._write_back()
        finally:
            self.leave()
        # Not after an exception: it may be of this rank alone. The next forward publishes in any case.
        if self._options.writeback and error is None:
            for flat in instance._flats:
                flat.publish()

    def leave(self) -> None:
        """Shows this rank's part again, without writing back."""
        instance = self._instance
        managed = [m for buffer in self._buffers for m in buffer.parameters]
        faces.restore_parameters(m for m in managed if not _in_place(m))
        if not uses_orig_params(instance) and self.here:
            faces.replace_by_tensors(managed)
            for m in managed:
                m.parameter.grad = None
                m.parameter.data = m.parameter.data.new_empty(0)
            instance._flat_entries.update(self._registered)
        for flat in instance._flats:
            flat.show()
        self._buffers = []
        instance._whole = None
        set_summoned(instance, False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The instance's forward in the meantime."""
        if self.for_loading:
            for instance in instances_of(self._instance):
                give_up_loading(instance)
            return self._instance.forward(*args, **kwargs)
        if not self.here:
            raise _C.InvalidArgument(
                "[FSDP.forward] called in a context of rank0_only=True on a rank that has no whole parameters; summon "
                "them on all ranks"
            )
        return wrapped(self._instance)(*args, **kwargs)

    def _gather(self, flat: _C.FlatBuffer, order: list[int]) -> _Buffer:
        parameters = [self._instance._managed[i] for i in order]
        values = flat.whole_values(flat.local())
        if not flat.trainable:
            values = values.to(parameters[0].dtype)  # it is kept in the compute dtype
        gradients = flat.whole_gradient() if self._options.with_grads else None
        if self.here and self._options.offload_to_cpu:
            values = values.cpu()
        return _Buffer(flat, parameters, values, gradients)

    def _show(self) -> None:
        instance = self._instance
        for buffer in self._buffers:
            for i, m in enumerate(buffer.parameters):
                m.parameter.grad = None  # of another shape
                m.parameter.data = buffer.views[i]
                if buffer.gradients is not None and m.parameter.requires_grad:
                    m.parameter.grad = buffer.gradient_views[i]
        if not uses_orig_params(instance):
            entries = instance._flat_entries
            self._registered = {name: p for name, p in entries.items() if isinstance(p, FlatParameter)}
            for name in self._registered:
                del entries[name]
            faces.restore_parameters(instance._managed)  # in the module's order, not that of buffers

    @torch.no_grad()
    def _write_back(self) -> None:
        for buffer in self._buffers:
            for i, m in enumerate(buffer.parameters):
                _take(buffer.views[i], faces.entry_now(m), m.names[0])
            buffer.flat.set_values(buffer.values)
            if buffer.gradients is None:
                continue
            for i, m in enumerate(buffer.parameters):
                gradient = m.parameter.grad
                _take(
                    buffer.gradient_views[i],
                    torch.zeros_like(m.parameter) if gradient is None else gradient,
                    m.names[0],
                )
            buffer.flat.set_gradient(buffer.gradients)


def _in_place(managed: faces.Managed) -> bool:
    return faces.entry_now(managed) is managed.parameter


def _take(view: Tensor, value: Any, name: str) -> None:
    if isinstance(value, Tensor) and value.data_ptr() == view.data_ptr() and value.shape == view.shape:
        return
    if not isinstance(value, Tensor) or value.shape != view.shape:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise _C.InvalidArgument(
            f"[summon_full_params] parameter {name} of shape {list(view.shape)} was replaced by {found}, which cannot "
            "be written back; give it another shape before FSDP(...)"
        )
    view.copy_(value)


def give_up_loading(instance: Instance) -> None:
    """After an exception in the middle of loading: the instance's parameters are sharded again."""
    if instance._whole is not None and instance._whole.for_loading:
        instance._whole.leave()


@contextlib.contextmanager
def summon(module: nn.Module, recurse: bool, options: SummonOptions) -> Generator[None]:
    """The parameters below `module` are whole within this context; `recurse=False`: those of `module` itself."""
    instances = instances_of(module) if recurse else [module] if isinstance(module, Instance) else []
    _check(options, instances)
    with contextlib.ExitStack() as stack:
        for instance in instances:
            stack.enter_context(Summoned(instance, options))
        yield


def _check(options: SummonOptions, instances: list[Instance]) -> None:
    if options.writeback and options.rank0_only:
        raise _C.InvalidArgument(
            "[summon_full_params] writeback=True and rank0_only=True: the others would not see what rank 0 writes; "
            "pass writeback=False, or summon on all ranks"
        )
    if options.with_grads and options.offload_to_cpu:
        raise _C.InvalidArgument("[summon_full_params] with_grads=True and offload_to_cpu=True; pass one of them")
    if options.with_grads and not all(uses_orig_params(instance) for instance in instances):
        raise _C.InvalidArgument("[summon_full_params] with_grads=True needs FSDP(..., use_orig_params=True)")
