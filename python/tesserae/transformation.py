"""tsm.transform: where SMP v2 puts tensor-parallel layers into a model. At a degree of 1 there is nothing to put."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tesserae import _C


def transform(
    model: nn.Module,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """The model as it is, moved to `device` and `dtype` if they are given and it is not on the meta device.

    With `load_state_dict_from_rank0`, FSDP's sync_module_states brings rank 0's weights to the others, as in SMP v2.
    Raises InvalidArgument for a `config`: mixtures of experts are not available yet.
    """
    if config is not None:
        raise _C.InvalidArgument(
            f"[tsm.transform] config = {config!r}: expert parallelism is not available yet; leave it out"
        )
    if any(tensor.is_meta for tensor in model.parameters()):
        device = None
    return model.to(device=device, dtype=dtype) if device is not None or dtype is not None else model
