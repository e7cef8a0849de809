"""Trains a case with whatever torch.distributed.fsdp.FullyShardedDataParallel means, and says how it went.

Nothing here knows of Tesserae: the same lines train both sides.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from models import MODELS, Case, tokens
from parity_cases import ParityCase

STEPS = 3
BF16, FP16 = torch.bfloat16, torch.float16
PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
    "pure_bf16": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
    "fp16": MixedPrecision(param_dtype=FP16, reduce_dtype=FP16, buffer_dtype=FP16),
    "reduce_bf16": MixedPrecision(reduce_dtype=BF16),
}


@dataclass
class Outcome:
    """What a rank saw. Tensors are copies."""

    losses: list[float]  # of every backward, of this rank
    norms: list[float]  # what clip_grad_norm_ returned
    names: list[str]  # of the parameters, without FSDP's prefix
    initial: dict[str, Tensor]  # full state dict, before the first step
    state: dict[str, Tensor]  # the same, after the last


def groups_of(case: ParityCase) -> dict[str, object]:
    """Hybrid strategies shard over pairs; one is told by a mesh and the other by two groups."""
    if case.strategy == "HYBRID_SHARD":
        return {"device_mesh": init_device_mesh("cpu", (case.world // 2, 2))}
    if case.strategy == "_HYBRID_SHARD_ZERO2":
        rank = dist.get_rank()
        pairs = [dist.new_group([first, first + 1]) for first in range(0, case.world, 2)]
        replicas = [dist.new_group(list(range(place, case.world, 2))) for place in range(2)]
        return {"process_group": (pairs[rank // 2], replicas[rank % 2])}
    return {}


def arguments_of(case: ParityCase) -> dict[str, object]:
    return {
        "sharding_strategy": ShardingStrategy[case.strategy],
        "mixed_precision": PRECISIONS[case.precision],
        "cpu_offload": CPUOffload(offload_params=case.offload),
        "use_orig_params": case.use_orig_params,
        "device_id": torch.device("cpu"),
    } | groups_of(case)


def policy_of(case: ParityCase, kind: Case) -> object:
    units = set(kind.units)
    policies = {
        "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=units),
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=kind.unit_size),
        "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: type(module) in units),
        "module": ModuleWrapPolicy(units),
    }
    return policies.get(case.policy)


def wrap_units_by_hand(model: nn.Module, units: tuple[type[nn.Module], ...], arguments: dict[str, object]) -> None:
    with enable_wrap(wrapper_cls=FSDP, **arguments):
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, units):
                    setattr(parent, name, wrap(child))


def shard(case: ParityCase) -> FSDP:
    kind = MODELS[case.model]
    model, arguments = kind(), arguments_of(case)
    if case.policy == "manual":
        wrap_units_by_hand(model, kind.units, arguments)
    sharded = FSDP(model, auto_wrap_policy=policy_of(case, kind), **arguments)
    if case.checkpoint != "none":
        implementation = CheckpointImpl[case.checkpoint.upper()]
        apply_activation_checkpointing(
            sharded,
            check_fn=lambda module: isinstance(module, kind.units),
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
        )
    return sharded


def optimizer_of(case: ParityCase, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def backwards(case: ParityCase, model: FSDP) -> Iterator[contextlib.AbstractContextManager]:
    """The contexts of the backwards of a step."""
    if case.accumulate == "no_sync":
        yield model.no_sync()
    if case.accumulate == "every":
        yield contextlib.nullcontext()
    yield contextlib.nullcontext()


def full_state(model: FSDP) -> dict[str, Tensor]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(case: ParityCase) -> Outcome:
    model = shard(case)
    initial = full_state(model)
    optimizer = optimizer_of(case, model)
    losses, norms = [], []
    for step in range(STEPS):
        for part, context in enumerate(backwards(case, model)):
            with context:
                loss = MODELS[case.model].loss(model, tokens(step, part, dist.get_rank()))
                loss.backward()
            losses.append(loss.item())
        if case.clip:
            norms.append(model.clip_grad_norm_(0.7).item())
        optimizer.step()
        optimizer.zero_grad()
    state = full_state(model)
    with FSDP.summon_full_params(model):
        names = [name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()]
    return Outcome(losses, norms, names, initial, state)
