"""tsm.data: token files as batches to train on, in one order for every number of ranks.

    dataset = tsm.data.TokenDataset({"web.bin": 0.8, "code.bin": 0.2}, length=4096, batch=8, seed=1)
    for tokens, targets in dataset:
        ...
    dcp.save({"model": ..., "data": dataset}, checkpoint_id=...)     # and dcp.load, at any number of ranks

What decides and what reads is C++ (tesserae/data/loader.h); this is its shape in torch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tesserae import _C
from tesserae.job import config as configuration
from tesserae.job.state import state
from tesserae.torch_compat.data import who_deals_out

__all__ = ["Batch", "PackedBatch", "TokenDataset", "TokenWriter"]

TokenWriter = _C.TokenWriter

Path = str | os.PathLike[str]


class Batch(NamedTuple):
    """int64 [batch, length], on the CPU."""

    tokens: Tensor
    targets: Tensor  # the same, one token later


class PackedBatch(NamedTuple):
    """With documents=True. `position_ids`: of each token in its document. `documents`: int64 [n], where documents begin
    in the batch as one row; of a batch that is one row tsm.context_parallel(documents=...) takes them."""

    tokens: Tensor
    targets: Tensor
    position_ids: Tensor
    documents: Tensor


class TokenDataset(IterableDataset):
    """Samples of `length` tokens in a shuffled order, each once an epoch, without end; of several paths with weights, a
    mixture in which every stretch from the beginning has the weights to less than one sample.

    `paths`: files of tokens, and folders with *.bin files; one, several (read as one body), or {path or paths: weight}.
    `batch`: samples of a rank. The ranks of a step share out consecutive samples, so the global batch alone decides
    what a step trains on. `format`: "tokens" (with a header: tesserae tokenize), "uint16", "uint32" or "text"; None:
    told by the first file's header. `vocabulary`: tokens are below it; uint32 needs it.
    `documents`: batches say where packed documents begin; `document_end` is the token after each, None: what the header
    says. `validation_fraction`: of each path the last part, for validation_batch() alone.

    `rank`, `ranks`: which of how many different batches; None: the data-parallel coordinates of tsm.state after
    tsm.init (the ranks of a tensor or context group read the same), else torch.distributed's, else 0 of 1.

    Iterate over it, or over DataLoader(dataset, batch_size=None). It is Stateful: its state_dict() says how many
    samples of all ranks were handed out, and it goes on from there at any number of ranks and any batch size. Every
    iterator continues where the dataset is. Used from one thread. Raises InvalidArgument, Corruption and IoError.
    """

    def __init__(
        self,
        paths: Path | Sequence[Path] | Mapping[Any, float],
        *,
        length: int,
        batch: int,
        seed: int = 0,
        documents: bool = False,
        document_end: int | None = None,
        validation_fraction: float = 0.0,
        format: str | None = None,
        vocabulary: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        super().__init__()
        if (rank is None) != (ranks is None):
            raise _C.InvalidArgument(f"[TokenDataset] rank={rank}, ranks={ranks}: give both, or neither")
        if not isinstance(seed, SupportsIndex) or not 0 <= operator.index(seed) < 2**64:
            raise _C.InvalidArgument(f"[TokenDataset] seed={seed}: give an integer from 0 to 2^64 - 1")
        weights = paths if isinstance(paths, Mapping) else {_hashable(paths): 1.0}
        self._sources = [(_open(_files(key), format, vocabulary), float(weight)) for key, weight in weights.items()]
        self._options = {
            "length": length,
            "batch": batch,
            "seed": seed,
            "validation_fraction": validation_fraction,
        }
        self._place = (rank, ranks) if rank is not None else None
        self._loaders: dict[tuple[int, int], _C.Loader] = {}
        self._document_end = self._end_of_documents(document_end) if documents else None
        self._samples = 0
        self._loader()  # what cannot be read is said here

    # ---- what there is ----
    @property
    def vocabulary(self) -> int:
        """How many tokens the tokenizer knows, as the header says: ids are below it."""
        return self._sources[0][0].vocabulary

    @property
    def document_end(self) -> int | None:
        """What the header says; None if it says nothing."""
        return self._sources[0][0].document_end

    @property
    def tokens(self) -> int:
        """Of all paths together, whatever their weights."""
        return sum(len(stream) for stream, _ in self._sources)

    @property
    def epoch_samples(self) -> int:
        """Of all paths, without what is held out."""
        return self._loader().training_samples

    @property
    def samples(self) -> int:
        """That were handed out to all ranks since the beginning."""
        return self._samples

    # ---- batches ----
    def __iter__(self) -> Iterator[Any]:  # Batch, with documents=True PackedBatch: whoever unpacks one knows which
        worker = get_worker_info()
        if worker is not None:
            raise _C.InvalidArgument(
                f"[TokenDataset] it was given to a DataLoader with num_workers={worker.num_workers}; take "
                "num_workers=0: reading a batch takes less time than sending it from another process, and "
                "state_dict() would not know what workers have read"
            )
        dealer = who_deals_out() if self._loader().global_batch > self._options["batch"] else None
        if dealer is not None:
            raise _C.InvalidArgument(
                f"[TokenDataset] {dealer} deals out what one rank reads, but each rank's dataset reads its own "
                "batches: iterate over it, or over its DataLoader, without accelerator.prepare"
            )
        return self._batches()

    def _batches(self) -> Iterator[Batch | PackedBatch]:
        while True:
            loader = self._loader()
            batch = loader.training_batch(self._samples)
            self._samples += loader.global_batch
            yield self._shaped(*batch)

    def validation_batch(self, index: int) -> Batch | PackedBatch:
        """Of this rank, from what is held out; the same at every call. Begins anew where there are no more."""
        return self._shaped(*self._loader().validation_batch(index))

    def _shaped(self, tokens: Tensor, targets: Tensor) -> Batch | PackedBatch:
        if self._document_end is None:
            return Batch(tokens, targets)
        return PackedBatch(tokens, targets, *_C.find_documents(tokens, self._document_end))

    # ---- state ----
    def state_dict(self) -> dict[str, Any]:
        """How many samples all ranks have read, and in which order: the same on every rank, whatever their number."""
        return {"samples": self._samples, "order": self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises InvalidArgument, and changes nothing, for the state of other data."""
        if set(state_dict) != {"samples", "order"} or not isinstance(state_dict["order"], dict):
            raise _C.InvalidArgument(
                f"[TokenDataset.load_state_dict] a state with {', '.join(map(str, state_dict)) or 'nothing'} is none "
                "of a TokenDataset; give what its state_dict() returned"
            )
        mine, other = self._order(), state_dict["order"]
        for key, value in mine.items():
            if key == "files" and key not in other:
                continue  # it was saved before states said so
            if other.get(key) != value:
                raise _C.InvalidArgument(
                    f"[TokenDataset.load_state_dict] {key} was {other.get(key)} when the state was saved and is "
                    f"{value} now: the samples would come in another order; make the dataset as it was, "
                    "or begin anew"
                )
        samples = state_dict["samples"]
        if not isinstance(samples, int) or samples < 0:
            raise _C.InvalidArgument(f"[TokenDataset.load_state_dict] samples is {samples}; it counts them from 0")
        self._samples = samples

    def _order(self) -> dict[str, Any]:
        """All that the order of samples is a function of."""
        return {
            "length": self._options["length"],
            "seed": self._options["seed"],
            "validation_fraction": self._options["validation_fraction"],
            "tokens": [len(stream) for stream, _ in self._sources],
            "files": self._loader().fingerprints,
            "weights": [weight for _, weight in self._sources],
        }

    # ----
    def _loader(self) -> _C.Loader:
        """Of this rank's place, which tsm.init and init_process_group may change."""
        place = self._place if self._place is not None else _place()
        if place not in self._loaders:
            rank, ranks = place
            self._loaders = {place: _C.Loader(self._sources, rank=rank, ranks=ranks, **self._options)}
        return self._loaders[place]

    def _end_of_documents(self, given: int | None) -> int:
        ends = {stream.document_end for stream, _ in self._sources} if given is None else {given}
        if len(ends) != 1 or None in ends:
            raise _C.InvalidArgument(
                f"[TokenDataset] documents=True, but the files end documents with {sorted(map(str, ends))}; "
                "give document_end, the token after each document"
            )
        end = ends.pop()
        assert end is not None
        if not 0 <= end < self.vocabulary:
            raise _C.InvalidArgument(f"[TokenDataset] document_end is {end}; the tokens are 0 to {self.vocabulary - 1}")
        return end


def _place() -> tuple[int, int]:
    if configuration.current() is not None:
        return state.dp_rank, state.dp_size
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _hashable(paths: Path | Sequence[Path]) -> Any:
    return paths if isinstance(paths, (str, os.PathLike)) else tuple(paths)


def _files(key: Any) -> list[str]:
    return [os.fspath(path) for path in ([key] if isinstance(key, (str, os.PathLike)) else key)]


def _open(files: list[str], format: str | None, vocabulary: int) -> _C.TokenStream:
    if format is None:
        first = next((file for file in files if os.path.isfile(file)), None)
        if first is not None and not _C.begins_as_token_file(first):
            raise _C.InvalidArgument(
                f"[TokenDataset] {first} has no header that says what is in it; give format: uint16 or uint32 for "
                "tokens (and vocabulary), text for text as bytes"
            )
        format = "tokens"
    return _C.TokenStream(files, format=format, suffixes=[] if format == "text" else [".bin"], vocabulary=vocabulary)
