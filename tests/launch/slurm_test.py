"""Slurm itself (tools/slurm_test_cluster.sh): the scripts of examples/slurm as they are, what srun tells ranks, and
jobs that are requeued while they train."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launched import ROOT, ROUNDED, TINY, Cluster, Environment, expect_same_training, history, hosts, run, text, until

EXAMPLES = ROOT / "examples" / "slurm"
PAGE = ROOT / "docs" / "slurm.md"
CLUSTER = ROOT / "tools" / "slurm_test_cluster.sh"
LOSS = re.compile(r"^step +(\d+) +loss ([\d.]+)", re.MULTILINE)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)  # of a page
REQUEUED_STEPS = 150


def losses_of(written: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(written)}


# ---- what is started ----
def test_train(cluster: Cluster, local_run: Callable[[int], Path], tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "run"
    job = cluster.submit(log, EXAMPLES / "train.sbatch", TINY, "--set", f"run.folder={out}")
    cluster.wait(job, log)
    expect_same_training(out, local_run(4), ranks=4)
    assert hosts(out) == cluster.hosts


SRUN = {
    "blocks": ("--ntasks-per-node=2",),
    "round robin": ("--ntasks=4", "--distribution=cyclic"),  # ranks are ordered by host all the same
    "pmi2": ("--ntasks-per-node=2", "--mpi=pmi2"),  # sets MPICH's variables beside Slurm's
    "uneven": ("--ntasks=3", "--distribution=block"),
}


@pytest.mark.long
@pytest.mark.parametrize("options", SRUN.values(), ids=SRUN)
def test_srun(cluster: Cluster, local_run: Callable[[int], Path], options: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "run"
    cluster.run("srun", "--nodes=2", *options, "tesserae", "train", TINY, "--set", f"run.folder={out}")
    ranks = 3 if "--ntasks=3" in options else 4
    expect_same_training(out, local_run(ranks), ranks)
    assert hosts(out) == cluster.hosts


@pytest.mark.long
def test_ranks_of_one_node_without_srun(cluster: Cluster, local_run: Callable[[int], Path], tmp_path: Path) -> None:
    """The shell of a job script has the variables of a task, and is none."""
    log, script = tmp_path / "log", tmp_path / "alone.sbatch"
    script.write_text(f"#!/bin/bash\ntesserae train {TINY} --nproc 2 --set run.folder={tmp_path}/run\n")
    cluster.wait(cluster.submit(log, "--nodes=1", "--ntasks=2", script), log)
    expect_same_training(tmp_path / "run", local_run(2), ranks=2)


ONE_TASK = {"one node": ("--nodes=1", "--ntasks=1"), "each of two nodes": ("--nodes=2", "--ntasks-per-node=1")}


@pytest.mark.long
@pytest.mark.parametrize("options", ONE_TASK.values(), ids=ONE_TASK)
def test_one_task_a_node_starts_the_ranks_there(
    cluster: Cluster, local_run: Callable[[int], Path], options: tuple[str, ...], tmp_path: Path
) -> None:
    out, ranks = tmp_path / "run", 2 if "--nodes=1" in options else 4
    cluster.run("srun", *options, "tesserae", "train", TINY, "--nproc", "2", "--set", f"run.folder={out}")
    expect_same_training(out, local_run(ranks), ranks)
    assert hosts(out) == (cluster.hosts if ranks == 4 else 1)


@pytest.mark.long
def test_two_steps_of_a_job_at_a_time(cluster: Cluster, local_run: Callable[[int], Path], tmp_path: Path) -> None:
    """They share nodes and the job's number, and do not meet."""
    log, script = tmp_path / "log", tmp_path / "both.sbatch"
    train = f"srun --exact --ntasks 2 --ntasks-per-node 1 tesserae train {TINY} --set run.folder={tmp_path}"
    script.write_text(f"#!/bin/bash\n{train}/one &\none=$!\n{train}/two || exit\nwait $one\n")
    cluster.wait(cluster.submit(log, "--nodes=2", "--ntasks-per-node=2", script), log)
    for name in ("one", "two"):
        expect_same_training(tmp_path / name, local_run(2), ranks=2)


@pytest.mark.long
def test_torchrun_and_one_task_a_rank(cluster: Cluster, environment: Environment, tmp_path: Path) -> None:
    """A Python script by torchrun, on each node one, and by srun alone, as docs/slurm.md says."""
    [by_srun] = (block for block in BLOCK.findall(PAGE.read_text()) if "RANK=$SLURM_PROCID" in block)
    (tmp_path / "tasks.sbatch").write_text(by_srun.replace("train.py", '"$@"'))
    script = (ROOT / "examples" / "python" / "fully_shard.py", "--steps", "20")
    alone = losses_of(run("torchrun", "--standalone", "--nproc-per-node", "4", *script, environment=environment))
    assert sorted(alone) == [1, 10, 20]
    for launcher in (EXAMPLES / "torchrun.sbatch", tmp_path / "tasks.sbatch"):
        log = tmp_path / f"{launcher.name}.log"
        cluster.wait(cluster.submit(log, launcher, *script), log)
        # Gradients are rounded as the first losses are; the last is a thirtieth of them.
        assert losses_of(text(log)) == pytest.approx(alone, rel=ROUNDED, abs=ROUNDED)


# ---- what is ended, and goes on ----
def submit_long(cluster: Cluster, folder: Path) -> str:
    settings = (f"train.steps={REQUEUED_STEPS}", "checkpoint.every_steps=40", f"run.folder={folder / 'run'}")
    return cluster.submit(folder / "log", EXAMPLES / "requeue.sbatch", TINY, "--set", *settings)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    cluster.wait(submit_long(cluster, folder), folder / "log")
    assert len(history(folder / "run")) == REQUEUED_STEPS
    return folder / "run"


Command = tuple[str, ...]
ENDED_BY: dict[str, tuple[Callable[[str], Command], str]] = {
    "scontrol requeue": (lambda job: ("scontrol", "requeue", job), "SIGTERM"),
    # What --signal=B:USR1@120 sends two minutes before the time limit.
    "the warning": (lambda job: ("scancel", "--batch", "--signal=USR1", job), "SIGUSR1"),
    "a job of more importance": (
        lambda job: ("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"),
        "SIGTERM",
    ),
}


@pytest.mark.parametrize(
    ("end", "asked_by"),
    [
        pytest.param(*how, id=name, marks=() if name == "scontrol requeue" else pytest.mark.long)
        for name, how in ENDED_BY.items()
    ],
)
def test_a_requeued_job_ends_as_if_nobody_had_disturbed_it(
    cluster: Cluster, undisturbed: Path, end: Callable[[str], Command], asked_by: str, tmp_path: Path
) -> None:
    log, out = tmp_path / "log", tmp_path / "run"
    job = submit_long(cluster, tmp_path)

    def trains() -> bool:
        return (out / "metrics.jsonl").exists() and len(history(out)) >= 20

    until("20 steps", trains, lambda: text(log))
    cluster.run(*end(job))
    until("wait for the second start", lambda: cluster.job(job)["JobState"] == "PENDING", lambda: text(log))
    saved = history(out)
    assert 20 <= len(saved) < REQUEUED_STEPS, "it was to be ended in the middle"
    cluster.wait(job, log)

    assert cluster.job(job)["Restarts"] == "1"
    assert f"asked by {asked_by}" in text(log)
    assert f"resumed at step {len(saved)} from" in text(log), "no step is made twice"
    assert history(out) == history(undisturbed), "to the last bit"


# ---- the cluster itself ----
def processes_of(folder: Path) -> list[str]:
    """Those that have the cluster's configuration in their environment, ended ones that nobody waited for not among
    them."""
    sign = f"SLURM_CONF={folder}/slurm.conf".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if sign in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "comm").read_text().strip())
        except OSError:
            continue
    return found


def call(environment: Environment, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(CLUSTER), "--folder", str(folder), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_down_ends_jobs_and_leaves_nothing(cluster: Cluster, environment: Environment, tmp_path: Path) -> None:
    """Another one beside `cluster`, which stays."""
    folder = Path("/tmp") / f"slurm-{os.getpid()}"
    try:
        for verb in ("up", "up"):  # the second ends the first
            done = call(environment, folder, verb)
            assert done.returncode == 0, done.stderr
        here = environment | {"SLURM_CONF": str(folder / "slurm.conf")}
        run("sbatch", "--nodes=2", f"--output={tmp_path}/log", "--wrap", "srun sleep 1000", environment=here)
        until("job that runs", lambda: "sleep" in processes_of(folder), lambda: text(tmp_path / "log"))
        assert "slurmd" in processes_of(folder)
    finally:
        done = call(environment, folder, "down")
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert processes_of(folder) == []
    assert not folder.exists()
    assert call(environment, folder, "down").returncode == 0, "nothing to do is no error"
    assert call(environment, folder, "status").returncode == 1
    assert "node2" in cluster.run("sinfo", "--Node")


@pytest.mark.long
@pytest.mark.parametrize("after", [0.2, 0.5, 0.9])
def test_up_that_is_interrupted_leaves_nothing(cluster: Cluster, environment: Environment, after: float) -> None:
    folder = Path("/tmp") / f"slurm-{os.getpid()}"
    process = subprocess.Popen(
        [str(CLUSTER), "--folder", str(folder), "up"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(after)
        process.send_signal(signal.SIGTERM)
        status = process.wait(120)
        if status == 0:  # it was up by then
            assert call(environment, folder, "down").returncode == 0
        assert status in (0, 143, -signal.SIGTERM)
        until("end of all processes", lambda: not processes_of(folder), lambda: str(processes_of(folder)))
        assert not folder.exists()
    finally:
        process.kill()
        call(environment, folder, "down")


def test_missing_packages_are_named(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "id", "realpath", "env"):
        (tools / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool}"))
    done = call({"PATH": str(tools)}, tmp_path / "cluster", "up")
    assert done.returncode == 77, done.stderr
    assert re.search(r"missing: .*slurm-client", done.stderr)
    assert not (tmp_path / "cluster").exists()


def test_mistakes_are_said(tmp_path: Path) -> None:
    for words, said in (
        ((), "up, down, status or install?"),
        (("up", "--nodes", "0"), "--nodes 0"),
        (("up", "down"), "up or down?"),
        (("--node", "2"), "--node"),
        (("up", "--folder", "/tmp/a b"), "/tmp/a b"),
        (("up", "--folder", "/tmp/" + "a" * 90), "too long"),
    ):
        done = call(dict(os.environ), tmp_path, *words)
        assert (done.returncode, done.stdout) == (64, "")
        assert said in done.stderr


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"slurm-other-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "theirs").touch()
        assert call(dict(os.environ), folder, "down").returncode == 0
        assert (folder / "theirs").exists()
        done = call(dict(os.environ), folder, "up")
        assert done.returncode in (1, 77), done.stderr  # 77: packages are missing
        assert (folder / "theirs").exists()
    finally:
        shutil.rmtree(folder)
