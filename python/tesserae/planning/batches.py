"""The batch that a script gives its model, with other rows and no values; and the loss of what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tesserae import _C
from tesserae.torch_compat import tracing


def rows_of(batch: Any, rows: int) -> Any:
    """The batch with so many rows."""
    tensors = tracing.tensors_of(batch)
    if not tensors or tensors[0].dim() == 0:
        raise _C.InvalidArgument("[tsm.plan] the batch has no tensor whose first dimension are rows")
    count = tensors[0].shape[0]

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != count:
            return tensor
        return torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

    return tracing.map_tensors(cut, batch)


def fake(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Where the model is; floats in the dtype that is computed in, as FSDP casts them."""

    def made(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind, device=device)

    return tracing.map_tensors(made, batch)


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's forward."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        value = loss(output)
    elif isinstance(output, dict) and "loss" in output:  # transformers' outputs are dicts
        value = output["loss"]
    else:
        value = getattr(output, "loss", output)
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise _C.InvalidArgument(
            f"[tsm.plan] the model returned a {type(output).__name__} without a loss: give `loss`, a function of it "
            "that returns one number (a tensor without dimensions)"
        )
    return value
