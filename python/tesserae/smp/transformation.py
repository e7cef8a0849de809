"""tsm.transform: puts the configured kinds of parallelism into a model, before FSDP wraps it. At degrees of 1 there is
nothing to put.

1. Layers that are split over tensor-parallel ranks (tensor_parallel/transformation.py).
2. Experts that are shared out over expert-parallel ranks, and cut over tensor-parallel ones
   (experts/transformation.py).
3. Sequences that are cut over context-parallel ranks (context/transformation.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tesserae import _C
from tesserae.context import transformation as context
from tesserae.experts import transformation as experts
from tesserae.job.device import default_device
from tesserae.job.fabrics import context_degree, context_of, has_parts, parallel_of, tensor_degree
from tesserae.tensor_parallel import transformation as tensor_parallel


def transform(
    model: nn.Module,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str | None = None,
    *,
    plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
) -> nn.Module:
    """The model itself, with layers that are split over the tensor_parallel_degree of tsm.init, and experts that are
    shared out by its expert_parallel_degree, before FSDP wraps it.

    Known are Llama, Mistral, GPT-NeoX, GPT-2, T5, Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss of Hugging Face; for others
    `plan` says which layers are split how, by patterns of module names: {"*.q_proj": "column", "*.o_proj": "row"};
    docs/python.md has its words. Parameters have values, the same on all ranks, or are on the meta device. With
    `load_state_dict_from_rank0` only rank 0's have values: its tensor-parallel group takes them here, the other ranks
    by FSDP's sync_module_states.
    With `sequence_parallel`, for models that are known, each rank computes and keeps norms, dropout and the residual
    stream for its piece of the sequence while it trains (hidden states that a model returns on demand are pieces then).
    Afterwards the model is moved to `device` and `dtype` if they are given and it is not on the meta device.

    Every rank calls it, after init_process_group; ranks of one tensor-parallel group are seeded alike and read the same
    data. With a context_parallel_degree the language models among them, T5 and gpt-oss aside, take whole sequences, the
    same on the ranks of a context group, of which each works on its positions; `cp_comm_type` says how keys and values
    travel ("p2p", "all_gather", "all_to_all", "shared"; None: as context_parallel_method of tsm.init says).

    With an expert_parallel_degree, E, Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss of Hugging Face: each rank has 1/E of
    the experts of a layer, and tokens travel to them (GShard: Lepikhin et al., 2020, arXiv:2006.16668). Ranks read
    different data, as without it; forward and backward are collective, also for evaluation. With
    `load_state_dict_from_rank0` the first E ranks (of each tensor-parallel index) take rank 0's experts here. With a
    tensor_parallel_degree each rank has its part of the hidden layer of its experts, also where a `plan` says how all
    else is split.

    Raises InvalidArgument: for heads, experts and sizes that the degree does not divide (naming the degrees that would
    do), for patterns of the plan that match nothing, for other models without a plan, for dropout inside attention at a
    context degree, and for a `config` (how experts are routed and balanced is the model's own configuration).
    """
    if config is not None:
        raise _C.InvalidArgument(
            f"[tsm.transform] config = {config!r}: leave it out. Expert parallelism takes expert_parallel_degree of "
            "tsm.init and the model's own configuration; how layers are split is told by plan="
        )
    place = default_device()  # where FSDP computes; `device` may be where the model waits for it
    ranks = context_of(place, cp_comm_type) if context_degree() > 1 else None
    if ranks is not None:  # before anything is changed
        context.check(model, ranks, tensor_degree())
    mixtures = experts.check(model, place) if has_parts() else []
    if tensor_degree() > 1:
        tensor_parallel.install(model, plan, parallel_of(place), load_state_dict_from_rank0, place, sequence_parallel)
    if mixtures:
        experts.install(model, mixtures, load_state_dict_from_rank0, place)
    if ranks is not None:
        context.install(model, ranks)
    if any(tensor.is_meta for tensor in model.parameters()):
        device = None
    return model.to(device=device, dtype=dtype) if device is not None or dtype is not None else model
