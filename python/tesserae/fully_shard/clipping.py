"""torch.nn.utils.clip_grad_norm_ of gradients on several meshes: experts that ranks share out are on one of their own,
and torch stacks norms of one mesh only. Gradients of one mesh, and lists with plain ones, are torch's affair."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tesserae.torch_compat.clip import set_halves, torch_clip, torch_norm


def install() -> None:
    set_halves(_norm, _clip)


def uninstall() -> None:
    set_halves(torch_norm, torch_clip)


def _by_mesh(tensors: list[Tensor]) -> dict[DeviceMesh, list[Tensor]]:
    """{} if some are plain."""
    found: dict[DeviceMesh, list[Tensor]] = {}
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            return {}
        found.setdefault(tensor.device_mesh, []).append(tensor)
    return found


def _norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Replicated on the mesh of the first. Collective over the meshes."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    groups = _by_mesh(tensors)
    if len(groups) < 2:
        return torch_norm(tensors, norm_type, error_if_nonfinite, foreach)
    each = [cast(DTensor, torch_norm(group, norm_type, False, foreach)) for group in groups.values()]
    norms = [norm.full_tensor() for norm in each]
    total = torch_norm(norms, norm_type, error_if_nonfinite, foreach)
    mesh = next(iter(groups))
    return DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _clip(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups = _by_mesh([p for p in parameters if p.grad is not None])
    if len(groups) < 2:
        torch_clip(parameters, max_norm, total_norm, foreach)
        return
    total = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    for group in groups.values():
        torch_clip(group, max_norm, total, foreach)
