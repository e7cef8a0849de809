"""Experts of tsm.transform beside training: state dicts, models that begin without weights, the dial, checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

from both_faces import TOLERANCE, away_from, sharded, whole_state
from closeness import distance
from expert_models import MAX_NORM, MODELS, RANKS, alone, batch, loss_of, wrap
from ranks import run_ranks
from tensor_parallel_test import drawn


# ---- state ----
def beginnings(rank: int, world_size: int, tensor: int) -> list[str]:
    """From the meta device, from rank 0, and what goes in and comes out of state dicts. `tensor`: T."""
    import tesserae as tsm
    from tesserae.delayed_param import DelayedParamIniter

    shares = RANKS // tensor
    tsm.init({"tensor_parallel_degree": tensor, "expert_parallel_degree": 2, "hybrid_shard_degree": shares})
    found = []

    def check(what: str, state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert list(state) == list(expected), what
        wrong = [name for name in expected if not torch.equal(state[name], expected[name])]
        found.extend([f"{what}: {wrong}"] if wrong else [])

    # Not wrapped: whole tensors under the names of Hugging Face.
    for name in MODELS:
        expected, other = MODELS[name]().state_dict(), MODELS[name](seed=1).state_dict()
        model = tsm.transform(MODELS[name]())
        check(f"{name}, transformed", model.state_dict(), expected)
        model.load_state_dict(copy.deepcopy(other))
        check(f"{name}, loaded", model.state_dict(), other)

    # Any degree gives the numbers of one, if units are made in the same order: experts before the layer around them.
    for name, method in (("mixtral", None), ("gpt_oss", None), ("mixtral", drawn)):
        with torch.device("meta"):
            model, whole = MODELS[name](), MODELS[name]()
        states = []
        for each in (tsm.transform(model), whole):
            torch.manual_seed(3)
            init = DelayedParamIniter(each, method)
            functions = {"param_init_fn": init.get_param_init_fn(), "post_param_init_fn": init.get_post_param_init_fn()}
            with init.validate_params_and_buffers_inited():
                experts = {type(p) for p in each.modules() if type(p).__name__.endswith("Experts")}
                states.append(whole_state(wrap(name, each, *experts, **functions)))
        check(f"{name} from the meta device", *states)

    # Only rank 0 has values.
    for name in ("mixtral", "qwen2_moe"):
        with torch.device("cpu" if rank == 0 else "meta"):
            model = MODELS[name]()
        model = tsm.transform(model, load_state_dict_from_rank0=True)
        init = DelayedParamIniter(model).get_param_init_fn()
        sharded = wrap(name, model, param_init_fn=init, sync_module_states=True, use_orig_params=name == "mixtral")
        check(f"{name} from rank 0", whole_state(sharded), MODELS[name]().state_dict())
        other = MODELS[name](seed=1).state_dict()
        sharded.load_state_dict(copy.deepcopy(other))
        check(f"{name}, loaded", whole_state(sharded), other)
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
            chunks = sharded.state_dict()
            sharded.load_state_dict(MODELS[name]().state_dict())
            sharded.load_state_dict(chunks)
        check(f"{name}, loaded from chunks", whole_state(sharded), other)
        options = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, options):
            state = sharded.state_dict()
        check(f"{name} of rank 0", state, other if rank == 0 else {})
    turns = {1: [(1, 1, 1), (2, 4, 4), (4, 4, 4)], 2: [(1, 1, 1), (1, 2, 2), (2, 2, 2)]}
    return found + moments() + turning(turns[tensor]) + (in_dtensors() if tensor == 1 else [])


def moments() -> list[str]:
    """Optimizers' state by name: whole, of rank 0 alone, and back."""
    import tesserae as tsm

    found = []
    for use_orig_params in (True, False):
        model = wrap("qwen3_moe", tsm.transform(MODELS["qwen3_moe"]()), use_orig_params=use_orig_params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, batch(0, tsm.state.dp_rank)).backward()
        optimizer.step()
        plain = MODELS["qwen3_moe"]()
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        torch.stack([loss_of(plain, batch(0, rank)) for rank in range(tsm.state.dp_size)]).mean().backward()
        theirs.step()
        expected = {name: theirs.state[p] for name, p in plain.named_parameters()}
        for rank0_only in (False, True):
            options = FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
            config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, options, config):
                state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                again = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state))
            before = [t.clone() for values in optimizer.state.values() for t in values.values()]
            optimizer.load_state_dict(again)
            after = [t for values in optimizer.state.values() for t in values.values()]
            if len(before) != len(after) or not all(map(torch.equal, before, after)):
                found.append(f"optimizer state changes on its way (rank0_only={rank0_only})")
            if state and sorted(state["state"]) != sorted(expected):
                found.append(f"optimizer state of {sorted(state['state'])}")
            for name, values in state.get("state", {}).items():
                if not distance(values["exp_avg"], expected[name]["exp_avg"]) <= TOLERANCE:
                    found.append(f"exp_avg of {name} differs")
    return found


def turning(turns: list[tuple[int, int, int]]) -> list[str]:
    """The dial moves experts too, to the bit."""
    import tesserae as tsm

    model = wrap("mixtral", tsm.transform(MODELS["mixtral"]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, degrees in enumerate(turns):
        loss_of(model, batch(10 * step, tsm.state.dp_rank)).backward()
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        before = whole_state(model)
        tsm.reshard(model, optimizer, degrees=degrees)
        if not all(map(torch.equal, before.values(), whole_state(model).values())):
            found.append(f"parameters changed on the way to {degrees}")
    if wrong := away_from(alone("mixtral", False, False, 1, tsm.state.dp_size).state, whole_state(model)):
        found.append(f"trained over changes of degrees: {wrong}")
    return found


def in_dtensors() -> list[str]:
    """The dial and torch's state dicts under fully_shard."""
    import tesserae as tsm

    model = sharded(MODELS["mixtral"].unit, tsm.transform(MODELS["mixtral"]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, degree in enumerate((1, 2, 4)):
        loss_of(model, batch(10 * step, dist.get_rank())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        before = whole_state(model)
        tsm.reshard(model, optimizer, hybrid_shard_degree=degree)
        if not all(map(torch.equal, before.values(), whole_state(model).values())):
            found.append(f"DTensors changed on the way to {degree}")
    if wrong := away_from(alone("mixtral", False, False, 1).state, whole_state(model)):
        found.append(f"DTensors trained over changes of degrees: {wrong}")
    expected = MODELS["gpt_oss"](seed=1).state_dict()
    with torch.device("meta"):
        empty = MODELS["gpt_oss"]()
    empty = sharded(MODELS["gpt_oss"].unit, tsm.transform(empty)).to_empty(device="cpu")
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(empty, copy.deepcopy(expected), options=whole)
    state = get_model_state_dict(empty, options=whole)
    if wrong_names := [name for name in expected if not torch.equal(state[name], expected[name])]:
        found.append(f"full state dicts of DTensors: {wrong_names}")
    return found


@pytest.mark.parametrize("tensor", (1, 2))
def test_state_dicts_beginnings_and_the_dial(tensor: int) -> None:
    assert run_ranks(beginnings, RANKS, tensor, deadline=120) == [[]] * RANKS


# ---- the automatic choice ----
def chooses(rank: int, world_size: int, tensor: int, folder: str) -> None:
    import tesserae as tsm

    axes = {"tensor_parallel_degree": tensor, "expert_parallel_degree": 2}
    tsm.init({**axes, "hybrid_shard_degree": "auto", "run": {"folder": folder}})
    model = wrap("mixtral", tsm.transform(MODELS["mixtral"]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plain = MODELS["mixtral"]()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(30):
        loss_of(model, batch(step, tsm.state.dp_rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        each = [loss_of(plain, batch(step, other)) for other in range(tsm.state.dp_size)]
        (sum(each) / len(each)).backward()  # type: ignore[union-attr]
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert not away_from(plain.state_dict(), whole_state(model))
    if rank == 0:
        events = [json.loads(line) for line in (Path(folder) / "dial.jsonl").read_text().splitlines()]
        facts = events[0]["facts"]
        experts = sum(p.numel() for name, p in plain.named_parameters() if ".experts." in name)
        assert (facts["expert_degree"], facts["expert_units"]) == (2, 2)
        assert facts["expert_parameters"] == experts // 2 // tensor, "half of them, or of their parts, are a rank's"
        assert any("decision" in event for event in events), events[:5]


def test_the_automatic_choice_counts_experts_over_their_ranks(tmp_path: Path) -> None:
    run_ranks(chooses, RANKS, 2, str(tmp_path))


# ---- checkpoints ----
def saves(
    rank: int, world_size: int, axes: tuple[int, int], folder: str, load: bool, in_dtensors: bool = False
) -> dict[str, Any]:
    """Two steps of AdamW at this T and E, saved; or what was saved, loaded. The logical tensors."""
    import tesserae as tsm

    tensor, experts = axes
    if world_size > 1:
        degree = min(2 if load else 4, world_size // tensor)
        tsm.init({"tensor_parallel_degree": tensor, "expert_parallel_degree": experts, "hybrid_shard_degree": degree})
    found = {}
    for name in ("mixtral", "gpt_oss"):
        model: Any = MODELS[name](seed=2 if load else 0, num_key_value_heads=4)
        if world_size > 1:
            model = tsm.transform(model)
            model = sharded(MODELS[name].unit, model) if in_dtensors else wrap(name, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if load:
            assert tsm.checkpoint.load(f"{folder}/{name}", model, optimizer).step == 2
            if in_dtensors:
                tsm.checkpoint.save(f"{folder}/again/{name}", model, optimizer, step=2)
        else:
            for step in range(2):
                loss_of(model, batch(step, tsm.state.dp_rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            tsm.checkpoint.save(f"{folder}/{name}", model, optimizer, step=2)
        if world_size == 1:
            found[name] = model.state_dict(), {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
            continue
        if in_dtensors:
            moments = {n: optimizer.state[p]["exp_avg"].full_tensor() for n, p in model.named_parameters()}
            found[name] = whole_state(model), moments
            continue
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
            found[name] = model.state_dict(), {key: value["exp_avg"] for key, value in state.items()}
    return found


def assert_same(everyone: list[dict[str, Any]]) -> None:
    """To the bit."""
    for each in everyone[1:]:
        for name, tensors in everyone[0].items():
            for ours, theirs in zip(each[name], tensors, strict=True):
                assert set(ours) == set(theirs)
                assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def test_checkpoints_load_at_any_degree(tmp_path: Path) -> None:
    """Bitwise, weights and moments: saved at E = 2, loaded at 4, at 1 and on one process; under fully_shard, too."""
    folder = str(tmp_path)
    saved = run_ranks(saves, RANKS, (1, 2), folder, False, deadline=120)
    loaded = run_ranks(saves, RANKS, (1, 4), folder, True, deadline=120)
    loaded += run_ranks(saves, RANKS, (1, 1), folder, True, deadline=120)
    dtensors = run_ranks(saves, RANKS, (1, 4), folder, True, True, deadline=120)
    alone_again = [saves(0, 1, (1, 1), each, True) for each in (folder, f"{folder}/again")]
    assert_same([*saved, *loaded, *dtensors, *alone_again])


def test_checkpoints_load_at_any_t_and_e(tmp_path: Path) -> None:
    """From T = 2, E = 2 to T = 4, to E = 4 and to one process; from E = 4 to T = 2, E = 2."""
    folder, other = str(tmp_path / "both"), str(tmp_path / "experts")
    saved = run_ranks(saves, RANKS, (2, 2), folder, False, deadline=120)
    loaded = [run_ranks(saves, RANKS, axes, folder, True, deadline=120) for axes in ((4, 1), (1, 4))]
    assert_same([*saved, *loaded[0], *loaded[1], saves(0, 1, (1, 1), folder, True)])
    saved = run_ranks(saves, RANKS, (1, 4), other, False, deadline=120)
    assert_same([*saved, *run_ranks(saves, RANKS, (2, 2), other, True, deadline=120)])
