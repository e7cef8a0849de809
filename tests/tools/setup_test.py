"""tools/setup.sh, where checkouts and compilers are not called as usual."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What set-up reads, in a folder whose name has a space."""
    folder = tmp_path / "my code"
    for part in ("tools", "cmake"):
        shutil.copytree(ROOT / part, folder / part)
    for file in ROOT.glob("requirements*.txt"):
        shutil.copy(file, folder)
    return folder


def set_up(folder: Path, bin_folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """With this Python, and nothing to install packages with."""
    bin_folder.mkdir(exist_ok=True)
    for name in ("apt-get", "sudo"):
        (bin_folder / name).write_text("#!/bin/sh\nexit 1\n")
        (bin_folder / name).chmod(0o755)
    variables |= {"TESSERAE_PYTHON": sys.executable, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", folder / "tools/setup.sh"], env=os.environ | variables, capture_output=True, text=True
    )


def test_in_a_folder_with_a_space(checkout: Path, tmp_path: Path) -> None:
    done = set_up(checkout, tmp_path / "bin")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "build/setup/python").read_text().strip() == sys.executable


def test_the_compiler_that_is_named(checkout: Path, tmp_path: Path) -> None:
    """Where there is no other: `c++` fails."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/c++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/c++").chmod(0o755)
    done = set_up(checkout, tmp_path / "bin")
    assert done.returncode == 1
    assert "missing: compiler" in done.stderr or "installing g++" in done.stdout  # the latter as root
    done = set_up(checkout, tmp_path / "bin", CXX=compiler)
    assert done.returncode == 0, done.stdout + done.stderr
