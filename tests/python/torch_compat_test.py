"""A torch that lacks a name which is private to it: what is missing, in which torch, and what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import tesserae as tsm
from tesserae.torch_compat.checked import CHECKED, UnsupportedTorch, checked, require


def test_the_tests_run_with_a_torch_that_was_checked() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in CHECKED


def test_a_name_that_is_missing_is_an_import_error_that_names_it() -> None:
    script = (
        "import torch.distributed.utils as utils\n"
        "del utils._to_kwargs\n"
        "try:\n"
        "    import tesserae\n"
        "except ImportError as error:\n"
        "    print(type(error).__mro__[1].__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for part in ("Error [import tesserae] torch " + torch.__version__, "_to_kwargs", "torch.distributed.utils"):
        assert part in done.stdout
    assert f"pip install 'torch=={CHECKED[-1]}.*'" in done.stdout


def test_it_is_an_error_of_tesserae() -> None:
    with pytest.raises(UnsupportedTorch, match="no_such_name") as caught, checked():
        from torch.nn.modules.module import no_such_name  # noqa: F401
    assert isinstance(caught.value, tsm.Error) and isinstance(caught.value, ImportError)


def test_attributes_are_looked_for() -> None:
    require(nn.Module(), "_parameters")
    with pytest.raises(UnsupportedTorch, match=r"torch.nn.modules.linear.Linear has no _never"):
        require(nn.Linear(1, 1), "_parameters", "_never")
