"""What the tests of checkpoints save and load: a small model of odd sizes, under any wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import tesserae as tsm


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen one, a buffer that forward changes, and two units when it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.block = nn.Sequential(nn.Linear(5, 11), nn.LayerNorm(11), nn.Linear(11, 5))
        self.scale = nn.Parameter(torch.full((5,), 1.5), requires_grad=False)
        self.head = nn.Linear(5, 13)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.embed(tokens)
        return self.head((hidden + self.block(hidden)) * self.scale)


@dataclass
class Way:
    """How a model is sharded, on how many ranks. `ranks` 0: not at all, without torch.distributed."""

    ranks: int
    strategy: str = "FULL_SHARD"
    degree: int = 0  # hybrid_shard_degree
    use_orig_params: bool = True
    compute: torch.dtype | None = None  # of parameters in forward and backward

    def __str__(self) -> str:
        return f"{self.ranks}-{self.strategy}-{self.degree}-{'orig' if self.use_orig_params else 'flat'}"


def make(way: Way, seed: int, lr: float = 0.01) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if way.ranks:
        tsm.init({"hybrid_shard_degree": way.degree})
        options = {
            "sharding_strategy": ShardingStrategy[way.strategy],
            "use_orig_params": way.use_orig_params,
            "mixed_precision": MixedPrecision(param_dtype=way.compute, reduce_dtype=torch.float32),
            "device_id": torch.device("cpu"),
        }
        model.block = FSDP(model.block, **options)
        model = FSDP(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.8, 0.95))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(13, (3, 4), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and moments of a sharded model, gathered by the engine and not through a checkpoint."""
    found = {}
    for instance in FSDP.fsdp_modules(model):
        for flat, parameters in zip(instance._flats, instance._local, strict=True):
            states = [optimizer.state.get(p, {}) for p in parameters]
            parts = {"": flat.local()}
            if flat.trainable:
                for key in ("exp_avg", "exp_avg_sq"):
                    parts[key] = flat.join([state.get(key) for state in states], torch.float32)
            for key, part in parts.items():
                whole = flat.whole_values(part)
                for names, shape, begin in zip(flat.names, flat.shapes, flat.begins, strict=True):
                    size = torch.Size(shape).numel()
                    found[f"{key}/{names[0]}"] = whole[begin : begin + size].view(shape).clone()
    return found


def plain_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The same of a model that is not sharded."""
    for name, parameter in model.named_parameters():
        yield f"/{name}", parameter.detach()
        for key in ("exp_avg", "exp_avg_sq"):
            if key in optimizer.state.get(parameter, {}):
                yield f"{key}/{name}", optimizer.state[parameter][key]


def loaded_plainly(path: Path) -> tuple[dict[str, Tensor], nn.Module, torch.optim.AdamW]:
    """What a checkpoint has, as seen by a model that is not sharded and has other values before."""
    model, optimizer = make(Way(0), seed=99, lr=1.0)
    assert tsm.checkpoint.load(path, model, optimizer) is not None
    return dict(plain_tensors(model, optimizer)), model, optimizer


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not differing


def phase() -> Tensor:
    return torch.tensor([1 + 2j, 3 - 4j])
