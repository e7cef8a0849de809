"""The models that parity is proved on: three of transformers from small random configurations, and one for each thing
that is hard about sharding a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

VOCABULARY = 43  # odd sizes: nothing divides by the number of ranks
WIDTH = 24
SEQUENCE = 7
BATCH = 2


@dataclass(frozen=True)
class Case:
    """A model and what it trains on."""

    build: Callable[[], nn.Module]  # of one seed: the same values wherever it is called
    units: tuple[type[nn.Module], ...]  # what a transformer policy wraps
    loss: Callable[[nn.Module, Tensor], Tensor]  # of [BATCH, SEQUENCE + 1] tokens
    unit_size: int  # elements: a size-based policy with this bound finds the units and not the embeddings
    uniform: bool = True  # all parameters of a unit are trainable, or none

    def __call__(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()


def tokens(step: int, part: int, rank: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return torch.randint(2, VOCABULARY, (BATCH, SEQUENCE + 1), generator=random)


# ---- transformers ----
def causal_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def seq2seq_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch[:, :4].contiguous(), use_cache=False).loss


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=6,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            decoder_start_token_id=0,
            eos_token_id=1,
        )
    )


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )


def gpt_neox() -> nn.Module:
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )


# ---- our own ----
class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 41)
        self.down = nn.Linear(41, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LowRank(nn.Module):
    """A frozen linear layer and a trainable correction of rank 2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Linear(width, 2, bias=False)
        self.b = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class LowRankBlock(Block):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.adapter = LowRank(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.adapter(x))


class ForgetfulBlock(Block):
    """Has a parameter that takes no part in forward, beside others that do."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.forgotten = nn.Parameter(torch.randn(5, 3))


class Decoder(nn.Module):
    """Embedding, blocks, head: predicts each token from those before it, summed."""

    def __init__(self, block: type[Block], blocks: int = 2, tied: bool = False, times: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.times = times
        nn.init.normal_(self.embedding.weight, std=0.3)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch).cumsum(1)
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def low_rank() -> nn.Module:
    model = Decoder(LowRankBlock)
    model.embedding.requires_grad_(False)
    return model


def unused() -> nn.Module:
    """A parameter of a unit is not used, and of the root; nor is a whole unit."""
    model = Decoder(ForgetfulBlock)
    model.spare = ForgetfulBlock()
    model.forgotten = nn.Parameter(torch.randn(3))
    return model


MODELS: dict[str, Case] = {
    "t5": Case(t5, (T5Block,), seq2seq_loss, 4000),
    "llama": Case(llama, (LlamaDecoderLayer,), causal_loss, 3000),
    "gpt_neox": Case(gpt_neox, (GPTNeoXLayer,), causal_loss, 3000),
    "tied": Case(lambda: Decoder(Block, tied=True), (Block,), next_token_loss, 2000),
    "frozen": Case(low_rank, (LowRankBlock,), next_token_loss, 2500, uniform=False),
    "unused": Case(unused, (ForgetfulBlock,), next_token_loss, 2000),
    "twice": Case(lambda: Decoder(Block, times=2), (Block,), next_token_loss, 2000),
}
