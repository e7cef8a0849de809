"""FSDP.optim_state_dict and its kin: the state of an optimizer by the names of whole parameters, and back.

An optimizer holds the tensors that an instance shows between steps: a slice of each parameter (use_orig_params=True),
or a flat parameter for a whole buffer. For each it keeps tensors of the same size, scalars and other values.
optim_saving.py and optim_loading.py say how they become a state dict of whole parameters and come back from it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer

from tesserae.fsdp.install import original
from tesserae.fsdp.optim_keys import Keys
from tesserae.fsdp.optim_loading import load
from tesserae.fsdp.optim_saving import save
from tesserae.fsdp.state_dicts import StateDicts
from tesserae.torch_compat.optimizers import OptimInput


class OptimStateDicts:
    """The part of FSDP that is about the state dicts of optimizers."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The state of `optim` (or `optim_state_dict`, which it gave), of the type that was set. Collective."""
        settings = StateDicts.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        saved = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return save(
            Keys.of(model, optim, state=saved),
            saved,
            rank0_only=getattr(config, "rank0_only", False),
            sharded=settings.state_dict_type != StateDictType.FULL_STATE_DICT,
            to_cpu=getattr(config, "offload_to_cpu", True),
            group=group,
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from what optim_state_dict() gave, on any number of ranks. Collective."""
        config = StateDicts.get_state_dict_type(model).optim_state_dict_config
        keys = Keys.of(model, optim, named=is_named_optimizer)
        result = load(keys, optim_state_dict, rank0_only=getattr(config, "rank0_only", False), group=group)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Whole state on rank 0, or on all ranks. Use optim_state_dict() in new code."""
        original("_warn_optim_input")(optim_input, stacklevel=3)
        state = optim.state_dict()
        keys = Keys.of(model, optim, optim_input, state)
        return save(keys, state, rank0_only=rank0_only, sharded=False, to_cpu=True, group=group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """This rank's chunks of the state. Use optim_state_dict() in new code."""
        state = optim.state_dict()
        return save(Keys.of(model, optim, state=state), state, rank0_only=False, sharded=True, to_cpu=True, group=group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from full_optim_state_dict() on every rank."""
        original("_warn_optim_input")(optim_input, stacklevel=3)
        return load(Keys.of(model, optim, optim_input), full_optim_state_dict, rank0_only=False, group=None)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The same from rank 0 alone. Collective."""
        original("_warn_optim_input")(optim_input, stacklevel=3)
        return load(Keys.of(model, optim, optim_input), full_optim_state_dict or {}, rank0_only=True, group=group)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from sharded_optim_state_dict(). Collective."""
        return load(Keys.of(model, optim), sharded_optim_state_dict, rank0_only=False, group=None)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: Any,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """As torch's: names of parameters become ids, or the reverse. With use_orig_params=False a flat parameter has
        many names, so give it a model that is not wrapped."""
        rekey = original("rekey_optim_state_dict")
        return rekey(optim_state_dict, optim_state_key_type, model, optim_input, optim)
