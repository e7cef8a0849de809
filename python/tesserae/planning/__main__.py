"""python -m tesserae.planning SCRIPT: what `tesserae plan --script` starts. Facts of tracing.py go to standard output,
whatever the script prints to standard error."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tesserae import _C
from tesserae.planning.tracing import DTYPES, trace


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tesserae.planning")
    parser.add_argument("script", type=Path)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--units", action="append", default=[])
    options = parser.parse_args(arguments)
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        try:
            facts = trace_script(options.script, options.dtype, options.units or None)
        except (_C.InvalidArgument, OSError) as error:
            print(f"tesserae: {error}", file=sys.stderr)
            return 2
        json.dump(facts, output)
    return 0


def trace_script(script: Path, dtype: str, units: list[str] | None) -> dict[str, Any]:
    """The facts of what the file defines."""
    names = runpy.run_path(str(script), run_name="tesserae_plan")
    missing = [name for name in ("model_fn", "batch") if name not in names]
    if missing:
        raise _C.InvalidArgument(
            f"[plan --script] {script} defines no {' and no '.join(missing)}: model_fn() makes the model, batch is "
            "what it is called with (or a function that makes that); loss(output), where the model returns no loss"
        )
    batch = names["batch"]
    return trace(
        names["model_fn"],
        batch() if callable(batch) else batch,
        loss=names.get("loss"),
        units=units,
        dtype=dtype,
        tell=lambda line: print(f"plan: {script.name}: {line}", file=sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
