"""Documents of text files, JSON lines and Parquet, a batch at a time, and the tokens of a batch: what
`tesserae tokenize` does in its workers.

The reader makes batches of about BATCH_BYTES, in the order of the input, and parses nothing: lines travel as they are.
encode() parses and tokenizes a batch. So memory is bounded by the batches under way (and by the largest document), and
what comes out does not depend on who encodes which batch.
"""

from __future__ import annotations

import array
import gzip
import importlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from tesserae import _C

BATCH_BYTES = 1 << 20
KINDS = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".json.gz": "jsonl",
    ".parquet": "parquet",
}


@dataclass(frozen=True)
class Input:
    path: Path
    kind: str  # "text", "jsonl" or "parquet"
    size: int  # in bytes, as it lies there


@dataclass(frozen=True)
class Batch:
    """`items`: the bytes of documents or lines, or strings. `places`: the file of each, or the one file of all."""

    kind: str
    items: list[Any]
    places: list[str]
    first: int  # of the file: line or row of the first item, from 1
    read: int  # bytes of input that it took, for the progress

    def place(self, index: int) -> str:
        if self.kind == "text":
            return self.places[index]
        return (
            f"{self.places[0]}:{self.first + index}"
            if self.kind == "jsonl"
            else (f"{self.places[0]}, row {self.first + index}")
        )


@dataclass(frozen=True)
class Encoded:
    tokens: bytes  # uint32
    documents: int
    skipped: list[str]  # why, of documents that cannot be read
    read: int


def library(module: str) -> Any:
    """The user's own; InvalidArgument says what to install where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise _C.InvalidArgument(
            f"[tokenize] {package} is not installed here ({error}): pip install {package}"
        ) from error


# ---- finding ----
def find_inputs(paths: Sequence[str], kind: str | None, suffixes: Sequence[str]) -> list[Input]:
    """Files as they are given; of folders those whose names end in `suffixes` (none: in those of KINDS), sorted.

    `kind` is that of all of them; None: told by the name, text where it does not tell. Raises InvalidArgument for a
    path that does not exist, and where there is nothing to read.
    """
    wanted = tuple(suffixes) or tuple(end for end, known in KINDS.items() if kind in (None, known))
    found = []
    for given in map(Path, paths):
        if given.is_dir():
            files = [path for path in sorted(given.rglob("*")) if path.name.endswith(wanted) and path.is_file()]
            if not files:
                raise _C.InvalidArgument(
                    f"[tokenize] no file in {given} ends in {', '.join(wanted)}; give --suffix, or other paths"
                )
        elif given.is_file():
            files = [given]
        else:
            raise _C.InvalidArgument(f"[tokenize] there is no file or folder {given}; check the path")
        found += [Input(path, kind or kind_of(path.name), path.stat().st_size) for path in files]
    return found


def kind_of(name: str) -> str:
    ends = [end for end in KINDS if name.endswith(end)]
    return KINDS[max(ends, key=len)] if ends else "text"


# ---- reading ----
def read_batches(inputs: Iterable[Input], field: str) -> Iterator[Batch]:
    texts: list[Input] = []  # small files travel together
    for given in inputs:
        if given.kind == "text":
            texts.append(given)
            if sum(text.size for text in texts) < BATCH_BYTES:
                continue
        if texts:
            yield _read_texts(texts)
            texts = []
        if given.kind == "jsonl":
            yield from _read_lines(given)
        elif given.kind == "parquet":
            yield from _read_rows(given, field)
    if texts:
        yield _read_texts(texts)


def _read_texts(texts: list[Input]) -> Batch:
    items = []
    for text in texts:
        try:
            items.append(text.path.read_bytes())
        except OSError as error:
            raise _C.IoError(f"[tokenize] cannot read {text.path}: {error}") from error
    return Batch("text", items, [str(text.path) for text in texts], 1, sum(text.size for text in texts))


def _read_lines(given: Input) -> Iterator[Batch]:
    line, done = 1, 0
    try:
        with given.path.open("rb") as raw:
            file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if given.path.suffix == ".gz" else raw
            while lines := file.readlines(BATCH_BYTES):
                yield Batch("jsonl", lines, [str(given.path)], line, raw.tell() - done)
                line, done = line + len(lines), raw.tell()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _C.Corruption(f"[tokenize] {given.path} is no whole gzip file, after line {line - 1}: {error}") from error
    except OSError as error:
        raise _C.IoError(f"[tokenize] cannot read {given.path}: {error}") from error


def _read_rows(given: Input, field: str) -> Iterator[Batch]:
    parquet, arrow = library("pyarrow.parquet"), library("pyarrow")
    try:
        with parquet.ParquetFile(given.path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise _C.InvalidArgument(
                    f"[tokenize] {given.path} has no column {field!r}; --field names one of: {', '.join(names)}"
                )
            kind = file.schema_arrow.field(field).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise _C.InvalidArgument(
                    f"[tokenize] column {field!r} of {given.path} has type {kind}; --field names one of strings"
                )
            rows = max(file.metadata.num_rows, 1)
            at_once = max(1, min(rows * BATCH_BYTES // max(given.size, 1), 10_000))
            row = 0
            for batch in file.iter_batches(batch_size=at_once, columns=[field]):
                items = batch.column(0).to_pylist()
                read = given.size * (row + len(items)) // rows - given.size * row // rows
                yield Batch("parquet", items, [str(given.path)], row + 1, read)
                row += len(items)
    except (arrow.ArrowException, OSError) as error:
        raise _C.Corruption(f"[tokenize] {given.path} cannot be read as Parquet: {error}") from error


# ---- encoding ----
class Encoder:
    """Tokens of batches. `tokenizer`: the text of a tokenizer file; `end`: the token after each document."""

    def __init__(self, tokenizer: str, end: int | None, field: str, skip_invalid: bool) -> None:
        self._tokenizer = library("tokenizers").Tokenizer.from_str(tokenizer)
        # What a model's inputs need; of a corpus it would cut documents off.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._end = [] if end is None else [end]
        self._field = field
        self._skip_invalid = skip_invalid

    def encode(self, batch: Batch) -> Encoded:
        texts, skipped = [], []
        for index, item in enumerate(batch.items):
            try:
                text = self._text(batch.kind, item)
            except ValueError as error:
                reason = f"{batch.place(index)}: {error}"
                if not self._skip_invalid:
                    raise _C.InvalidArgument(
                        f"[tokenize] {reason}; put it right, or leave such documents out with --skip-invalid"
                    ) from None
                skipped.append(reason)
            else:
                if text:
                    texts.append(text)
        tokens = array.array("I")
        for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            tokens.extend(encoding.ids)
            tokens.extend(self._end)
        return Encoded(tokens.tobytes(), len(texts), skipped, batch.read)

    def _text(self, kind: str, item: Any) -> str:
        """Empty: there is no document. Raises ValueError saying what is wrong with it."""
        if kind == "text":
            return _utf8(item)
        if kind == "jsonl":
            line = _utf8(item).strip()
            if not line:
                return ""
            try:
                item = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"no JSON at character {error.pos + 1}: {error.msg}") from None
            if not isinstance(item, dict) or self._field not in item:
                has = (
                    f"an object with {', '.join(map(repr, item)) or 'nothing'}"
                    if isinstance(item, dict)
                    else "no object"
                )
                raise ValueError(f"{has}, and --field is {self._field!r}")
            item = item[self._field]
        if not isinstance(item, str):
            raise ValueError(f"{self._field!r} is {'null' if item is None else type(item).__name__}, not a string")
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start + 1} of {self._field!r} is half of a surrogate pair") from None
        return item


def _utf8(item: bytes) -> str:
    try:
        return item.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 ({error.reason})") from None
