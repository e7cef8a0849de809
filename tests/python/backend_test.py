"""torch.distributed's backend "tesserae" with real processes: what it computes is what Gloo computes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tesserae
from ranks import RankFailed, run_ranks

Op = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
ARITHMETIC = (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX)
BITS = (Op.BAND, Op.BOR, Op.BXOR)
REDUCTIONS = [
    *((dtype, op) for dtype in (*FLOATS, *INTEGERS, torch.bool) for op in ARITHMETIC),
    *((dtype, Op.AVG) for dtype in FLOATS),
    *((dtype, op) for dtype in (*INTEGERS, torch.bool) for op in BITS),
    *((dtype, op) for dtype in (torch.complex64, torch.complex128) for op in (Op.SUM, Op.AVG)),
]
EVERY = tuple({dtype for dtype, _ in REDUCTIONS})
MOVED = (*FLOATS, *INTEGERS, torch.bool)  # Gloo moves no complex numbers

Results = list[torch.Tensor]


def start(backend: str = "tesserae", **arguments: object) -> None:
    dist.init_process_group(backend, **arguments)  # type: ignore[arg-type]


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Other values on each rank, whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    values = torch.randint(0, 4, shape, generator=generator)
    if dtype.is_floating_point or dtype.is_complex or dtype.is_signed:
        values = values - 2
    return values.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.view(torch.uint8)


def assert_same(ours: Results, theirs: Results, what: object) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype, what
        assert torch.equal(mine, other), f"{what}: {mine.flatten()[:8]} against {other.flatten()[:8]}"


# ---- every operation, against Gloo ----
def all_reduce(group: dist.ProcessGroup, dtype: torch.dtype, op: Op, size: int) -> Results:
    tensor = sample((size,), dtype)
    dist.all_reduce(tensor, op, group)
    return [tensor]


def reduce(group: dist.ProcessGroup, dtype: torch.dtype, op: Op, size: int) -> Results:
    tensor = sample((size,), dtype)
    root = dist.get_world_size() - 1
    dist.reduce(tensor, root, op, group)
    return [tensor] if dist.get_rank() == root else []


def reduce_scatter_tensor(group: dist.ProcessGroup, dtype: torch.dtype, op: Op, size: int) -> Results:
    output = torch.zeros(size, dtype=dtype)
    dist.reduce_scatter_tensor(output, sample((size * dist.get_world_size(),), dtype), op, group)
    return [output]


def reduce_scatter(group: dist.ProcessGroup, dtype: torch.dtype, op: Op, size: int) -> Results:
    output = torch.zeros(size, dtype=dtype)
    dist.reduce_scatter(output, [sample((size,), dtype, i) for i in range(dist.get_world_size())], op, group)
    return [output]


def broadcast(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> Results:
    tensor = sample((size,), dtype)
    dist.broadcast(tensor, dist.get_world_size() - 1, group)
    return [tensor]


def all_gather(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> Results:
    outputs = [torch.zeros(size, 2, dtype=dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, sample((size, 2), dtype), group)
    return outputs


def all_gather_into_tensor(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> Results:
    output = torch.zeros(size * dist.get_world_size(), dtype=dtype)
    dist.all_gather_into_tensor(output, sample((size,), dtype), group)
    return [output]


def gather(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> Results:
    outputs = [torch.zeros(size, dtype=dtype) for _ in range(dist.get_world_size())]
    root = dist.get_world_size() - 1
    dist.gather(sample((size,), dtype), outputs if dist.get_rank() == root else None, root, group)
    return outputs


def scatter(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> Results:
    inputs = [sample((size,), dtype, i) for i in range(dist.get_world_size())]
    output = torch.zeros(size, dtype=dtype)
    dist.scatter(output, inputs if dist.get_rank() == 0 else None, 0, group)
    return [output]


def all_to_all_single(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> Results:
    output = torch.zeros(size * dist.get_world_size(), dtype=dtype)
    dist.all_to_all_single(output, sample((size * dist.get_world_size(),), dtype), group=group)
    return [output]


def all_to_all_uneven(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> Results:
    """Rank i sends size * (i + j) rows to rank j: some send nothing."""
    ranks, me = range(dist.get_world_size()), dist.get_rank()
    counts = [size * (me + other) for other in ranks]
    output = torch.zeros(sum(counts), 3, dtype=dtype)
    dist.all_to_all_single(output, sample((sum(counts), 3), dtype), counts, counts, group)
    return [output]


def coalesced(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> Results:
    world = dist.get_world_size()
    reduced = [sample((size,), dtype, 1), sample((size + 1,), dtype, 2)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in reduced:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    gathered = [torch.zeros(size * world, dtype=dtype), torch.zeros((size + 1) * world, dtype=dtype)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for output in gathered:
            dist.all_gather_into_tensor(output, sample((output.numel() // world,), dtype), group)
    manager.wait()
    return [*reduced, *gathered]


def messages(group: dist.ProcessGroup, dtype: torch.dtype, size: int) -> Results:
    """A ring, both directions, two tags that are received in the other order."""
    me, world = dist.get_rank(), dist.get_world_size()
    ahead, behind = (me + 1) % world, (me - 1) % world
    first, second = torch.zeros(size, dtype=dtype), torch.zeros(size + 1, dtype=dtype)
    works = [
        dist.isend(sample((size,), dtype, 1), ahead, group, tag=1),
        dist.isend(sample((size + 1,), dtype, 2), ahead, group, tag=2),
        dist.irecv(second, behind, group, tag=2),
        dist.irecv(first, behind, group, tag=1),
    ]
    for work in works:
        assert work is not None
        work.wait()
    anybody = torch.zeros(2, dtype=dtype)
    if me == 0:
        for _ in range(world - 1):
            assert dist.recv(anybody, group=group, tag=3) in range(1, world)
    else:  # a tag of its own: anybody's next message must not be taken for this one
        dist.send(torch.ones(2, dtype=dtype), 0, group, tag=3)
    swapped = torch.zeros(size, dtype=dtype)
    operations = [
        dist.P2POp(dist.isend, sample((size,), dtype), ahead, group),
        dist.P2POp(dist.irecv, swapped, behind, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [first, second, anybody, swapped]


REDUCERS: tuple[Callable[..., Results], ...] = (all_reduce, reduce, reduce_scatter_tensor, reduce_scatter)
MOVERS: tuple[Callable[..., Results], ...] = (
    *(broadcast, all_gather, all_gather_into_tensor, gather, scatter),
    *(all_to_all_single, all_to_all_uneven, coalesced, messages),
)


def every_operation(rank: int, world_size: int) -> int:
    start()
    ours, theirs = dist.group.WORLD, dist.new_group(backend="gloo")
    checked = 0
    for size, dtypes in (
        (1, EVERY),
        (1000, EVERY),
        (70_001, (torch.float32, torch.bfloat16)),
    ):  # the last: several blocks
        for run in REDUCERS:
            for dtype, op in REDUCTIONS:
                if dtype not in dtypes or (op == Op.AVG and dtype.is_complex and run is reduce):
                    continue  # torch's own front refuses the average of complex numbers in a reduce
                assert_same(run(ours, dtype, op, size), run(theirs, dtype, op, size), (run.__name__, dtype, op, size))
                checked += 1
        for run in MOVERS:
            for dtype in MOVED:
                if dtype not in dtypes or (run is coalesced and dtype == torch.bool):
                    continue  # as sums of bits Gloo's are no truth values
                assert_same(run(ours, dtype, size), run(theirs, dtype, size), (run.__name__, dtype, size))
                checked += 1
    return checked


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_operation_dtype_and_reduction_as_gloo(ranks: int) -> None:
    small = len(REDUCERS) * len(REDUCTIONS) - 2 + len(MOVERS) * len(MOVED) - 1
    cases = 2 * small + 2 * (len(REDUCERS) * (len(ARITHMETIC) + 1) + len(MOVERS))
    assert run_ranks(every_operation, ranks, init=False, deadline=300) == [cases] * ranks


def moves_of_layouts(group: dist.ProcessGroup, world_size: int) -> Results:
    transposed = sample((3, 2), torch.float32).t()
    whole = torch.zeros(3, 2 * world_size).t()
    pieces = [torch.zeros(3, 2).t() for _ in range(world_size)]
    piece = torch.zeros(3, 2).t()
    dist.all_gather_into_tensor(whole, transposed.t().reshape(2, 3), group)
    dist.all_gather(pieces, transposed, group)
    dist.reduce_scatter_tensor(piece, sample((2 * world_size, 3), torch.float32, 1), group=group)
    dist.all_reduce(transposed, group=group)
    return [whole, *pieces, piece, transposed]


def layouts(rank: int, world_size: int) -> None:
    start()
    ours, theirs = dist.group.WORLD, dist.new_group(backend="gloo")
    assert_same(moves_of_layouts(ours, world_size), moves_of_layouts(theirs, world_size), "layouts")
    behind = torch.full((8,), float(rank))
    dist.broadcast(behind[::2], world_size - 1)  # Gloo writes to the gaps
    assert behind.tolist() == [float(world_size - 1), float(rank)] * 4
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather_into_tensor(torch.zeros(0), empty)
    dist.reduce_scatter_tensor(empty, torch.zeros(0))
    dist.all_to_all_single(torch.zeros(0, 4), torch.zeros(0, 4))
    small, nothing = torch.zeros(0, 2), [torch.zeros(0, 2) for _ in range(world_size)]
    dist.all_gather(nothing, small)
    # Dtypes that Gloo does not have.
    short = torch.full((3,), rank, dtype=torch.int16)
    dist.all_reduce(short)
    assert short.tolist() == [sum(range(world_size))] * 3
    complexes = [torch.zeros(2, dtype=torch.complex64) for _ in range(world_size)]
    dist.all_to_all(complexes, [torch.full((2,), complex(rank, i)) for i in range(world_size)])
    assert [one.tolist() for one in complexes] == [[complex(i, rank)] * 2 for i in range(world_size)]
    eight = torch.zeros(2 * world_size).to(torch.float8_e4m3fn)
    dist.all_gather_into_tensor(eight, torch.full((2,), float(rank)).to(torch.float8_e4m3fn))
    assert eight.float().tolist() == [float(i // 2) for i in range(2 * world_size)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_layouts_and_empty_tensors(ranks: int) -> None:
    run_ranks(layouts, ranks, init=False)


def rounding(rank: int, world_size: int) -> None:
    """Sums that round: the same bits on all ranks, every time, and near those of Gloo."""
    start()
    theirs = dist.new_group(backend="gloo")
    for size in (5, 300_001):
        values = torch.randn(size, generator=torch.Generator().manual_seed(rank))
        sums = []
        for group in (None, None, theirs):
            total = values.clone()
            dist.all_reduce(total, group=group)
            sums.append(total)
        assert torch.equal(sums[0], sums[1])
        torch.testing.assert_close(sums[0], sums[2])
        every: list[torch.Tensor] = [torch.zeros(size) for _ in range(world_size)]
        dist.all_gather(every, sums[0], theirs)
        assert all(torch.equal(one, sums[0]) for one in every)


def test_sums_have_the_same_bits_on_all_ranks() -> None:
    run_ranks(rounding, 4, init=False)


# ---- asynchrony, groups, objects ----
def asynchronous(rank: int, world_size: int) -> None:
    start()
    tensors = [torch.full((100_000,), float(i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        assert work is not None and work.wait()
        assert work.is_completed() and work.is_success()
        assert tensor.unique().tolist() == [i * world_size]
    # A callback that waits for another operation of the group, as PowerSGD's does.
    first, second = torch.ones(4), torch.ones(4)

    def then(future: torch.futures.Future) -> torch.Tensor:
        inner = dist.all_reduce(second, async_op=True)
        assert inner is not None
        return future.value()[0] + inner.get_future().wait()[0]

    work = dist.all_reduce(first, async_op=True)
    assert work is not None
    assert work.get_future().then(then).wait().tolist() == [2.0 * world_size] * 4
    if rank == 0:
        time.sleep(2)
    late = dist.barrier(async_op=True)
    assert late is not None
    if rank != 0:
        with pytest.raises(tesserae.Timeout, match="has not ended after 200 ms"):
            late.wait(timedelta(milliseconds=200))
    late.wait()


def test_asynchronous_operations_and_futures() -> None:
    run_ranks(asynchronous, 2, init=False)


def groups(rank: int, world_size: int) -> None:
    start()
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    mine = odd if rank % 2 else even
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=mine)
    assert total.item() == (4 if rank % 2 else 2)
    dist.broadcast(total, 3 if rank % 2 else 2, group=mine)
    pair, pairs = dist.new_subgroups(2)
    assert len(pairs) == 2 and dist.get_world_size(pair) == 2
    both = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(both, torch.tensor([float(rank)]), group=pair)
    assert [int(x) for x in both] == [rank // 2 * 2, rank // 2 * 2 + 1]
    alone, _ = dist.new_subgroups(1)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=alone)
    dist.barrier(alone)
    assert value.item() == rank

    objects: list[object] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 100 * rank})
    assert [one["rank"] for one in objects] == list(range(world_size))  # type: ignore[index]
    gathered: list[object] | None = [None] * world_size if rank == 1 else None
    dist.gather_object(rank * rank, gathered, 1)
    assert gathered is None or gathered == [0, 1, 4, 9]
    sent = ["a", {"b": rank}]
    dist.broadcast_object_list(sent, 2)
    assert sent == ["a", {"b": 2}]
    got: list[object] = [None]
    dist.scatter_object_list(got, [f"to {i}" for i in range(world_size)] if rank == 0 else None, 0)
    assert got == [f"to {rank}"]

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(32.0).view(8, 4)
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    assert torch.equal(sharded.redistribute(mesh, [Shard(0), Shard(1)]).full_tensor(), whole)
    summed = funcol.all_reduce(torch.ones(3), "sum", mesh["shard"].get_group())
    assert funcol.wait_tensor(summed).tolist() == [2.0] * 3


def test_subgroups_objects_and_device_meshes() -> None:
    run_ranks(groups, 4, init=False)


# ---- trainers and checkpoints of torch ----
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24)) for _ in range(3)))


def train(kind: str, rank: int) -> list[float]:
    model = network()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach(), Op.AVG)
        losses.append(loss.item())
    return losses


def trains(rank: int, world_size: int, backend: str, kind: str) -> list[float]:
    start(backend)
    return train(kind, rank)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_trainers_reach_the_losses_of_gloo(kind: str, ranks: int) -> None:
    ours = run_ranks(trains, ranks, "cpu:tesserae", kind, init=False)
    theirs = run_ranks(trains, ranks, "gloo", kind, init=False)
    if ranks == 2:  # a sum of two has one order
        assert ours == theirs
    else:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


def checkpoints(rank: int, world_size: int, folder: str) -> None:
    start()
    mesh = init_device_mesh("cpu", (world_size,))
    model = network()
    fully_shard(model, mesh=mesh)
    state = {"model": model.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=folder)
    other = network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fully_shard(other, mesh=mesh)
    found = {"model": other.state_dict(), "step": 0}
    dcp.load(found, checkpoint_id=folder)
    assert found["step"] == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), other.state_dict()[name].full_tensor()), name


def test_distributed_checkpoints(tmp_path: Path) -> None:
    run_ranks(checkpoints, 2, str(tmp_path / "checkpoint"), init=False)


def engine(rank: int, world_size: int) -> list[float]:
    start()
    tesserae.init({"hybrid_shard_degree": 2})
    model = FullyShardedDataParallel(network(), use_orig_params=True)
    assert type(model).__module__.startswith("tesserae")
    loss = model(torch.ones(2, 24)).square().mean()
    loss.backward()
    return [loss.item()]


def test_scripts_of_the_engine_run_on_it() -> None:
    assert len(set(map(tuple, run_ranks(engine, 2, init=False)))) == 1


# ---- what goes wrong ----
def mistakes(rank: int, world_size: int) -> None:
    start()
    for wrong in (
        lambda: dist.all_reduce(torch.ones(2), Op.BAND),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), Op.AVG),
        lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2)),
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5)),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
    ):
        with pytest.raises((tesserae.InvalidArgument, ValueError, RuntimeError)):
            wrong()
    total = torch.ones(1)
    dist.all_reduce(total)  # the group is as it was
    assert total.item() == world_size


def test_mistakes_are_errors_at_once() -> None:
    run_ranks(mistakes, 2, init=False)


DISAGREEMENTS: dict[str, tuple[Callable[[int], object], str, str]] = {
    "sizes": (lambda rank: dist.all_reduce(torch.ones(10 + rank)), "all_reduce of 10 x Float", "all_reduce of 11 x"),
    "dtypes": (lambda rank: dist.all_reduce(torch.ones(4).to(FLOATS[rank])), "4 x Float", "4 x Double"),
    "reductions": (
        lambda rank: dist.all_reduce(torch.ones(4), (Op.SUM, Op.MAX)[rank]),
        "all_reduce of 4 x Float",
        r"all_reduce \(maximum\) of 4 x Float",
    ),
    "operations": (
        lambda rank: dist.barrier() if rank else dist.all_reduce(torch.ones(4)),
        "rank 0 called all_reduce of 4 x Float",
        "rank 1 called barrier",
    ),
    "roots": (lambda rank: dist.broadcast(torch.ones(4), rank), "broadcast of 4 x Float from member", "rank 1 called"),
    "gathers": (
        lambda rank: dist.gather(torch.ones(4 + rank), [torch.ones(4)] * 2 if rank == 0 else None, 0),
        "gather of 4 x Float to member 0",
        "gather of 5 x Float to member 0",
    ),
    "splits": (
        lambda rank: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [1, 3] if rank else [2, 2]),
        "rank 1 sends 1 elements to rank 0",
        "which expects 2 of it",
    ),
}


def disagree(rank: int, world_size: int, kind: str) -> None:
    start()
    call, first, second = DISAGREEMENTS[kind]
    began = time.monotonic()
    with pytest.raises(tesserae.Mismatch, match=first) as caught:
        call(rank)
        dist.barrier()  # who sends may not have noticed yet
    assert caught.match(second)
    assert time.monotonic() - began < 10
    with pytest.raises(tesserae.Mismatch):
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("kind", list(DISAGREEMENTS))
def test_disagreement_names_both_on_all_ranks(kind: str) -> None:
    run_ranks(disagree, 2, kind, init=False)


def loses_a_peer(rank: int, world_size: int, folder: str) -> None:
    start()
    pair = dist.new_group([1, 2])
    dist.barrier()
    if rank == 2:
        Path(folder, "died").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with pytest.raises(tesserae.PeerLost) as caught:
            dist.all_reduce(torch.ones(100_000))
        assert caught.value.ranks == (2,)
        assert time.time() - float(Path(folder, "died").read_text()) < float(os.environ.get("TESSERAE_NOTICE", "1"))
        if rank == 1:
            with pytest.raises(tesserae.PeerLost) as caught:
                dist.all_reduce(torch.ones(4), group=pair)
            assert caught.value.ranks == (2,) and "global ranks 1, 2" in str(caught.value)
        outcome = "noticed"
    except BaseException as error:
        outcome = repr(error)
    Path(folder, f"rank-{rank}").write_text(outcome)


def test_a_killed_peer_is_named_within_a_second(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 2 failed"):
        run_ranks(loses_a_peer, 3, str(tmp_path), init=False)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["noticed"] * 2


def waits_for_a_stopped_peer(rank: int, world_size: int, folder: str) -> None:
    start(timeout=timedelta(seconds=8))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with pytest.raises(tesserae.Timeout, match="deadline of 8000 ms") as caught:
            dist.all_reduce(torch.ones(4))
        outcome = repr(caught.value.silent)
    except BaseException as error:
        outcome = repr(error)
    Path(folder, "outcome").write_text(outcome)
    raise RuntimeError("seen")


def test_a_stopped_peer_is_named_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="seen"):
        run_ranks(waits_for_a_stopped_peer, 2, str(tmp_path), init=False)
    assert (tmp_path / "outcome").read_text() == "(1,)"


# ---- nothing is left behind ----
def works_until_killed(rank: int, world_size: int, folder: str) -> None:
    start()
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor)
    assert shared_by(os.getpid())
    Path(folder, f"rank-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    end = time.monotonic() + 0.05
    while rank != 0 or time.monotonic() < end:
        dist.all_reduce(tensor, Op.MAX)
    for file in Path(folder).iterdir():
        os.kill(int(file.read_text()), signal.SIGKILL)


def shared_by(process: int) -> list[str]:
    """What a process has mapped of anonymous shared memory."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [line for line in maps.splitlines() if "memfd:tesserae-" in line]


@pytest.mark.parametrize("jobs", [20, pytest.param(100, marks=pytest.mark.long)])
def test_killed_jobs_leave_no_memory_behind(jobs: int, tmp_path: Path) -> None:
    processes = []
    for job in range(jobs):
        folder = tmp_path / f"job-{job}"
        folder.mkdir()
        with pytest.raises(RankFailed, match="ended by signal SIGKILL"):
            run_ranks(works_until_killed, 2, str(folder), init=False)
        processes += [int(file.read_text()) for file in folder.iterdir()]
    assert len(processes) == 2 * jobs
    assert [lines for process in processes if (lines := shared_by(process))] == []  # nobody else ever maps it
    assert [name for name in os.listdir("/dev/shm") if "tesserae" in name] == []
