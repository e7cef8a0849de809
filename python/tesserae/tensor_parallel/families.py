"""What is known of Hugging Face's models, by the model_type of their configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tesserae import _C
from tesserae.tensor_parallel import sequence
from tesserae.tensor_parallel.layers import Together
from tesserae.torch_compat.modules import own_modules


@dataclass(frozen=True)
class Family:
    plan: dict[str, str]
    heads: tuple[str, str]  # names in the configuration: of queries, of keys and values
    # Layers that read the same input, by a pattern of the names of the module around them.
    together: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Modules in which dropout works on split activations: from their begin to their row layer.
    dropout: tuple[str, ...] = ()
    # Where the residual stream is, for sequence parallelism.
    sequence: sequence.Names | None = None
    # The loss is computed inside forward, from labels that are targets as they are; else by model.loss_function.
    loss_inside: bool = False


_LLAMA = Family(
    plan={
        "*self_attn.q_proj": "column",
        "*self_attn.k_proj": "column",
        "*self_attn.v_proj": "column",
        "*self_attn.o_proj": "row",
        "*mlp.gate_proj": "column",
        "*mlp.up_proj": "column",
        "*mlp.down_proj": "row",
        "*embed_tokens": "vocabulary",
        "*lm_head": "head",
    },
    heads=("num_attention_heads", "num_key_value_heads"),
    together={"*self_attn": ("q_proj", "k_proj", "v_proj"), "*mlp": ("gate_proj", "up_proj")},
    dropout=("*self_attn",),
    sequence=sequence.Names("layers", ("input_layernorm", "post_attention_layernorm", "norm")),
)

# Attention is Llama's; experts are cut beside (experts/transformation.py), routers are whole.
_MIXTURE = replace(
    _LLAMA,
    plan=_LLAMA.plan
    | {
        "*shared_expert.gate_proj": "column",
        "*shared_expert.up_proj": "column",
        "*shared_expert.down_proj": "row",
        "*self_attn.q_norm": "summed",  # of a head
        "*self_attn.k_norm": "summed",
    },
    together=_LLAMA.together | {"*shared_expert": ("gate_proj", "up_proj")},
    sequence=sequence.Names("layers", ("input_layernorm", "post_attention_layernorm", "norm"), "experts"),
)

FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _MIXTURE,
    "qwen2_moe": _MIXTURE,
    "qwen3_moe": _MIXTURE,
    "gpt_oss": replace(_MIXTURE, plan=_MIXTURE.plan | {"*self_attn": "divide:sinks"}),
    "gpt_neox": Family(
        plan={
            "*attention.query_key_value": "column",  # head by head: query, key and value of one after the other
            "*attention.dense": "row",
            "*mlp.dense_h_to_4h": "column",
            "*mlp.dense_4h_to_h": "row",
            "*embed_in": "vocabulary",
            "*lm_head": "head",
            "*embed_out": "head",  # its name before transformers 5
        },
        heads=("num_attention_heads", "num_attention_heads"),
        dropout=("*attention",),
        sequence=sequence.Names("layers", ("input_layernorm", "post_attention_layernorm", "final_layer_norm")),
    ),
    "gpt2": Family(
        plan={
            "*.attn": "divide:num_heads,split_size",
            "*crossattention": "divide:num_heads,split_size",
            "*crossattention.c_attn": "column:2",
            "*crossattention.q_attn": "column",
            "*crossattention.c_proj": "row",
            "*.attn.c_attn": "column:3",
            "*.attn.c_proj": "row",
            "*mlp.c_fc": "column",
            "*mlp.c_proj": "row",
            "*wte": "vocabulary",
            "*lm_head": "head",
        },
        heads=("num_attention_heads", "num_attention_heads"),
        dropout=("*.attn", "*crossattention"),
        sequence=sequence.Names("h", ("ln_1", "ln_cross_attn", "ln_2", "ln_f")),
    ),
    "t5": Family(
        plan={
            "*SelfAttention": "divide:n_heads,inner_dim",
            "*EncDecAttention": "divide:n_heads,inner_dim",
            "*Attention.q": "column",
            "*Attention.k": "column",
            "*Attention.v": "column",
            "*Attention.o": "row",
            "*Attention.relative_attention_bias": "features",  # of a head each
            "*DenseReluDense.wi": "column",
            "*DenseReluDense.wi_0": "column",
            "*DenseReluDense.wi_1": "column",
            "*DenseReluDense.wo": "row",
            "*shared": "vocabulary",
            "*embed_tokens": "vocabulary",
            "*lm_head": "head",
        },
        heads=("num_heads", "num_heads"),
        together={
            "*SelfAttention": ("q", "k", "v"),
            "*EncDecAttention": ("k", "v"),
            "*DenseReluDense": ("wi_0", "wi_1"),
        },
        dropout=("*Attention", "*DenseReluDense"),
        sequence=sequence.Names("block", ("layer_norm", "final_layer_norm")),
        loss_inside=True,
    ),
}


def family_of(model: nn.Module) -> Family | None:
    return FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))


def check_heads(family: Family, config: Any, parallel: _C.Parallel) -> None:
    """Raises InvalidArgument, naming the degrees that would do, for heads that the ranks do not divide."""
    query, key_value = (getattr(config, name) for name in family.heads)
    _C.heads_of_rank(query, query if key_value is None else key_value, parallel)


def put_together(family: Family, model: nn.Module) -> None:
    for name, module in model.named_modules():
        for pattern, layers in family.together.items():
            if fnmatchcase(name, pattern) and all(layer in own_modules(module) for layer in layers):
                Together(module, layers)
