"""torch's linear layers and embeddings in a sharded model: torch's numbers, with gradients where they are reduced."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.flop_counter import FlopCounterMode

import tesserae as tsm
from fully_shard_runs import ours
from ranks import run_ranks
from tesserae.fully_shard.engine import prepare
from tesserae.torch_compat.fsdp2 import state_of


class Model(nn.Module):
    """Layers of a script, among them some that are no plain linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(9, 8, padding_idx=2)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.own = Doubled(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.down(F.relu_(self.up(x)))
        return self.head(self.own(self.normed(x)))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


TOKENS = torch.tensor([[1, 2, 3, 8], [3, 0, 2, 1]])


def trained(wrap: Callable[[nn.Module], nn.Module], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list]:
    model = wrap(Model().to(dtype))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        loss = model(TOKENS).float().square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        losses.append(loss.item())
    return model, losses


def wrap_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True)


FACES: dict[str, Callable[[nn.Module], nn.Module]] = {"FSDP1": wrap_fsdp1, "FSDP2": fully_shard}


def in_place(model: nn.Module) -> int:
    unit = model._unit if isinstance(model, FullyShardedDataParallel) else state_of(model).prepared()
    return unit.statistics().gradients_in_place


def computes_in_place(rank: int, world_size: int, face: str) -> None:
    _, expected = trained(lambda model: model)
    with ours():
        model, losses = trained(FACES[face])
        assert losses == expected if world_size == 1 else losses == pytest.approx(expected, rel=1e-6)
        # The table, up, down and head; own has a forward of its own, and the weight of normed is computed.
        assert in_place(model) == 3 * 4
        types = [type(part) for part in model.modules()]
        assert types.count(nn.Linear) == 3 and types.count(nn.Embedding) == 1


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_computed_where_they_are_reduced(world_size: int, face: str) -> None:
    run_ranks(computes_in_place, world_size, face)


def leaves_others_alone(rank: int, world_size: int) -> None:
    with ours():
        model = fully_shard(Model())
        prepare(state_of(model))
        seen = []
        model.up.register_forward_hook(lambda module, args, output: seen.append(output.shape))
        expected = Model()(TOKENS)
        torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=0)
        assert seen == [(2, 4, 12)]

        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(TOKENS), Model()(TOKENS), rtol=0, atol=0)
        with FlopCounterMode(display=False) as ours_counted:
            model(TOKENS).sum().backward()
        with FlopCounterMode(display=False) as counted:
            Model()(TOKENS).sum().backward()
        assert ours_counted.get_total_flops() == counted.get_total_flops() > 0
        compiled = torch.compile(model.up, backend="eager")
        model.unshard()
        torch.testing.assert_close(compiled(expected.new_ones(2, 8)), Model().up(expected.new_ones(2, 8)))
        model.reshard()


def test_who_watches_sees_what_torch_does() -> None:
    run_ranks(leaves_others_alone, 1)


def is_copied(rank: int, world_size: int) -> None:
    with ours():
        trained(lambda model: fully_shard(model))
        layer = nn.Sequential(nn.Linear(3, 4))
        wrapped = wrap_fsdp1(layer)
        wrapped(torch.ones(1, 3)).sum().backward()
        changed = layer[0]
        assert "forward" in vars(changed)
        twin = copy.deepcopy(changed)
        assert twin.forward.__self__ is twin
        changed_file = io.BytesIO()
        with FullyShardedDataParallel.summon_full_params(wrapped):
            torch.save(changed, changed_file)
            expected = changed(torch.ones(1, 3))
        changed_file.seek(0)
        loaded = torch.load(changed_file, weights_only=False)
        torch.testing.assert_close(loaded(torch.ones(1, 3)), expected)


def test_copies_and_files_have_layers_of_their_own() -> None:
    run_ranks(is_copied, 1)


def multiplies_wide(rank: int, world_size: int, config: dict[str, Any], face: str) -> None:
    """Of small integers a widened product is exact before it is rounded; torch's depends on the CPU."""
    with ours(config):
        layer = nn.Linear(300, 7, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(torch.randint(-8, 9, (7, 300)))
        weight = layer.weight.detach().clone()
        model = FACES[face](nn.Sequential(layer))
        x = torch.randint(-8, 9, (4, 300)).to(torch.bfloat16)
        exact = (x.double() @ weight.double().T).to(torch.bfloat16)
        torch.testing.assert_close(model(x), exact, rtol=0, atol=0)
        model(x).sum().backward()
        assert next(model.parameters()).grad is not None


@pytest.mark.parametrize("face", FACES)
def test_products_of_bf16_in_fp32(face: str) -> None:
    run_ranks(multiplies_wide, 2, {"cpu_bf16_products": "fp32"}, face)


def test_bad_input() -> None:
    with pytest.raises(tsm.InvalidArgument, match="cpu_bf16_products"):
        tsm.init({"cpu_bf16_products": "bf16"})
