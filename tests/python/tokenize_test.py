"""tesserae tokenize: from text, JSON lines and Parquet to a file that trains."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import ranks
import tesserae as tsm
from tesserae import corpus, tokenize

PROGRAM = Path(tsm.__file__).absolute().parents[2] / "cli/tesserae"
TEXTS = ["so much depends", "upon", "", "a red wheel barrow, naïve", "glazed with rain\nwater"]
BYTES = {character: code for code, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
END = 300


@pytest.fixture(autouse=True, scope="module")
def one_server() -> None:
    """Workers come from the server of ranks.py, with what that has imported: there is one in a process."""
    ranks._start_server()
    forkserver.ensure_running()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A token for each byte, as a tokenizer file that would truncate what it is given."""
    made = Tokenizer(models.BPE(vocab={**BYTES, "<|endoftext|>": END}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.enable_truncation(3)
    made.enable_padding(length=512)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def expected(texts: list[str]) -> list[int]:
    to_unicode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [
        token
        for text in texts
        if text
        for token in [*(BYTES[c] for piece, _ in to_unicode.pre_tokenize_str(text) for c in piece), END]
    ]


def run(*arguments: Any) -> int:
    return tokenize.main([str(argument) for argument in arguments])


def tokens_of(path: Path) -> list[int]:
    """As docs/format.md says."""
    content = path.read_bytes()
    assert content[:8] == b"TSRTOKEN"
    count = int.from_bytes(content[-32:-24], "little")
    width = int.from_bytes(content[12:16], "little")
    return array("H" if width == 2 else "I", content[64 : 64 + count * width]).tolist()


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    content = "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path, texts: list[Any], field: str = "text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(texts))), field: texts}), path, row_group_size=2)
    return path


# ---- what comes out ----
def test_every_format_gives_the_same_tokens(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    (folder / "picture.png").write_bytes(b"\xff")
    inputs = {
        "text": folder,
        "lines": write_jsonl(tmp_path / "a.jsonl", TEXTS),
        "gzip": write_jsonl(tmp_path / "a.jsonl.gz", TEXTS),
        "parquet": write_parquet(tmp_path / "a.parquet", TEXTS),
    }
    for name, given in inputs.items():
        out = tmp_path / f"{name}.bin"
        assert run(given, "--out", out, "--tokenizer", tokenizer, "--workers", 1) == 0
        assert tokens_of(out) == expected(TEXTS), name
        assert f"{out}: 4 documents, {len(expected(TEXTS))} tokens of uint16, vocabulary 301" in capsys.readouterr().out
    dataset = tsm.data.TokenDataset(tmp_path / "text.bin", length=8, batch=1)
    assert (dataset.vocabulary, dataset.document_end) == (301, END)


def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 2_000)  # many batches
    texts = [f"document {number} " * (number % 37) for number in range(600)]
    inputs = [write_jsonl(tmp_path / "a.jsonl", texts[:400]), write_parquet(tmp_path / "b.parquet", texts[400:])]
    for workers in (1, 3):
        out = tmp_path / f"{workers}.bin"
        assert run(*inputs, "--out", out, "--tokenizer", tokenizer, "--workers", workers) == 0
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "3.bin").read_bytes()
    assert tokens_of(tmp_path / "1.bin") == expected(texts)


def test_progress_adds_up_to_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 2_000)
    texts = [f"document {number} " * 9 for number in range(300)]
    (tmp_path / "a.txt").write_text(texts[0])
    paths = [
        tmp_path / "a.txt",
        write_jsonl(tmp_path / "a.jsonl", texts),
        write_jsonl(tmp_path / "b.jsonl.gz", texts),
        write_parquet(tmp_path / "c.parquet", texts),
    ]
    inputs = corpus.find_inputs([str(path) for path in paths], None, [])
    assert [given.kind for given in inputs] == ["text", "jsonl", "jsonl", "parquet"]
    batches = list(corpus.read_batches(inputs, "text"))
    assert len(batches) > 30 and sum(len(batch.items) for batch in batches) == 901
    assert sum(batch.read for batch in batches) == sum(path.stat().st_size for path in paths)


def test_options(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", ["ab"], field="body")
    out = tmp_path / "out.bin"
    command = [lines, "--out", out, "--tokenizer", tmp_path, "--workers", 1, "--field", "body"]
    assert run(*command, "--no-end-token", "--dtype", "uint32") == 0
    assert tokens_of(out) == [BYTES["a"], BYTES["b"]]
    assert run(*command) == 1, "it is there"
    assert run(*command, "--overwrite", "--no-header", "--end-token", "b") == 0
    assert array("H", out.read_bytes()).tolist() == [BYTES["a"], BYTES["b"], BYTES["b"]]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    assert run(*command, "--overwrite", "--format", "text") == 0
    assert tokens_of(out)[-1] == BYTES["a"]


# ---- what is wrong ----
def failure(capsys: pytest.CaptureFixture, *arguments: Any) -> str:
    assert run(*arguments, "--workers", 1) == 1
    return capsys.readouterr().err


def test_bad_documents_are_named(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.bin"
    after = ["--out", out, "--tokenizer", tokenizer]
    lines = tmp_path / "a.jsonl"
    for bad, what in (
        (b'{"text": "a', ":3: no JSON at character 10: Unterminated string"),
        (b"[1]", ":3: no object, and --field is 'text'"),
        (b'{"body": "x"}', ":3: an object with 'body', and --field is 'text'"),
        (b'{"text": null}', ":3: 'text' is null, not a string"),
        (b'{"text": "\\ud800"}', ":3: character 1 of 'text' is half of a surrogate pair"),
        (b'{"text": "\xff"}', ":3: byte 10 is not UTF-8"),
    ):
        lines.write_bytes(b'{"text": "a"}\n\n' + bad + b'\n{"text": "b"}\n')
        assert f"[tokenize] {lines}{what}" in failure(capsys, lines, *after)
        assert not out.exists() and not Path(f"{out}.tmp").exists()
    assert run(lines, *after, "--skip-invalid", "--workers", 1) == 0
    assert tokens_of(out) == expected(["a", "b"])
    said = capsys.readouterr()
    assert "1 documents left out" in said.out and f"left out {lines}:3: byte 10" in said.err

    rows = write_parquet(tmp_path / "a.parquet", ["a", "b", None])
    assert f"{rows}, row 3: 'text' is null" in failure(capsys, rows, *after, "--overwrite")
    assert "has no column 'body'; --field names one of: id, text" in failure(
        capsys, rows, *after, "--overwrite", "--field", "body"
    )
    assert "column 'id' of" in failure(capsys, rows, *after, "--overwrite", "--field", "id")
    text = tmp_path / "a.txt"
    text.write_bytes(b"abc\xff")
    assert f"{text}: byte 3 is not UTF-8" in failure(capsys, text, *after, "--overwrite")


def test_bad_files_and_tokenizers_are_named(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.bin"
    lines = write_jsonl(tmp_path / "a.jsonl", ["a"])
    after = ["--out", out, "--tokenizer", tokenizer]
    assert f"there is no file or folder {tmp_path}/none" in failure(capsys, tmp_path / "none", *after)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert f"no file in {folder} ends in .txt" in failure(capsys, folder, *after)
    packed = write_jsonl(tmp_path / "a.jsonl.gz", ["abc"] * 100)
    packed.write_bytes(packed.read_bytes()[:-9])
    assert f"{packed} is no whole gzip file" in failure(capsys, packed, *after)
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"PAR1")
    assert f"{broken} cannot be read as Parquet" in failure(capsys, broken, *after)
    empty = write_jsonl(tmp_path / "b.jsonl", [])
    assert f"there is no token for {out}" in failure(capsys, empty, *after)
    assert "no token <|endoftxt|>; did you mean <|endoftext|>?" in failure(
        capsys, lines, *after, "--end-token", "<|endoftxt|>"
    )
    assert "is no tokenizer file" in failure(capsys, lines, "--out", out, "--tokenizer", lines)
    assert "cannot read the tokenizer" in failure(capsys, lines, "--out", out, "--tokenizer", folder)
    nameless = tmp_path / "nameless.json"
    Tokenizer(models.BPE(vocab=BYTES, merges=[])).save(str(nameless))
    assert "does not tell which token ends a document (none of the usual names)" in failure(
        capsys, lines, "--out", out, "--tokenizer", nameless
    )
    assert not out.exists()


def test_an_error_in_a_worker_ends_all_of_them(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", 2_000)
    lines = write_jsonl(tmp_path / "a.jsonl", ["word " * 100] * 100)
    lines.write_bytes(lines.read_bytes() + b"[]\n")
    out = tmp_path / "out.bin"
    assert run(lines, "--out", out, "--tokenizer", tokenizer, "--workers", 2) == 1
    assert f"{lines}:101: no object" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokenizer.json"]


# ---- the program ----
def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "TESSERAE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **more}


def start(tmp_path: Path, tokenizer: Path, workers: int) -> subprocess.Popen:
    """On input that takes minutes, until some of it is written."""
    lines = write_jsonl(tmp_path / "lines.jsonl", ["word " * 200] * 1_000)
    out = tmp_path / "out.bin"
    command = [PROGRAM, "tokenize", *[lines] * 2_000, "--out", out, "--tokenizer", tokenizer, "--workers", str(workers)]
    job = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    temporary = Path(f"{out}.tmp")
    deadline = time.monotonic() + 120
    while not (temporary.exists() and temporary.stat().st_size > 1_000_000):
        assert job.poll() is None and time.monotonic() < deadline, job.stderr and job.stderr.read()
        time.sleep(0.05)
    assert not out.exists()
    return job


def started_by(process: int) -> list[int]:
    """With those that they started themselves: the reader, the server of its workers, and these."""
    found = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found += [child, *started_by(child)]
    return found


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_interrupted_it_leaves_nothing(tmp_path: Path, tokenizer: Path) -> None:
    job = start(tmp_path, tokenizer, workers=1)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 130, errors
    assert f"interrupted; {tmp_path}/out.bin was not written" in errors
    assert not (tmp_path / "out.bin").exists() and not (tmp_path / "out.bin.tmp").exists()


def test_killed_it_leaves_no_output_and_no_process(tmp_path: Path, tokenizer: Path) -> None:
    job = start(tmp_path, tokenizer, workers=2)
    others = started_by(job.pid)
    assert len(others) >= 4, "the reader, the server of its workers, and two of these"
    job.kill()
    _, errors = job.communicate(timeout=120)
    assert "RuntimeWarning" not in errors and "Traceback" not in errors, errors
    deadline = time.monotonic() + 120
    while any(map(runs, others)):
        assert time.monotonic() < deadline, [process for process in others if runs(process)]
        time.sleep(0.05)
    assert not (tmp_path / "out.bin").exists()
    lines = write_jsonl(tmp_path / "a.jsonl", ["ab"])
    assert run(lines, "--out", tmp_path / "out.bin", "--tokenizer", tokenizer, "--workers", 1) == 0
    assert tokens_of(tmp_path / "out.bin") == expected(["ab"]), "what was left is not in the way"


def program(*arguments: Any, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(PROGRAM), *map(str, arguments)], env=environment(**more), capture_output=True, text=True, timeout=300
    )


def test_from_text_to_training(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [f"the square of {n} is {n * n}" for n in range(400)])
    other = write_jsonl(tmp_path / "b.jsonl", [f"the double of {n} is {2 * n}" for n in range(400)])
    out = tmp_path / "a.bin"
    made = program("tokenize", lines, "--out", out, "--tokenizer", tokenizer, "--workers", 1)
    assert made.returncode == 0, made.stderr
    assert run(other, "--out", tmp_path / "b.bin", "--tokenizer", tokenizer, "--workers", 1) == 0
    shown = json.loads(program("inspect", "--json", out).stdout)
    assert shown["document_end"] == END and shown["vocabulary"] == 301 and shown["dtype"] == "uint16"
    assert program("verify", out).stdout.startswith(f"{out}: good, {shown['tokens']:,} tokens")
    config = {
        "run": {"folder": str(tmp_path / "run")},
        "model": {"dimension": 16, "layers": 1, "heads": 2, "document_end": END},
        "data": {"path": [str(out), str(tmp_path / "b.bin")], "weights": [0.7, 0.3], "format": "tokens"},
        "train": {"steps": 20, "batch_per_rank": 2, "eval_every": 0, "sample_tokens": 0},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
    }
    config["data"]["sequence_length"] = 32
    (tmp_path / "job.json").write_text(json.dumps(config))
    trained = program("train", tmp_path / "job.json", "--nproc", 2)
    assert trained.returncode == 0, trained.stderr
    assert "a mixture of 2" in trained.stdout + trained.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]

    content = bytearray(out.read_bytes())
    content[100] ^= 1
    out.write_bytes(content)
    damaged = program("verify", out)
    assert damaged.returncode == 1 and f"{out}: bytes 64 to " in damaged.stdout


def test_without_its_libraries_it_says_what_to_do(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", ["a"])
    command = ["tokenize", lines, "--out", tmp_path / "out.bin", "--tokenizer", tokenizer]
    none = program(*command, TESSERAE_PYTHON="/nowhere/python")
    assert none.returncode == 1 and "name a Python that has them in TESSERAE_PYTHON" in none.stderr
    (tmp_path / "tokenizers.py").write_text("raise ImportError('not here')")
    bare = program(*command, PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    assert bare.returncode == 1 and "pip install tokenizers" in bare.stderr


def test_help_and_wrong_command_lines(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--help")
    assert ended.value.code == 0 and "usage: tesserae tokenize" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        run("a.txt", "--out", "a.bin", "--tokenizer", "t.json", "--workers", 0)
    assert ended.value.code == 2 and "--workers is 0; it must be 1 or more" in capsys.readouterr().err
