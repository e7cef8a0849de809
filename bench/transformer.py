"""The decoder transformer of tesserae/model in plain PyTorch: what the peers of the comparison train first; gpt2.py has
their second model.

RMSNorm, rotary positions, SwiGLU, grouped-query attention, tied or untied head. The same shapes, the same kernels, the
same initial values and tokens as ours; compare.py refuses to compare runs whose losses differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from initial import OnMeta


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


def rotary_table(shape: Shape, device: torch.device) -> Tensor:
    """exp(i * angle) for each position and pair of features: [sequence, 1, head dimension / 2]."""
    head = shape.dimension // shape.heads
    exponents = torch.arange(0, head, 2, dtype=torch.float64) / -head
    angles = torch.outer(torch.arange(shape.sequence, dtype=torch.float64), shape.rotary_base**exponents)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1).to(device)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turns the pairs (2i, 2i + 1) of [batch, time, heads, head] by the angle of their position, in fp32 inside."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[: x.size(1)]).flatten(-2).type_as(x)


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
        q = rotate(self.query(x).unflatten(-1, (self.heads, self.head)), table)
        k = rotate(self.key(x).unflatten(-1, (self.kv_heads, self.head)), table)
        v = self.value(x).unflatten(-1, (self.kv_heads, self.head))
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=grouped
        )
        return self.output(y.transpose(1, 2).flatten(-2))


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


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    log_probabilities = F.log_softmax(logits.flatten(0, 1), dim=-1, dtype=torch.float32)
    return F.nll_loss(log_probabilities, targets.flatten())


class Transformer(OnMeta):
    """forward(tokens, targets) is the mean cross entropy in nats a token."""

    def __init__(self, shape: Shape, device: torch.device):
        super().__init__()
        self.layers, self.tied = shape.layers, shape.tied
        with torch.device("meta"):
            self.embedding = nn.Embedding(shape.vocabulary, shape.dimension)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.dimension, eps=shape.norm_epsilon)
            self.head = nn.Linear(shape.dimension, shape.vocabulary, bias=False)
        self.tie()
        self.table = rotary_table(shape, device)  # no buffer: DDP would broadcast it in every step

    def tie(self) -> None:
        if self.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return loss_of(self.head(self.norm(x)), targets)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def batch_of(shape: Shape, batch: int, step: int, rank: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank's step. bench/step.cpp makes the same numbers from the same generator."""
    generator = torch.Generator().manual_seed(1000 + step * ranks + rank)
    tokens = torch.randint(shape.vocabulary, (batch, shape.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
