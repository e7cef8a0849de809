"""Of every test session: one thread per process, and one tesserae, for the processes that tests start too."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

_spec = importlib.util.find_spec("tesserae")
if _spec is None or _spec.origin is None:
    pytest.exit("tesserae is not here: `make test` builds it; or set PYTHONPATH=build/release/python", returncode=4)
_folder = str(Path(_spec.origin).absolute().parent.parent)
# The simulated accelerator, which the test suite builds beside the package (tests/sim/python).
_sim = str(Path(_folder).parent / "tests" / "sim" / "python")
sys.path.append(_sim)
os.environ["PYTHONPATH"] = os.pathsep.join([_folder, _sim, *filter(None, [os.environ.get("PYTHONPATH")])])
