"""Small mixtures of the families whose experts tsm.transform shares out, batches for them, and their training by one
process."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeDecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from tensor_models import TOKENS, VOCABULARY, WIDTH, Model

LENGTH = 7
RANKS, STEPS, MAX_NORM = 4, 3, 0.7
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    **TOKENS,
}


def mixtral(**changes: Any) -> nn.Module:
    sizes = {"intermediate_size": 24, "num_local_experts": 4, "sliding_window": None}
    return MixtralForCausalLM(MixtralConfig(**_SIZES | sizes | changes))


def qwen2_moe(**changes: Any) -> nn.Module:
    """A dense layer, one with experts and a shared one."""
    sizes = {"intermediate_size": 40, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16}
    kind = {"num_experts": 8, "mlp_only_layers": [0], "norm_topk_prob": False}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**_SIZES | sizes | kind | changes))


def qwen3_moe(**changes: Any) -> nn.Module:
    sizes = {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 8, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES | sizes | changes))


def gpt_oss(**changes: Any) -> nn.Module:
    """Stacks the other way round, interleaved gates, clamped, biases everywhere."""
    sizes = {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8, "sliding_window": 4}
    model = GptOssForCausalLM(GptOssConfig(**_SIZES | sizes | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and not parameter.is_meta:
            nn.init.normal_(parameter, std=0.1)  # transformers begins with zeros
    return model


MODELS = {
    "mixtral": Model(mixtral, MixtralDecoderLayer),
    "qwen2_moe": Model(qwen2_moe, Qwen2MoeDecoderLayer),
    "qwen3_moe": Model(qwen3_moe, Qwen3MoeDecoderLayer),
    "gpt_oss": Model(gpt_oss, GptOssDecoderLayer),
}


def batch(step: int, rank: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(2, VOCABULARY, (2, LENGTH), generator=random)


def loss_of(model: nn.Module, tokens: Tensor, auxiliary: bool = False) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=auxiliary).loss


def wrap(name: str, model: nn.Module, *units: type[nn.Module], **arguments: Any) -> FullyShardedDataParallel:
    """`units`: more of them than decoder layers."""
    arguments = {"use_orig_params": True, **arguments}
    policy = ModuleWrapPolicy({MODELS[name].unit, *units})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **arguments)


def built(name: str, one_expert: bool = False, **changes: Any) -> nn.Module:
    """`one_expert`: the experts' scores do not depend on tokens, the first two win."""
    model = MODELS[name](**changes)
    for path, parameter in model.named_parameters():
        if one_expert and path.endswith((".gate.weight", ".router.weight")):
            nn.init.zeros_(parameter)  # of equal scores topk takes what it takes: the same on every rank
    return model


class Alone(NamedTuple):
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    logits: Tensor
    momenta: dict[str, Tensor]  # of SGD: what gradients have added up to


@functools.cache
def alone(
    name: str,
    one_expert: bool,
    auxiliary: bool,
    parts: int,
    batches: int = RANKS,
    heads: int = 2,
    steps: int = STEPS,
) -> Alone:
    """What one process makes of the batches of all ranks. The auxiliary loss is that of each rank's tokens, averaged.
    `heads`: of keys and values."""
    model = built(name, one_expert, num_key_value_heads=heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        for part in range(parts):
            each = [loss_of(model, batch(10 * step + part, rank), auxiliary) for rank in range(batches)]
            loss = torch.stack(each).mean()
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model.eval()(input_ids=batch(0, 0), use_cache=False).logits
    momenta = {path: optimizer.state[p]["momentum_buffer"] for path, p in model.named_parameters()}
    return Alone(losses, norms, copy.deepcopy(model.state_dict()), logits, momenta)
