"""What torchtitan does to a model and in its training loop, on our fully_shard against torch's own: the same losses,
norms of gradients and weights, and checkpoints that either loads. torchtitan itself wants a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import tesserae as tsm
from library_runs import Run, assert_same, is_ours, whole
from ranks import run_ranks
from torchtitan_model import LENGTH, VOCABULARY, Llama, parallelized

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Job:
    """A model, its optimizer and its schedule, and what is saved of them."""

    def __init__(self, model: Llama, data: DeviceMesh) -> None:
        self.model, self.data = model, data
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 3))
        self.step = 0

    def train(self, steps: int, run: Run, splits: bool) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * self.step + self.data.get_local_rank())
            tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
            with loss_parallel() if splits else contextlib.nullcontext():
                logits = self.model(tokens[:, :-1]).flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
                loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()], foreach=True)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), 0.5, norm, foreach=True)
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            run.losses.append(loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item())
            run.norms.append(norm.item())

    def state(self) -> dict[str, object]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
            "schedule": self.schedule.state_dict(),
            "step": torch.tensor(self.step),
        }

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FLAT)
        self.schedule.load_state_dict(state["schedule"])
        self.step = int(state["step"])


def make_job(splits: bool, selective: bool, seed: int) -> Job:
    """Four ranks: two that shard, times two that split layers or are replicas."""
    if splits:
        world = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_shard", "cp", "tp"))
        data = world["dp_shard", "cp"]._flatten("dp_shard_cp")
        return Job(parallelized(world["tp"], data, selective, seed), data)
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return Job(parallelized(None, world, selective, seed), world._flatten("dp"))


def trained(rank: int, world_size: int, ours: bool, splits: bool, selective: bool, saved: str) -> Run:
    """Two steps, a checkpoint, two steps."""
    if ours:
        tsm.init()
    job, run = make_job(splits, selective, 1), Run()
    assert is_ours(job.model) == ours
    job.train(2, run, splits)
    dcp.save(job.state(), checkpoint_id=saved)
    job.train(2, run, splits)
    run.weights = whole(job.model)
    return run


def resumed(rank: int, world_size: int, ours: bool, splits: bool, selective: bool, folder: str) -> Run:
    """The last two of them, in a model that had other values."""
    if ours:
        tsm.init()
    job, run = make_job(splits, selective, 2), Run()
    job.load(folder)
    job.train(2, run, splits)
    run.weights = whole(job.model)
    return run


@pytest.mark.parametrize(
    ("splits", "selective"), [(False, False), (True, True)], ids=["replicas, recomputed", "split, partly recomputed"]
)
def test_torchtitan(splits: bool, selective: bool, tmp_path: Path) -> None:
    def run(function: Callable, ours: bool, folder: str) -> list[Run]:
        return run_ranks(function, 4, ours, splits, selective, str(tmp_path / folder))

    theirs = run(trained, False, "theirs")
    assert_same(run(trained, True, "ours"), theirs)
    for part in theirs:
        part.losses, part.norms = part.losses[2:], part.norms[2:]
    assert_same(run(resumed, True, "theirs"), theirs)
    assert_same(run(resumed, False, "ours"), theirs)
