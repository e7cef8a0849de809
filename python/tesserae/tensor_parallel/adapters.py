"""Adapters (PEFT's LoRA) of layers that tsm.transform has split: PEFT would make them of a rank's part, or of sizes
that do not fit one."""

from __future__ import annotations

from torch import nn

from tesserae import _C
from tesserae.job.fabrics import tensor_degree
from tesserae.tensor_parallel.layers import Column, Head, Row, has_adapters


def require_none(model: nn.Module) -> None:
    """Raises InvalidArgument where a layer of which a rank takes or gives a part has adapters."""
    if tensor_degree() == 1:
        return
    for name, part in model.named_modules():
        if has_adapters(part) and isinstance(part.get_base_layer(), (Column, Row, Head)):  # type: ignore[operator]
            raise _C.InvalidArgument(
                f"[FSDP] {name} has adapters (PEFT), and is split over tensor-parallel ranks: they would be made for a "
                "rank's part of it. Adapt layers that are not split, or train with tensor_parallel_degree 1"
            )
