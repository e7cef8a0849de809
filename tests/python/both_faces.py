"""What tests ask of a model of either face, FSDP's or fully_shard's: units, clipping, whole parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

from closeness import distance

TOLERANCE = 1e-5  # relative, in fp32


def sharded(unit: type[nn.Module], model: nn.Module, **arguments: Any) -> nn.Module:
    """By fully_shard; the modules of class `unit` are units, as those of FSDP's ModuleWrapPolicy are."""
    for module in model.modules():
        if isinstance(module, unit):
            fully_shard(module, **arguments)
    return fully_shard(model, **arguments)


def clipped_norm(model: nn.Module, most: float) -> float:
    """Clips gradients; their norm before."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(most).item()
    return nn.utils.clip_grad_norm_(model.parameters(), most).full_tensor().item()


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return model.state_dict()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def away_from(expected: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, float]:
    """Entries that are not as expected, and by how much."""
    assert list(state) == list(expected)
    assert [name for name in expected if state[name].shape != expected[name].shape] == []
    found = {name: distance(state[name], value) for name, value in expected.items()}
    return {name: off for name, off in found.items() if not off <= TOLERANCE}
