"""Weights tied across the borders of FSDP's units: the instance around all modules that use one shards it. torch's own
FSDP does not train such models; what is compared is one process that trains on the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tesserae as tsm
from models import WIDTH, Block, Decoder, next_token_loss, tokens
from ranks import run_ranks
from same_state import differences
from tesserae.torch_compat.instance import clean_tensor_name

RANKS, STEPS = 2, 4


class Pair(nn.Module):
    """A unit around two whose blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.second.up.weight = self.first.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def embedding_and_head() -> nn.Module:
    return Decoder(Block, tied=True)


def two_blocks() -> nn.Module:
    model = Decoder(Block)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def inside_a_unit() -> nn.Module:
    return Decoder(Pair)


def across_units() -> nn.Module:
    """One weight in both pairs, which the root has; each pair has one of its own, too."""
    model = Decoder(Pair)
    model.blocks[1].first.norm.weight = model.blocks[0].second.norm.weight
    return model


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    units: tuple[type[nn.Module], ...]
    use_orig_params: bool = True
    strategy: str = "FULL_SHARD"
    checkpointing: bool = False


BOTH = (Block, nn.Embedding)
CASES = [
    Case(embedding_and_head, BOTH),
    Case(embedding_and_head, BOTH, use_orig_params=False, checkpointing=True),
    Case(embedding_and_head, BOTH, strategy="NO_SHARD"),
    Case(two_blocks, (Block,)),
    Case(two_blocks, (Block,), use_orig_params=False),
    Case(two_blocks, (Block,), checkpointing=True),
    Case(inside_a_unit, (Block, Pair), checkpointing=True),
    Case(inside_a_unit, (Block, Pair), use_orig_params=False, strategy="SHARD_GRAD_OP"),
    Case(across_units, (Block, Pair)),
    Case(across_units, (Block, Pair), use_orig_params=False),
]


def build(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return case.build()


def wrap(case: Case, model: nn.Module) -> FSDP:
    sharded = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy(case.units),
        sharding_strategy=ShardingStrategy[case.strategy],
        use_orig_params=case.use_orig_params,
        device_id=torch.device("cpu"),
    )
    if case.checkpointing:
        apply_activation_checkpointing(sharded, check_fn=lambda module: isinstance(module, Block))
    return sharded


def train(model: nn.Module, ranks: range, steps: range) -> tuple[torch.optim.Optimizer, list[float]]:
    """On the batches of those ranks. The losses of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        loss = torch.stack([next_token_loss(model, tokens(step, 0, rank)) for rank in ranks]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer, losses


def trains_as_one_process(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    tsm.init()
    found = []
    for case in cases:
        print(case, flush=True)  # in the report, if it is the last
        alone, model = build(case), wrap(case, build(case))
        optimizer, expected = train(alone, range(world_size), range(STEPS))
        own, losses = train(model, range(rank, rank + 1), range(STEPS))
        mean = torch.tensor(losses)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        texts = differences(mean, torch.tensor(expected), 1e-5, "losses")
        state = model.state_dict()
        texts += differences(state, alone.state_dict(), 1e-4, "parameters")
        moments = FSDP.full_optim_state_dict(model, own, rank0_only=False)["state"]
        names = {name: i for i, (name, _) in enumerate(alone.named_parameters())}
        wanted = {name: optimizer.state_dict()["state"][i] for name, i in names.items()}
        texts += differences(
            {name: each["exp_avg"] for name, each in moments.items()},
            {name: each["exp_avg"] for name, each in wanted.items()},
            1e-3,
            "moments",
        )
        with FSDP.summon_full_params(model):
            whole = {clean_tensor_name(n): p.detach().clone() for n, p in model.named_parameters()}
        texts += differences(whole, {name: state[name] for name in whole}, 0.0, "summoned")
        kinds = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT]
        for kind in kinds:
            other = wrap(case, build(case, seed=1))
            with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
                other.load_state_dict(model.state_dict())
            texts += differences(other.state_dict(), state, 0.0, f"{kind}, loaded")
        shards = sum(p.numel() for p in model.parameters())
        if case.strategy != "NO_SHARD" and not shards < 0.6 * sum(p.numel() for p in alone.parameters()):
            texts.append(f"{shards} elements of parameters on a rank")
        found += [f"{case}: {text}" for text in texts]
    return found


def test_trains_as_one_process() -> None:
    ranks = run_ranks(trains_as_one_process, RANKS, CASES, deadline=240)
    found = [text for texts in ranks for text in texts]
    assert not found, "\n".join(found[:40])


def ignored_stay_so(rank: int, world_size: int) -> None:
    """What an inner instance ignores is not left to the one around it."""
    tsm.init()
    block = Block()
    model = nn.Sequential(FSDP(block, ignored_modules=[block.up], use_orig_params=True), nn.Linear(WIDTH, 1))
    sharded = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    sharded(torch.ones(2, 3, WIDTH)).sum().backward()
    assert block.up.weight.grad is not None
    assert block.up.weight.shape == block.up.weight.grad.shape == (41, WIDTH)


def test_ignored_stay_so() -> None:
    run_ranks(ignored_stay_so, RANKS)


def computes_in_bf16(rank: int, world_size: int) -> None:
    """An instance casts its inputs also where all that it computes with belongs to the one around it."""
    tsm.init()
    model = Decoder(Block, tied=True)
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    sharded = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}), mixed_precision=bf16)
    norm = nn.LayerNorm(WIDTH)  # in fp32, as its inputs
    model.head.register_forward_pre_hook(lambda module, inputs: norm(inputs[0].float()), prepend=True)
    next_token_loss(sharded, tokens(0, 0, rank)).backward()
    assert sharded(tokens(0, 0, rank)).dtype == torch.bfloat16


def test_computes_in_bf16() -> None:
    run_ranks(computes_in_bf16, RANKS)


def wrapped_by_hand(rank: int, world_size: int) -> None:
    """Inside out, with flat parameters: the error of python.md, at wrapping."""
    tsm.init()
    model = Decoder(Block, tied=True)
    model.embedding = FSDP(model.embedding, use_orig_params=False)
    with pytest.raises(tsm.InvalidArgument, match="belongs to an FSDP instance already"):
        FSDP(model, use_orig_params=False)


def test_wrapped_by_hand() -> None:
    run_ranks(wrapped_by_hand, RANKS)
