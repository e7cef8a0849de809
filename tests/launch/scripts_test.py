"""`tesserae run` of small scripts: what ranks print, import and end with."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launched import DEADLINE, clean_environment, program, until


def start(folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    (folder / "script").mkdir()
    (folder / "script/train.py").write_text(textwrap.dedent(script))
    environment = clean_environment()
    for name in ("PYTHONUNBUFFERED", "PYTHONPATH"):
        environment.pop(name, None)
    environment["TESSERAE_PYTHON"] = sys.executable
    return subprocess.Popen(
        [str(program()), "run", "--nproc", "2", *options, str(folder / "script/train.py")],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_what_a_rank_printed_before_it_was_killed_is_seen(tmp_path: Path) -> None:
    script = """
        import os, signal, time
        if os.environ["RANK"] == "1":
            print("the last words")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    said, _ = start(tmp_path, script).communicate(timeout=DEADLINE)
    assert "rank 1: the last words" in said


def test_modules_of_python_are_not_those_of_the_folder_where_it_runs(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('of the folder')")
    job = start(tmp_path, "import colorsys; print(colorsys.__file__)")
    said, _ = job.communicate(timeout=DEADLINE)
    assert job.returncode == 0, said
    assert str(tmp_path) not in said


ENDS_EARLY = """
    import os, pathlib, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    folder = pathlib.Path(__file__).parent
    (folder / f"begun-{os.getpid()}").touch()
    while not (folder / "notice").exists():
        time.sleep(0.05)
    time.sleep(4 * int(os.environ["RANK"]))
    sys.exit(75)
"""


@pytest.mark.parametrize("how", ["asked by a signal", "asked by a file"])
def test_a_script_that_ends_early_is_no_failure(how: str, tmp_path: Path) -> None:
    job = start(tmp_path, ENDS_EARLY, "--early-exit", "75", "--max-restarts", "1", "--replacements", "1")

    def begun() -> int:
        return len(list((tmp_path / "script").glob("begun-*")))

    until("two ranks", lambda: begun() == 2, lambda: "")
    if how == "asked by a signal":
        job.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "script/notice").touch()
    said, _ = job.communicate(timeout=DEADLINE)
    assert job.returncode == 75, said
    assert begun() == 2, said
