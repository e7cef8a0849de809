"""tsm.on_whole_matrices: for optimizers that need whole matrices, while parameters and state stay rows.

Each matrix comes whole to one rank of those that share it out, which computes, and its rows go back. So ranks share the
work, and nobody holds more than 1/O of the matrices at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tesserae import _C
from tesserae.fully_shard.places import Sharing, sharing_of
from tesserae.torch_compat.fsdp2 import local_of, placed_as

Function = Callable[[Tensor, int], Tensor]


@torch.no_grad()
def on_whole_matrices(function: Function, tensors: Sequence[DTensor]) -> list[DTensor]:
    """function(matrix, index) of each of `tensors`, called on one rank with the whole matrix; index is its place in
    `tensors`. Returns DTensors of the results' rows, placed as `tensors` are.

    `tensors` are parameters that fully_shard has sharded, their gradients, or tensors that were computed of them
    element by element, in any shape and in one dtype. The results have shape and dtype of the matrices. The same rank
    gets the same matrix each time that the ranks bring the same list, until the degree changes; work is shared out by
    m * n * min(m, n). Replicas compute the same. Collective over the ranks of the parameters' mesh, which bring tensors
    of the same shapes in the same order. Not thread-safe.

    Raises InvalidArgument for other tensors (also those that tensor parallelism has split), and Mismatch where ranks
    bring different lists. What the function raises is raised on its rank; the others wait for that rank until it ends
    (PeerLost) or the deadline (Timeout).
    """
    if isinstance(tensors, Tensor) or not callable(function):
        raise _C.InvalidArgument(
            f"[tsm.on_whole_matrices] called with a {type(function).__name__} and a {type(tensors).__name__}; pass a "
            "function of (matrix, index), and a list of DTensors"
        )
    results: dict[int, Tensor] = {}
    by_sharing: dict[Sharing, list[int]] = {}
    for index, tensor in enumerate(tensors):
        sharing = sharing_of(tensor) if isinstance(tensor, DTensor) else None
        if sharing is None:
            kind = f"DTensor of {tensor.placements}" if isinstance(tensor, DTensor) else type(tensor).__name__
            raise _C.InvalidArgument(
                f"[tsm.on_whole_matrices] tensor {index} of shape {list(tensor.shape)} is a {kind}; rows that "
                "fully_shard of tesserae has cut are expected"
            )
        by_sharing.setdefault(sharing, []).append(index)
    for sharing, indices in by_sharing.items():
        asked = [tensors[index] for index in indices]
        parts = _apply(lambda matrix, i, indices=indices: function(matrix, indices[i]), asked, sharing)
        results.update(zip(indices, parts, strict=True))
    return [placed_as(tensor, results[index]) for index, tensor in enumerate(tensors)]


def _apply(function: Function, tensors: list[DTensor], sharing: Sharing) -> list[Tensor]:
    """This rank's parts of the results."""
    if sharing.degree == 1:
        return [_checked(function(local_of(tensor), i), tensor, i) for i, tensor in enumerate(tensors)]
    dims = [_dim_of(tensor) for tensor in tensors]
    rows = [_as_rows(local_of(t), t, dim) for t, dim in zip(tensors, dims, strict=True)]
    shapes = [(t.size(dim), row.size(1)) for t, dim, row in zip(tensors, dims, rows, strict=True)]
    whole = _C.WholeMatrices(sharing.fabric, sharing.degree, shapes)
    mine = [i for i, owner in enumerate(whole.owners) if owner == sharing.fabric.rank % sharing.degree]
    done = []
    for i, matrix in zip(mine, whole.collect(rows), strict=True):
        given = _from_rows(matrix, tensors[i], dims[i]).contiguous()
        done.append(_as_rows(_checked(function(given, i), tensors[i], i), tensors[i], dims[i]))
    parts = whole.distribute(done, rows[0])
    return [_from_rows(part, t, dim) for part, t, dim in zip(parts, tensors, dims, strict=True)]


def _dim_of(tensor: DTensor) -> int:
    return next(placement.dim for placement in tensor.placements if isinstance(placement, Shard))


def _as_rows(part: Tensor, of: DTensor, dim: int) -> Tensor:
    """[rows, elements of a row], contiguous; `dim` is what the rows are indices of."""
    columns = of.numel() // of.size(dim) if of.size(dim) else 0
    return part.movedim(dim, 0).reshape(part.size(dim), columns).contiguous()


def _from_rows(rows: Tensor, of: DTensor, dim: int) -> Tensor:
    others = [size for d, size in enumerate(of.shape) if d != dim]
    return rows.view(rows.size(0), *others).movedim(0, dim)


def _checked(result: Tensor, of: DTensor, index: int) -> Tensor:
    if result.shape != of.shape or result.dtype != of.dtype:
        raise _C.InvalidArgument(
            f"[tsm.on_whole_matrices] the function made {list(result.shape)} of {result.dtype} of matrix {index}, "
            f"which is {list(of.shape)} of {of.dtype}; return one of the same shape and dtype"
        )
    return result
