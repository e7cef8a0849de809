"""tesserae tokenize: text, JSON lines and Parquet -> a file of tokens to train on.

   tesserae tokenize corpus/*.jsonl.gz --tokenizer tokenizer.json --out corpus.bin
   python -m tesserae.tokenize ...                                 # the same

1. This process reads batches of documents (corpus.py) in the order of the input.
2. Workers encode them; no more than a few batches a worker are under way.
3. Their tokens go to the writer (tesserae/data/token_writer.h) in the order of the batches, so the number of workers
   changes nothing. The file has its name when all is on the disk; whatever happens before, there is none.
"""

from __future__ import annotations

import argparse
import difflib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tesserae import _C
from tesserae.corpus import Batch, Encoded, Encoder, find_inputs, library, read_batches

# Where neither --end-token nor tokenizer_config.json says how documents end: what models call it.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tesserae tokenize",
        description="Turn text, JSON lines and Parquet into a file of tokens to train on.",
        epilog="Files named *.jsonl, *.ndjson (also .gz) and *.parquet have a document in each line or row; any other "
        "file is one document, UTF-8. Train on what comes out with data.format tokens (docs/data.md); "
        "`tesserae inspect` shows what it is and `tesserae verify` checks it. Exit status: 0 done; 1 failed, "
        "and there is no output; 2 the command line cannot work; 130 interrupted, and there is no output.",
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="files, and folders read recursively in sorted order"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the file that is made; .bin is the usual suffix")
    parser.add_argument(
        "--tokenizer", required=True, metavar="PATH", help="a tokenizer.json of Hugging Face, or a folder with one"
    )
    parser.add_argument("--field", default="text", help="key of JSON objects, column of Parquet (default: text)")
    parser.add_argument("--format", choices=("text", "jsonl", "parquet"), help="of all inputs, whatever their names")
    parser.add_argument(
        "--suffix", action="append", default=[], metavar=".END", help="in folders, read files that end so (repeatable)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that encode (default: a core each)")
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--end-token",
        metavar="TOKEN",
        help="put after each document (default: eos_token of tokenizer_config.json, or "
        "the one of the usual names that the tokenizer has)",
    )
    end.add_argument("--no-end-token", action="store_true", help="put nothing after documents")
    parser.add_argument("--dtype", choices=("uint16", "uint32"), help="default: the smaller that holds the vocabulary")
    parser.add_argument(
        "--no-header",
        action="store_true",
        help="the tokens alone (data.format uint16 or uint32, nanoGPT); no checksums",
    )
    parser.add_argument(
        "--skip-invalid", action="store_true", help="leave out, and count, documents that cannot be read"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it is there")
    options = parser.parse_args(arguments)
    if options.workers is None:
        options.workers = len(os.sched_getaffinity(0))
    if options.workers < 1:
        parser.error(f"--workers is {options.workers}; it must be 1 or more")
    return options


# ---- the tokenizer ----
def read_tokenizer(given: str) -> tuple[str, Path]:
    """Its text, and where it lies."""
    path = Path(given)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        library("tokenizers").Tokenizer.from_str(text)
    except _C.Error:
        raise
    except OSError as error:
        raise _C.InvalidArgument(f"[tokenize] cannot read the tokenizer: {error}") from error
    except Exception as error:  # the library raises a plain Exception
        raise _C.InvalidArgument(
            f"[tokenize] {path} is no tokenizer file of Hugging Face's tokenizers ({error}); "
            "transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        ) from error
    return text, path


def end_token(options: argparse.Namespace, vocabulary: dict[str, int], path: Path) -> int | None:
    """Raises InvalidArgument where neither the command line nor the tokenizer says one."""
    if options.no_end_token:
        return None
    name = options.end_token
    if name is None:
        name = _configured_end(path.parent / "tokenizer_config.json")
    if name is None:
        usual = [token for token in END_TOKENS if token in vocabulary]
        if len(usual) != 1:
            raise _C.InvalidArgument(
                f"[tokenize] {path} does not tell which token ends a document ({', '.join(usual) or 'none'} of the "
                "usual names); give --end-token TOKEN or --no-end-token"
            )
        name = usual[0]
    if name not in vocabulary:
        near = difflib.get_close_matches(name, vocabulary, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; --end-token names one that it has"
        raise _C.InvalidArgument(f"[tokenize] {path} has no token {name}{hint}")
    return vocabulary[name]


def _configured_end(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise _C.InvalidArgument(f"[tokenize] {path} cannot be read ({error}); give --end-token") from error
    return found["content"] if isinstance(found, dict) else found


# ---- workers ----
_encoder: Encoder | None = None  # of a worker


def start_worker(arguments: tuple[Any, ...]) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reader decides what becomes of it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are what is parallel here
    _encoder = Encoder(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def encode(batch: Batch) -> Encoded:
    assert _encoder is not None
    return _encoder.encode(batch)


def encode_all(batches: Iterator[Batch], workers: int, arguments: tuple[Any, ...]) -> Iterator[Encoded]:
    """In the order of `batches`."""
    if workers == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        yield from map(Encoder(*arguments).encode, batches)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tesserae.corpus", "tokenizers"])  # imported once, not by each worker
    pool = ProcessPoolExecutor(workers, context, start_worker, (arguments,))
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(encode, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise _C.Error(
            "[tokenize] a worker was killed, as happens where memory is short; take fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# ---- progress ----
class Progress:
    """A line on standard error that is drawn anew, where a person looks."""

    def __init__(self, size: int) -> None:
        self.documents = self.tokens = 0
        self._size = size
        self._read = 0
        self._begin = time.monotonic()
        self._drawn = 0.0
        self._shown = sys.stderr.isatty()

    def add(self, encoded: Encoded, tokens: int) -> None:
        self.documents += encoded.documents
        self.tokens = tokens
        self._read += encoded.read
        if self._shown and time.monotonic() - self._drawn > 0.5:
            self._drawn = time.monotonic()
            print(f"\r\033[K{self.text()}", end="", file=sys.stderr, flush=True)

    def text(self) -> str:
        seconds = max(time.monotonic() - self._begin, 1e-3)
        left = seconds * (self._size - self._read) / max(self._read, 1)
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.tokens / seconds:,.0f} tokens/s, "
            f"{self._read / max(self._size, 1):.0%}, {left // 60:.0f} min {left % 60:.0f} s left"
        )

    def clear(self) -> None:
        if self._drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# ----
def run(options: argparse.Namespace) -> None:
    text, path = read_tokenizer(options.tokenizer)
    vocabulary = library("tokenizers").Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    end = end_token(options, vocabulary, path)
    inputs = find_inputs(options.inputs, options.format, options.suffix)
    writer = _C.TokenWriter(
        options.out,
        vocabulary=max(vocabulary.values()) + 1,
        document_end=end,
        bytes_per_token={None: 0, "uint16": 2, "uint32": 4}[options.dtype],
        header=not options.no_header,
        replace=options.overwrite,
    )
    progress = Progress(sum(given.size for given in inputs))
    skipped, shown = 0, 5
    try:
        arguments = (text, end, options.field, options.skip_invalid)
        for encoded in encode_all(read_batches(inputs, options.field), options.workers, arguments):
            writer.add(encoded.tokens)
            progress.add(encoded, writer.tokens)
            for reason in encoded.skipped[: max(shown - skipped, 0)]:
                progress.clear()
                print(f"tesserae tokenize: left out {reason}", file=sys.stderr)
            skipped += len(encoded.skipped)
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    finally:
        progress.clear()
    left_out = f"; {skipped:,} documents left out" if skipped else ""
    ends = "nothing between documents" if end is None else f"documents end with token {end}"
    print(
        f"{options.out}: {progress.documents:,} documents, {writer.tokens:,} tokens of "
        f"uint{8 * writer.bytes_per_token}, vocabulary {max(vocabulary.values()) + 1:,}, {ends}{left_out}"
    )


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        run(options)
    except KeyboardInterrupt:
        print(f"tesserae tokenize: interrupted; {options.out} was not written", file=sys.stderr)
        return 130
    except _C.Error as error:
        print(f"tesserae: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
