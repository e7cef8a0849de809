"""tsm.compare_replicas: a bit changed in the memory of a rank is found in parameters and in the optimizer's state, with
FSDP1 and fully_shard."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import tesserae as tsm
from elastic_loop_test import Job, expect_nothing_left
from ranks import run_ranks


def trained(face: str, degree: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    tsm.init({"hybrid_shard_degree": degree})
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    if face == "fsdp1":
        for i, layer in enumerate(model):
            model[i] = FullyShardedDataParallel(layer, use_orig_params=True)
        model = FullyShardedDataParallel(model, use_orig_params=True)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def flip(tensors: Any) -> None:
    """The lowest bit of the first number that this rank has of them."""
    first = next(local(t) for t in tensors if local(t).numel() > 0)
    first.view(-1).view(torch.int32)[0] ^= 1


def differ_by_a_bit(
    rank: int, world_size: int, face: str, degree: int, where: str
) -> list[tuple[list[int], bool, str]]:
    model, optimizer = trained(face, degree)
    assert tsm.compare_replicas(model, optimizer) == []
    before = [local(p).clone() for p in model.parameters()]
    kept = {id(value) for state in optimizer.state.values() for value in state.values()}
    if rank == 1:
        parameters = list(model.parameters())
        if where == "state":  # a counter is not compared, and stops nothing
            optimizer.state[parameters[0]]["step"] += 1
        flip(parameters if where == "parameters" else [optimizer.state[p]["exp_avg"] for p in parameters])
    found = tsm.compare_replicas(model, optimizer)
    if rank != 1:
        assert all(torch.equal(local(p), b) for p, b in zip(model.parameters(), before, strict=True))
    assert kept == {id(value) for state in optimizer.state.values() for value in state.values()}, "what was shown stays"
    assert not tsm.compare_replicas(model, None) if where == "state" else tsm.compare_replicas(model, None)
    assert [report.here for report in found] == [rank in report.suspects for report in found]
    step(model, optimizer)
    return [(report.suspects, report.decided, report.text) for report in found]


@pytest.mark.parametrize("where", ["parameters", "state"])
@pytest.mark.parametrize("face", ["fsdp1", "fully_shard"])
def test_of_three_the_odd_one_is_named(face: str, where: str) -> None:
    (found,) = set(map(repr, run_ranks(differ_by_a_bit, 3, face, 1, where)))
    assert re.fullmatch(r"\[\(\[1\], True, 'rank 1: 0\.0\.(weight|bias)'\)\]", found), found


@pytest.mark.parametrize("face", ["fsdp1", "fully_shard"])
def test_of_two_nobody_knows_which(face: str) -> None:
    (found,) = set(map(repr, run_ranks(differ_by_a_bit, 4, face, 2, "parameters")))
    assert re.fullmatch(r"\[\(\[1, 3\], False, 'rank 1: (\S+); rank 3: \1'\)\]", found), found


def is_whole(rank: int, world_size: int, face: str) -> None:
    model, optimizer = trained(face, world_size)
    assert tsm.compare_replicas(model, optimizer) == [], "nobody has the same"
    tsm.uninstall()
    with pytest.raises(tsm.InvalidArgument, match="no module in the model that tesserae has sharded"):
        tsm.compare_replicas(nn.Linear(2, 2), None)


def test_where_nothing_has_a_replica_nothing_differs() -> None:
    run_ranks(is_whole, 2, "fully_shard")


# Three replicas; in step 7 a bit of the model changes on rank 2.
LOOP = textwrap.dedent("""\
    import os
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    import tesserae as tsm

    RANKS = {ranks}
    tsm.init({{"hybrid_shard_degree": 1}})

    def train(job):
        os.write(1, f"epoch {{job.epoch}} rank {{job.rank}} of {{job.world_size}} process {{os.getpid()}}\\n".encode())
        torch.manual_seed(1)
        model = nn.Linear(8, 8)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in job.steps(model, optimizer, 20, check_replicas_every=4):
            loss = model(torch.randn(6, 8, generator=torch.Generator().manual_seed(step))[job.samples]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == {at} and job.rank == RANKS - 1 and job.epoch == 0:
                next(model.parameters()).to_local().view(-1).view(torch.int32)[0] ^= 1
            if job.rank == 0:
                os.write(1, f"step {{step}} loss {{loss.item()!r}}\\n".encode())

    tsm.elastic(train, backend="tesserae", global_batch=6)
""")


def loop(folder: Path, *options: str, ranks: int, at: int, sharded: bool = True) -> Job:
    script = folder / "script.py"
    text = LOOP.format(ranks=ranks, at=at).replace("[job.samples]", "[job.samples.start : job.samples.stop]")
    script.write_text(text if sharded else text.replace("    fully_shard(model)\n", ""))
    return Job(folder, ["--nproc", str(ranks), *options], script)


def test_a_loop_replaces_the_rank_that_differs_and_loses_no_step(tmp_path: Path) -> None:
    memory = {path.name for path in Path("/dev/shm").glob("tesserae-elastic-*")}  # others keep it there
    alone, disturbed = tmp_path / "alone", tmp_path / "disturbed"
    alone.mkdir()
    disturbed.mkdir()
    undisturbed = loop(alone, ranks=3, at=-1)
    assert undisturbed.status() == 0, undisturbed.text()
    job = loop(disturbed, "--replacements", "1", ranks=3, at=7)
    assert job.status() == 0, job.text()
    assert "ReplicasDiffer: [Job.steps] after step 8 the state of replicas differs: rank 2: weight" in job.text()
    assert "3 ranks go on from step 8," in job.text()
    # Step 7 was made before the bit changed; what came after it is from whole replicas.
    assert job.losses() == undisturbed.losses()
    expect_nothing_left(job, memory)


def test_a_loop_of_two_replicas_ends(tmp_path: Path) -> None:
    job = loop(tmp_path, "--replacements", "1", ranks=2, at=6)
    assert job.status() != 0
    assert "Nothing says which are right. They agreed after step 4: begin again from what was" in job.text()


def test_a_model_that_is_not_sharded_has_nothing_to_compare(tmp_path: Path) -> None:
    job = loop(tmp_path, ranks=2, at=-1, sharded=False)
    assert job.status() != 0
    assert "check_replicas_every: there is no module in the model that tesserae has sharded" in job.text()
    assert not job.losses(), "before the first step"
