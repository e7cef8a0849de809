"""The ranks of a script's job, and their connections."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import tesserae as tsm
from ranks import run_ranks
from tesserae.job import fabrics
from tesserae.job.fabrics import fabric_of


def several_jobs(rank: int, world_size: int) -> None:
    """A default group that is gone leaves its address, and its name, to the next one."""
    made, groups = [], []
    for _ in range(8):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        made.append(fabric_of(None, torch.device("cpu")))
        assert made[-1] is fabric_of(None, torch.device("cpu"))
        tsm.init({"hybrid_shard_degree": 1})
        groups.append(tsm.state.rep_rank_process_group)
        assert groups[-1] is tsm.state.rep_rank_process_group
        dist.destroy_process_group()
    assert len(set(made)) == len(set(groups)) == 8


def test_each_job_of_a_process_has_connections_and_groups_of_its_own() -> None:
    run_ranks(several_jobs, 1, init=False)


def waits_as_the_script_does(rank: int, world_size: int) -> None:
    cpu = torch.device("cpu")
    short, long = (dist.new_group(timeout=timedelta(seconds=seconds)) for seconds in (100, 7200))

    def deadlines(group: dist.ProcessGroup) -> list[float]:
        keys = {"connect_deadline_seconds": 60.0, "deadline_seconds": 300.0}
        return [fabrics._deadline(key, default, group, cpu) for key, default in keys.items()]

    assert (deadlines(short), deadlines(long)) == ([100.0, 300.0], [7200.0, 7200.0])
    tsm.init()
    assert (deadlines(short), deadlines(long)) == ([100.0, 300.0], [7200.0, 7200.0])
    tsm.uninstall()
    tsm.init({"run": {"deadline_seconds": 7}})
    assert (deadlines(short), deadlines(long)) == ([100.0, 7.0], [7200.0, 7.0])


def test_ranks_wait_for_each_other_as_long_as_the_scripts_group() -> None:
    run_ranks(waits_as_the_script_does, 2)


FORKS = """
    import gc, multiprocessing, sys, time
    import torch, torch.distributed as dist
    import tesserae as tsm
    from tesserae.job import fabrics
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    dist.init_process_group("gloo")
    tsm.init({})
    model = FSDP(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    tsm.checkpoint.async_save(sys.argv[1], model, step=1)
    model(torch.ones(2, 4)).sum().backward()

    def use_and_drop():
        global model
        try:
            model(torch.ones(2, 4))
        except tsm.CommError as error:
            assert "was forked from a rank" in str(error), error
        else:
            raise AssertionError("the child trained")
        del model
        fabrics.leave()
        gc.collect()

    # Ends without the end of an interpreter, in which torch's own Gloo group would join threads that are not there.
    child = multiprocessing.get_context("fork").Process(target=use_and_drop)
    child.start()
    child.join(60)
    assert child.exitcode == 0, child.exitcode
    time.sleep(1.5)  # so long that a goodbye of the child would be heard
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    assert tsm.checkpoint.maybe_finalize_async_calls() == [0]
    dist.destroy_process_group()
    print("trained on")
"""


def test_a_forked_child_of_a_rank_harms_nobody(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(textwrap.dedent(FORKS))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path / "c")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("trained on") == 2
    assert (tmp_path / "c" / "step-1").is_dir()
