from __future__ import annotations

import torch
from torch import nn

from tesserae.utils.module_utils import empty_module_params, move_buffers_to_device


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.scale.mark = "kept"
        self.register_buffer("steps", torch.arange(3), persistent=False)


def test_parameters_are_new_on_the_device_and_keep_what_they_are() -> None:
    with torch.device("meta"):
        module = Tied()
    assert empty_module_params(module, torch.device("cpu")) is module
    assert module.scale.device.type == "cpu"
    assert (module.scale.shape, module.scale.requires_grad, module.scale.mark) == ((2,), False, "kept")
    assert module.first.weight.is_meta, "not those of submodules"
    empty_module_params(module, torch.device("cpu"), recurse=True)
    assert not any(p.is_meta for p in module.parameters())
    assert module.second.weight is module.first.weight
    assert module.steps.is_meta, "no buffers"


def test_parameters_are_made_where_this_rank_computes() -> None:
    module = nn.Linear(2, 2, device="meta")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert empty_module_params(module).weight.device.type == expected


def test_buffers_move_with_their_values() -> None:
    module = Tied()
    move_buffers_to_device(module, torch.device("cpu"))
    assert module.steps.tolist() == [0, 1, 2]
    assert "steps" not in module.state_dict(), "still not persistent"
    with torch.device("meta"):
        module = Tied()
    assert move_buffers_to_device(module, torch.device("cpu")) is module
    assert (module.steps.device.type, module.norm.running_mean.device.type) == ("cpu", "meta")
    move_buffers_to_device(module, torch.device("cpu"), recurse=True)
    assert module.norm.running_mean.device.type == "cpu"
