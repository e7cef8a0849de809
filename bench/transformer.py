"""The decoder transformer of tesserae/model in plain PyTorch: what the peers of the comparison train.

RMSNorm, rotary positions, SwiGLU, grouped-query attention, tied or untied head. The same shapes, the same kernels and the
same number of parameters as ours; compare.py refuses to compare models whose numbers of parameters differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    dimension: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    sequence: int
    tied: bool = False
    norm_epsilon: float = 1e-5
    rotary_base: float = 10_000.0


def rotary_table(shape: Shape) -> Tensor:
    """cos and sin for each position and pair of features: [2, sequence, head dimension / 2]."""
    head = shape.dimension // shape.heads
    frequency = shape.rotary_base ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
    angle = torch.outer(torch.arange(shape.sequence, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turns the pairs (x_i, x_{i + head/2}) of [batch, heads, time, head] by the angle of their position."""
    cos, sin = table[:, : x.size(-2)].to(x.dtype).unbind(0)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.head = shape.dimension // shape.heads
        self.query = nn.Linear(shape.dimension, self.heads * self.head, bias=False)
        self.key = nn.Linear(shape.dimension, self.kv_heads * self.head, bias=False)
        self.value = nn.Linear(shape.dimension, self.kv_heads * self.head, bias=False)
        self.output = nn.Linear(self.heads * self.head, shape.dimension, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q = self.query(x).view(batch, time, self.heads, self.head).transpose(1, 2)
        k = self.key(x).view(batch, time, self.kv_heads, self.head).transpose(1, 2)
        v = self.value(x).view(batch, time, self.kv_heads, self.head).transpose(1, 2)
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True, enable_gqa=grouped)
        return self.output(y.transpose(1, 2).reshape(batch, time, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate = nn.Linear(shape.dimension, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.dimension, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.dimension, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dimension, eps=shape.norm_epsilon)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dimension, eps=shape.norm_epsilon)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """forward(tokens, targets) is the mean cross entropy in nats a token."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dimension)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dimension, eps=shape.norm_epsilon)
        self.head = nn.Linear(shape.dimension, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("table", rotary_table(shape), persistent=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def batch_of(shape: Shape, batch: int, step: int, rank: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank's step. bench/step.cpp makes the same numbers from the same generator."""
    generator = torch.Generator().manual_seed(1000 + step * ranks + rank)
    tokens = torch.randint(shape.vocabulary, (batch, shape.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
