"""What the tests of training libraries share: small models, their data, and what a script sees of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
import torch
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import tesserae as tsm
from accelerate_on_cpu import gpu_job_over_gloo

VOCABULARY, LENGTH = 48, 12
LAYERS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block"}


@dataclass
class Run:
    """What a script sees of a training run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)  # whole


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if kind == "gpt2":  # input and output embedding are one
        sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout))
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, **sizes))


def sequences(count: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row} for row in tokens]


def prepare(ours: bool) -> None:
    """At the beginning of a rank: Accelerate serves FSDP on the CPU, and FSDP is ours or torch's."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = gpu_job_over_gloo
    if ours:
        tsm.init()


def assert_same(ours: list[Run], theirs: list[Run]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-5)
        assert one.norms == pytest.approx(other.norms, rel=1e-5)
        assert one.weights.keys() == other.weights.keys()
        for name, weight in other.weights.items():
            torch.testing.assert_close(one.weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)


def is_ours(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("tesserae.") for kind in type(model).__mro__)


def whole(model: nn.Module) -> dict[str, Tensor]:
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # torch's keeps what an evaluation has gathered
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
