"""The program that plans: the one of this package."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

import tesserae._build
from tesserae import _C


def program() -> Path:
    """In a wheel it lies in the package, in a build beside it."""
    package = Path(tesserae._build.__file__).absolute().parent
    places = (package / "bin/tesserae", package.parents[1] / "cli/tesserae")
    for place in places:
        if place.is_file():
            return place
    raise _C.InvalidArgument(
        f"[tsm.plan] the program tesserae is at none of {', '.join(map(str, places))}: build it (make program), or "
        "install the wheel"
    )


def run_plan(facts: dict[str, Any], options: list[str]) -> tuple[int, str]:
    """`tesserae plan` of what was traced: exit status and output. Raises InvalidArgument for what it refuses."""
    folders = [str(Path(torch.__file__).parent / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    done = subprocess.run(
        [program(), "plan", "--traced", "-", *options],
        input=json.dumps(facts),
        capture_output=True,
        text=True,
        env=os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(folders)},
    )
    if done.returncode not in (0, 1) or not done.stdout:
        what = done.stderr.strip().splitlines()
        raise _C.InvalidArgument(f"[tsm.plan] {what[0].removeprefix('tesserae: ') if what else 'the program failed'}")
    return done.returncode, done.stdout
