"""Moving the tensors of modules to a device where torch cannot do it in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def can_move_in_place(device: torch.device) -> bool:
    """Whether a tensor of the CPU can get memory of the device: `tensor.data = ...`. Not on devices that torch has been
    taught (PrivateUse1); nn.Module.to() makes new parameters there, too."""
    return torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))


@torch.no_grad()
def replace_tensors(modules: Iterable[nn.Module], device: torch.device, moves: Callable[[Tensor], bool]) -> None:
    """Puts a successor on the device in the place of each parameter and buffer of these modules themselves that `moves`
    says; tied ones have one successor."""
    successors: dict[Tensor, Tensor] = {}

    def successor(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not moves(tensor):
            return tensor
        if tensor not in successors:
            moved = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, tensor.requires_grad)
                moved.grad = tensor.grad.to(device) if tensor.grad is not None else None
            moved.__dict__.update(tensor.__dict__)
            successors[tensor] = moved
        return successors[tensor]

    for module in modules:
        for entries in (module._parameters, module._buffers):
            entries.update({name: successor(tensor) for name, tensor in entries.items()})
