"""`import torch.sagemaker` is answered with tesserae, and everything under it with the module of that name under
tesserae."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

ALIAS = "torch.sagemaker"


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
