"""torch.distributed's backend "tesserae" with real processes: what it computes is what Gloo computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tesserae
from ranks import run_ranks

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


def coalesced_and_lists(rank: int, world_size: int) -> int:
    """Several tensors in one operation, and lists, are as one tensor after the other."""
    start()
    checked = 0
    for size in (1, 1000):
        for dtype, op in REDUCTIONS:
            wholes = [sample((length * world_size,), dtype, length) for length in (size, size + 1, 2 * size)]
            together = [torch.zeros(whole.numel() // world_size, dtype=dtype) for whole in wholes]
            with dist._coalescing_manager(async_ops=True) as manager:
                for output, whole in zip(together, wholes, strict=True):
                    dist.reduce_scatter_tensor(output, whole, op)
            manager.wait()
            alone = [torch.zeros_like(output) for output in together]
            for output, whole in zip(alone, wholes, strict=True):
                dist.reduce_scatter_tensor(output, whole, op)
            assert_same(together, alone, ("reduce_scatter_tensor_coalesced", dtype, op, size))
            checked += 1
        for dtype in EVERY:
            pieces = [sample((length, 2), dtype, length) for length in (size, size + 1)]
            lists = [[torch.zeros_like(piece) for piece in pieces] for _ in range(world_size)]
            dist.all_gather_coalesced(lists, pieces)
            for i, piece in enumerate(pieces):
                gathered = [torch.zeros_like(piece) for _ in range(world_size)]
                dist.all_gather(gathered, piece)
                assert_same([of_rank[i] for of_rank in lists], gathered, ("all_gather_coalesced", dtype, size))

            sent = [sample((size * (rank + other), 2), dtype, other) for other in range(world_size)]  # some are empty
            received = [torch.zeros_like(one) for one in sent]
            dist.all_to_all(received, sent)
            counts = [len(one) for one in sent]
            single = torch.zeros(sum(counts), 2, dtype=dtype)
            dist.all_to_all_single(single, torch.cat(sent), counts, counts)
            assert_same(received, list(single.split(counts)), ("all_to_all", dtype, size))
            checked += 2
    return checked


@pytest.mark.parametrize("ranks", [2, 3])
def test_coalesced_operations_and_lists_as_one_by_one(ranks: int) -> None:
    cases = 2 * (len(REDUCTIONS) + 2 * len(EVERY))
    assert run_ranks(coalesced_and_lists, ranks, init=False, deadline=120) == [cases] * ranks


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
