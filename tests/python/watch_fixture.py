"""Run folders as a job with a monitor leaves them, for tests of the page and for a look at it:

python tests/python/watch_fixture.py FOLDER [--ranks 8] [--slow 3 | --slow -1] [--steps 400] [--live SECONDS]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

STAGES = ["data", "forward", "gather", "backward", "reduce", "optimizer", "between"]
USUAL = [0.004, 0.052, 0.008, 0.104, 0.014, 0.021, 0.003]
LANES = ["compute", "gather", "reduce"]
VERBS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "exchange", "barrier"]
CATEGORIES = ["parameters", "gradients", "masters", "optimizer", "buffers", "shared", "program", "other"]
KINDS = ["tokens", "expert_tokens", "pairs"]
HOPS = [  # link, lane, verb, ranks, bytes a second
    ("shared memory", "gather", "all_gather", 4, 7.2e9),
    ("shared memory", "reduce", "reduce_scatter", 4, 4.1e9),
    ("tcp", "reduce", "exchange", 8, 1.15e9),
    ("shared memory", "control", "all_reduce", 4, 0.8e9),
]
MIB = 1 << 20
TOKENS = 4096


class Fixture:
    """A made-up job in `folder`; nothing is written before a method says so."""

    def __init__(self, folder: Path | str, ranks: int = 8, slow: int | None = 3, steps: int = 400, blocks: int = 6):
        self.folder = Path(folder)
        self.ranks, self.slow, self.steps = ranks, slow, steps
        self.units = ["model", *(f"blocks.{i}" for i in range(blocks))]
        self.random = random.Random(7)
        self.delay = 0.12
        (self.folder / "monitor").mkdir(parents=True, exist_ok=True)

    def replace(self, name: str, document: Any) -> None:
        path = self.folder / name
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(document))
        os.replace(fresh, path)

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        with (self.folder / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def slow_at(self, step: int) -> bool:
        return self.slow is not None and step > 0.6 * self.steps

    def stage_seconds(self, step: int) -> list[list[float]]:
        table = []
        for rank in range(self.ranks):
            row = [usual * self.random.uniform(0.97, 1.03) for usual in USUAL]
            if self.slow_at(step):
                if rank == self.slow:
                    row[3] += self.delay
                else:
                    row[4] += self.delay * self.random.uniform(0.9, 1.0)
            table.append([round(value, 5) for value in row])
        return table

    def config(self) -> None:
        self.replace("config.json", {"train": {"steps": self.steps}, "model": {"kind": "transformer"}})

    def metrics_lines(self, begin: int, end: int) -> list[dict[str, Any]]:
        lines = []
        for step in range(begin, end + 1):
            seconds = (0.206 + (self.delay if self.slow_at(step) else 0)) * self.random.uniform(0.97, 1.04)
            line = {
                "step": step,
                "loss": round(2.1 + 7.4 * math.exp(-step / (0.16 * self.steps)) + self.random.gauss(0, 0.05), 4),
                "lr": 3e-4,
                "grad_norm": round(1 + 3 / step, 4),
                "tokens_per_second": round(TOKENS / seconds, 1),
                "step_ms": round(1e3 * seconds, 2),
                "comm_ms": round(1e3 * 0.022, 2),
                "degrees": [2, 2, min(4, self.ranks)],
                "memory_bytes": 900 * MIB,
                "state_bytes": 540 * MIB,
            }
            if step % 50 == 0:
                line["val_loss"] = round(line["loss"] + 0.08, 4)
            lines.append(line)
        return lines

    def metrics(self, begin: int, end: int) -> None:
        self.append("metrics.jsonl", self.metrics_lines(begin, end))

    def now(self, step: int, state: str = "running", when: float | None = None, silent: int | None = None) -> None:
        ranks, is_slow = self.ranks, self.slow_at(step)
        per_host = max(1, ranks // 2) if ranks <= 16 else 8
        hosts = [rank // per_host for rank in range(ranks)]
        seconds = self.stage_seconds(step)
        busy = []
        for rank in range(ranks):
            behind = is_slow and rank == self.slow
            stage = "backward" if behind else "reduce" if is_slow else self.random.choice(STAGES[1:6])
            busy.append({
                "rank": rank,
                "step": step + 1,
                "stage": stage,
                "unit": self.random.choice(self.units[1:]) if stage != "optimizer" else "",
                "for": round(self.random.uniform(0.001, 0.09), 4) if rank != silent else 8.4,
                "age": round(self.random.uniform(0.05, 0.5), 2) if rank != silent else 8.2,
            })  # fmt: skip
        base = [64, 33, 130, 260, 44, 48, 112, 64]
        memory = [[int(value * MIB * self.random.uniform(0.985, 1.015)) for value in base] for _ in range(ranks)]
        traffic = [[64 * MIB, 66 * MIB, 3 * MIB if rank % 4 == 0 else MIB, 0, 0, 0] for rank in range(ranks)]
        slow = []
        if is_slow:
            slow.append({
                "rank": self.slow,
                "stage": "backward",
                "seconds": self.delay,
                "share": 0.367,
                "since": int(0.6 * self.steps) + 1,
                "why": "It waited for a processor 61 % of the time: another process uses the cores of host a.",
            })  # fmt: skip
        self.replace("monitor/now.json", {
            "format": 1,
            "time": time.time() if when is None else when,
            "state": state,
            "process": {"host": "a", "pid": 4242},
            "job": {
                "ranks": ranks,
                "hosts": hosts,
                "host_names": [chr(97 + i) if i < 26 else f"node-{i}" for i in range(hosts[-1] + 1)],
                "device": "cpu",
                "degrees": [2, 2, min(4, ranks)],
                "axes": {"tensor": 1, "context": 1, "expert": 1},
                "steps": self.steps,
                "source": "tesserae train",
                "parameters": 34_100_000,
                "tokens_per_step": TOKENS,
            },
            "stages": STAGES,
            "waits": ["gather", "reduce"],
            "step": step,
            "seconds": seconds,
            "usual": self.stage_seconds(step),
            "step_seconds": round(max(sum(row) for row in seconds), 4),
            "slow": slow,
            "ranks": busy,
            "memory": {
                "categories": CATEGORIES,
                "bytes": memory,
                "peak": [int(sum(row) * 1.14) for row in memory],
                "limit": [1024 * MIB] * ranks,
            },
            "traffic": {"verbs": VERBS, "bytes": traffic},
            "load": self.load(),
            "links": self.links(),
        })  # fmt: skip

    def load(self) -> dict[str, Any]:
        """Rank 1 has the experts that are chosen most."""
        tokens = [TOKENS // self.ranks] * self.ranks
        experts = [int(2 * of * self.random.uniform(0.9, 1.1)) for of in tokens]
        experts[1 % self.ranks] = 3 * tokens[0]
        pairs = [2_000_000 + 1000 * (rank % 3) for rank in range(self.ranks)]
        columns = [tokens, experts, pairs]
        return {
            "kinds": KINDS,
            "amounts": [list(row) for row in zip(*columns)],
            "most": [column.index(max(column)) for column in columns],
            "imbalance": [round(max(column) * self.ranks / sum(column), 4) for column in columns],
        }

    def links(self) -> dict[str, Any]:
        """Rank 6 has a bad network card."""
        bad = min(6, self.ranks - 1)
        table: dict[str, list[list[float]]] = {"calls": [], "bytes": [], "seconds": [], "speed": []}
        for rank in range(self.ranks):
            speeds = [usual * self.random.uniform(0.95, 1.05) for *_, usual in HOPS]
            if rank == bad:
                speeds[2] /= 3.5
            sent = [64 * MIB, 66 * MIB, 33 * MIB, MIB]
            table["calls"].append([14, 7, 7, 3])
            table["bytes"].append(list(sent))
            table["seconds"].append([round(1.3 * size / speed, 6) for size, speed in zip(sent, speeds)])
            table["speed"].append([int(speed) for speed in speeds])
        hops = [{"link": link, "lane": lane, "verb": verb, "ranks": ranks} for link, lane, verb, ranks, _ in HOPS]
        slowest = [min(range(self.ranks), key=lambda rank: table["speed"][rank][hop]) for hop in range(len(HOPS))]
        return {"hops": hops, **table, "slowest": slowest}

    def timeline(self, step: int) -> None:
        stage = STAGES.index
        ranks = []
        for rank, table in enumerate(self.stage_seconds(step)):
            blocks = len(self.units) - 1
            events: list[list[int]] = []
            at = 0.0

            def add(lane: int, name: str, unit: int, seconds: float, begin: float, into: list[list[int]]) -> None:
                into.append([lane, stage(name), unit, int(1e6 * begin), int(1e6 * seconds)])

            add(0, "data", -1, table[0], at, events)
            at += table[0]
            for block in range(blocks):
                wait = table[2] / blocks
                add(0, "gather", block + 1, wait, at, events)
                add(1, "gather", block + 1, 0.007, max(0.0, at - 0.005), events)
                add(0, "forward", block + 1, table[1] / blocks, at + wait, events)
                at += wait + table[1] / blocks
            for block in reversed(range(blocks)):
                add(0, "backward", block + 1, table[3] / blocks, at, events)
                at += table[3] / blocks
                add(2, "reduce", block + 1, 0.011, at, events)
            add(0, "reduce", 0, table[4], at, events)
            at += table[4]
            add(0, "optimizer", -1, table[5], at, events)
            at += table[5]
            add(0, "between", -1, table[6], at, events)
            ranks.append({"rank": rank, "seconds": round(at + table[6], 5), "events": events})
        self.replace("monitor/timeline.json", {
            "step": step, "lanes": LANES, "stages": STAGES, "units": self.units, "ranks": ranks
        })  # fmt: skip

    def events(self, step: int) -> None:
        begin = time.time() - 0.25 * step
        lines: list[dict[str, Any]] = [
            {"time": begin, "step": 0, "kind": "started", "text": f"{self.ranks} ranks on 2 hosts, P=1 G=2 O=4"},
        ]
        if step > 40:
            lines.append({
                "time": begin + 10,
                "step": 40,
                "kind": "dial",
                "text": "P=1 G=2 O=4 -> P=2 G=2 O=4 in 0.031 s, 96.2 MB moved (asked for by tesserae dial)",
            })  # fmt: skip
        for saved in range(100, step + 1, 100):
            lines.append({
                "time": begin + 0.25 * saved, "step": saved, "kind": "checkpoint", "text": f"step-{saved} is complete"
            })  # fmt: skip
        if self.slow_at(step):
            since = int(0.6 * self.steps) + 1
            lines.append({
                "time": begin + 0.25 * since,
                "step": since,
                "kind": "slow",
                "rank": self.slow,
                "text": f"rank {self.slow} takes 0.12 s longer than the others in backward: 37 % of a step",
            })  # fmt: skip
        self.append("monitor/events.jsonl", sorted(lines, key=lambda line: line["time"]))

    def write(self, step: int, state: str = "running", when: float | None = None) -> Fixture:
        """All files, as they are after that step."""
        self.config()
        self.metrics(1, step)
        self.timeline(step)
        self.events(step)
        self.now(step, state, when)
        return self


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--slow", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--live", type=float, default=0)
    arguments = parser.parse_args()
    slow = arguments.slow if arguments.slow >= 0 else None
    fixture = Fixture(arguments.folder, arguments.ranks, slow, arguments.steps)
    step = int(0.7 * arguments.steps)
    fixture.write(step)
    end = time.monotonic() + arguments.live
    while time.monotonic() < end and step < arguments.steps:
        time.sleep(0.5)
        step += 1
        fixture.metrics(step, step)
        fixture.timeline(step)
        fixture.now(step)


if __name__ == "__main__":
    main()
