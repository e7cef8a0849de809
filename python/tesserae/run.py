"""Runs a script that was written for SMP v2: in it, `import torch.sagemaker as tsm` is tesserae.

    torchrun --nproc-per-node 8 -m tesserae.run [--config smp.json] script.py [arguments of the script]

`--config` names the configuration of a `tsm.init()` without arguments: a SageMaker job has it in its environment.

 1. A finder answers for torch.sagemaker and everything under it with the module of that name under tesserae.
 2. The script runs as __main__, as by `python script.py`: sys.argv, sys.path[0] and __file__ are as there.
 3. A worker process that is spawned (of a DataLoader, say) imports __main__ anew. Its __spec__ names this module, which
    then does 1. and runs the script in the worker, where __name__ is "__mp_main__" as in any such worker.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

from tesserae.config import CONFIG_VARIABLE

ALIAS = "torch.sagemaker"
SCRIPT_VARIABLE = "TESSERAE_RUN_SCRIPT"


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torch.sagemaker.x is the module object tesserae.x, not a second copy of it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != ALIAS and not name.startswith(ALIAS + "."):
            return None
        if importlib.util.find_spec(_real(name)) is None:
            raise ModuleNotFoundError(f"[tesserae.run] {name} is not available in tesserae", name=name)
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_real(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import system has put the alias's in its place


def _real(name: str) -> str:
    return "tesserae" + name.removeprefix(ALIAS)


def install_alias() -> None:
    """`import torch.sagemaker` means tesserae from now on, in this process."""
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs `script` as __main__ with the alias in place."""
    install_alias()
    script = os.path.abspath(script)
    os.environ[SCRIPT_VARIABLE] = script
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    main = ModuleType("__main__")
    main.__file__ = script
    main.__spec__ = importlib.util.find_spec("tesserae.run")
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tesserae.run", description="Run a script in which torch.sagemaker is tesserae."
    )
    parser.add_argument("--config", help="the JSON file that tsm.init() reads when it is called without an argument")
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(arguments)
    if options.config is not None:
        os.environ[CONFIG_VARIABLE] = os.path.abspath(options.config)
    if not os.path.isfile(options.script):
        parser.error(f"there is no file {options.script}")
    run_script(options.script, options.arguments)


if __name__ == "__main__":
    _main(sys.argv[1:])
elif __name__ == "__mp_main__":  # 3.
    install_alias()
    globals().update(runpy.run_path(os.environ[SCRIPT_VARIABLE], run_name="__mp_main__"))
