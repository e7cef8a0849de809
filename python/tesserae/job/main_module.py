"""A script that runs as __main__ in an interpreter which began with something else."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType


def run_as_main(code: CodeType, file: str, spec: ModuleSpec | None = None) -> None:
    """Runs `code` of `file` as the module __main__, which it stays. `spec` is what workers that are spawned import in
    its place, and the package to which its relative imports refer; none: they run `file`, as of `python file`."""
    main = ModuleType("__main__")
    package = spec.parent if spec else None
    main.__dict__.update(__file__=file, __spec__=spec, __package__=package, __cached__=None)
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    # multiprocessing, which torch has imported by now, calls it so, too: what workers send back is looked up there.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(code, main.__dict__)
