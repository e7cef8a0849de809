"""Runs a script that was written for SMP v2: in it, `import torch.sagemaker as tsm` is tesserae.

    torchrun --nproc-per-node 8 -m tesserae.run [--config smp.json] script.py [arguments of the script]

`--config` names the configuration of a `tsm.init()` without arguments: a SageMaker job has it in its environment.

 1. `import torch.sagemaker` is answered with tesserae (smp/alias.py).
 2. The script runs as __main__, as by `python script.py`: sys.argv, sys.path[0] and __file__ are as there.
 3. A worker process that is spawned (of a DataLoader, say) imports __main__ anew. Its __spec__ names this module, which
    then does 1. and runs the script in the worker, where __name__ is "__mp_main__" as in any such worker.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence

from tesserae.job.config import CONFIG_VARIABLE
from tesserae.launch.fork_server import run_as_main
from tesserae.smp.alias import install_alias

SCRIPT_VARIABLE = "TESSERAE_RUN_SCRIPT"


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs `script` as __main__ with the alias in place."""
    install_alias()
    script = os.path.abspath(script)
    os.environ[SCRIPT_VARIABLE] = script
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    run_as_main(code, script, importlib.util.find_spec("tesserae.run"))


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
