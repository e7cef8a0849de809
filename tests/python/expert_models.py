"""Small mixtures of the families whose experts tsm.transform shares out, and batches for them."""

from __future__ import annotations

from typing import Any

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
