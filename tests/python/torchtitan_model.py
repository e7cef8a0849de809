"""A Llama as torchtitan has it, and its parallelisms, applied as torchtitan's parallelize does: tensor and sequence
parallelism by torch's plans, activation checkpointing around each block, fully_shard of the embedding, each block, the
final norm with the head, and the whole. It is built on the meta device and gets its values last.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 48, 12, 32, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        query, key, value = (w(x).unflatten(-1, (-1, WIDTH // HEADS)) for w in (self.wq, self.wk, self.wv))
        heads = rotated(query, turns), rotated(key, turns), value
        attended = scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads), is_causal=True)
        return self.wo(attended.transpose(1, 2).flatten(2))


def rotated(heads: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[: heads.shape[1], None]).flatten(-2).type_as(heads)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 80, bias=False) for _ in range(2))
        self.w2 = nn.Linear(80, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("turns", self.make_turns(), persistent=False)

    def make_turns(self) -> Tensor:
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** (-torch.arange(0, size, 2) / size))
        return torch.polar(torch.ones_like(angles), angles)

    @torch.no_grad()
    def init_weights(self) -> None:
        self.turns = self.make_turns()
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.turns)
        return self.output(self.norm(x))


def replicated(*layouts: Shard | None) -> PrepareModuleInput:
    wanted = tuple(Replicate() if layout is not None else None for layout in layouts)
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=wanted)


def split_layers(model: Llama, mesh: DeviceMesh) -> None:
    around = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, around)
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": replicated(Shard(1), None),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": replicated(Shard(1)),
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = op == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(model: Llama, selective: bool) -> None:
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_products)
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False, **options))


def shard(model: Llama, mesh: DeviceMesh) -> None:
    fully_shard(model.tok_embeddings, mesh=mesh, reshard_after_forward=True)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard([model.norm, model.output], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def parallelized(split_over: DeviceMesh | None, shard_over: DeviceMesh, selective: bool, seed: int) -> Llama:
    with torch.device("meta"):
        model = Llama()
    if split_over is not None:
        split_layers(model, split_over)
    recompute(model, selective)
    shard(model, shard_over)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()
    return model.train()
