"""What is said of a model of fully_shard: errors that say what to do, and tsm.status."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

import tesserae as tsm
from fully_shard_runs import make_model, ours, shard_all
from ranks import run_ranks


class Borrower(nn.Module):
    """Has a parameter of another module."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Chain(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x


def refuses(rank: int, world_size: int) -> None:
    theirs = fully_shard(nn.Linear(4, 4))
    with ours():
        with pytest.raises(tsm.InvalidArgument, match=r"torch's own FSDP.*Call tsm.init\(\) before"):
            fully_shard(nn.Sequential(theirs))
        late = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(late.parameters(), lr=0.1)
        fully_shard(late)(torch.ones(1, 4)).sum().backward()
        with pytest.raises(tsm.InvalidArgument, match=r"built before fully_shard"):
            optimizer.step()
        model = shard_all(make_model())
        assert isinstance(model, FSDPModule) and type(model).__name__ == "FSDPSequential"
        assert type(model[:2]) is nn.Sequential
        with pytest.raises(AssertionError, match="has already been applied"):
            fully_shard(model)
        with pytest.raises(ValueError, match="scalar parameters"):
            scalar = nn.Linear(2, 2)
            scalar.factor = nn.Parameter(torch.tensor(1.0))
            fully_shard(scalar)
        with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
            fully_shard(nn.Linear(5, 4, bias=False), shard_placement_fn=lambda parameter: Shard(1))
        with pytest.raises(tsm.InvalidArgument, match="it was sharded before"):
            again = fully_shard(nn.Linear(4, 4))
            fully_shard(nn.Sequential(Borrower(again.weight)))
        with pytest.raises(tsm.InvalidArgument, match="mesh is 'dp', a str; pass a DeviceMesh"):
            fully_shard(nn.Linear(4, 4), mesh="dp")
        with pytest.raises(tsm.InvalidArgument, match="mp_policy is 'bf16', a str"):
            fully_shard(nn.Linear(4, 4), mp_policy="bf16")
        with pytest.raises(tsm.InvalidArgument, match="an empty list of modules"):
            fully_shard([])
        with pytest.raises(tsm.InvalidArgument, match="'model' is a str; pass the model"):
            tsm.status("model")
        with pytest.raises(ValueError, match="factor of 2"):
            fully_shard(nn.Linear(4, 4), reshard_after_forward=3)
        with pytest.raises(ValueError, match="containers"):
            fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
        fully_shard(Chain([nn.Linear(2, 2)]))(torch.ones(1, 2))  # a container with a forward of its own is a module
        with pytest.raises(tsm.InvalidArgument, match="sharded by fully_shard"):
            FullyShardedDataParallel(nn.Sequential(fully_shard(nn.Linear(4, 4))))
        with pytest.raises(tsm.InvalidArgument, match="wrapped by FullyShardedDataParallel"):
            fully_shard(nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4))))
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        fully_shard(tied[0])
        fully_shard(tied)
        with pytest.raises(ValueError, match="shared with a parameter already managed"):
            tied(torch.randn(1, 4))
    assert type(fully_shard(nn.Linear(4, 4))).__mro__[1] is FSDPModule  # torch's again


def says_who_trains_what(rank: int, world_size: int) -> None:
    theirs = fully_shard(nn.Linear(4, 4))
    with ours({"hybrid_shard_degree": 1}):
        model = shard_all(make_model(), ignored_params=set())
        wrapped = FullyShardedDataParallel(nn.Linear(4, 4))
        everything = nn.ModuleDict({"mine": model, "theirs": theirs, "wrapped": wrapped, "plain": nn.Linear(2, 2)})
        status = tsm.status(everything)
        served = status.parts["tesserae (fully_shard)"]
        assert served.units == ["mine", "mine.0", "mine.1", "mine.2"] and served.degrees == (1, 1, 1)
        assert len(served.parameters) == len(list(model.parameters()))
        assert status.parts["torch (fully_shard)"].parameters == ["theirs.weight", "theirs.bias"]
        assert status.left_to_torch == ["theirs.weight", "theirs.bias", "plain.weight", "plain.bias"]
        assert "tesserae (fully_shard), 4 units, P=1 G=1 O=1: 20 parameters (mine.0.norm.weight, " in str(status), str(
            status
        )
        assert "nobody: each rank trains its own: 2 parameters (plain.weight, plain.bias)" in str(status)


class LooksUp(nn.Module):
    """Asks for a sparse gradient where no layer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, index: Tensor) -> Tensor:
        return nn.functional.embedding(index, self.weight, sparse=True)


def refuses_sparse_gradients(rank: int, world_size: int) -> None:
    index = torch.tensor([1, 2])
    device = torch.device("cpu")
    with ours():
        says = r"weight is the weight of an Embedding\(sparse=True\), and gradients are reduced whole"
        with pytest.raises(tsm.InvalidArgument, match=rf"\[fully_shard\] {says}"):
            fully_shard(nn.Embedding(4, 2, sparse=True))(index)
        with pytest.raises(tsm.InvalidArgument, match=rf"\[FSDP\] 0.{says}"):
            FullyShardedDataParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True)), device_id=device)
        with pytest.raises(tsm.InvalidArgument, match=r"EmbeddingBag\(sparse=True\)"):
            fully_shard(nn.EmbeddingBag(4, 2, sparse=True, mode="sum"))(index[None])
        frozen = nn.Embedding(4, 2, sparse=True).requires_grad_(False)
        assert fully_shard(frozen)(index).shape == (2, 2)
        with pytest.raises(RuntimeError, match=r"gradient of parameter weight is sparse.*without sparse=True"):
            fully_shard(LooksUp())(index).sum().backward()


def test_sparse_gradients_are_refused_with_their_reason() -> None:
    run_ranks(refuses_sparse_gradients, 2)


def test_status() -> None:
    run_ranks(says_who_trains_what, 2)


def test_bad_input() -> None:
    run_ranks(refuses, 2)
