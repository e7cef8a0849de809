"""tools/gpu_check.sh runs from end to end on the simulated device: what first runs on a GPU is known to work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tesserae import _C

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(_C.__file__).absolute().parents[2]  # the package lies in <build>/python

CHECKS = {
    1: {"lanes", "parity", "groups", "nccl", "train"},
    2: {"host_cost", "step_plain", "step_sharded", "python_plain", "python_fsdp1", "python_fsdp2", "python_tesserae",
        "python_tesserae2"},
    3: {"checkpoint", "checkpoint_dcp", "dial", "dial_restart", "offload_none", "offload_activations",
        "offload_state"},
    4: {"profile_fsdp2", "profile_tesserae2"},
}  # fmt: skip
NOT_HERE = {1: {"nccl", "train"}, 2: {"host_cost"}, 3: {"dial_restart"}}


def gpu_check(*words: str, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "tools/gpu_check.sh", *words],
        env={**os.environ, "TESSERAE_PYTHON": sys.executable, "OUT": str(out), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("part", CHECKS)
def test_a_part_runs_on_the_simulated_device(part: int, tmp_path: Path) -> None:
    done = gpu_check("--device", "sim", "--build", str(BUILD), str(part), out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / f"part{part}.json").read_text())
    checks = report["checks"]
    assert checks.keys() == CHECKS[part]
    assert {name for name, check in checks.items() if check["outcome"] == "not here"} == NOT_HERE.get(part, set())
    assert all(check["why"] for check in checks.values() if check["outcome"] == "not here")
    if part == 2:
        losses = {
            name: [round(loss, 4) for loss in run["losses"]]
            for name, run in report["measured"].items()
            if name != "python_fsdp2"
        }
        # Not looked at: torch's own FSDP2, whose losses become NaN for some delays there; why is not known.
        assert len({tuple(values) for values in losses.values()}) == 1, losses  # all train the same model
    if part == 3:
        none, activations, state = (report["measured"][f"offload_{what}"] for what in ("none", "activations", "state"))
        for run in (activations, state):
            assert [round(loss, 4) for loss in run["losses"]] == [round(loss, 4) for loss in none["losses"]]
            assert len(run["step_ms"]) == len(none["step_ms"])
        assert activations["activations"]["in_bytes_per_step"] > 0
        # Not looked at: the peak beside activations that leave, which two layers do not have.
        assert state["peak_device_bytes"] < 0.6 * none["peak_device_bytes"]
        assert [run["state_on_host"] for run in (none, activations, state)] == [False, False, True]
    if part == 4:
        assert {path.name for path in tmp_path.glob("trace_*")} == {
            f"trace_{m}.json.gz" for m in ("fsdp2", "tesserae2")
        }


def test_what_fails_is_told(tmp_path: Path) -> None:
    build = tmp_path / "build"  # without a program in it
    build.mkdir()
    done = gpu_check("--device", "sim", "--build", str(build), "1", out=tmp_path)
    assert done.returncode == 1
    lanes = json.loads((tmp_path / "part1.json").read_text())["checks"]["lanes"]
    assert lanes["outcome"].startswith("failed") and "test_device" in lanes["why"][-1]


def test_mistakes_are_refused(tmp_path: Path) -> None:
    for words in ([], ["5"], ["--device", "tpu", "1"]):
        done = gpu_check(*words, out=tmp_path)
        assert (done.returncode, "--device cuda|sim" in done.stderr) == (2, True), words
