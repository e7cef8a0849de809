"""torch.optim.Muon on rows: momentum and parameters stay where they are, matrices are orthogonalised whole.

1. Momentum, row by row, on every rank.
2. What Muon orthogonalises comes whole to one rank for each matrix, in bf16 as torch computes it, and goes back.
3. Weight decay and update, row by row.

torch's own code would do the same on DTensors, product by product, with a gather in front of each; and since sums of
bf16 products are then formed in another order, it does not follow one process. Here it does, to the bit.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from tesserae.fully_shard.places import sharing_of
from tesserae.fully_shard.whole_matrices import on_whole_matrices
from tesserae.torch_compat.fsdp2 import local_of, placed_as
from tesserae.torch_compat.muon import adjusted_lr, orthogonalised, set_update, torch_update


def install() -> None:
    set_update(_update)


def uninstall() -> None:
    set_update(torch_update)


def _update(params: list[Tensor], grads: list[Tensor], muon_momentum_bufs: list[Tensor], **options: Any) -> None:
    """As torch calls it; parameters that are not ours go to torch."""
    triples = list(zip(params, grads, muon_momentum_bufs, strict=True))
    ours = [triple for triple in triples if isinstance(triple[0], DTensor) and sharing_of(triple[0]) is not None]
    if ours:
        _update_rows(ours, **options)
    taken = {id(parameter) for parameter, _, _ in ours}
    if others := [triple for triple in triples if id(triple[0]) not in taken]:
        torch_update(*map(list, zip(*others, strict=True)), **options)


def _update_rows(
    triples: list[tuple[Tensor, Tensor, Tensor]],
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    **_: Any,  # has_complex: Muon has refused such parameters
) -> None:
    lr = float(lr)
    updates = []
    for parameter, gradient, buffer in triples:  # 1.
        now, average = local_of(gradient), local_of(buffer)
        average.lerp_(now, 1 - momentum)
        update = now.lerp(average, momentum) if nesterov else average
        updates.append(placed_as(parameter, update.bfloat16()))
    updates = on_whole_matrices(  # 2.
        lambda matrix, _: orthogonalised(matrix, ns_coefficients, ns_steps, eps).contiguous(), updates
    )
    for (parameter, _, _), update in zip(triples, updates, strict=True):  # 3.
        rows = local_of(parameter)
        rows.mul_(1 - lr * weight_decay)
        rows.add_(local_of(update), alpha=-adjusted_lr(lr, adjust_lr_fn, parameter.shape))
