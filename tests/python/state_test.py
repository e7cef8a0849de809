from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

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


def test_degrees_that_a_script_assigns_before_init_count() -> None:
    """As Amazon's example does where a flag says so."""
    state = tsm.state
    state.tensor_parallel_degree = 1
    assert state.tensor_parallel_degree == 1, "before tsm.init, too"
    with pytest.raises(tsm.InvalidArgument, match="context_parallel_degree: must be at least 1"):
        state.context_parallel_degree = 0
    tsm.init({"tensor_parallel_degree": 2, "expert_parallel_degree": 2})
    try:
        assert (state.tensor_parallel_degree, state.expert_parallel_degree) == (1, 2)
        state.tensor_parallel_degree = 1
        with pytest.raises(tsm.InvalidArgument, match=r"expert_parallel_degree is 2 since tsm.init"):
            state.expert_parallel_degree = 1
        tsm.init({"tensor_parallel_degree": 2, "expert_parallel_degree": 2})
    finally:
        tsm.uninstall()
    with pytest.raises(tsm.InvalidArgument, match="call tsm.init"):
        _ = state.tensor_parallel_degree


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


def saves_as_amazons_example(rank: int, world_size: int, folder: str, degree: int) -> None:
    """Its ranks of get_rep_rank() 0 save, over the model's group."""
    tsm.init({"hybrid_shard_degree": degree})
    torch.manual_seed(0)
    model = FSDP(nn.Linear(6, 5), device_id=torch.device("cpu"))
    ranker, group = tsm.state.ranker, model.process_group
    assert [rank] in ranker.get_rep_groups()
    with pytest.raises(tsm.InvalidArgument, match="9 is none of the job's 4 ranks"):
        ranker.get_rep_rank(9)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = {"model": model.state_dict()}
        if ranker.get_rep_rank(rank) == 0:
            checkpoint.save(saved, checkpoint_id=folder, process_group=group)
        dist.barrier()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        read = {"model": model.state_dict()}
        checkpoint.load(read, checkpoint_id=folder, process_group=group)
        model.load_state_dict(read["model"])
    with FSDP.summon_full_params(model):
        torch.manual_seed(0)
        torch.testing.assert_close(model.weight, nn.Linear(6, 5).weight)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_ranks_that_the_ranker_names_save_everything(tmp_path: Path, degree: int) -> None:
    run_ranks(saves_as_amazons_example, 4, str(tmp_path), degree)


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
