"""The second model of the comparison: GPT-2 as most training scripts have it, in plain PyTorch.

LayerNorm, biases, learned positions, one projection for query, key and value, GELU, and a head that has the embedding's
weights: these are one unit with the last norm and the positions, since a tied weight has one owner.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from initial import OnMeta
from transformer import Shape, loss_of


class Gpt2Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.dimension, 3 * shape.dimension)
        self.output = nn.Linear(shape.dimension, shape.dimension)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(-2))


class Gpt2FeedForward(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.up = nn.Linear(shape.dimension, 4 * shape.dimension)
        self.down = nn.Linear(4 * shape.dimension, shape.dimension)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Gpt2Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.dimension)
        self.attention = Gpt2Attention(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.dimension)
        self.feed_forward = Gpt2FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Gpt2(OnMeta):
    """forward(tokens, targets) is the mean cross entropy in nats a token."""

    def __init__(self, shape: Shape, device: torch.device):
        super().__init__()
        self.layers = shape.layers
        with torch.device("meta"):
            self.embedding = nn.Embedding(shape.vocabulary, shape.dimension)
            self.positions = nn.Embedding(shape.sequence, shape.dimension)
            self.blocks = nn.ModuleList(Gpt2Block(shape) for _ in range(shape.layers))
            self.norm = nn.LayerNorm(shape.dimension)
            self.head = nn.Linear(shape.dimension, shape.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), targets)
