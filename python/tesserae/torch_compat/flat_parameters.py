"""What other libraries read of a flat parameter, and of the parameters in it. Accelerate upcasts parameters through
`_handle`; DCP reads names and shapes; Lightning looks for FSDP's mark on the parameters of an optimizer."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from tesserae.torch_compat.checked import checked

with checked():
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened


class FlatHandle:
    """Stands for FSDP's handle of a flat parameter: the attributes that are read outside of torch.

    With use_orig_params=True, `flat_param` is a parameter without elements that nobody else knows: it tells dtype,
    device and names.
    """

    def __init__(
        self,
        instance: TorchFSDP,
        flat_param: nn.Parameter,
        names: Sequence[str],
        set_master_dtype: Callable[[torch.dtype], None],
    ) -> None:
        self._instance = weakref.proxy(instance)  # which has this: it must go without the collector
        self._set_master_dtype = set_master_dtype
        self._use_orig_params = instance._use_orig_params
        if self._use_orig_params:
            flat_param = nn.Parameter(flat_param.detach()[:0].clone(), requires_grad=flat_param.requires_grad)
            flat_param._fqns = tuple(names)
        self.flat_param = flat_param
        self._original_dtype = flat_param.dtype
        self._fwd_bwd_param_dtype = instance.mixed_precision.param_dtype or flat_param.dtype
        self._reduce_dtype = instance.mixed_precision.reduce_dtype or self._fwd_bwd_param_dtype
        self._fully_sharded_module = getattr(instance, "_fsdp_wrapped_module", None)

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """In what dtype the optimizer sees the parameters. Accelerate sets it before the first step, after it has given
        `flat_param` data of that dtype, so that parameters loaded in bf16 are trained in fp32."""
        return self._original_dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        self._set_master_dtype(dtype)
        self._original_dtype = dtype

    @property
    def uses_sharded_strategy(self) -> bool:
        return self._instance.sharding_strategy.name != "NO_SHARD"


def mark_flat_parameter(parameter: nn.Parameter, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
    """Makes isinstance(parameter, torch.distributed.fsdp.FlatParameter) hold, and tells what is in it."""
    mark_flattened(parameter)
    parameter._is_flat_param = True
    parameter._fqns = tuple(names)
    parameter._shapes = tuple(torch.Size(shape) for shape in shapes)
    parameter._num_params = len(names)
    parameter._numels_with_padding = tuple(math.prod(shape) for shape in shapes)  # without any
    parameter._is_padding_mask = (False,) * len(names)


def mark_flattened(parameter: nn.Parameter) -> None:
    """FSDP has this parameter: torch marks flat parameters so, and with use_orig_params=True those in them."""
    _set_fsdp_flattened(parameter)
