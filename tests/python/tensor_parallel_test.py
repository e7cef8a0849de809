"""tsm.transform + FSDP against one process that trains the unsplit model on the batches of all data-parallel ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
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

from parity_test import distance
from ranks import run_ranks

VOCABULARY, WIDTH, HEADS, SEQUENCE = 43, 32, 8, 7  # 43: the last parts of the vocabulary end with padding
STEPS, RATE, MAX_NORM = 12, 0.1, 0.7
TOLERANCE = 1e-5


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
    return MistralForCausalLM(MistralConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **TOKENS, **sizes | tied | changes))


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


def parts_of(step: int) -> int:
    return 2 if step % 3 == 0 else 1  # with an accumulation of two


# ---- one process ----
@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def train_alone(name: str, data_ranks: int, steps: int = STEPS) -> Outcome:
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        for part in range(parts_of(step)):
            loss = loss_of(name, model, torch.cat([batch(step, part, rank) for rank in range(data_ranks)]))
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, norms, {key: value.clone() for key, value in model.state_dict().items()})


# ---- ranks ----
def wrap(name: str, model: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
    arguments = {"use_orig_params": True, **arguments}
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({MODELS[name].unit}), **arguments)


def train_split(name: str, data_rank: int, steps: int = STEPS, checkpointed: bool = False, **arguments: Any) -> Outcome:
    import tesserae as tsm

    model = tsm.transform(MODELS[name]())
    if checkpointed:
        model.gradient_checkpointing_enable()
    model = wrap(name, model.train(), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        parts = parts_of(step)
        for part in range(parts):
            with contextlib.nullcontext() if part == parts - 1 else model.no_sync():
                loss = loss_of(name, model, batch(step, part, data_rank))
                loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=tsm.state.dp_process_group)
            losses.append(total.item() / tsm.state.dp_size)
        norms.append(model.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return Outcome(losses, norms, model.state_dict())


def furthest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def differences(ours: Outcome, theirs: Outcome) -> list[str]:
    found = []
    if not furthest(ours.losses, theirs.losses) <= TOLERANCE:
        found.append(f"losses {ours.losses}, not {theirs.losses}")
    if not furthest(ours.norms, theirs.norms) <= TOLERANCE:
        found.append(f"norms {ours.norms}, not {theirs.norms}")
    if list(ours.state) != list(theirs.state):
        return [*found, f"state dict has {list(ours.state)}, not {list(theirs.state)}"]
    for key, expected in theirs.state.items():
        if ours.state[key].shape != expected.shape:
            found.append(f"{key} is {list(ours.state[key].shape)}, not {list(expected.shape)}")
        elif not distance(ours.state[key], expected) <= TOLERANCE:
            found.append(f"{key} is {distance(ours.state[key], expected):.1e} away")
    return found


def forward_and_state(name: str) -> list[str]:
    """What differs before any training: logits, tokens, state dicts."""
    import tesserae as tsm

    whole = MODELS[name]().eval()
    split = tsm.transform(MODELS[name]()).eval()
    tokens, found = batch(0, 0, 0), []
    with torch.no_grad():
        if not distance(logits_of(name, split, tokens), logits_of(name, whole, tokens)) <= TOLERANCE:
            found.append("logits differ")
        if not furthest([loss_of(name, split, tokens).item()], [loss_of(name, whole, tokens).item()]) <= TOLERANCE:
            found.append("the loss of evaluation differs")
    generated = [m.generate(tokens, max_new_tokens=6, do_sample=False) for m in (split, whole)]
    if not torch.equal(*generated):
        found.append(f"generates {generated[0]}, not {generated[1]}")
    expected = whole.state_dict()
    mine = split.state_dict()
    if list(mine) != list(expected) or not all(torch.equal(mine[key], expected[key]) for key in expected):
        found.append("state_dict() is not that of the whole model")
    other = MODELS[name](seed=1).state_dict()
    split.load_state_dict(copy.deepcopy(other))
    again = split.state_dict()
    if not all(torch.equal(again[key], other[key]) for key in other):
        found.append("what load_state_dict() took, state_dict() does not give")
    return found


def parity(rank: int, world_size: int, tp: int, degree: int, names: list[str]) -> list[str]:
    data_ranks = world_size // tp
    expected = {name: train_alone(name, data_ranks) for name in names}
    import tesserae as tsm

    tsm.init({"tensor_parallel_degree": tp, "hybrid_shard_degree": degree})
    assert (tsm.state.tp_size, tsm.state.tp_rank) == (tp, rank % tp)
    assert (tsm.state.dp_size, tsm.state.dp_rank) == (data_ranks, rank // tp)
    assert dist.get_process_group_ranks(tsm.state.tp_process_group) == [rank - rank % tp + i for i in range(tp)]
    assert dist.get_process_group_ranks(tsm.state.dp_process_group) == list(range(rank % tp, world_size, tp))
    found = []
    for index, name in enumerate(names):
        print(name, flush=True)
        found += [f"{name}: {text}" for text in forward_and_state(name)]
        # All kinds of options, spread over the models.
        ours = train_split(name, rank // tp, checkpointed=index % 2 == 1, use_orig_params=index % 3 != 2)
        found += [f"{name}: {text}" for text in differences(ours, expected[name])]
    return found


@pytest.mark.parametrize(
    ("world_size", "tp", "degree", "names"),
    [
        (4, 2, 2, ["llama", "mistral", "gpt_neox", "gpt2", "t5"]),
        (4, 4, 1, ["llama", "mistral", "gpt_neox", "gpt2", "t5"]),
        (4, 2, 1, ["t5", "llama", "gpt2"]),
        (2, 2, 1, ["gpt_neox", "mistral"]),
    ],
    ids=["tp2x2", "tp4", "tp2xDDP", "two ranks"],
)
def test_parity(world_size: int, tp: int, degree: int, names: list[str]) -> None:
    """Forward, tokens, twelve clipped steps with accumulation, and state dicts are those of one process."""
    assert run_ranks(parity, world_size, tp, degree, names, deadline=240) == [[]] * world_size
