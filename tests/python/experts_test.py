"""Expert parallelism in Python: tsm.transform and FSDP against one process with whole models."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from expert_models import MODELS, batch, loss_of, wrap
from parity_test import distance, furthest
from ranks import run_ranks

RANKS, STEPS, MAX_NORM, TOLERANCE = 4, 3, 0.7, 1e-5


@dataclass(frozen=True)
class Case:
    model: str
    experts: int  # E
    degrees: tuple[int, int, int] = (4, 4, 4)
    checkpointing: bool = False
    auxiliary: bool = False
    accumulate: bool = False
    use_orig_params: bool = True
    one_expert: bool = False  # routers send every token to the first experts: the others get none


# Every E of four ranks for every family, degrees of all three, options spread over them.
CASES = [
    Case("mixtral", 1, (2, 4, 4)),
    Case("mixtral", 2, (4, 4, 4), checkpointing=True, auxiliary=True),
    Case("mixtral", 4, (2, 2, 4), one_expert=True),
    Case("mixtral", 2, (1, 2, 4), accumulate=True, use_orig_params=False),
    Case("qwen2_moe", 1, (4, 4, 4), auxiliary=True),
    Case("qwen2_moe", 2, (2, 2, 2), accumulate=True),
    Case("qwen2_moe", 4, (4, 4, 4), auxiliary=True, use_orig_params=False),
    Case("qwen3_moe", 1, (1, 1, 1)),
    Case("qwen3_moe", 2, (1, 4, 4), auxiliary=True, one_expert=True),
    Case("qwen3_moe", 4, (1, 1, 4), checkpointing=True),
    Case("gpt_oss", 1, (2, 2, 2)),
    Case("gpt_oss", 2, (4, 4, 4), one_expert=True, checkpointing=True, use_orig_params=False),
    Case("gpt_oss", 4, (1, 2, 2), auxiliary=True),
]


def built(name: str, one_expert: bool = False, **changes: Any) -> nn.Module:
    """`one_expert`: the experts' scores do not depend on tokens, the first two win."""
    model = MODELS[name](**changes)
    for path, parameter in model.named_parameters():
        if one_expert and path.endswith((".gate.weight", ".router.weight")):
            nn.init.zeros_(parameter)  # of equal scores topk takes what it takes: the same on every rank
    return model


@functools.cache
def alone(
    name: str, one_expert: bool, auxiliary: bool, parts: int
) -> tuple[list[float], list[float], dict[str, Tensor], Tensor]:
    """Losses, norms, parameters, and logits in the end, of one process that trains the batches of all ranks. The
    auxiliary loss is that of each rank's tokens, averaged."""
    model = built(name, one_expert)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        for part in range(parts):
            each = [loss_of(model, batch(10 * step + part, rank), auxiliary) for rank in range(RANKS)]
            loss = torch.stack(each).mean()
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model.eval()(input_ids=batch(0, 0), use_cache=False).logits
    return losses, norms, copy.deepcopy(model.state_dict()), logits


def whole_state(model: nn.Module, kind: StateDictType = StateDictType.FULL_STATE_DICT) -> Any:
    with FullyShardedDataParallel.state_dict_type(model, kind):
        return model.state_dict()


def away_from(expected: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, float]:
    """Entries that are not as expected, and by how much."""
    assert list(state) == list(expected)
    assert [name for name in expected if state[name].shape != expected[name].shape] == []
    found = {name: distance(state[name], value) for name, value in expected.items()}
    return {name: off for name, off in found.items() if not off <= TOLERANCE}


def trains(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    import tesserae as tsm

    found = []
    for case in cases:
        print(case, flush=True)
        names = dict(zip(("parameters", "gradients", "optimizer"), case.degrees, strict=True))
        tsm.init({"expert_parallel_degree": case.experts, "degrees": names})
        try:
            assert (tsm.state.ep_size, tsm.state.ep_rank) == (case.experts, rank % case.experts)
            first = rank - rank % case.experts
            members = dist.get_process_group_ranks(tsm.state.ep_process_group)
            assert members == list(range(first, first + case.experts))
            assert tsm.state.dp_size == world_size
            model = tsm.transform(built(case.model, case.one_expert)).train()
            if case.checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model = wrap(case.model, model, use_orig_params=case.use_orig_params)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            losses, norms, parts = [], [], 2 if case.accumulate else 1
            for step in range(STEPS):
                for part in range(parts):
                    model._unit.set_boundary(part == parts - 1)
                    loss = loss_of(model, batch(10 * step + part, rank), case.auxiliary)
                    loss.backward()
                    total = loss.detach().clone()
                    dist.all_reduce(total)
                    losses.append(total.item() / world_size)
                norms.append(model.clip_grad_norm_(MAX_NORM).item())
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                logits = model.eval()(input_ids=batch(0, 0), use_cache=False).logits
            expected = alone(case.model, case.one_expert, case.auxiliary, parts)
            if not furthest(losses, expected[0]) <= TOLERANCE:
                found.append(f"{case}: losses {losses}, expected {expected[0]}")
            if not furthest(norms, expected[1]) <= TOLERANCE:
                found.append(f"{case}: norms {norms}, expected {expected[1]}")
            if not distance(logits, expected[3]) <= 10 * TOLERANCE:
                found.append(f"{case}: logits differ by {distance(logits, expected[3])}")
            if wrong := away_from(expected[2], whole_state(model)):
                found.append(f"{case}: parameters {wrong}")
        finally:
            tsm.uninstall()
    return found


@pytest.mark.parametrize("part", range(2))
def test_models_train_as_on_one_process(part: int) -> None:
    assert run_ranks(trains, RANKS, CASES[part::2], deadline=240) == [[]] * RANKS
