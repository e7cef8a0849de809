"""The dial of a script: its schedule, the socket of its run folder, and the automatic choice."""

from __future__ import annotations

import json
import subprocess
import threading
import warnings
from pathlib import Path

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

import tesserae as tsm
from checkpoint_models import Net, train
from ranks import run_ranks
from tesserae import _C

PROGRAM = Path(_C.__file__).parents[2] / "cli" / "tesserae"


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: torch.nn.Module = Net()
    options = {
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
        "sharding_strategy": ShardingStrategy.FULL_SHARD,
    }
    model.block = FSDP(model.block, **options)
    model = FSDP(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def degrees_of(model: torch.nn.Module) -> str:
    return model._unit.describe().splitlines()[0].split(": ")[1]


def follows_its_schedule(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")
    schedule = [
        {"step": 2, "hybrid_shard_degree": 2},
        {"step": 3, "degrees": {"parameters": 1, "gradients": 2, "optimizer": 4}},
        {"step": 5, "hybrid_shard_degree": 4},
    ]
    losses = []
    for settings in ({}, {"dial": {"schedule": schedule}}):
        tsm.init(settings)
        model, optimizer = build()
        seen = []
        losses.append([])
        for step in range(7):
            losses[-1] += train(model, optimizer, range(step, step + 1), rank)
            seen.append(degrees_of(model))
        if settings:
            assert seen == [
                "P=4 G=4 O=4",
                "P=4 G=4 O=4",
                "P=2 G=2 O=2",
                "P=1 G=2 O=4",
                "P=1 G=2 O=4",
                "P=4 G=4 O=4",
                "P=4 G=4 O=4",
            ], seen
        tsm.uninstall()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)


def test_the_schedule_is_followed() -> None:
    run_ranks(follows_its_schedule, 4)


class Seldom:
    """Two optimizers, of which one makes every third step only."""

    def __init__(self, model: torch.nn.Module) -> None:
        *most, last = (p for p in model.parameters() if p.requires_grad)
        self.both = [torch.optim.AdamW(parameters, lr=0.01) for parameters in (most, [last])]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for optimizer in self.both[: 2 if self.steps % 3 == 0 else 1]:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()


def moves_what_was_loaded(rank: int, world_size: int, folder: str) -> None:
    """One of the optimizers has its state from a checkpoint, and has made no step when the dial turns."""
    warnings.simplefilter("ignore")
    losses = []
    for settings in ({}, {}, {"dial": {"schedule": [{"step": 1, "hybrid_shard_degree": 1}]}}):
        tsm.init(settings)
        model, _ = build()
        optimizers = Seldom(model)
        loaded = tsm.checkpoint.load(folder, model, optimizers.both)
        losses.append(train(model, optimizers, range(loaded.step if loaded else 0, 9), rank))  # type: ignore[arg-type]
        if loaded is None:
            model, _ = build()
            optimizers = Seldom(model)
            train(model, optimizers, range(3), rank)  # type: ignore[arg-type]
            tsm.checkpoint.save(folder, model, optimizers.both, step=3)
        else:
            assert degrees_of(model) == ("P=1 G=1 O=1" if settings else "P=2 G=2 O=2")
        tsm.uninstall()
    torch.testing.assert_close(losses[1], losses[0][3:], rtol=1e-6, atol=0)
    torch.testing.assert_close(losses[2], losses[1], rtol=1e-5, atol=0)


def test_an_optimizer_that_has_made_no_step_is_moved(tmp_path: Path) -> None:
    run_ranks(moves_what_was_loaded, 2, str(tmp_path))


def takes_requests(rank: int, world_size: int, folder: str) -> None:
    tsm.init({"run": {"folder": folder}})
    model, optimizer = build()
    answers: list[subprocess.CompletedProcess[str]] = []

    def ask() -> None:
        for asked in (["--degree", "2"], ["--offload", "optimizer=disk"]):
            command = [str(PROGRAM), "dial", folder, *asked, "--wait", "60"]
            answers.append(subprocess.run(command, capture_output=True, text=True, check=False))

    train(model, optimizer, range(2), rank)
    asking = threading.Thread(target=ask)
    if rank == 0:
        asking.start()
    done = torch.zeros(1)
    step = 2
    while done.item() == 0:
        train(model, optimizer, range(step, step + 1), rank)
        step += 1
        done[0] = rank == 0 and not asking.is_alive()
        torch.distributed.all_reduce(done)
        assert step < 100_000
    assert degrees_of(model) == "P=2 G=2 O=2"
    if rank == 0:
        answer, refused = answers
        assert answer.returncode == 0, answer
        assert refused.returncode == 1 and "does not change its tier" in refused.stderr, refused
        assert "P=2 G=2 O=2" in answer.stdout, answer
        assert (Path(folder) / "dial.sock").stat().st_mode & 0o777 == 0o600


def test_a_running_script_takes_requests(tmp_path: Path) -> None:
    run_ranks(takes_requests, 4, str(tmp_path))


def trains_two_models(rank: int, world_size: int, folder: str) -> None:
    """As a GAN does. One socket cannot mean both: it is that of the first."""
    tsm.init({"run": {"folder": folder}})
    models = [build(), build()]
    for step in range(3):
        for model, optimizer in models:
            train(model, optimizer, range(step, step + 1), rank)
    if rank == 0:
        assert (Path(folder) / "dial.sock").is_socket()


def test_two_models_in_one_run_folder(tmp_path: Path) -> None:
    run_ranks(trains_two_models, 2, str(tmp_path))


def chooses(rank: int, world_size: int, folder: str) -> None:
    tsm.init({"hybrid_shard_degree": "auto", "run": {"folder": folder}})
    model, optimizer = build()
    before = degrees_of(model)
    assert before == "P=4 G=4 O=4", "until the tuner knows better, what needs least memory"
    train(model, optimizer, range(60), rank)
    if rank == 0:
        record = (Path(folder) / "dial.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in record]
        decisions = [event["decision"] for event in events if "decision" in event]
        assert decisions and all(decision["why"] for decision in decisions), events[:5]
        asked = list(decisions[-1]["degrees"])
        assert [int(each[2:]) for each in degrees_of(model).split()] == asked


def test_the_automatic_choice_says_why(tmp_path: Path) -> None:
    run_ranks(chooses, 4, str(tmp_path))
