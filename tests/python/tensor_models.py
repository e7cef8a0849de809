"""Small models of the families that tsm.transform knows, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

VOCABULARY, WIDTH, HEADS, SEQUENCE = 43, 32, 8, 7  # 43: the last parts of the vocabulary end with padding


@dataclass(frozen=True)
class Model:
    build: Callable[..., nn.Module]
    unit: type[nn.Module]

    def __call__(self, seed: int = 0, **changes: Any) -> nn.Module:
        torch.manual_seed(seed)
        return self.build(**changes)


TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def llama(**changes: Any) -> nn.Module:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **TOKENS, **sizes | changes))


def mistral(**changes: Any) -> nn.Module:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": 4, "intermediate_size": 40, "num_hidden_layers": 2}
    tied = {"tie_word_embeddings": True, "sliding_window": 4}
    return MistralForCausalLM(
        MistralConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **TOKENS, **sizes | tied | changes)
    )


def gpt_neox(**changes: Any) -> nn.Module:
    sizes = {"num_attention_heads": HEADS, "intermediate_size": 40, "num_hidden_layers": 2}
    drop = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, max_position_embeddings=32, **TOKENS, **sizes | drop | changes
        )
    )


def gpt2(**changes: Any) -> nn.Module:
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_head=HEADS, n_layer=2, n_positions=32, **TOKENS, **drop | changes
        )
    )


def t5(**changes: Any) -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 40, "num_layers": 2, "num_heads": HEADS, "dropout_rate": 0.0}
    kind = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **tokens, **sizes | kind | changes))


MODELS = {
    "llama": Model(llama, LlamaDecoderLayer),
    "mistral": Model(mistral, MistralDecoderLayer),
    "gpt_neox": Model(gpt_neox, GPTNeoXLayer),
    "gpt2": Model(gpt2, GPT2Block),
    "t5": Model(t5, T5Block),
}


def batch(step: int, part: int, rank: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return torch.randint(2, VOCABULARY, (2, SEQUENCE), generator=random)


def loss_of(name: str, model: nn.Module, tokens: Tensor) -> Tensor:
    if name == "t5":
        labels = tokens[:, :4].clone()
        labels[:, 3] = -100  # is not counted
        return model(input_ids=tokens, labels=labels).loss
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def logits_of(name: str, model: nn.Module, tokens: Tensor) -> Tensor:
    more = {"decoder_input_ids": tokens[:, :3]} if name == "t5" else {}
    return model(input_ids=tokens, use_cache=False, **more).logits


def wrap(name: str, model: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
    arguments = {"use_orig_params": True, **arguments}
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({MODELS[name].unit}), **arguments)
