from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tesserae as tsm
from ranks import run_ranks
from tesserae.job import config


@pytest.fixture(autouse=True)
def clean() -> Any:
    yield
    tsm.uninstall()


def initialised(document: dict[str, Any]) -> Any:
    """As after tsm.init(document), without the FSDP class."""
    config.set_current(config.read(document))
    return tsm.state


def test_before_init_there_is_nothing_to_read() -> None:
    for name in ("hybrid_shard_degree", "rank", "world_size", "tp_rank", "rep_rank_process_group"):
        with pytest.raises(tsm.InvalidArgument, match=r"call tsm.init\(\) first"):
            getattr(tsm.state, name)


def test_the_configuration_is_there_after_init() -> None:
    state = initialised({"hybrid_shard_degree": 4, "random_seed": 9, "sm_activation_offloading": False})
    assert (state.hybrid_shard_degree, state.random_seed, state.sm_activation_offloading) == (4, 9, False)
    assert (state.tensor_parallel_degree, state.tp_size, state.tp_rank) == (1, 1, 0)
    assert (state.context_parallel_degree, state.expert_parallel_degree, state.activation_loading_horizon) == (1, 1, 2)


# Of the second of two tasks on a host.
SLURM = {
    "JOB_ID": "7", "STEP_ID": "0", "PROCID": "1", "LOCALID": "1", "NODEID": "0", "NTASKS": "2", "NNODES": "1",
    "TASKS_PER_NODE": "2", "JOB_NODELIST": "localhost", "STEP_NODELIST": "localhost", "STEP_NUM_TASKS": "2",
}  # fmt: skip


def test_before_init_process_group_ranks_are_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    state = initialised({})
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (state.rank, state.world_size) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (state.rank, state.world_size) == (3, 8)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SLURM.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert (state.rank, state.world_size, state.dp_rank, state.dp_size) == (1, 2, 1, 2)
    with pytest.raises(tsm.InvalidArgument, match=r"\[tsm.state.tp_process_group\].*init_process_group\(\) first"):
        _ = state.tp_process_group


def groups(rank: int, world_size: int, document: dict[str, Any]) -> tuple[list[int] | None, list[int], float | None]:
    state = initialised(document)
    assert (state.rank, state.world_size) == (rank, world_size)
    assert state.world_process_group is dist.group.WORLD
    replicas = state.rep_rank_process_group
    assert state.rep_rank_process_group is replicas, "made once"
    total = None
    if replicas is not None:
        value = torch.tensor(float(rank))
        dist.all_reduce(value, group=replicas)
        total = value.item()
    alone = dist.get_process_group_ranks(state.tp_process_group)
    return replicas and dist.get_process_group_ranks(replicas), alone, total


def test_replicas_hold_the_same_shard() -> None:
    assert run_ranks(groups, 4, {"hybrid_shard_degree": 2}) == [
        ([0, 2], [0], 2.0),
        ([1, 3], [1], 4.0),
        ([0, 2], [2], 2.0),
        ([1, 3], [3], 4.0),
    ]


def ranker(rank: int, world_size: int, document: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    state = initialised(document)
    groups = state.ranker.get_rep_groups()
    replicas = state.rep_rank_process_group
    assert ([rank] if replicas is None else dist.get_process_group_ranks(replicas)) in groups
    with pytest.raises(tsm.InvalidArgument, match="no rank 9"):
        state.ranker.get_rep_rank(9)
    return groups, [state.ranker.get_rep_rank(other) for other in range(world_size)]


@pytest.mark.parametrize(
    ("document", "groups", "ranks"),
    [
        ({"hybrid_shard_degree": 2}, [[0, 2], [1, 3]], [0, 0, 1, 1]),
        ({"hybrid_shard_degree": 1}, [[0, 1, 2, 3]], [0, 1, 2, 3]),
        ({"hybrid_shard_degree": 1, "tensor_parallel_degree": 2}, [[0, 2], [1, 3]], [0, 0, 1, 1]),
        ({"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}, [[0], [1], [2], [3]], [0, 0, 0, 0]),
        ({}, [[0], [1], [2], [3]], [0, 0, 0, 0]),
    ],
)
def test_the_ranker_knows_the_replicas_of_all_ranks(
    document: dict[str, Any], groups: list[list[int]], ranks: list[int]
) -> None:
    assert run_ranks(ranker, 4, document) == [(groups, ranks)] * 4


def test_replicas_of_raw_degrees_hold_the_same_optimizer_state() -> None:
    document = {"degrees": {"parameters": 1, "gradients": 2, "optimizer": 4}}
    assert run_ranks(groups, 4, document) == [([rank], [rank], float(rank)) for rank in range(4)]


def test_replicas_of_no_shard_are_all_ranks() -> None:
    assert run_ranks(groups, 2, {"hybrid_shard_degree": 1}) == [([0, 1], [rank], 1.0) for rank in range(2)]


def test_without_a_degree_the_script_decides() -> None:
    assert run_ranks(groups, 2, {}) == [(None, [rank], None) for rank in range(2)]


def two_jobs(rank: int, world_size: int, meeting: str) -> None:
    state = initialised({"hybrid_shard_degree": 1})
    first = state.tp_process_group
    dist.destroy_process_group()
    # Gloo's new connections were refused once while the other rank still closed its old ones.
    over = dist.FileStore(f"{meeting}-over", world_size)
    over.set(f"rank {rank}", "gone")
    over.wait([f"rank {other}" for other in range(world_size)])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    assert state.tp_process_group is not first
    dist.barrier(group=state.tp_process_group)


def test_a_second_job_in_one_process_has_groups_of_its_own(tmp_path: Path) -> None:
    run_ranks(two_jobs, 2, str(tmp_path / "meeting"))
