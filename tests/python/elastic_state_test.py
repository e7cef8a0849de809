"""What of a process lives on from one epoch of tsm.elastic to the next: random numbers, degrees, listeners, an exit."""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path

from elastic_loop_test import Job, expect_nothing_left, memory  # noqa: F401

# Ranks are lost before anything is saved, after the dial has turned, after it has turned back, and while the other
# computes in its backward.
LOSES = textwrap.dedent("""\
    import os, signal, time
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    import tesserae as tsm

    schedule = [{"step": 4, "hybrid_shard_degree": 2}, {"step": 10, "hybrid_shard_degree": 1}]
    tsm.init({"hybrid_shard_degree": 1, "dial": {"schedule": schedule}})
    torch.manual_seed(3)  # at the top, as scripts do

    def train(job):
        os.write(1, f"epoch {job.epoch} rank {job.rank} of {job.world_size} process {os.getpid()}\\n".encode())
        asked = tsm.preemption()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        now = 0

        def lose(*_):
            if (job.epoch, now) in ((0, 0), (1, 6), (2, 11)):
                if job.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(2)  # it hears of that while it computes

        model[1][1].register_full_backward_hook(lose)
        for step in job.steps(model, optimizer, 13):
            now = step
            model(torch.full((2, 8), step / 13)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            asked.requested()
            if job.rank == 0:
                os.write(1, f"degree {step} {tsm.state.hybrid_shard_degree}\\n".encode())
        total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
        os.write(1, f"weights {total!r}\\n".encode())

    tsm.elastic(train)
""")

EXITS = textwrap.dedent("""\
    import os, sys
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    import tesserae as tsm

    def train(job):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in job.steps(model, optimizer, 8):
            if job.rank == 1 and step == 3:
                sys.exit(7)
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    tsm.elastic(train)
""")


def test_what_new_processes_cannot_know_is_the_same_on_all_ranks(tmp_path: Path, memory: set[str]) -> None:  # noqa: F811
    (tmp_path / "script.py").write_text(LOSES)
    job = Job(tmp_path, ["--nproc=2", "--replacements=3"], tmp_path / "script.py")
    assert job.status() == 0, job.text()
    assert job.epoch() == 3
    assert len({job.ranks(epoch)[0] for epoch in range(4)}) == 1, "rank 0 keeps its process"
    (tmp_path / "alone").mkdir()
    undisturbed = LOSES.replace("((0, 0), (1, 6), (2, 11))", "()")
    (tmp_path / "alone/script.py").write_text(undisturbed)
    alone = Job(tmp_path / "alone", ["--nproc=2"], tmp_path / "alone/script.py")
    assert alone.status() == 0, alone.text()
    for find in (r"weights (\S+)", r"degree (\d+) (\d+)"):
        assert set(re.findall(find, job.text())) == set(re.findall(find, alone.text())), job.text()
    assert len(set(re.findall(r"weights (\S+)", job.text()))) == 1
    expect_nothing_left(job, memory)


def test_a_rank_that_exits_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EXITS)
    begin = time.monotonic()
    job = Job(tmp_path, ["--nproc=2"], tmp_path / "script.py")
    assert job.status() == 7, job.text()
    assert time.monotonic() - begin < 150, "others waited for it until their deadline of 300 s"
