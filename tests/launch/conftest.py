"""A Slurm cluster on this machine for the tests that ask for one, and runs to compare with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launched import ROOT, TINY, Cluster, Environment, clean_environment, program, run

CLUSTER = ROOT / "tools" / "slurm_test_cluster.sh"
MISSING = 77


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One in which `tesserae`, `python` and `torchrun` are those that are tested, with one thread a rank."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "tesserae").symlink_to(program())
    for name, arguments in (("python", ""), ("torchrun", "-m torch.distributed.run ")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    package = program().parent.parent / "python"
    # Open MPI refuses to work for root unless it is told twice.
    may = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    python = {"PYTHONPATH": os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))}
    return clean_environment() | may | python | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="session")
def cluster(environment: Environment) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short, for the sockets in it
    command = [str(CLUSTER), "--folder", str(folder)]
    try:
        done = subprocess.run([*command, "up"], env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode == MISSING:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        exported = dict(re.findall(r"^export (\w+)=(.*)$", done.stdout, re.MULTILINE))
        # A name for itself has each node only where it is a host.
        yield Cluster(environment | exported, hosts=1 if "MASTER_ADDR" in exported else 2)
    finally:
        down = subprocess.run([*command, "down"], env=environment, capture_output=True, text=True, timeout=300)
        shutil.rmtree(folder, ignore_errors=True)
    assert down.returncode == 0, down.stderr


@pytest.fixture(scope="session")
def local_run(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The run folder of examples/tiny.json with --nproc, which was compared with one process elsewhere."""
    folder = tmp_path_factory.mktemp("local")

    def of(ranks: int) -> Path:
        out = folder / str(ranks)
        if not out.exists():
            run(program(), "train", TINY, "--nproc", str(ranks), "--set", f"run.folder={out}", environment=environment)
        return out

    return of
