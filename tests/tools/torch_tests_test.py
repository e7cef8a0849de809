"""tools/torch_tests.py on a checkout that has one file of tests: what only torch passes is named, and fails it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import os

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest
from torch.testing._internal.common_utils import TestCase, run_tests

ended = False


class TestEnds(TestCase):
    def read(self):  # as where tests share their processes, which end with the first that fails
        global ended
        if ended or os.environ["TORCH_TESTS_ENGINE"] == "tesserae":
            ended = True
            raise AttributeError("it is private")

    def test_1_reads(self):
        self.read()

    def test_2_reads(self):
        self.read()

    def test_3_does_not(self):
        assert not ended


class TestSmall(FSDPTest):
    @property
    def world_size(self):
        return torch.cuda.device_count()

    def train(self):
        model = FSDP(torch.nn.Linear(64, 64).cuda(), device_id=self.rank)
        model(torch.ones(2, 64, device="cuda")).sum().backward()
        return model

    @skip_if_lt_x_gpu(2)
    def test_trains(self):
        assert self.world_size == 2
        assert any(parameter.grad.any() for parameter in self.train().parameters() if parameter.numel())

    @skip_if_lt_x_gpu(2)
    def test_reads_what_is_private(self):
        self.train()._handle.flat_param._full_param_padded

    @skip_if_lt_x_gpu(2)
    def test_wants_a_device(self):
        torch.cuda.memory_stats()["allocated_bytes.all.current"]


if __name__ == "__main__":
    run_tests()
"""


def torch_tests(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools/torch_tests.py", *words, "--out", folder / "out.json"],
        capture_output=True,
        text=True,
        env=os.environ | {"CI": ""} | environment,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "test/distributed/fsdp"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(TESTS)
    return tmp_path


def test_what_only_torch_passes_is_named(checkout: Path) -> None:
    done = torch_tests(checkout, str(checkout), "-k", "TestSmall")
    assert "| test_small.py | 2 | 1 |" in done.stdout, done.stdout + done.stderr
    assert "FAILED: test_small.py::TestSmall::test_reads_what_is_private\n    AttributeError" in done.stdout
    assert done.returncode == 1
    outcomes = json.loads((checkout / "out.json").read_text())
    assert {test.rpartition("::")[2]: line["outcome"] for test, line in outcomes["torch"].items()} == {
        "test_trains": "passed",
        "test_reads_what_is_private": "passed",
        "test_wants_a_device": "failed",
    }


def test_what_failed_after_another_runs_once_more_alone(checkout: Path) -> None:
    done = torch_tests(checkout, str(checkout), "-k", "TestEnds")
    assert "| test_small.py | 3 | 1 |" in done.stdout, done.stdout + done.stderr
    for number in (1, 2):
        assert f"TestEnds::test_{number}_reads\n    AttributeError: it is private" in done.stdout


def test_without_tesserae_nothing_passes_on_it(checkout: Path) -> None:
    broken = checkout / "broken/tesserae"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('not built')\n")
    done = torch_tests(checkout, str(checkout), "-k", "trains", PYTHONPATH=str(broken.parent))
    assert "| test_small.py | 1 | 0 |" in done.stdout, done.stdout + done.stderr
    assert "tesserae: test_small.py could not run: ImportError: not built" in done.stderr
    assert done.returncode == 1


def test_a_folder_without_tests_is_said(tmp_path: Path) -> None:
    done = torch_tests(tmp_path, str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no such tests in" in done.stderr
