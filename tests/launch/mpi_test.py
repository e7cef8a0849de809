"""Open MPI's mpirun and MPICH's, on one host and inside of a job of Slurm, on two."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launched import ROOT, TINY, Cluster, Environment, expect_same_training, free_port, hosts, run, text

PAGE = ROOT / "docs" / "slurm.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)  # of a page
PACKAGES = {"openmpi": "openmpi-bin", "mpich": "mpich"}
SAYS = {"openmpi": "Open MPI", "mpich": "HYDRA"}
# More ranks than cores. Debian has both, by these names; elsewhere the one that is `mpirun`.
OPTIONS = {"openmpi": ("--oversubscribe", "--bind-to", "none"), "mpich": ("-bind-to", "none")}


def mpirun(kind: str) -> tuple[str, ...]:
    for name in (f"mpirun.{kind}", "mpirun"):
        if (found := shutil.which(name)) is None:
            continue
        version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60)
        if SAYS[kind] in version.stdout:
            # By its name: by a path, Open MPI puts its own folder first on the path of ranks, which may have a python3.
            return (name, *OPTIONS[kind])
    pytest.skip(f"missing: {PACKAGES[kind]} (Debian package)")


@pytest.mark.parametrize("kind", PACKAGES)
def test_on_one_host(kind: str, environment: Environment, local_run: Callable[[int], Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    # MPICH says nothing by which a port could be chosen.
    meet = {"MASTER_PORT": free_port()} if kind == "mpich" else {}
    command = (*mpirun(kind), "-n", "4", "tesserae", "train", TINY, "--set", f"run.folder={out}")
    run(*command, environment=environment | meet)
    expect_same_training(out, local_run(4), ranks=4)
    assert hosts(out) == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", PACKAGES)
def test_inside_of_slurm_on_two_hosts(
    kind: str, cluster: Cluster, local_run: Callable[[int], Path], tmp_path: Path
) -> None:
    """As docs/slurm.md says: mpirun asks Slurm for the nodes, and the ranks meet where MASTER_ADDR says."""
    [block] = (block for block in BLOCK.findall(PAGE.read_text()) if "mpirun tesserae" in block)
    log, out, script = tmp_path / "log", tmp_path / "run", tmp_path / "mpi.sbatch"
    script.write_text(block.replace("mpirun", " ".join(mpirun(kind))).replace("job.json", '"$@"'))
    cluster.wait(cluster.submit(log, script, TINY, "--set", f"run.folder={out}"), log)
    expect_same_training(out, local_run(4), ranks=4)
    assert hosts(out) == cluster.hosts, text(log)


@pytest.mark.long
def test_mpich_is_told_where_to_meet(environment: Environment) -> None:
    words = [*mpirun("mpich"), "-n", "2", "tesserae", "train", str(TINY)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "set MASTER_PORT to a free port" in done.stderr
