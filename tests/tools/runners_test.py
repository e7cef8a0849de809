"""What runs the tests: a test that did not run is told from one that passed."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str | Path, ci: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ({"CI": "true"} if ci else {})
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


def build_folder(folder: Path, python: str) -> Path:
    (folder / "CMakeCache.txt").write_text(f"CMAKE_BUILD_TYPE:STRING=Release\nTESSERAE_PYTHON:BOOL={python}\n")
    return folder


def test_a_package_that_was_not_built_is_an_error(tmp_path: Path) -> None:
    done = run(ROOT / "tools/pytest.sh", build_folder(tmp_path, "ON"), "60", "--collect-only")
    assert done.returncode == 1
    assert "no extension in" in done.stderr


def test_a_build_without_python_on_purpose_has_none_to_test(tmp_path: Path) -> None:
    done = run(ROOT / "tools/pytest.sh", build_folder(tmp_path, "OFF"), "60", "--collect-only")
    assert (done.returncode, done.stderr) == (0, "")
    assert "configured without Python" in done.stdout


def test_a_build_takes_all_cores_whatever_number_of_threads_is_set(tmp_path: Path) -> None:
    """nproc takes OMP_NUM_THREADS for the number of cores, and many set that to 1."""
    for name in ("tools/build.sh", "tools/phase.sh", "CMakePresets.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
        (tmp_path / name).chmod(0o755)
    (tmp_path / "build/setup").mkdir(parents=True)
    (tmp_path / "build/release").mkdir()
    (tmp_path / "build/setup/stamp").touch()
    (tmp_path / "build/setup/python").touch()
    (tmp_path / "bin").mkdir()
    for tool in ("cmake", "ninja"):
        called = f'#!/bin/sh\necho {tool} "$@" >> {tmp_path}/called\necho c++ -o made.o -c source.cpp\n'
        (tmp_path / "bin" / tool).write_text(called)
        (tmp_path / "bin" / tool).chmod(0o755)

    def jobs(threads: str) -> str:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        subprocess.run(
            [tmp_path / "tools/build.sh", "release", "all"],
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": threads}, check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        return (tmp_path / "called").read_text().rsplit("--parallel ", 1)[1].split()[0]

    assert jobs("1") == jobs("64")


SKIPS = {
    "by mark": "import pytest\n@pytest.mark.skip(reason='no such thing')\ndef test_it(): pass",
    "in the test": "import pytest\ndef test_it(): pytest.skip('no such thing')",
    "of the file": "import pytest\npytest.skip('no such thing', allow_module_level=True)",
    "by unittest": "import unittest\n@unittest.skip('no such thing')\nclass T(unittest.TestCase):\n  def test(_): pass",
}


@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS)
def test_a_skip_fails_in_ci(skip: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(skip + "\n")
    pytest_here = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path)
    assert run(*pytest_here).returncode in (0, 5)  # 5: no tests were collected
    done = run(*pytest_here, ci=True)
    assert done.returncode in (1, 2), done.stdout  # 2: collecting failed
    assert "no list permits" in done.stdout and "no such thing" in done.stdout


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.xfail\ndef test_it(): assert False\n")
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path, ci=True)
    assert done.returncode == 0, done.stdout


def side_by_side(folder: Path, pytest_line: str, ctest_line: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TEST_LOG": str(folder / "ctest.log")}
    words = [ROOT / "tools/test.sh", pytest_line, ctest_line]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("lines", "failed"),
    [
        (("echo python", "echo program"), []),
        (("echo python; exit 3", "echo program"), ["pytest, status 3"]),
        (("echo python", "echo program; exit 8"), ["ctest, status 8"]),
        (("echo python; false | cat", "echo program; false"), ["pytest, status 1", "ctest, status 1"]),
    ],
)
def test_neither_half_of_the_tests_hides_a_failure(lines: tuple[str, str], failed: list[str], tmp_path: Path) -> None:
    done = side_by_side(tmp_path, *lines)
    assert done.returncode == bool(failed)
    assert done.stderr.splitlines() == [f"test: failed: {which}" for which in failed]
    written = [line for line in done.stdout.splitlines() if not line.startswith("==")]
    assert written == ["python", "program"]


def test_the_halves_of_the_tests_run_beside_each_other(tmp_path: Path) -> None:
    both = "touch {mine}; until [ -e {other} ]; do sleep 0.05; done"
    a, b = tmp_path / "a", tmp_path / "b"
    done = side_by_side(tmp_path, both.format(mine=a, other=b), both.format(mine=b, other=a))
    assert (done.returncode, done.stderr) == (0, "")


def test_tests_that_are_stopped_leave_no_half_behind(tmp_path: Path) -> None:
    halves = [f"echo $$ >{tmp_path / 'pytest'}; exec sleep 300", f"sleep 300 & echo $! >{tmp_path / 'ctest'}; wait"]
    environment = os.environ | {"TEST_LOG": str(tmp_path / "ctest.log")}
    words = [ROOT / "tools/test.sh", *halves]
    # Where this session itself was started in the background SIGINT is ignored, which bash could not change.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(words, env=environment, start_new_session=True, preexec_fn=heed) as running:
        wait_until(lambda: all((tmp_path / half).exists() for half in ("pytest", "ctest")))
        os.killpg(running.pid, signal.SIGINT)  # as Ctrl-C does
        assert running.wait(timeout=60) == 130
    ctest = int((tmp_path / "ctest").read_text())
    wait_until(lambda: not Path(f"/proc/{ctest}").exists() or " Z " in Path(f"/proc/{ctest}/stat").read_text())


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def nightly(folder: Path, *parts: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What it did, and the rows of its report."""
    environment = os.environ | {"NIGHTLY_FOLDER": str(folder / "nightly")}
    words = [ROOT / "tools/nightly.sh", *parts]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    return done, (folder / "nightly.md").read_text().splitlines()[4:]


def test_a_night_goes_on_after_a_failure_and_fails(tmp_path: Path) -> None:
    done, rows = nightly(tmp_path, "first=echo well", "second=echo broken; false; echo not here", "third=true")
    assert done.returncode == 1
    assert rows == ["| first | passed | 0.0 |", "| second | failed, status 1 | 0.0 |", "| third | passed | 0.0 |"]
    assert "nightly: failed: second" in done.stderr
    assert "== third (3/3" in done.stdout
    assert (tmp_path / "nightly/first.log").read_text() == "well\n"
    assert (tmp_path / "nightly/second.log").read_text() == "broken\n"


def test_a_night_of_successes_is_one(tmp_path: Path) -> None:
    done, rows = nightly(tmp_path, "only=true")
    assert (done.returncode, rows) == (0, ["| only | passed | 0.0 |"])


def test_a_night_has_all_that_is_long() -> None:
    assert run(ROOT / "tools/nightly.sh", "--list").stdout.split() == [
        "parity",
        "long",
        "asan",
        "tsan",
        "fuzz",
        "docs",
        "torch",
    ]


@pytest.mark.parametrize(("name", "status"), [("some_test", 1), ("bench_hosts", 0)])
def test_a_program_that_skips_fails_in_ci_unless_it_is_listed(name: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "CTestTestfile.cmake").write_text(
        f'add_test({name} "sh" "-c" "exit 77")\nset_tests_properties({name} PROPERTIES SKIP_RETURN_CODE 77)\n'
        'add_test(another "true")\n'
    )
    assert run(ROOT / "tools/ctest.sh", tmp_path).returncode == 0
    done = run(ROOT / "tools/ctest.sh", tmp_path, ci=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert (f"{name} was skipped" in done.stderr) == (status == 1)


def test_the_sanitizers_have_their_settings(tmp_path: Path) -> None:
    build = tmp_path / "tsan"
    build.mkdir()
    (build / "CTestTestfile.cmake").write_text('add_test(settings "sh" "-c" "echo $TSAN_OPTIONS; false")\n')
    done = run(ROOT / "tools/ctest.sh", build)
    assert f"suppressions={ROOT}/cmake/tsan.supp:halt_on_error=1" in done.stdout, done.stdout + done.stderr
