"""Initial values of the models that are compared: by the name of a parameter, so that they are the same numbers however
a candidate makes its model, and the same as ours in C++.

Who keeps a whole model makes it whole. Who shards makes it on the meta device, and each rank keeps its part of a
parameter's values at once: FSDP1 unit by unit (param_init_fn), FSDP2 parameter by parameter. Our C++ candidate does so,
too, so that no memory is told apart that only the start of one of them takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

SEED = 12345
RESIDUAL = ("attention.output.weight", "feed_forward.down.weight")  # what adds to the residual stream


def seed_of(seed: int, name: str) -> int:
    """The seed of a parameter's initial values, as tesserae/model/init.cpp derives it."""
    mask = 2**64 - 1
    value = 0xCBF29CE484222325 ^ seed
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 & mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)


def values_of(name: str, size: Sequence[int], layers: int, seed: int = SEED) -> Tensor:
    """The whole of a parameter."""
    if len(size) == 1:
        return torch.zeros(size) if name.endswith("bias") else torch.ones(size)
    deviation = 0.02 / math.sqrt(2 * layers) if name.endswith(RESIDUAL) else 0.02
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    return torch.empty(size).normal_(0.0, deviation, generator=generator)


class OnMeta(nn.Module):
    """A model that was made on the meta device. It has `layers`; `tie` ties what it ties."""

    layers: int

    def tie(self) -> None:
        pass

    @torch.no_grad()
    def fill(self, device: torch.device) -> None:
        """All parameters, whole."""
        self.to_empty(device=device)
        self.tie()  # to_empty makes a parameter for each of its places
        for name, parameter in self.named_parameters():
            parameter.copy_(values_of(name, parameter.shape, self.layers))

    @torch.no_grad()
    def fill_shards(self, device: torch.device, with_values: bool = True) -> None:
        """After fully_shard: this rank's part of each parameter. No rank speaks to another."""
        from torch.distributed.tensor import distribute_tensor

        self.to_empty(device=device)
        for name, parameter in self.named_parameters() if with_values else ():
            whole = values_of(name, parameter.shape, self.layers)
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())

    def filler(self, device: torch.device) -> Callable[[nn.Module], None]:
        """FSDP1's param_init_fn: makes the parameters of one module, not of those inside."""
        names = {module: name for name, module in self.named_modules()}  # before they are wrapped

        def make(module: nn.Module) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                values = values_of(f"{names[module]}.{key}", parameter.shape, self.layers)
                module.register_parameter(key, nn.Parameter(values.to(device)))
            self.tie()

        return make
