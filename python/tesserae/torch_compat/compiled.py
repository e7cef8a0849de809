"""Modules that torch.compile has wrapped. Apart from modules.py: importing torch's compiler takes seconds."""

from __future__ import annotations

from torch import nn

from tesserae.torch_compat.checked import checked

with checked():
    from torch._dynamo import OptimizedModule


def uncompiled(module: nn.Module) -> nn.Module:
    """What torch.compile(module) was made of; any other module as it is."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module
