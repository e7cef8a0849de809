"""Tensors of the training state -> the pieces of a save or load.

A cut (begin, end, start) says where some of a whole tensor's elements lie: elements [begin, end) of the whole,
flattened, are the local memory's from `start` on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from tesserae import _C
from tesserae.torch_compat.sharded_tensors import compute_local_shape_and_global_offset

Cut = tuple[int, int, int]
Tensors = dict[str, tuple[list[int], torch.dtype]]  # of a checkpoint: name -> (shape, dtype)


class Pieces:
    """What one save takes, or what one load fills.

    `stored`: the tensors of the checkpoint that is loaded; None for a save. `all_held`: a save has also what other
    ranks write, and of tensors of which this rank has nothing an empty piece (held_state.h).
    """

    def __init__(self, stored: Tensors | None = None, *, all_held: bool = False) -> None:
        self.stored = stored
        self.all_held = all_held
        self.pieces: list[_C.Piece] = []
        self.copied = False  # some are of copies, not of the tensors' memory
        self.used: set[str] = set()  # names that were asked for, and are in the checkpoint
        self._when_filled: list[Callable[[], None]] = []

    def add(
        self,
        names: Sequence[str],
        shape: Sequence[int],
        cuts: Sequence[Cut],
        tensor: torch.Tensor,
        *,
        split: _C.Splits | None = None,
        written: bool = True,
        changes_in_forward: bool = False,
        optional: bool = False,
    ) -> None:
        """`tensor`: this rank's memory. `names`: what the tensor may be called in a checkpoint; it is saved under the
        first. `split`: the cuts are of this part of the whole. `written`: this rank saves it. `optional`: a checkpoint
        may lack it, it then stays as it is."""
        name = names[0]
        if self.stored is not None:
            name = next((n for n in names if n in self.stored), name)
            if name in self.stored:
                self.used.add(name)
        elif not written and not self.all_held:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.layout != torch.strided or local.is_meta:
            what = "on the meta device" if local.is_meta else f"of layout {local.layout}"
            raise _C.InvalidArgument(f"[checkpoint] {name} is {what}: there are no bytes to save or fill")
        local = local.detach()
        dense = local.resolve_conj().resolve_neg().contiguous()
        flat = dense.view(-1)
        if dense is not local:
            self.copied = True
            if self.stored is not None:
                self._when_filled.append(lambda: _copy(local, flat))
        if _C.is_paged(flat):  # C++ copies block by block
            flat = _C.alias_of(flat)
        nothing = [(0, 0, 0)] if self.all_held else []
        for begin, end, start in cuts or nothing:
            self.pieces.append(
                _C.Piece(
                    name,
                    list(shape),
                    begin,
                    end,
                    flat.narrow(0, start, end - begin),
                    split=split,
                    written=written and len(cuts) > 0,
                    changes_in_forward=changes_in_forward,
                    optional=optional,
                )
            )

    def fill(self, name: str) -> torch.Tensor:
        """A new tensor on the host, which a whole tensor of the checkpoint will fill."""
        assert self.stored is not None
        shape, dtype = self.stored[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.add([name], shape, whole(tensor), tensor)
        return tensor

    def filled(self) -> None:
        """After a load: brings what could not be filled in place to where it belongs."""
        for call in self._when_filled:
            call()


def whole(tensor: torch.Tensor) -> list[Cut]:
    return [(0, tensor.numel(), 0)]


def cuts_of_block(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[Cut]:
    """The cuts of a block of a tensor that lies contiguously in local memory."""
    if math.prod(sizes) == 0:
        return []
    # Dimensions after `split` are whole, so a run of sizes[split] of their rows is contiguous in both.
    split = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    row = math.prod(shape[split + 1 :])
    run = row * (sizes[split] if sizes else 1)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    outer = itertools.product(*(range(o, o + s) for o, s in zip(offsets[:split], sizes[:split], strict=True)))
    first = offsets[split] * row if shape else 0
    begins = (sum(i * stride for i, stride in zip(index, strides)) + first for index in outer)
    return [(begin, begin + run, k * run) for k, begin in enumerate(begins)]


def cuts_of_dtensor(name: str, tensor: DTensor, ranks: int) -> tuple[list[Cut], bool, _C.Split | None]:
    """The cuts of this rank's part, whether it writes them, and of which split they are (None: of the whole). `ranks`:
    how many save together."""
    mesh = tensor.device_mesh
    if any(placement.is_partial() for placement in tensor.placements):
        raise _C.InvalidArgument(f"[checkpoint] {name} is a DTensor with partial sums; reduce it first")
    if mesh.size() != ranks:
        raise _C.InvalidArgument(
            f"[checkpoint] {name} is a DTensor over {mesh.size()} ranks, but {ranks} save together; pass the "
            "process_group of its device mesh, and a folder of its own for each such group"
        )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    copies = zip(coordinate, tensor.placements, strict=True)
    writes = all(place == 0 for place, placement in copies if placement.is_replicate())
    split = _split_of(tensor, offsets, sizes)
    if split is None:
        return cuts_of_block(tensor.shape, offsets, sizes), writes, None
    part, inside = list(tensor.shape), list(offsets)
    part[split.dim], inside[split.dim] = sizes[split.dim], 0
    return cuts_of_block(part, inside, sizes), writes, split


def _split_of(tensor: DTensor, offsets: Sequence[int], sizes: Sequence[int]) -> _C.Split | None:
    """How columns are cut, where one dimension behind the first is, evenly: one cut instead of one for each row."""
    parts: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dim = placement.dim % tensor.dim()  # type: ignore[attr-defined]
            parts[dim] = parts.get(dim, 1) * tensor.device_mesh.size(axis)
    columns = [dim for dim, count in parts.items() if dim > 0 and count > 1]
    if len(columns) != 1 or tensor.numel() == 0 or tensor.shape[columns[0]] % parts[columns[0]] != 0:
        return None
    dim = columns[0]
    return _C.Split(dim=dim, parts=parts[dim], index=offsets[dim] // sizes[dim])


@torch.no_grad()
def _copy(target: torch.Tensor, flat: torch.Tensor) -> None:
    target.copy_(flat.view(target.shape))
