"""What is built, what is installed, and with which torch it works."""

from __future__ import annotations

import importlib.metadata
import os
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
def test_pip_install_installs_a_package_that_works_and_nothing_else(tmp_path: Path) -> None:
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
    assert all(file.startswith("tesserae/") for file in package), package
    assert {Path(file).suffix for file in package} == {".py", ".pyi", ".so", ".typed"}
    sources = {str(file.relative_to(ROOT / "python")) for file in (ROOT / "python/tesserae").rglob("*.py")}
    assert sources | {"tesserae/_build.py", "tesserae/_C.pyi", "tesserae/py.typed"} <= package

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
