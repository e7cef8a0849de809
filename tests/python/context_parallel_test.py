"""Context parallelism in Python: tsm.transform and tsm.context_parallel against one process with whole sequences."""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported_before
from transformers import LlamaForTokenClassification

from both_faces import TOLERANCE, away_from, clipped_norm, sharded, whole_state
from closeness import distance, furthest
from ranks import run_ranks
from tensor_models import MODELS, VOCABULARY, wrap

LENGTH, STEPS, MAX_NORM = 13, 3, 0.7  # 13: no multiple of anything


@dataclass(frozen=True)
class Case:
    model: str
    context: int
    tensor: int = 1
    degrees: tuple[int, int, int] = (1, 1, 1)
    method: str | None = None
    packed: bool = False
    checkpointing: bool = False
    face: str = "fsdp"
    sequence_parallel: bool = False
    frozen: bool = False  # the first layer's attention
    accumulate: bool = False  # two backwards a step, the first in no_sync

    @property
    def batches(self) -> int:
        return 4 // (self.context * self.tensor)


# Every (T, C) of four ranks, every method, every family; degrees of all three.
CASES = [
    Case("llama", 2, degrees=(4, 4, 4)),
    Case("llama", 4, degrees=(1, 2, 4), method="p2p", packed=True),
    Case("llama", 2, degrees=(1, 4, 4), accumulate=True, frozen=True),
    Case("llama", 2, tensor=2, degrees=(2, 2, 2), checkpointing=True, sequence_parallel=True),
    Case("llama", 2, degrees=(4, 4, 4), face="fully_shard", checkpointing=True),
    Case("mistral", 4, degrees=(2, 2, 4), method="all_gather", accumulate=True),
    Case("mistral", 2, tensor=2, degrees=(1, 2, 2), packed=True, method="p2p"),
    Case("gpt_neox", 4, degrees=(4, 4, 4), method="all_to_all"),
    Case("gpt_neox", 2, degrees=(2, 2, 2), packed=True, checkpointing=True, method="p2p"),
    Case("gpt2", 2, tensor=2, degrees=(1, 1, 1), method="all_gather", frozen=True),
    Case("gpt2", 4, degrees=(1, 1, 4), checkpointing=True),
]


def rows_of(step: int, rows: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(2, VOCABULARY, (rows, LENGTH), generator=random)
    labels = tokens.clone()
    labels[:, 3:5] = -100  # not counted, and not as many on each rank
    return {"input_ids": tokens, "labels": labels}


def packed(rows: dict[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
    """Documents of 1, 7 and 5 tokens in a row."""
    positions = torch.cat([torch.arange(1), torch.arange(7), torch.arange(5)])
    return {name: value[index : index + count] for name, value in rows.items()} | {"position_ids": positions[None]}


def freeze(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if ".0.self_attn." in name or ".0.attn." in name:
            parameter.requires_grad_(False)


@functools.cache
def alone(
    model: str, batches: int, is_packed: bool, is_frozen: bool
) -> tuple[list[float], list[float], dict[str, Tensor], Tensor]:
    net = MODELS[model]()
    if is_frozen:
        freeze(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        rows = rows_of(step, 2 * batches)
        # A row each: documents of one row; the mean of rows with as many real tokens is that of all.
        parts = [packed(rows, i, 1) for i in range(2 * batches)] if is_packed else [rows]
        total = 0.0
        for part in parts:
            loss = net(**part, use_cache=False).loss / len(parts)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = net(input_ids=rows_of(0, 2)["input_ids"], use_cache=False).logits
    return losses, norms, copy.deepcopy(net.state_dict()), logits


def halves(part: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """A row each: with as many real tokens, so the mean of their means is that of both."""
    return [{name: value[i : i + 1] for name, value in part.items()} for i in range(2)]


def trains(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    import tesserae as tsm

    found = []
    for case in cases:
        names = dict(zip(("parameters", "gradients", "optimizer"), case.degrees, strict=True))
        tsm.init(
            {"context_parallel_degree": case.context, "tensor_parallel_degree": case.tensor, "degrees": names}
            if case.face == "fsdp"
            else {"context_parallel_degree": case.context}
        )
        try:
            assert (tsm.state.cp_size, tsm.state.dp_size) == (case.context, case.batches)
            assert dist.get_world_size(tsm.state.cp_process_group) == case.context
            assert dist.get_group_rank(tsm.state.cp_process_group, rank) == tsm.state.cp_rank
            net = tsm.transform(
                MODELS[case.model](), cp_comm_type=case.method, sequence_parallel=case.sequence_parallel
            ).train()
            if case.frozen:
                freeze(net)
            if case.checkpointing:
                net.gradient_checkpointing_enable({"use_reentrant": False})
            if case.face == "fsdp":
                net = wrap(case.model, net)
            else:
                net = sharded(MODELS[case.model].unit, net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            losses, norms = [], []
            for step in range(STEPS):
                rows, first = rows_of(step, 2 * case.batches), 2 * tsm.state.dp_rank
                part = {name: value[first : first + 2] for name, value in rows.items()}
                if case.packed:
                    part = packed(rows, first, 2)
                total = torch.zeros(())
                pieces = halves(part) if case.accumulate else [part]
                for piece in pieces:
                    with contextlib.nullcontext() if piece is pieces[-1] else net.no_sync():
                        loss = net(**piece, use_cache=False).loss / len(pieces)
                        loss.backward()
                    total += loss.detach()
                dist.all_reduce(total)
                losses.append(total.item() / world_size)
                norms.append(clipped_norm(net, MAX_NORM))
                optimizer.step()
                optimizer.zero_grad()
            net.eval()
            with torch.no_grad():
                tokens = rows_of(0, 2)["input_ids"]
                logits = net(input_ids=tokens).logits
                last = net(input_ids=tokens, logits_to_keep=1).logits
            expected = alone(case.model, case.batches, case.packed, case.frozen)
            if not furthest(losses, expected[0]) <= TOLERANCE:
                found.append(f"{case}: losses {losses}, expected {expected[0]}")
            if not furthest(norms, expected[1]) <= 10 * TOLERANCE:
                found.append(f"{case}: norms {norms}, expected {expected[1]}")
            if not distance(logits, expected[3]) <= 10 * TOLERANCE or not torch.equal(last, logits[:, -1:]):
                found.append(f"{case}: logits differ by {distance(logits, expected[3])}")
            if wrong := away_from(expected[2], whole_state(net)):
                found.append(f"{case}: parameters {wrong}")
        finally:
            tsm.uninstall()
    return found


@pytest.mark.parametrize("part", range(2))
def test_models_train_as_on_one_process(part: int) -> None:
    assert run_ranks(trains, 4, CASES[part::2], deadline=240) == [[]] * 4


# ---- tsm.context_parallel ----
class Own(nn.Module):
    """A script's own model: learned positions, attention by name and by an import from before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(VOCABULARY, 32), nn.Embedding(32, 32)
        self.mix, self.out = nn.Linear(32, 96), nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place(positions)
        for attention in (functional.scaled_dot_product_attention, imported_before):
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
            x = x + attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.out(x)


def batch_of(step: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone(), torch.arange(LENGTH)


def in_scope(rank: int, world_size: int, method: str) -> None:
    import tesserae as tsm

    def train(net: nn.Module, ours: bool) -> tuple[list[float], nn.Module]:
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
        for step in range(STEPS):
            tokens, targets, positions = batch_of(step)
            if ours:
                with tsm.context_parallel([tokens, targets, positions], [1, 1, 0]) as sequence:
                    assert tokens.shape == (2, sequence.tokens) and sequence.tokens < LENGTH
                    assert positions.equal(sequence.positions(tokens.device))
                    logits = net(tokens, positions)
                    losses_of_own = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                    loss = sequence.mean(losses_of_own, 2 * LENGTH)
                    loss.backward()
                assert tokens.shape == (2, LENGTH), "buffers are whole again"
                assert functional.scaled_dot_product_attention is imported_before
            else:
                loss = functional.cross_entropy(net(tokens, positions).flatten(0, 1), targets.flatten())
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, net

    torch.manual_seed(0)
    net = Own()
    expected, reference = train(copy.deepcopy(net), False)
    tsm.init({"context_parallel_degree": world_size, "context_parallel_method": method})
    losses, net = train(FullyShardedDataParallel(net, use_orig_params=True), True)
    assert furthest(losses, expected) <= TOLERANCE, (losses, expected)
    assert away_from(reference.state_dict(), whole_state(net)) == {}

    tokens, targets, positions = batch_of(0)
    q = torch.randn(1, 4, 5, 8)
    refused: list[tuple[str, Any]] = [
        ("differ in length", lambda: tsm.context_parallel([tokens, positions[1:]], [1, 0]).__enter__()),
        ("shape \\(2, 13\\) has no dim 2", lambda: tsm.context_parallel([tokens], [2]).__enter__()),
        ("shape \\(13,\\) has no dim -2", lambda: tsm.context_parallel([tokens, positions], [1, -2]).__enter__()),
        ("shape \\(\\) has no dim 0", lambda: tsm.context_parallel([torch.tensor(3)], [0]).__enter__()),
        ("give a dim for each", lambda: tsm.context_parallel([tokens], [1, 0]).__enter__()),
        ("requires gradients", lambda: tsm.context_parallel([torch.zeros(4, requires_grad=True)], [0]).__enter__()),
    ]
    refused.append(("given twice", lambda: tsm.context_parallel([tokens, tokens], [1, 1]).__enter__()))
    for text, act in refused:
        with pytest.raises(tsm.InvalidArgument, match=text):
            act()
        assert tokens.shape == (2, LENGTH)
    attend = functional.scaled_dot_product_attention
    with tsm.context_parallel([tokens], [1]):
        for text, arguments in (
            ("neither a mask", {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}),
            ("neither a mask", {"dropout_p": 0.1}),
            ("has the positions of this rank", {}),
        ):
            with pytest.raises(tsm.InvalidArgument, match=text):
                attend(q, q, q, **arguments)
        x = torch.randn(1, tokens.shape[1], 8)
        with pytest.raises(tsm.InvalidArgument, match="need_weights=False"):
            nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)


@pytest.mark.parametrize("method", ["auto", "p2p"])
def test_own_attention_reaches_across(method: str) -> None:
    run_ranks(in_scope, 2, method)


# ---- what is refused, and generation ----
def refuses(rank: int, world_size: int) -> None:
    import tesserae as tsm

    tsm.init({"context_parallel_degree": 2})
    for name, changes, text in (
        ("t5", {}, "known are the language models of Hugging Face's llama, mistral, mixtral, qwen2_moe, qwen3_moe"),
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop = 0.1: dropout inside attention"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1: dropout inside attention"),
    ):
        with pytest.raises(tsm.InvalidArgument, match=text):
            tsm.transform(MODELS[name](**changes))
    with pytest.raises(tsm.InvalidArgument, match="none of auto, shared, p2p"):
        tsm.transform(MODELS["llama"](), cp_comm_type="ring")
    with pytest.raises(tsm.InvalidArgument, match="do not divide 8 heads and 1 of keys"):
        tsm.transform(MODELS["llama"](num_key_value_heads=1), cp_comm_type="all_to_all")
    with pytest.raises(tsm.InvalidArgument, match="'dynamic' depend on the longest position"):
        tsm.transform(MODELS["llama"](rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}))
    other_loss = MODELS["llama"]()
    other_loss.loss_function = lambda logits, labels, **_: logits.mean()
    with pytest.raises(tsm.InvalidArgument, match="with their own loss"):
        tsm.transform(other_loss)
    with pytest.raises(tsm.InvalidArgument, match="how to cut the sequences of a LlamaForTokenClassification"):
        tsm.transform(LlamaForTokenClassification(MODELS["llama"]().config))
    net = tsm.transform(MODELS["llama"]()).eval()
    with pytest.raises(tsm.InvalidArgument, match="are cut already"):
        tsm.transform(net)
    with pytest.raises(tsm.InvalidArgument, match="context ranks 0 and 1 were given different tokens"):
        net(input_ids=rows_of(rank, 2)["input_ids"])
    tokens = rows_of(0, 2)["input_ids"]
    right, left = torch.ones_like(tokens), torch.ones_like(tokens)
    right[1, 9:], left[1, :2] = 0, 0
    for text, arguments in (
        ("padding on the left", {"attention_mask": left}),
        ("masks are", {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}),
        ("3 labels count the predictions of padding", {"attention_mask": right, "labels": tokens}),
        ("caches of keys and values", {"past_key_values": object()}),
        ("output_attentions", {"output_attentions": True}),
        ("output_hidden_states", {"output_hidden_states": True}),
        ("attention is causal", {"is_causal": False}),
        ("logits_to_keep: a number", {"logits_to_keep": torch.ones(2, LENGTH, dtype=torch.bool)}),
        ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0, 4, LENGTH])}),
        ("position_ids of shape", {"position_ids": torch.arange(4)[None]}),
        ("begin at different positions", {"position_ids": torch.tensor([[0, 1] + [0] * 11, [0] * 13])}),
    ):
        with pytest.raises(tsm.InvalidArgument, match=text):
            net(input_ids=tokens, **arguments)
    with pytest.raises(tsm.InvalidArgument, match="1 tokens cannot be cut over 2"):
        net(input_ids=tokens[:, :1])

    # Padding on the right changes nothing that counts; generation needs no cache; tuples as well as outputs.
    whole = MODELS["llama"]().eval()
    labels = tokens.masked_fill(right == 0, -100)
    labels[1, 9] = tokens[1, 9]  # the first padding, which the last real token predicts
    ours = net(input_ids=tokens, attention_mask=right, labels=labels)
    theirs = whole(input_ids=tokens, attention_mask=right, labels=labels)
    assert furthest([ours.loss.item()], [theirs.loss.item()]) <= TOLERANCE
    as_tuple = net(input_ids=tokens, attention_mask=right, labels=labels, return_dict=False)
    assert as_tuple[0].item() == ours.loss.item()
    other = {"labels": labels.clamp_min(0), "ignore_index": 0}  # no token is 0
    losses = [each(input_ids=tokens, **other).loss.item() for each in (net, whole)]
    assert furthest(losses[:1], losses[1:]) <= TOLERANCE
    embeddings = whole.get_input_embeddings()(tokens)
    assert distance(net(inputs_embeds=embeddings).logits, whole(inputs_embeds=embeddings).logits) <= TOLERANCE
    arguments = {"max_new_tokens": 5, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    assert net.generate(tokens, **arguments).equal(whole.generate(tokens, **arguments))

    net.loss_function = lambda logits, labels, **_: logits.mean()
    assert distance(net(input_ids=tokens).logits, whole(input_ids=tokens).logits) <= TOLERANCE
    with pytest.raises(tsm.InvalidArgument, match="loss_function of this LlamaForCausalLM was exchanged after"):
        net(input_ids=tokens, labels=tokens)


def from_rank_zero(rank: int, world_size: int) -> None:
    """Only rank 0 has weights: its tensor-parallel group takes them in transform, the others while FSDP wraps."""
    import tesserae as tsm
    from tesserae.delayed_param import DelayedParamIniter

    tsm.init({"context_parallel_degree": 2, "tensor_parallel_degree": 2})
    with torch.device("cpu" if rank == 0 else "meta"):
        net = MODELS["mistral"]()
    net = tsm.transform(net, load_state_dict_from_rank0=True)
    init = DelayedParamIniter(net)
    net = wrap("mistral", net, param_init_fn=init.get_param_init_fn(), sync_module_states=True)
    state = whole_state(net)
    for name, value in MODELS["mistral"]().state_dict().items():
        assert state[name].equal(value), name


def test_weights_of_rank_zero_reach_all() -> None:
    run_ranks(from_rank_zero, 4)


def test_refuses_what_cannot_be_cut() -> None:
    run_ranks(refuses, 2)
