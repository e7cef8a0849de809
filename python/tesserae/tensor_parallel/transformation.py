"""Puts tensor-parallel layers into a model, as SMP v2 does: tsm.transform's part of it.

1. What cannot be is refused, before anything is changed: heads and sizes that the ranks do not divide, and the like.
2. Layers become tensor-parallel ones where they stand, by the plan of the model's family or by the script's own.
3. With load_state_dict_from_rank0 the first tensor-parallel group takes rank 0's weights, one tensor at a time.
4. Parameters are cut; on the meta device they have only another shape, and get values when FSDP wraps the model.
5. The loss of a language model takes logits as they are split; dropout draws other numbers where activations are split.
6. With sequence_parallel the hidden states between split layers are cut along the sequence.
7. Before its first forward that is trained the ranks compare what they were given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from tesserae import _C
from tesserae.job.fabrics import job_mesh
from tesserae.job.state import state
from tesserae.tensor_parallel import dropout, families, loss, same_given, sequence
from tesserae.tensor_parallel import plan as plans
from tesserae.tensor_parallel.from_rank0 import FromRank0
from tesserae.tensor_parallel.layers import Head
from tesserae.tensor_parallel.parts import cut_parameters
from tesserae.torch_compat.modules import own_buffers, own_parameters


def install(
    model: nn.Module,
    plan: Mapping[str, str] | None,
    parallel: _C.Parallel,
    from_rank0: bool,
    place: torch.device,
    sequence_parallel: bool,
) -> None:
    """`plan`, `from_rank0`, `sequence_parallel`: as tsm.transform is given them. `place`: where FSDP computes. Raises
    InvalidArgument for models that are not known or split already, and for what the degree does not divide."""
    if any(isinstance(part, TorchFSDP) for part in model.modules()):
        raise _C.InvalidArgument("[tsm.transform] the model is wrapped by FSDP already; transform it before")
    family = families.family_of(model)
    if plan is None and family is None:
        raise _C.InvalidArgument(
            f"[tsm.transform] how to split a {type(model).__name__} over {parallel.size} ranks is not known; known are "
            f"Hugging Face's {', '.join(families.FAMILIES)}. Pass plan={{pattern of module names: kind}}"
        )
    if sequence_parallel and (plan is not None or family is None or family.sequence is None):
        raise _C.InvalidArgument(
            "[tsm.transform] sequence_parallel: which norms a plan's model has between its split layers is not known; "
            f"known are Hugging Face's {', '.join(families.FAMILIES)} without a plan. Leave it out"
        )
    # 1.
    if plan is None and family is not None:
        families.check_heads(family, model.config, parallel)
    changes = plans.check(plan if plan is not None else family.plan, model, parallel, every=plan is not None)  # type: ignore[union-attr]
    if sequence_parallel:
        sequence.check(family.sequence, model)  # type: ignore[union-attr,arg-type]
    source = _source_of_values(model, parallel, place) if from_rank0 else None
    # 2.
    layers = plans.apply(changes)
    # 3.
    if source is not None:
        _take(model, source)
    # 4.
    cut_parameters(model, layers)
    # 5.
    if plan is None and family is not None:
        families.put_together(family, model)
    heads = [layer for layer in layers if isinstance(layer, Head)]
    if len(heads) == 1:
        loss.install(model, heads[0], parallel, plan is None and family is not None and family.loss_inside)
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = _refuse_to_resize  # type: ignore[assignment]
    patterns = family.dropout if plan is None and family is not None else ("*",)
    random = _C.SplitRandom(parallel, state.random_seed, place)
    dropout.install(patterns, model, random)
    # 6.
    if sequence_parallel:
        sequence.install(family.sequence, model, parallel, random)  # type: ignore[union-attr,arg-type]
    # 7.
    same_given.install(model, parallel, place)


def _refuse_to_resize(*_: Any, **__: Any) -> None:
    raise _C.InvalidArgument(
        "[resize_token_embeddings] the model's embedding is split over tensor-parallel ranks; resize it before "
        "tsm.transform"
    )


def _source_of_values(model: nn.Module, parallel: _C.Parallel, place: torch.device) -> FromRank0 | None:
    """Of the first tensor-parallel group, if rank 0 has values; None in the others."""
    if job_mesh().index("state", dist.get_rank()) != 0:
        return None
    source = FromRank0(parallel.index == 0, parallel.broadcast, place)
    source.require([*model.parameters(), *model.buffers()])
    return source


def _take(model: nn.Module, source: FromRank0) -> None:
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, value in [*own_parameters(module).items(), *own_buffers(module).items()]:
            if value is None:
                continue
            if value not in moved:
                moved[value] = source.take(value)
            if isinstance(value, nn.Parameter):
                own_parameters(module)[name] = moved[value]  # type: ignore[assignment]
            else:
                own_buffers(module)[name] = moved[value]
