"""What is built, what is installed, and with which torch it works."""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import tesserae as tsm
from ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def test_version_is_that_of_the_project() -> None:
    project = re.search(r"project\(tesserae VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert project is not None
    assert tsm.__version__ == project[1]


def test_the_stub_says_what_the_extension_offers() -> None:
    done = subprocess.run(
        [ROOT / "tools/stub.sh"], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_torch_is_an_import_error_that_says_what_to_do() -> None:
    script = "import torch; torch.__version__ = '2.99.0'; import tesserae"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"built against torch {torch.__version__}, but torch 2.99.0 is installed here; build it again" in done.stderr


def test_no_part_of_the_package_takes_the_place_of_a_public_name() -> None:
    """Once `tesserae.x` is imported as a part, it is what `tsm.x` means."""
    parts = {part.name for part in pkgutil.iter_modules(tsm.__path__)}
    assert parts & set(tsm.__all__) == {"checkpoint", "data"}  # which are parts


def test_errors_keep_their_facts() -> None:
    assert issubclass(tsm.InvalidArgument, ValueError)
    assert issubclass(tsm.PeerLost, tsm.CommError) and issubclass(tsm.CommError, tsm.Error)
    assert (tsm.PeerLost.ranks, tsm.Timeout.silent) == ((), ())


def waits_alone(rank: int, world_size: int) -> str:
    """Rank 0 builds a model, rank 1 does not come."""
    if rank == 1:
        return ""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    tsm.init({"run": {"connect_deadline_seconds": 2}})
    with pytest.raises(tsm.Timeout) as caught:
        FSDP(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    return f"{type(caught.value).__name__} {caught.value.silent} {caught.value}"


def test_a_rank_that_does_not_come_is_named_within_the_deadline() -> None:
    text = run_ranks(waits_alone, 2, deadline=60)[0]
    assert text.startswith("Timeout (")
    assert "1" in text


@pytest.mark.skipif(shutil.which("ccache") is None, reason="without ccache it compiles everything a second time")
def test_pip_install_installs_what_works_and_nothing_else(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "of_the_tests.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    installed = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-build-isolation",
         "--disable-pip-version-check", str(ROOT)],
        # The compiler under the name by which CMake finds it in `make build`: a compiler cache tells them apart by
        # that.
        env={"CXX": "c++", **clean, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert installed.returncode == 0, (installed.stdout + installed.stderr)[-8000:]

    distribution = next(iter(importlib.metadata.distributions(name="tesserae", path=[str(site)])))
    files = {str(file) for file in distribution.files or () if "__pycache__" not in file.parts}
    package = {file for file in files if ".dist-info/" not in file}
    assert {file for file in package if not file.startswith("tesserae/")} == {"../../../bin/tesserae"}
    python_files = {file for file in package if file.endswith((".py", ".pyi", ".typed"))}
    sources = {str(file.relative_to(ROOT / "python")) for file in (ROOT / "python/tesserae").rglob("*.py")}
    assert python_files == sources | {"tesserae/_build.py", "tesserae/_C.pyi", "tesserae/py.typed"}
    headers = {
        str(file.relative_to(ROOT)) for file in (ROOT / "tesserae").rglob("*.h") if "gloo" not in str(file.parent)
    }
    assert {file.removeprefix("tesserae/include/") for file in package if file.endswith(".h")} == headers
    assert {Path(file).suffix for file in package} == {"", ".py", ".pyi", ".so", ".typed", ".h", ".a", ".cmake"}

    script = "import tesserae as tsm; tsm.init({'hybrid_shard_degree': 1}); print(tsm.__file__, tsm.is_initialized())"
    done = subprocess.run([python, "-c", script], env=clean, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{site}/tesserae/__init__.py True\n", done.stderr
    extension = next(file for file in package if file.endswith(".so"))
    # What lets a test kill a process from outside is in the build of the tests, and ships nowhere.
    assert b"TESSERAE_CRASH_AT" in Path(tsm._C.__file__).read_bytes()
    assert b"TESSERAE_CRASH_AT" not in (site / extension).read_bytes()
    if shutil.which("readelf"):
        header = subprocess.run(["readelf", "-d", site / extension], capture_output=True, text=True, check=True).stdout
        assert re.findall(r"R(?:UN)?PATH.*\[(.*)\]", header) == ["$ORIGIN/../torch/lib"]
    runs_the_program(environment, site, clean, tmp_path)
    builds_a_program(python, site, clean, tmp_path)


def runs_the_program(environment: Path, site: Path, clean: dict[str, str], folder: Path) -> None:
    """The console command, from anywhere, trains; with another torch it says what to do."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [environment / "bin/tesserae", *arguments]
        return subprocess.run(command, env=clean, cwd=folder, capture_output=True, text=True)

    assert run("--version").stdout == f"tesserae {tsm.__version__} (torch {str(torch.__version__).split('+')[0]})\n"
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    trained = run("train", str(ROOT / "examples/tiny.json"), "--nproc", "2", "--set", f"data.path={folder}/text.txt",
                  "--set", "train.steps=3", "--set", f"run.folder={folder}/run")  # fmt: skip
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "done: 3 steps" in trained.stdout + trained.stderr
    assert run("doctor").returncode == 0
    build = site / "tesserae/_build.py"
    was = build.read_text()
    build.write_text(re.sub('TORCH_VERSION = ".*"', 'TORCH_VERSION = "2.99.0"', was))
    refused = run("--version")
    build.write_text(was)
    assert refused.returncode == 1 and "built against torch 2.99.0" in refused.stderr


def builds_a_program(python: Path, site: Path, clean: dict[str, str], folder: Path) -> None:
    """find_package(Tesserae), outside of the tree, with what examples/cpp says."""
    shutil.copytree(ROOT / "examples/cpp", folder / "cpp")
    prefix = subprocess.run([python, "-c", "import tesserae; print(tesserae.cmake_prefix_path)"], env=clean, cwd=folder,
                            capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    assert prefix == str(site / "tesserae")
    for command in (
        ["cmake", "-S", "cpp", "-B", "cpp/build", f"-DCMAKE_PREFIX_PATH={prefix}", f"-DPython3_EXECUTABLE={python}"],
        ["cmake", "--build", "cpp/build"],
        [python, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2", "cpp/build/train"],
    ):
        done = subprocess.run(command, env=clean, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 6 and losses[-1] < 0.5 * losses[0]
    is_found(python, prefix, clean, folder)


ASKS = """
find_package(Tesserae QUIET)
if(Tesserae_FOUND)
  message(STATUS "found, ${Tesserae_VERSION}")
else()
  message(STATUS "not found, ${Tesserae_NOT_FOUND_MESSAGE}")
endif()
"""
PROJECT = "cmake_minimum_required(VERSION 3.22)\nproject(two CXX)\nadd_subdirectory(one)\nadd_subdirectory(two)\n"


def is_found(python: Path, prefix: str, clean: dict[str, str], folder: Path) -> None:
    """By each folder of a project that asks; and without torch the project that can do without goes on."""
    for part, text in {".": PROJECT, "one": ASKS, "two": ASKS}.items():
        (folder / "asks" / part).mkdir(exist_ok=True, parents=True)
        (folder / "asks" / part / "CMakeLists.txt").write_text(text)
    without = folder / "without-torch"
    venv.create(without, symlinks=True)
    for interpreter, found in {python: "-- found, ", without / "bin/python": "-- not found, "}.items():
        build = "with" if interpreter == python else "without"
        command = ["cmake", "-S", "asks", "-B", f"asks/{build}", f"-DCMAKE_PREFIX_PATH={prefix}"]
        done = subprocess.run(
            [*command, f"-DPython3_EXECUTABLE={interpreter}"], env=clean, cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        assert done.stdout.count(found) == 2, done.stdout
    assert "has none: name another Python" in done.stdout
