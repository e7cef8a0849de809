"""What each rank of a script does: tsm.metrics, RUN/monitor/, with FSDP1 and fully_shard."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

import tesserae as tsm
from ranks import run_ranks
from tesserae.monitor import watching

STEPS = 40
STAGES = ["data", "forward", "gather", "backward", "reduce", "optimizer", "agree", "between"]


class Slow(torch.utils.data.Dataset):
    """Batches of which each takes a while to read on one rank, from step 20 on."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index >= 20:
            time.sleep(0.2)
        return torch.full((8, 64), float(index))


def train(rank: int, ranks: int, face: str, folder: str) -> dict[str, Any]:
    tsm.init({"run": {"folder": folder}, "monitor": {"every_seconds": 0.05}})
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    if face == "FSDP1":
        model = FullyShardedDataParallel(model)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in DataLoader(Slow(rank), batch_size=None):
        time.sleep(0.02)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # an evaluation is no step
            model(batch)
    time.sleep(0.5)
    seen = tsm.metrics()
    tsm.uninstall()
    with pytest.raises(tsm.InvalidArgument, match="nothing is watched"):
        tsm.metrics()
    return seen


@pytest.mark.parametrize("face", ["FSDP1", "fully_shard"])
def test_rank_0_knows_what_all_ranks_do_and_who_is_slow(face: str, tmp_path: Path) -> None:
    seen, other = run_ranks(train, 2, face, str(tmp_path))
    assert seen["stages"] == STAGES
    assert seen["job"]["source"] == "python"
    assert seen["job"]["degrees"] == [2, 2, 2]
    # The last step ends where another would begin.
    assert seen["step"] == STEPS - 1
    assert len(seen["seconds"]) == 2
    data = STAGES.index("data")
    assert seen["usual"][1][data] > 0.15 > seen["usual"][0][data]
    assert seen["memory"]["bytes"][0][seen["memory"]["categories"].index("optimizer")] >= 2 * 4 * 4 * 64 * 65 / 2
    assert other["step"] == STEPS - 1, "a rank knows of itself"
    assert len(other["seconds"]) == 1

    folder = tmp_path / "monitor"
    now = json.loads((folder / "now.json").read_text())
    assert now["state"] == "ended"
    assert now["how"] == "done"
    timeline = json.loads((folder / "timeline.json").read_text())
    assert len(timeline["ranks"]) == 2
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    named = [event for event in events if event["kind"] == "slow" and event["rank"] == 1 and event["step"] >= 20]
    assert any(" in data" in event["text"] for event in named), events


def reports_seldom(rank: int, ranks: int) -> str:
    with pytest.raises(tsm.InvalidArgument) as raised:
        tsm.init({"monitor": {"enabled": True, "every_seconds": 5}})
    return str(raised.value)


def test_ranks_tell_of_themselves_before_they_count_as_silent() -> None:
    for text in run_ranks(reports_seldom, 2):
        assert "monitor.every_seconds" in text and "at most 2" in text


def without(rank: int, ranks: int) -> str:
    tsm.init({"monitor": {"enabled": False}})
    with pytest.raises(tsm.InvalidArgument, match="run folder|run.*folder") as raised:
        tsm.metrics()
    return str(raised.value)


def test_without_a_run_folder_nothing_is_watched_unless_asked() -> None:
    for text in run_ranks(without, 2):
        assert '"monitor": {"enabled": true}' in text


def asked(rank: int, ranks: int) -> dict[str, Any]:
    tsm.init({"monitor": {"enabled": True, "every_seconds": 0.05}})
    with pytest.raises(tsm.InvalidArgument, match="no training forward has begun yet"):
        tsm.metrics()
    model = FullyShardedDataParallel(nn.Linear(8, 8))
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        time.sleep(0.05)
    time.sleep(0.3)
    return tsm.metrics()


def test_without_a_folder_metrics_are_there_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = run_ranks(asked, 2)[0]
    assert seen["step"] == 3
    assert list(tmp_path.iterdir()) == []


def reads_tokens(rank: int, ranks: int, face: str) -> dict[str, Any]:
    tsm.init({"monitor": {"enabled": True, "every_seconds": 0.05}})
    model: nn.Module = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32))
    model = FullyShardedDataParallel(model) if face == "FSDP1" else fully_shard(model)
    for step in range(6):
        # As many in each step but for the last, which is not over.
        model(torch.zeros(4 + rank, 10 if step < 5 else 20, dtype=torch.int64)).sum().backward()
        with torch.no_grad():  # an evaluation is no step
            model(torch.zeros(64, 64, dtype=torch.int64))
        time.sleep(0.05)
    time.sleep(0.3)
    seen = tsm.metrics()
    tsm.uninstall()
    return seen


@pytest.mark.parametrize("face", ["FSDP1", "fully_shard"])
def test_rank_0_knows_who_has_most_to_do_and_what_links_carry(face: str) -> None:
    seen = run_ranks(reads_tokens, 2, face)[0]
    load = seen["load"]
    assert load["kinds"] == ["tokens", "expert_tokens", "pairs"]
    assert seen["step"] == 5
    assert [row[0] for row in load["amounts"]] == [40, 50]
    assert load["most"] == [1, None, None]
    assert load["imbalance"] == [pytest.approx(50 / 45, abs=1e-5), None, None]
    links = seen["links"]
    # Gathered parameters have one copy that all ranks of the host read: gradients are what is sent.
    (hop,) = [i for i, hop in enumerate(links["hops"]) if hop["verb"] == "reduce_scatter"]
    assert links["hops"][hop] == {"link": "shared memory", "lane": "reduce", "verb": "reduce_scatter", "ranks": 2}
    for rank in range(2):
        assert links["bytes"][rank][hop] > 0 and links["speed"][rank][hop] > 0
    assert links["slowest"][hop] in (0, 1)


def test_tokens_are_those_that_the_mask_leaves() -> None:
    """Of a batch of Hugging Face's, and of models of something else."""
    ids, mask = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    mask[0, 5:] = 0
    model = nn.Linear(2, 2)
    for args, kwargs, expected in [
        ((), {"input_ids": ids, "attention_mask": mask}, 13),
        (({"attention_mask": mask, "input_ids": ids, "labels": ids},), {}, 13),
        ((torch.zeros(2, 8), ids), {}, 16),
        ((torch.zeros(2, 8),), {"step": 3}, 0),
    ]:
        assert watching._tokens_of(model, args, kwargs) == expected  # type: ignore[arg-type]


def asks_for_stacks(rank: int, ranks: int, folder: str) -> list[str]:
    tsm.init({"run": {"folder": folder}, "monitor": {"every_seconds": 0.05}})
    model = FullyShardedDataParallel(nn.Linear(8, 8))
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
    if rank != 0:
        wait_here(8.0)  # in C, with the lock of Python let go, as in a collective
        return []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/monitor.sock")
        connection.sendall(b'{"ask": "stacks"}\n')
        connection.settimeout(60)
        said = connection.makefile().readlines()
    assert json.loads(said[-1])["silent"] == []
    return [Path(file).read_text() for file in json.loads(said[-1])["files"]]


def wait_here(seconds: float) -> None:
    time.sleep(seconds)


def test_stacks_show_pythons_frames_and_those_of_cpp(tmp_path: Path) -> None:
    first, second = run_ranks(asks_for_stacks, 2, str(tmp_path))[0]
    assert "asks_for_stacks" in first
    assert "wait_here" in second
    for text in (first, second):
        assert "tesserae::monitor::Monitor::run" in text
