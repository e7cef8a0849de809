"""The ranks of a script's job, and their connections."""

from __future__ import annotations

import torch
import torch.distributed as dist

import tesserae as tsm
from ranks import run_ranks
from tesserae.job.fabrics import fabric_of


def several_jobs(rank: int, world_size: int) -> None:
    """A default group that is gone leaves its address, and its name, to the next one."""
    fabrics, groups = [], []
    for _ in range(8):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        fabrics.append(fabric_of(None, torch.device("cpu")))
        assert fabrics[-1] is fabric_of(None, torch.device("cpu"))
        tsm.init({"hybrid_shard_degree": 1})
        groups.append(tsm.state.rep_rank_process_group)
        assert groups[-1] is tsm.state.rep_rank_process_group
        dist.destroy_process_group()
    assert len(set(fabrics)) == len(set(groups)) == 8


def test_each_job_of_a_process_has_connections_and_groups_of_its_own() -> None:
    run_ranks(several_jobs, 1, init=False)
