"""load_state_dict_from_rank0 of tsm.transform: the group of rank 0 takes the values that only rank 0 has, one tensor at
a time. The other ranks take them by FSDP's sync_module_states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tesserae import _C


@dataclass(frozen=True)
class FromRank0:
    """Every rank of the group makes the same calls in the same order."""

    is_rank0: bool
    broadcast: Callable[[Tensor], object]  # in place, from rank 0 to the group
    place: torch.device  # where FSDP computes

    def require(self, tensors: Iterable[Tensor]) -> None:
        """Raises InvalidArgument on all ranks of the group if rank 0 lacks values: were it to raise alone, the others
        would wait for its first tensor."""
        missing = self.is_rank0 and any(tensor.is_meta for tensor in tensors)
        told = torch.tensor([missing], dtype=torch.uint8, device=self.place)
        self.broadcast(told)
        if told.item():
            raise _C.InvalidArgument(
                "[tsm.transform] load_state_dict_from_rank0: rank 0's model is on the meta device; it must have its "
                "values"
            )

    @torch.no_grad()
    def take(self, value: Tensor) -> Tensor:
        """What rank 0 has in place of `value`, which has the same shape: a parameter if `value` is one, with what has
        been put on it. On rank 0 it is the same one, which an optimizer may have."""
        given = value.detach().to(self.place) if self.is_rank0 else torch.empty_like(value, device=self.place)
        given = given.contiguous()
        self.broadcast(given)
        if not isinstance(value, nn.Parameter):
            return given
        if value.is_meta:
            made = nn.Parameter(given, requires_grad=value.requires_grad)
            made.__dict__.update(value.__dict__)
            return made
        value.data = given
        return value
