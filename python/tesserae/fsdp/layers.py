"""torch's Linear and Embedding in a sharded model: the gradient of their weight is computed where it will be reduced,
which saves writing it elsewhere first and copying it there. A sparse one cannot be, nor be reduced.

Only the instance's `forward` changes, and to a function of the same arguments and numbers (tesserae/tensor/unsplit.h):
its class, parameters and hooks stay. A layer whose class or instance has a forward of its own is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tesserae import _C
from tesserae.job import config


class _Linear:
    """Its function is called forward, as torch's: by that name a copy of a bound method is pickled."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return F.linear(input, self.weight, self.bias)
        return _C.unsplit_linear(input, self.weight, self.bias)


class _WidenedLinear:
    """For `"cpu_bf16_products": "fp32"`."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return F.linear(input, self.weight, self.bias)
        return _C.unsplit_linear(input, self.weight, self.bias, widened=True)


class _Embedding:
    def forward(self: nn.Embedding, input: Tensor) -> Tensor:
        if self.scale_grad_by_freq or self.sparse or torch.compiler.is_compiling():
            return nn.Embedding.forward(self, input)
        if self.max_norm is not None:
            return _renormed(self, input)
        return _C.unsplit_embedding(input, self.weight, -1 if self.padding_idx is None else self.padding_idx)


def _renormed(layer: nn.Embedding, input: Tensor) -> Tensor:
    """What torch computes with the rows that it has scaled in the gathered weight, whose memory ranks share here; the
    gradient is that of the scaled rows."""
    rows = F.embedding(input, layer.weight, layer.padding_idx)
    with torch.no_grad():
        norms = torch.linalg.vector_norm(rows, layer.norm_type, dim=-1, keepdim=True)
        scaled = torch.where(norms > layer.max_norm, rows * (layer.max_norm / (norms + 1e-7)), rows)
    return scaled + (rows - rows.detach())


def require_dense_gradients(face: str, name: str, entries: Iterable[tuple[nn.Module, str]]) -> None:
    """Raises InvalidArgument if the trainable parameter of that name, which stands in these modules, would get a sparse
    gradient: said before training, not in the first backward."""
    for module, attribute in entries:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and attribute == "weight":
            kind = "Embedding" if isinstance(module, nn.Embedding) else "EmbeddingBag"
            raise _C.InvalidArgument(
                f"[{face}] {name} is the weight of an {kind}(sparse=True), and gradients are reduced "
                "whole: make it without sparse=True (Adagrad then leaves rows without a gradient as they are), or "
                "leave it out (ignored_modules, ignored_params)"
            )


def compute_gradients_in_place(modules: Iterable[nn.Module]) -> None:
    """Of the layers among `modules`, once their weights belong to a unit."""
    settings = config.current()
    widened = settings is not None and settings.cpu_bf16_products == "fp32"
    forwards = {
        nn.Linear.forward: (_WidenedLinear if widened else _Linear).forward,
        nn.Embedding.forward: _Embedding.forward,
    }
    for module in modules:
        forward = forwards.get(type(module).forward)
        if forward is not None and "forward" not in vars(module):
            module.forward = MethodType(forward, module)
