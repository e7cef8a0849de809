"""Runs of `tesserae train` whose metrics a benchmark reads."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cases import ROOT
from launch import HOSTS, UNAVAILABLE, Unavailable

CONFIG = ROOT / "examples" / "python-source.json"
# "step 30: P=4 G=4 O=4 -> P=1 G=1 O=1 in 0.41 s, ..."
CHANGE = re.compile(r"step (\d+): P=\d+ G=\d+ O=\d+ -> P=\d+ G=\d+ O=\d+ in ([\d.]+) (s|ms|us|µs)")
SECONDS = {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}

Degrees = tuple[int, int, int]


@dataclass(frozen=True)
class TrainRun:
    steps: list[dict]  # the records of metrics.jsonl
    change_seconds: dict[int, float]  # by the step after which the degrees changed
    output: str
    summary: dict  # summary.json

    def layout(self, at: int) -> Degrees:
        p, g, o = self.steps[at]["degrees"]
        return p, g, o

    def changes(self) -> list[dict]:
        """Each: the last step before it, the layouts, and its seconds where the run told them."""
        return [
            {
                "step": self.steps[at]["step"],
                "from": self.layout(at),
                "to": self.layout(at + 1),
                "seconds": self.change_seconds.get(self.steps[at]["step"]),
            }
            for at in range(len(self.steps) - 1)
            if self.layout(at) != self.layout(at + 1)
        ]

    def step_ms(self, dropped: int = 1, begin: int = 0, end: int | None = None) -> dict[Degrees, float]:
        """The median step under each layout, of the steps from `begin` to `end` (exclusive), without the first
        `dropped` after each change."""
        times: dict[Degrees, list[float]] = {}
        since = 0
        for at, record in enumerate(self.steps[:end]):
            since = since + 1 if at > 0 and self.layout(at) == self.layout(at - 1) else 0
            if since >= dropped and at >= begin:
                times.setdefault(self.layout(at), []).append(record["step_ms"])
        return {layout: statistics.median(values) for layout, values in times.items()}


def newest_tesserae() -> Path | None:
    return max(ROOT.glob("build/*/cli/tesserae"), key=lambda file: file.stat().st_mtime, default=None)


def on_hosts(command: list[str], hosts: int, ranks: int, rate: str) -> list[str]:
    """A verb of `tesserae` that starts ranks: on this host, or on emulated ones with links of that rate."""
    if hosts == 1:
        return [*command, "--nproc", str(ranks)]
    return [str(HOSTS), "--hosts", str(hosts), "--ranks", str(ranks // hosts), "--rate", rate, "--", *command]


def train(
    program: Path,
    settings: dict[str, object],
    ranks: int,
    deadline: float,
    hosts: int = 1,
    rate: str = "",
    record: Path | None = None,
) -> TrainRun:
    """The demo's configuration with these keys changed and nothing but training in it. RuntimeError with what the run
    wrote if it fails; Unavailable if this machine cannot have several hosts. `record`: where a copy of its dial.jsonl
    goes."""
    quiet = {"train.eval_every": 0, "train.eval_batches": 0, "train.sample_tokens": 0, "run.log_every": 1_000_000}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "run")
        command = [str(program), "train", str(CONFIG)]
        for key, value in {**quiet, **settings, "run.folder": str(place)}.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        command = on_hosts(command, hosts, ranks, rate)
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=False)
        output = done.stdout + done.stderr
        if done.returncode == UNAVAILABLE:
            raise Unavailable(output.strip())
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{output}")
        lines = (place / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((place / "summary.json").read_text())
        if record:
            record.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(place / "dial.jsonl", record)
    seconds = {int(step): float(value) * SECONDS[unit] for step, value, unit in CHANGE.findall(output)}
    return TrainRun([json.loads(line) for line in lines], seconds, output, summary)


def schedule_of(layouts: list[Degrees], steps: int) -> list[dict]:
    """One layout after the other, `steps` steps each; the run begins with the first."""
    return [
        {"step": at * steps, "degrees": dict(zip(("parameters", "gradients", "optimizer"), layout, strict=True))}
        for at, layout in enumerate(layouts)
        if at > 0 and layout != layouts[at - 1]
    ]


def name_of(layout: Degrees) -> str:
    """A hybrid shard degree where there is one, else the three degrees."""
    p, g, o = layout
    return str(p) if p == g == o else f"P={p} G={g} O={o}"
