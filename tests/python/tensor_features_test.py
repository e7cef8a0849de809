"""What FSDP scripts do beside plain training, with tensor-parallel ranks: optimizers and hooks made before
tsm.transform, frozen parameters, a gradient scaler, generation through the wrapper, the automatic choice of degrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from closeness import distance, furthest
from ranks import run_ranks
from tensor_models import MODELS, batch, loss_of, wrap

TOLERANCE, STEPS, DATA_RANKS = 1e-5, 6, 2


# ---- what was made before ----
def prepared(model: nn.Module) -> torch.optim.Optimizer:
    """With marks on parameters, by which an optimizer decays some, and a hook that alters a gradient."""
    for parameter in model.parameters():
        parameter.decays = parameter.dim() > 1  # type: ignore[attr-defined]
    model.get_input_embeddings().weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[operator]
    return torch.optim.SGD(decayed(model), lr=0.1)


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.decays == which], "weight_decay": 0.5 * which}
        for which in (False, True)
    ]


def trains_by_what_was_made_before(name: str) -> list[str]:
    """The parameters are the same objects, tied ones too, with FSDP and without."""
    import tesserae as tsm

    found, everyone = [], range(DATA_RANKS)
    for wrapped in (True, False):
        whole, split = MODELS[name](), MODELS[name]()
        theirs, ours = prepared(whole), prepared(split)
        before = list(split.parameters())
        graph = loss_of(name, split, batch(0, 0, 0))  # which knows the shapes
        if not wrapped:
            for model in (whole, split):
                loss_of(name, model, batch(5, 0, 0)).backward()
        model = tsm.transform(split)
        if not all(a is b for a, b in zip(before, model.parameters(), strict=True)):
            found.append("parameters are other objects")
        if [len(group["params"]) for group in decayed(split)] != [len(group["params"]) for group in decayed(whole)]:
            found.append("parameters have lost their marks")
        model = wrap(name, model) if wrapped else model
        for step in range(2):
            for each, optimizer, ranks in (
                (whole, theirs, everyone),
                (model, ours, range(tsm.state.dp_rank, tsm.state.dp_rank + 1) if wrapped else everyone),
            ):
                loss_of(name, each, torch.cat([batch(step, 0, rank) for rank in ranks])).backward()
                optimizer.step()
                optimizer.zero_grad()
        del graph
        state, expected = model.state_dict(), whole.state_dict()
        wrong = [key for key in expected if not distance(state[key], expected[key]) <= TOLERANCE]
        found += [f"wrapped={wrapped}: {wrong} differ"] if wrong else []
    return [f"{name}, made before: {text}" for text in found]


# ---- frozen parameters ----
def one_of_each(name: str) -> bool:
    """One that is split, and one that is whole."""
    return name not in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight")


def a_few(name: str) -> bool:
    """As adapters are trained: the first block has nothing that is, the embedding neither."""
    return name.startswith("model.layers.1.") and name.endswith(("v_proj.weight", "attention_layernorm.weight"))


def frozen(trained: Callable[[str], bool]) -> nn.Module:
    model = MODELS["llama"](tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    return model


def steps(model: nn.Module, data_ranks: range, clip: Callable[[float], Tensor]) -> tuple[list[float], list[float]]:
    """Losses, of these data-parallel ranks, and norms."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of("llama", model, torch.cat([batch(step, 0, rank) for rank in data_ranks]))
        loss.backward()
        losses.append(loss.item())
        norms.append(clip(0.7).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def trains_what_is_not_frozen(kind: Callable[[str], bool], flat: bool, sequence: bool) -> list[str]:
    import tesserae as tsm

    alone, start = frozen(kind), frozen(kind).state_dict()
    everyone = range(DATA_RANKS)
    losses, norms = steps(alone, everyone, lambda most: nn.utils.clip_grad_norm_(alone.parameters(), most))
    split = tsm.transform(frozen(kind), sequence_parallel=sequence).train()
    # torch's policies refuse blocks with both kinds of parameters where they become flat; one unit may have them.
    model = FullyShardedDataParallel(split, use_orig_params=False) if flat else wrap("llama", split)
    mine = steps(model, range(tsm.state.dp_rank, tsm.state.dp_rank + 1), model.clip_grad_norm_)
    means = torch.tensor(mine[0], dtype=torch.float64)
    dist.all_reduce(means, group=tsm.state.dp_process_group)
    found = []
    if not furthest((means / DATA_RANKS).tolist(), losses) <= TOLERANCE:
        found.append(f"losses {(means / DATA_RANKS).tolist()}, not {losses}")
    if not furthest(mine[1], norms) <= TOLERANCE:
        found.append(f"norms {mine[1]}, not {norms}")
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    for name, expected in alone.state_dict().items():
        if not distance(state[name], expected) <= TOLERANCE:
            found.append(f"{name} differs")
        if torch.equal(expected, start[name]) == kind(name):
            found.append(f"{name} was {'not ' if kind(name) else ''}trained by one process")
        if not kind(name) and not torch.equal(state[name], start[name]):
            found.append(f"{name} is frozen and has changed")
    words = f"{kind.__name__}{', flat' if flat else ''}{', sequence-parallel' if sequence else ''}"
    return [f"trained {words}: {text}" for text in found]


# ---- a gradient scaler ----
def scaled_steps(model: nn.Module, data_rank: int, skipped: int, overflow: Callable[[], None] | None) -> list[Any]:
    """Losses, and scales after each step; in the step `skipped` gradients overflow. On one process: it is left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0, growth_interval=2) if overflow is not None else None
    losses, scales = [], []
    for step in range(4):
        ranks = [data_rank] if scaler is not None else list(range(DATA_RANKS))
        loss = loss_of("llama", model, torch.cat([batch(step, 0, rank) for rank in ranks]))
        losses.append(loss.item())
        if scaler is None:
            loss.backward()
            if step != skipped:
                optimizer.step()
        else:
            scaler.scale(loss).backward()
            if step == skipped:
                overflow()  # type: ignore[misc]
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            stays = all(map(torch.equal, before, [p.detach() for p in model.parameters()]))
            assert stays == (step == skipped), f"step {step}: {'no parameter changed' if stays else 'it was taken'}"
        optimizer.zero_grad()
    return [losses, scales]


def all_skip_the_same_step(rank: int) -> list[str]:
    """A gradient overflows on one rank, in a part that no other rank has."""
    import tesserae as tsm

    model = wrap("llama", tsm.transform(MODELS["llama"]()))

    def overflow() -> None:
        if rank != 3:
            return
        parts = [p for name, p in model.named_parameters() if "_proj" in name and p.grad is not None and p.numel() > 0]
        parts[-1].grad[0] = float("inf")  # type: ignore[index]

    losses, scales = scaled_steps(model, tsm.state.dp_rank, 1, overflow)
    found = [] if scales == [1024.0, 512.0, 512.0, 1024.0] else [f"scales {scales}"]
    means = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(means, group=tsm.state.dp_process_group)
    expected, _ = scaled_steps(MODELS["llama"](), 0, 1, None)
    if not furthest((means / DATA_RANKS).tolist(), expected) <= TOLERANCE:
        found.append(f"losses {(means / DATA_RANKS).tolist()}, not {expected}")
    return [f"gradient scaler: {text}" for text in found]


# ---- generation ----
def generates(name: str) -> list[str]:
    """In FSDP, before and after a step. The embedding is the root's, whose forward generation does not call."""
    import tesserae as tsm

    whole: Any = MODELS[name]()
    model = wrap(name, tsm.transform(MODELS[name]()))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, whole)]
    tokens, found = batch(0, 0, 0), []

    def generate(each: Any) -> Tensor:
        return each.generate(tokens, max_new_tokens=6, min_new_tokens=6, do_sample=False, num_beams=2)

    for when in ("before", "after"):
        expected = generate(whole.eval())
        for recurse in (False, True):
            with FullyShardedDataParallel.summon_full_params(model.eval(), recurse=recurse, writeback=False):
                given = generate(model.module)
            if not torch.equal(given, expected):
                found.append(f"{name} generates {given} {when} a step, not {expected}")
        for each, optimizer in zip((model, whole), optimizers, strict=True):
            loss_of(name, each.train(), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def features(rank: int, world_size: int) -> list[str]:
    import tesserae as tsm

    found: list[str] = []
    for degrees in ((2, 2, 2), (1, 1, 2)):
        names = dict(zip(("parameters", "gradients", "optimizer"), degrees, strict=True))
        tsm.init({"tensor_parallel_degree": 2, "degrees": names})
        for kind in (one_of_each, a_few):
            for flat in (False, True):
                found += trains_what_is_not_frozen(kind, flat, sequence=flat == (kind is a_few))
        found += all_skip_the_same_step(rank)
        for name in ("llama", "t5"):
            found += generates(name)
        for name in ("llama", "gpt2"):
            found += trains_by_what_was_made_before(name)
        tsm.uninstall()
    return found


def test_frozen_parameters_scaling_and_generation() -> None:
    assert run_ranks(features, 4, deadline=240) == [[]] * 4


# ---- the automatic choice ----
def chooses(rank: int, world_size: int, folder: str) -> None:
    import tesserae as tsm

    tsm.init({"tensor_parallel_degree": 2, "hybrid_shard_degree": "auto", "run": {"folder": folder}})
    model = wrap("llama", tsm.transform(MODELS["llama"]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plain = MODELS["llama"]()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    losses, expected, seen = [], [], []
    for step in range(40):
        loss = loss_of("llama", model, batch(step, 0, tsm.state.dp_rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        each = [loss_of("llama", plain, batch(step, 0, data_rank)) for data_rank in range(DATA_RANKS)]
        (sum(each) / DATA_RANKS).backward()  # type: ignore[union-attr]
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        expected.append(each[tsm.state.dp_rank].item())
        seen.append(model._unit.describe().splitlines()[0].split(": ")[1])
    assert furthest(losses, expected) <= 1e-4
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, seen)
    assert everyone.count(seen) == world_size, "ranks had other degrees at the same step"
    if rank == 0:
        record = (Path(folder) / "dial.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in record]
        facts = events[0]["facts"]
        assert facts["tensor"] == 2, "two ranks of this host hold a part each"
        assert facts["host_of"] == [0, 0]
        decisions = [event["decision"] for event in events if "decision" in event]
        assert decisions and all(decision["why"] for decision in decisions), events[:5]
        assert len(set(seen)) > 1, "something was tried"


def test_the_automatic_choice_counts_the_tensor_ranks_of_a_host(tmp_path: Path) -> None:
    run_ranks(chooses, 4, str(tmp_path))
