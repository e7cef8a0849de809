"""torch.distributed.checkpoint on our modules: its checkpoints go from FSDP1 to ours, back, and to other numbers of
ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW, Optimizer

import tesserae as tsm
from models import MODELS, tokens
from ranks import run_ranks
from same_state import differences

CPU = torch.device("cpu")


class Script(Stateful):
    """What torch's tutorials put into a checkpoint."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def build(name: str, use_orig_params: bool = True, mesh: bool = False, seed: int = 0) -> tuple[FSDP, Optimizer]:
    kind = MODELS[name]
    model = FSDP(
        kind(seed),
        auto_wrap_policy=ModuleWrapPolicy(set(kind.units)),
        device_id=CPU,
        use_orig_params=use_orig_params,
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)) if mesh else None,
    )
    return model, AdamW(model.parameters(), lr=1e-3)


def train(name: str, model: nn.Module, optimizer: Optimizer, first: int, steps: int = 2) -> list[float]:
    """On the same batches on all ranks: as many as there may be."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = MODELS[name].loss(model, tokens(step, 0, 0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for group in states[1].get("param_groups", ()):  # in the order in which the optimizer sees them, flat or not
        group["params"] = sorted(group["params"])
    return states


def begin(rank: int, world_size: int, ours: bool, folder: Path, names: list[str], layout: dict[str, bool]) -> Any:
    """Trains and saves; what training from there on gives."""
    warnings.simplefilter("ignore")
    if ours:
        tsm.init()
    found = {}
    for name in names:
        model, optimizer = build(name, **layout)
        train(name, model, optimizer, first=0)
        dcp.save({"script": Script(model, optimizer)}, checkpoint_id=folder / name)
        state = whole(model, optimizer)
        found[name] = (state, train(name, model, optimizer, first=2))
    return found


def resume(
    rank: int, world_size: int, ours: bool, folder: Path, expected: dict[str, Any], layout: dict[str, bool]
) -> None:
    warnings.simplefilter("ignore")
    if ours:
        tsm.init()
    for name, (state, losses) in expected.items():
        print(name, flush=True)  # in the report, if it is the last
        model, optimizer = build(name, **layout, seed=1)
        dcp.load({"script": Script(model, optimizer)}, checkpoint_id=folder / name)
        found = differences(whole(model, optimizer), state)
        assert not found, "\n".join(found[:20])
        assert train(name, model, optimizer, first=2) == pytest.approx(losses, rel=1e-5)


SLICES, FLAT, MESH = {"use_orig_params": True}, {"use_orig_params": False}, {"use_orig_params": True, "mesh": True}


def describe(side: tuple[bool, int, dict[str, bool]]) -> str:
    ours, ranks, layout = side
    return "-".join(["ours" if ours else "FSDP1", str(ranks), *(key for key, on in layout.items() if on)])


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ((True, 2, SLICES), (True, 4, FLAT)),
        ((True, 4, FLAT), (True, 2, SLICES)),
        ((True, 4, MESH), (False, 2, MESH)),
        ((False, 2, SLICES), (True, 4, SLICES)),
        ((False, 4, FLAT), (True, 2, FLAT)),
        ((True, 2, SLICES), (False, 4, FLAT)),
    ],
    ids=describe,
)
def test_goes_anywhere(writer: Any, reader: Any, tmp_path: Path) -> None:
    names = ["tied", "llama"]
    saved = run_ranks(begin, writer[1], writer[0], tmp_path, names, writer[2])[0]
    run_ranks(resume, reader[1], reader[0], tmp_path, saved, reader[2])
