"""Scripts on an accelerator that torch knows and Tesserae does not: the simulated one (tests/sim), one device a rank.

Each case trains with FSDP and with fully_shard, with several seeds of the delays on streams. All seeds give the same
numbers to the bit, and those are what one process computes on the CPU without either.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW

import tesserae as tsm
from both_faces import away_from, clipped_norm, sharded, whole_state
from fully_shard_runs import WIDTH, Block, make_model
from ranks import RankFailed, run_ranks

STEPS = 3
PARTS = 2  # of a step that accumulates
ROWS = 4
CLIP = 0.5
# Who waits for another rank says in which group and operation before run_ranks() gives up.
DEADLINE = {"run": {"deadline_seconds": 60}}


@dataclass(frozen=True)
class Case:
    face: str  # fsdp or fully_shard
    mixed: bool = False
    offload: bool = False
    parts: int = 1
    degree: int = 0  # hybrid_shard_degree
    turns: tuple[int, ...] = ()  # the degree from the step after the first on

    def __str__(self) -> str:
        said = {"mixed": self.mixed, "offload": self.offload, "no_sync": self.parts > 1, "hybrid": self.degree}
        return "-".join([self.face, *[name for name, on in (said | {"dial": self.turns}).items() if on]])


FACES = ("fsdp", "fully_shard")
WITH_2 = [
    Case(face, **options)
    for face in FACES
    for options in ({}, {"mixed": True}, {"offload": True}, {"parts": PARTS}, {"mixed": True, "offload": True})
]
WITH_4 = [Case(face, **options) for face in FACES for options in ({"degree": 2}, {"turns": (1, 2)})]


def rows(step: int, part: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().pow(2).mean()


def alone(case: Case, ranks: int, steps: int = STEPS) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """What one process computes of all ranks' batches on the CPU: losses of rank 0, norms, parameters."""
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        for part in range(case.parts):
            for rank in range(ranks):
                computes = copy.deepcopy(model).bfloat16() if case.mixed else model
                batch = rows(step, part, rank)
                loss = loss_of(computes, batch.bfloat16() if case.mixed else batch) / case.parts
                if rank == 0:
                    losses.append(loss.item())
                gradients = torch.autograd.grad(loss, list(computes.parameters()))
                for parameter, gradient in zip(model.parameters(), gradients):
                    share = gradient.float() / ranks
                    parameter.grad = share if parameter.grad is None else parameter.grad + share
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def build(case: Case) -> nn.Module:
    model = make_model()
    if case.face == "fsdp":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.accelerator.current_device_index(),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if case.mixed else None,
            cpu_offload=CPUOffload(offload_params=True) if case.offload else None,
        )
    arguments: dict[str, Any] = {}
    if case.mixed:
        arguments["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if case.offload:
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    else:
        model.to(torch.accelerator.current_accelerator())
    return sharded(Block, model, **arguments)


def gradients_stay(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
    """This backward is not reduced, unless it is the last of the step."""
    if isinstance(model, FullyShardedDataParallel):
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def train(case: Case, model: nn.Module, optimizer: AdamW, first: int, last: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    for step in range(first, last):
        if case.turns and step > 0:
            tsm.reshard(model, optimizer, hybrid_shard_degree=case.turns[step - 1])
        for part in range(case.parts):
            with gradients_stay(model, part == case.parts - 1):
                loss = loss_of(model, rows(step, part, dist.get_rank()).to(device)) / case.parts
                loss.backward()
            losses.append(loss.item())
        norms.append(clipped_norm(model, CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def begin(rank: int) -> None:
    """As a script does, on the accelerator that there is."""
    import tesserae_sim  # noqa: F401  (after the fork: streams are threads)

    torch.accelerator.set_device_index(rank)
    device = torch.accelerator.current_accelerator()
    dist.init_process_group(f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}")


def other_delays(seed: int) -> None:
    import tesserae_sim

    tesserae_sim.restart(seed)


# ---- in ranks ----
def collectives_give_what_they_should(rank: int, world_size: int) -> None:
    begin(rank)
    device = torch.accelerator.current_accelerator()
    tens = torch.arange(2.0 * world_size, device=device) + 10 * rank
    swapped = torch.empty_like(tens)
    dist.all_to_all_single(swapped, tens)
    assert swapped.tolist() == [10 * peer + 2 * rank + k for peer in range(world_size) for k in (0, 1)]
    gathered = [torch.empty(1, device=device) for _ in range(world_size)] if rank == 1 else None
    dist.gather(torch.full((1,), float(rank), device=device), gathered, dst=1)
    assert gathered is None or torch.cat(gathered).tolist() == list(range(world_size))
    part = torch.empty(2, device=device)
    dist.scatter(part, list((tens - 10 * rank).split(2)) if rank == 2 else None, src=2)
    assert part.tolist() == [2 * rank, 2 * rank + 1]


def calls_another_collective(rank: int, world_size: int) -> None:
    import tesserae_sim

    begin(rank)
    tensor = torch.ones(3, device=torch.accelerator.current_accelerator())
    dist.all_reduce(tensor)
    if rank == 0:
        dist.broadcast(tensor, 0)
    else:
        dist.all_reduce(tensor)
    with pytest.raises(tesserae_sim.OrderMismatch, match="broadcast .* all_reduce|all_reduce .* broadcast"):
        torch.accelerator.synchronize()


def trains_like_one_process(rank: int, world_size: int, case: Case, seeds: int) -> None:
    begin(rank)
    losses, norms, parameters = alone(case, world_size)
    first: dict[str, Tensor] = {}
    for seed in range(seeds):
        other_delays(seed)
        tsm.init({"hybrid_shard_degree": case.degree} | DEADLINE)
        model = build(case)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        found, found_norms = train(case, model, optimizer, 0, STEPS)
        if rank == 0:
            assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)
        state = {name: value.cpu() for name, value in whole_state(model).items()}
        assert away_from(parameters, state) == {}
        first = first or state
        assert [name for name in state if not state[name].equal(first[name])] == [], f"seed {seed}"
        tsm.uninstall()


def goes_on_from_dcp(rank: int, world_size: int, face: str, folder: Path) -> None:
    begin(rank)
    tsm.init(DEADLINE)
    case = Case(face)
    model = build(case)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(case, model, optimizer, 0, 2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    expected = train(case, model, optimizer, 2, 4), {name: v.cpu() for name, v in whole_state(model).items()}

    other_delays(1)
    model = build(case)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    found = train(case, model, optimizer, 2, 4), {name: v.cpu() for name, v in whole_state(model).items()}
    assert found[0] == expected[0]
    assert [name for name, value in expected[1].items() if not found[1][name].equal(value)] == []


def draws_again(rank: int, world_size: int) -> None:
    begin(rank)
    device = torch.accelerator.current_accelerator()
    state = tsm.checkpoint.random_state()
    assert device.type in state
    first = torch.randn(5, device=device), torch.randn(5)
    torch.manual_seed(17)
    tsm.checkpoint.set_random_state(state)
    again = torch.randn(5, device=device), torch.randn(5)
    assert all(a.equal(b) for a, b in zip(first, again))


def lacks_a_backend(rank: int, world_size: int) -> None:
    begin(rank)
    tsm.init()
    del dist.Backend.default_device_backend_map[torch.accelerator.current_accelerator().type]
    model = FullyShardedDataParallel(make_model(), device_id=torch.accelerator.current_device_index())
    loss_of(model, rows(0, 0, rank).to(model.compute_device)).backward()


# ---- tests ----
def test_collectives_between_processes():
    run_ranks(collectives_give_what_they_should, 3, init=False)


def test_another_collective_on_another_rank_is_found():
    run_ranks(calls_another_collective, 2, init=False)


@pytest.mark.parametrize("face", FACES)
def test_a_checkpoint_of_dcp_goes_on(face: str, tmp_path: Path):
    run_ranks(goes_on_from_dcp, 2, face, tmp_path, init=False)


def test_random_numbers_of_the_device_are_saved():
    run_ranks(draws_again, 1, init=False)


def test_a_device_without_a_backend_is_refused():
    with pytest.raises(RankFailed, match=r"\[FSDP\] torch.distributed has no backend for sim; .* registers one"):
        run_ranks(lacks_a_backend, 2, init=False)


@pytest.mark.parametrize("case", WITH_2, ids=str)
def test_two_ranks_train_like_one_process(case: Case):
    run_ranks(trains_like_one_process, 2, case, 3, init=False)


@pytest.mark.parametrize("case", WITH_4, ids=str)
def test_four_ranks_train_like_one_process(case: Case):
    run_ranks(trains_like_one_process, 4, case, 2, init=False)
