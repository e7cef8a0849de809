"""tsm.data.TokenDataset: one order of samples for every number of ranks, and what a checkpoint of it goes on from."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

import tesserae as tsm
from ranks import run_ranks

LENGTH = 4


def write(path: Path, tokens: Sequence[int], vocabulary: int = 10_000, **options: Any) -> str:
    writer = tsm.data.TokenWriter(str(path), vocabulary=vocabulary, **options)
    writer.add(array("I", tokens).tobytes())
    writer.finish()
    return str(path)


def counting(folder: Path, name: str, samples: int, first: int = 0) -> str:
    """Samples that their first token names."""
    return write(folder / name, range(first, first + samples * LENGTH + 1))


def firsts(tokens: torch.Tensor) -> list[int]:
    return tokens[:, 0].tolist()


# ---- ranks ----
def reads(
    rank: int, ranks: int, paths: Any, steps: int, config: dict[str, int], saved: str, load: bool
) -> list[list[int]]:
    """What every rank reads, by step; from where `saved` says, then saved there."""
    if config:
        tsm.init(config)
    dataset = tsm.data.TokenDataset(paths, length=LENGTH, batch=8 // (ranks // max(config.values(), default=1)), seed=3)
    if load:
        held = {"data": dataset}
        dcp.load(held, checkpoint_id=saved)
    batches = iter(dataset)
    read = [firsts(next(batches).tokens) for _ in range(steps)]
    if saved and not load:
        dcp.save({"data": dataset}, checkpoint_id=saved)
    return read


def in_order(by_rank: list[list[list[int]]]) -> list[int]:
    return [token for step in zip(*by_rank) for part in step for token in part]


@pytest.mark.parametrize("mixed", [False, True])
def test_the_order_is_the_same_for_every_number_of_ranks_and_goes_on_at_another(tmp_path: Path, mixed: bool) -> None:
    paths: Any = counting(tmp_path, "a.bin", 50)
    if mixed:
        paths = {paths: 3.0, counting(tmp_path, "b.bin", 20, first=1_000): 1.0}
    saved = str(tmp_path / "checkpoint")
    alone = reads(0, 1, paths, 12, {}, "", False)
    whole = in_order([alone])
    assert len(set(whole[:40])) == 40 and whole[:50] != sorted(whole[:50])
    assert in_order(run_ranks(reads, 4, paths, 5, {}, saved, False)) == whole[: 5 * 8]
    # At step 7 the first epoch is over.
    assert in_order(run_ranks(reads, 2, paths, 7, {}, saved, True)) == whole[5 * 8 :]
    if mixed:
        for begin in range(0, len(whole), 4):
            assert sum(token >= 1_000 for token in whole[begin : begin + 4]) == 1


def test_ranks_of_a_tensor_group_read_the_same(tmp_path: Path) -> None:
    path = counting(tmp_path, "a.bin", 50)
    by_rank = run_ranks(reads, 4, path, 3, {"tensor_parallel_degree": 2}, "", False)
    assert by_rank[0] == by_rank[1] and by_rank[2] == by_rank[3]
    assert in_order(by_rank[::2]) == in_order([reads(0, 1, path, 3, {}, "", False)])


def test_dist_gives_the_place_where_there_is_no_init(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    path = counting(tmp_path, "a.bin", 50)
    whole = firsts(next(iter(tsm.data.TokenDataset(path, length=LENGTH, batch=6))).tokens)
    parts = [
        firsts(next(iter(tsm.data.TokenDataset(path, length=LENGTH, batch=2, rank=rank, ranks=3))).tokens)
        for rank in range(3)
    ]
    assert sum(parts, []) == whole


# ---- state ----
def test_state_says_what_was_handed_out(tmp_path: Path) -> None:
    dataset = tsm.data.TokenDataset(counting(tmp_path, "a.bin", 50), length=LENGTH, batch=8, seed=3)
    batches = iter(dataset)
    next(batches), next(batches)
    state = dataset.state_dict()
    assert dataset.samples == state["samples"] == 16
    following = [firsts(next(batches).tokens) for _ in range(3)]
    dataset.load_state_dict(state)
    assert [firsts(next(batches).tokens) for _ in range(3)] == following, "a live iterator follows"
    other = tsm.data.TokenDataset(tmp_path / "a.bin", length=LENGTH, batch=4, seed=3)
    other.load_state_dict(state)
    assert firsts(next(iter(other)).tokens) == following[0][:4], "the batch may be another"


def test_the_state_of_other_data_is_refused(tmp_path: Path) -> None:
    path = counting(tmp_path, "a.bin", 50)
    state = tsm.data.TokenDataset(path, length=LENGTH, batch=8, seed=3).state_dict()
    other = tsm.data.TokenDataset(path, length=LENGTH, batch=8, seed=4)
    with pytest.raises(tsm.InvalidArgument, match=r"seed was 3 when the state was saved and is 4 now"):
        other.load_state_dict(state)
    longer = tsm.data.TokenDataset(path, length=2 * LENGTH, batch=8, seed=3)
    with pytest.raises(tsm.InvalidArgument, match=r"length was 4 .* is 8 now"):
        longer.load_state_dict(state)
    with pytest.raises(tsm.InvalidArgument, match="a state with epoch is none of a TokenDataset"):
        other.load_state_dict({"epoch": 1})
    assert other.samples == 0


def test_the_state_of_other_files_is_refused(tmp_path: Path) -> None:
    """Also of as many tokens, and of the same files in another order."""
    paths = [counting(tmp_path, "a.bin", 50), counting(tmp_path, "b.bin", 60)]
    state = tsm.data.TokenDataset(paths, length=LENGTH, batch=8, seed=3).state_dict()
    (tmp_path / "other").mkdir()
    moved = [shutil.copy(path, tmp_path / "other") for path in paths]
    tsm.data.TokenDataset(moved, length=LENGTH, batch=8, seed=3).load_state_dict(state)
    changed = write(tmp_path / "c.bin", [1] * (50 * LENGTH + 1))
    for files in (list(reversed(paths)), [changed, paths[1]]):
        other = tsm.data.TokenDataset(files, length=LENGTH, batch=8, seed=3)
        with pytest.raises(tsm.InvalidArgument, match="files was .* when the state was saved"):
            other.load_state_dict(state)
    del state["order"]["files"]  # as it was saved before states said so
    tsm.data.TokenDataset(paths, length=LENGTH, batch=8, seed=3).load_state_dict(state)


def prepared_by_accelerate(rank: int, world_size: int, path: str) -> str:
    from accelerate import Accelerator

    dataset = tsm.data.TokenDataset(path, length=LENGTH, batch=2)
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(dataset, batch_size=None))
    try:
        next(iter(loader))
    except tsm.InvalidArgument as error:
        return str(error)
    return "it reads"


def test_nobody_deals_out_what_one_rank_reads(tmp_path: Path) -> None:
    for found in run_ranks(prepared_by_accelerate, 2, counting(tmp_path, "a.bin", 50)):
        assert "DataLoaderDispatcher deals out what one rank reads" in found


# ---- batches ----
def test_targets_are_one_later_and_validation_is_held_out(tmp_path: Path) -> None:
    dataset = tsm.data.TokenDataset(counting(tmp_path, "a.bin", 50), length=LENGTH, batch=9, validation_fraction=0.1)
    assert dataset.epoch_samples == 45
    seen = set()
    for _, (tokens, targets) in zip(range(5), dataset):
        assert tokens.dtype == torch.int64 and tokens.shape == (9, LENGTH)
        assert torch.equal(targets, tokens + 1)
        seen |= set(firsts(tokens))
    assert seen == {LENGTH * sample for sample in range(45)}
    assert set(firsts(dataset.validation_batch(0).tokens)) == {LENGTH * sample for sample in range(45, 50)}
    with pytest.raises(tsm.InvalidArgument, match="nothing is held out"):
        tsm.data.TokenDataset(tmp_path / "a.bin", length=LENGTH, batch=1).validation_batch(0)


def test_packed_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [5, 0, 6, 6, 0, 7, 0, 7, 9], document_end=0)
    dataset = tsm.data.TokenDataset(path, length=8, batch=1, documents=True)
    batch = next(iter(dataset))
    assert dataset.document_end == 0
    assert batch.tokens.tolist() == [[5, 0, 6, 6, 0, 7, 0, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1, 0]]
    assert batch.documents.tolist() == [0, 2, 5, 7]
    assert next(iter(tsm.data.TokenDataset(path, length=8, batch=1))).tokens.equal(batch.tokens)
    plain = write(tmp_path / "b.bin", [1, 2, 3])
    with pytest.raises(tsm.InvalidArgument, match="documents=True, but the files end documents with"):
        tsm.data.TokenDataset(plain, length=2, batch=1, documents=True)
    with pytest.raises(tsm.InvalidArgument, match="document_end is 10000; the tokens are 0 to 9999"):
        tsm.data.TokenDataset(plain, length=2, batch=1, documents=True, document_end=10_000)


def packed_attention(rank: int, ranks: int, path: str) -> list[int]:
    tsm.init({"context_parallel_degree": 2})
    batch = next(iter(tsm.data.TokenDataset(path, length=8, batch=1, documents=True)))
    tokens = batch.tokens.clone()
    with tsm.context_parallel([tokens], [1], documents=batch.documents.tolist()) as sequence:
        assert sequence.length == 8
        return sequence.positions(torch.device("cpu")).tolist()


def test_documents_are_what_context_parallelism_takes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [5, 0, 6, 6, 0, 7, 0, 7, 9], document_end=0)
    assert sorted(sum(run_ranks(packed_attention, 2, path), [])) == list(range(8))


# ---- DataLoader ----
def test_in_a_dataloader(tmp_path: Path) -> None:
    path = counting(tmp_path, "a.bin", 50)
    direct = iter(tsm.data.TokenDataset(path, length=LENGTH, batch=8, seed=1))
    dataset = tsm.data.TokenDataset(path, length=LENGTH, batch=8, seed=1)
    for _, batch in zip(range(3), DataLoader(dataset, batch_size=None)):
        assert batch.tokens.equal(next(direct).tokens)
    assert dataset.samples == 24, "one batch was not fetched ahead"
    with pytest.raises(tsm.InvalidArgument, match=r"num_workers=2; take num_workers=0"):
        next(iter(DataLoader(dataset, batch_size=None, num_workers=2)))


# ---- files ----
def test_what_cannot_be_read_is_said_at_once(tmp_path: Path) -> None:
    def dataset(path: Any, **options: Any) -> tsm.data.TokenDataset:
        return tsm.data.TokenDataset(path, **({"length": LENGTH, "batch": 1} | options))

    plain = tmp_path / "plain.bin"
    plain.write_bytes(array("H", range(9)).tobytes())
    assert dataset(plain, format="uint16").tokens == 9
    with pytest.raises(tsm.InvalidArgument, match="has no header that says what is in it; give format"):
        dataset(plain)
    with pytest.raises(tsm.InvalidArgument, match="there is no .*missing"):
        dataset(tmp_path / "missing")
    with pytest.raises(tsm.InvalidArgument, match="the data has 9 tokens, too few"):
        dataset(plain, format="uint16", length=9)
    with pytest.raises(tsm.InvalidArgument, match="rank=1, ranks=None: give both"):
        dataset(plain, format="uint16", rank=1)
    with pytest.raises(tsm.InvalidArgument, match="vocabularies of 10000 and 300"):
        dataset({counting(tmp_path, "a.bin", 9): 1, write(tmp_path / "b.bin", range(99), vocabulary=300): 1})
    with pytest.raises(tsm.InvalidArgument, match="a weight is -1"):
        dataset({tmp_path / "a.bin": 1, (tmp_path / "a.bin", tmp_path / "a.bin"): -1})


def test_a_damaged_block_is_named_with_its_bytes(tmp_path: Path) -> None:
    path = Path(counting(tmp_path, "a.bin", 50))
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)
    dataset = tsm.data.TokenDataset(path, length=LENGTH, batch=1)
    with pytest.raises(tsm.Corruption, match=rf"{path}: bytes 64 to 466 \(tokens 0 on\)"):
        next(iter(dataset))
    path.write_bytes(content[:-7])
    with pytest.raises(tsm.Corruption, match="it is cut short"):
        tsm.data.TokenDataset(path, length=LENGTH, batch=1)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "x"])
def test_a_seed_that_is_none_is_named(seed: object, tmp_path: Path) -> None:
    with pytest.raises(tsm.InvalidArgument, match=f"seed={seed}: give an integer from 0"):
        tsm.data.TokenDataset(counting(tmp_path, "a.bin", 50), length=LENGTH, batch=8, seed=seed)
