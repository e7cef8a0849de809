"""The part of FSDP that is about the state dicts of modules, in the three types that FSDP has.

state_saving.py and state_loading.py say how they are made and taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch import nn

from tesserae.fsdp import state_loading, state_saving
from tesserae.fsdp.install import original
from tesserae.fsdp.instance import Instance, instances_of
from tesserae.fsdp.whole import give_up_loading


class StateDicts(Instance):
    """The part of FSDP that is about the state dicts of modules."""

    @staticmethod
    def set_state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As torch's: what state_dict() and optim_state_dict() give from now on. Returns the settings before."""
        return original("set_state_dict_type")(module, *args, **kwargs)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """As torch's: the settings, which all instances in `module` share."""
        return original("get_state_dict_type")(module)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Generator[None]:
        """set_state_dict_type() within a context."""
        before = StateDicts.set_state_dict_type(module, *args, **kwargs)
        try:
            yield
        finally:
            StateDicts.set_state_dict_type(
                module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state of the whole module by the names that it has without FSDP, of the type that was set. Collective."""
        return state_saving.save(self, *_arguments(*args, **kwargs))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's, for whole values and sharded ones, under names without FSDP. Collective."""
        try:
            return nn.Module.load_state_dict(self, *args, **kwargs)
        finally:
            for instance in instances_of(self):
                give_up_loading(instance)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        give_up_loading(self)
        state_loading.begin(self, state_dict, prefix, local_metadata, errors)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)


def _arguments(*args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> tuple[Any, str, bool]:
    """nn.Module.state_dict still takes positions."""
    given = (destination, prefix, keep_vars)
    return (*args, *given[len(args) :])  # type: ignore[return-value]
