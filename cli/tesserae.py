#!/usr/bin/env python3
"""Runs the program inside the package tesserae, with the torch of this Python. Neither is imported: that takes time."""

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path


def folder_of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"tesserae: the package {package} is not installed for {sys.executable}")
    return Path(found.submodule_search_locations[0])


def main() -> None:
    ours, torch = folder_of("tesserae"), folder_of("torch")
    built = re.search(r'TORCH_VERSION = "(.*)"', (ours / "_build.py").read_text())[1]
    installed = importlib.metadata.version("torch")
    # A version may or may not carry its variant (+cpu, +cu130) in what the installer has written down.
    if built.split("+")[0] != installed.split("+")[0]:
        sys.exit(
            f"tesserae: it was built against torch {built}, but torch {installed} is installed here; install that "
            "torch, or tesserae's wheel for yours, or build it again: pip install --force-reinstall --no-deps ."
        )
    # torch may lie in another folder of packages than tesserae, where the program's own path to it leads nowhere.
    folders = [str(torch / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    os.environ.setdefault("TESSERAE_PYTHON", sys.executable)  # for verbs that are Python's
    program = ours / "bin" / "tesserae"
    os.execv(program, [str(program), *sys.argv[1:]])


main()
