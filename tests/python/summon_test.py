"""FSDP.summon_full_params: what is whole, on which ranks, and what is left of it afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tesserae as tsm
from models import MODELS, WIDTH, Block, Decoder, next_token_loss, tokens
from ranks import run_ranks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
BF16 = torch.bfloat16


def shard(model: nn.Module, use_orig_params: bool = True, strategy: str = "FULL_SHARD", **arguments: object) -> FSDP:
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
        **arguments,
    )


def plain(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(Block, tied=True)


def both(rank: int, world_size: int, function: Callable[..., None], *arguments: object) -> None:
    """With the user's parameters and with flat ones, in one launch."""
    for use_orig_params in (True, False):
        print(f"{use_orig_params=}", flush=True)  # in the report, if it is the last
        function(rank, world_size, use_orig_params, *arguments)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return list(ours) == list(theirs) and all(
        ours[name].shape == theirs[name].shape and torch.equal(ours[name], theirs[name]) for name in theirs
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = next_token_loss(model, tokens(step, 0, dist.get_rank()))
    loss.backward()
    optimizer.step()
    return loss.item()


# ---- what is whole ----
def parameters_are_those_of_the_module(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()
    expected = values(plain())
    for strategy in STRATEGIES:
        model = shard(plain(), use_orig_params, strategy, mixed_precision=MixedPrecision(param_dtype=BF16))
        before, block = values(model), values(model.module.blocks[0])
        with FSDP.summon_full_params(model):
            assert same(values(model), expected)
            assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in model.parameters())
            assert model.module.head.weight is model.module.embedding.weight
            assert same(values(model.module.blocks[0].module), values(plain().blocks[0]))
        assert same(values(model), before)
        with FSDP.summon_full_params(model, recurse=False):
            assert model.module.embedding.weight.shape == expected["embedding.weight"].shape
            assert same(values(model.module.blocks[0]), block)
        outer = nn.Sequential(model)  # a module that is not FSDP itself
        with FSDP.summon_full_params(outer):
            assert same(values(outer[0]), expected)
        with FSDP.summon_full_params(outer, recurse=False):
            assert same(values(model), before)


def test_parameters_are_those_of_the_module() -> None:
    run_ranks(both, 2, parameters_are_those_of_the_module)


class Odd(nn.Module):
    """Vectors before matrices, as recurrent layers of several layers have them."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("scale", (8,)), ("first", (8, 8)), ("shift", (8,)), ("second", (8, 8))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def parameters_are_in_the_modules_order(rank: int, world_size: int, use_orig_params: bool) -> None:
    for make in (Odd, lambda: nn.LSTM(8, 8, 2, bidirectional=True)):
        torch.manual_seed(0)
        expected = make()
        torch.manual_seed(0)
        model = FSDP(make(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        with FSDP.summon_full_params(model, writeback=False):
            vector = nn.utils.parameters_to_vector(model.parameters()).clone()
        assert torch.equal(vector, nn.utils.parameters_to_vector(expected.parameters()))
        assert list(model.state_dict()) == list(expected.state_dict())


def test_parameters_are_in_the_modules_order() -> None:
    run_ranks(both, 2, parameters_are_in_the_modules_order)


def frozen_parameters_have_their_own_dtype(rank: int, world_size: int) -> None:
    tsm.init()
    kind = MODELS["frozen"]
    model = FSDP(
        kind(),
        auto_wrap_policy=ModuleWrapPolicy(set(kind.units)),
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=BF16),
    )
    with FSDP.summon_full_params(model):
        for name, value in kind().named_parameters():
            whole = model.get_parameter(name)
            assert (whole.shape, whole.dtype, whole.requires_grad) == (value.shape, value.dtype, value.requires_grad)
            assert torch.equal(whole, value)
    kind.loss(model, tokens(0, 0, rank)).backward()


def test_frozen_parameters_have_their_own_dtype() -> None:
    run_ranks(frozen_parameters_have_their_own_dtype, 2)


def rank_0_alone(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()
    model, expected = shard(plain(), use_orig_params), values(plain())
    before = values(model)
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        now = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in values(model).items()}
        if rank == 0:
            assert same(now, expected)
        else:
            assert same(now, {name.replace("_fsdp_wrapped_module.", ""): value for name, value in before.items()})
            with pytest.raises(tsm.InvalidArgument, match="rank0_only=True on a rank"):
                model(tokens(0, 0, 0))
    assert same(values(model), before)
    next_token_loss(model, tokens(0, 0, rank)).backward()


def test_rank_0_alone() -> None:
    run_ranks(both, 2, rank_0_alone)


# ---- what is left ----
def each_rank_writes_its_part(rank: int, world_size: int, use_orig_params: bool) -> None:
    """In place, by assigning to .data and by another Parameter: all count, and training goes on from there."""
    tsm.init()
    for strategy in STRATEGIES:
        model = shard(plain(), use_orig_params, strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, 0)
        target = values(plain(seed=7))
        with FSDP.summon_full_params(model):
            embedding = model.module.embedding
            with torch.no_grad():
                embedding.weight.copy_(target["embedding.weight"])
            for i, block in enumerate(model.module.blocks):
                for name, parameter in block.module.named_parameters():
                    value = target[f"blocks.{i}.{name}"]
                    if i == 0:
                        parameter.data = value.clone()
                    else:
                        owner, _, attribute = name.rpartition(".")
                        setattr(block.module.get_submodule(owner), attribute, nn.Parameter(value.clone()))
        with FSDP.summon_full_params(model, writeback=False):
            assert same(values(model), target)
            for parameter in model.parameters():
                parameter.data.zero_()
        with FSDP.summon_full_params(model):
            assert same(values(model), target)
        reference = plain(seed=7)
        assert_same_losses(model, optimizer, reference)


def assert_same_losses(model: FSDP, optimizer: torch.optim.Optimizer, reference: nn.Module) -> None:
    """Both train for two steps, the reference on the batches of all ranks."""
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        loss = train(model, optimizer, step)
        theirs.zero_grad()
        for rank in range(dist.get_world_size()):
            expected = next_token_loss(reference, tokens(step, 0, rank))
            (expected / dist.get_world_size()).backward()
            if rank == dist.get_rank():
                assert loss == pytest.approx(expected.item(), rel=1e-5)
        theirs.step()


def test_each_rank_writes_its_part() -> None:
    run_ranks(both, 2, each_rank_writes_its_part)


def other_degrees(rank: int, world_size: int) -> None:
    """Three degrees: what is written reaches the parameter pieces too."""
    tsm.init({"degrees": {"parameters": 1, "gradients": 2, "optimizer": 4}})
    model = shard(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FSDP.summon_full_params(model), torch.no_grad():
        for parameter, value in zip(model.parameters(), plain(seed=7).parameters()):
            parameter.copy_(value)
    assert_same_losses(model, optimizer, plain(seed=7))


def test_other_degrees() -> None:
    run_ranks(other_degrees, 4)


def inside_an_accumulation(rank: int, world_size: int) -> None:
    """What is written between backwards without synchronisation is seen by the next of them."""
    tsm.init()
    model = shard(plain())
    with model.no_sync():
        next_token_loss(model, tokens(0, 0, rank)).backward()
        with FSDP.summon_full_params(model), torch.no_grad():
            for parameter, value in zip(model.parameters(), plain(seed=7).parameters()):
                parameter.copy_(value)
        loss = next_token_loss(model, tokens(1, 0, rank)).item()
        assert loss == pytest.approx(next_token_loss(plain(seed=7), tokens(1, 0, rank)).item(), rel=1e-5)


def test_inside_an_accumulation() -> None:
    run_ranks(inside_an_accumulation, 2)


def what_was_done_before_counts(rank: int, world_size: int) -> None:
    """Shards that were given other memory, and gradients that were set to nothing, stay so."""
    tsm.init()
    model = shard(plain())
    next_token_loss(model, tokens(0, 0, rank)).backward()
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
        parameter.grad = None
    with FSDP.summon_full_params(model):
        assert same(values(model), {name: value * 2 for name, value in values(plain()).items()})
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_was_done_before_counts() -> None:
    run_ranks(what_was_done_before_counts, 2)


# ---- gradients ----
def gradients(rank: int, world_size: int) -> None:
    tsm.init()
    reference = plain()
    for other in range(world_size):
        (next_token_loss(reference, tokens(0, 0, other)) / world_size).backward()
    for strategy in STRATEGIES:
        model = shard(plain(), strategy=strategy)
        with FSDP.summon_full_params(model, with_grads=True):
            assert all(parameter.grad is None for parameter in model.parameters())
        next_token_loss(model, tokens(0, 0, rank)).backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for (name, parameter), expected in zip(model.named_parameters(), reference.parameters()):
                assert (parameter.grad - expected.grad).abs().max() <= 1e-5 * expected.grad.abs().max(), name
                parameter.grad = torch.full_like(parameter, 3.0)
        assert all((parameter.grad == 3).all() for parameter in model.parameters() if parameter.numel() > 0)
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            model.module.embedding.weight.grad.zero_()
        assert all((parameter.grad == 3).all() for parameter in model.parameters() if parameter.numel() > 0)
        with FSDP.summon_full_params(model):
            assert all(parameter.grad is None for parameter in model.parameters())
        assert all((parameter.grad == 3).all() for parameter in model.parameters() if parameter.numel() > 0)


def test_gradients() -> None:
    run_ranks(gradients, 2)


# ---- within ----
def exceptions_leave_the_model_usable(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()
    model = shard(plain(), use_orig_params)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), values(model)
    with pytest.raises(KeyError), FSDP.summon_full_params(model):
        raise KeyError
    with pytest.raises(tsm.InvalidArgument, match=r"up.bias of shape \[41\] was replaced by a tensor of shape \[3\]"):
        with FSDP.summon_full_params(model):
            model.module.blocks[0].module.up.bias = nn.Parameter(torch.zeros(3))
    assert same(values(model), before)
    assert_same_losses(model, optimizer, plain())


def test_exceptions_leave_the_model_usable() -> None:
    run_ranks(both, 2, exceptions_leave_the_model_usable)


def nested_contexts(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()
    model, expected = shard(plain(), use_orig_params), values(plain())
    before = values(model)
    with FSDP.summon_full_params(model):
        with FSDP.summon_full_params(model.module.blocks[0]):
            assert same(values(model), expected)
        assert same(values(model), expected)
        assert same(model.state_dict(), plain().state_dict())
    with FSDP.summon_full_params(model.module.blocks[0]), FSDP.summon_full_params(model, writeback=False):
        assert same(values(model), expected)
    with FSDP.summon_full_params(model, writeback=False):
        with pytest.raises(tsm.InvalidArgument, match="have been summoned already"):
            with FSDP.summon_full_params(model):
                pass
    assert same(values(model), before)


def test_nested_contexts() -> None:
    run_ranks(both, 2, nested_contexts)


def wrong_uses(rank: int, world_size: int) -> None:
    tsm.init()
    model, flat = shard(plain()), shard(plain(), use_orig_params=False)
    for match, module, arguments in (
        ("writeback=True and rank0_only=True", model, {"rank0_only": True}),
        ("with_grads=True and offload_to_cpu=True", model, {"with_grads": True, "offload_to_cpu": True}),
        ("with_grads=True needs FSDP.*use_orig_params=True", flat, {"with_grads": True}),
    ):
        with pytest.raises(tsm.InvalidArgument, match=match), FSDP.summon_full_params(module, **arguments):
            pass

    def summon(*_: object) -> None:
        with FSDP.summon_full_params(model):
            pass

    handle = model.module.blocks[0].module.register_forward_pre_hook(summon)
    with pytest.raises(tsm.InvalidArgument, match='inside a forward of unit "root"'):
        model(tokens(0, 0, rank))
    handle.remove()
    loss = next_token_loss(model, tokens(0, 0, rank))
    loss.register_hook(summon)
    with pytest.raises(tsm.InvalidArgument, match="inside a backward"):
        loss.backward()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)


def test_wrong_uses() -> None:
    run_ranks(wrong_uses, 2)


def after_a_backward_that_threw(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()
    model, expected = shard(plain(), use_orig_params), values(plain())

    def fail(gradient: Tensor) -> None:
        raise KeyError

    hidden = model.module.embedding.register_forward_hook(lambda *all: all[-1].register_hook(fail) and None)
    with pytest.raises(KeyError):
        next_token_loss(model, tokens(0, 0, rank)).backward()
    hidden.remove()
    with FSDP.summon_full_params(model):
        assert same(values(model), expected)
    assert_same_losses(model, torch.optim.SGD(model.parameters(), lr=0.1), plain())


def test_after_a_backward_that_threw() -> None:
    run_ranks(both, 2, after_a_backward_that_threw)


# ---- apply, modules that keep references, generate ----
def apply_sees_whole_parameters(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()
    seen = []

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            with torch.no_grad():
                module.weight.fill_(0.5)

    torch.manual_seed(0)
    model = FSDP(Decoder(Block), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
    assert model.apply(fill) is model
    assert sorted(seen) == [(24, 41)] * 2 + [(41, 24)] * 2 + [(43, 24)]
    with FSDP.summon_full_params(model, writeback=False):
        assert all((p == 0.5).all() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)


def test_apply_sees_whole_parameters() -> None:
    run_ranks(both, 2, apply_sees_whole_parameters)


def lstm_keeps_its_own_references(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()

    def make() -> nn.LSTM:
        torch.manual_seed(0)
        return nn.LSTM(WIDTH, 7)

    model, inputs = FSDP(make(), use_orig_params=use_orig_params), torch.ones(3, 2, WIDTH)
    expected = make()(inputs)[0]
    with FSDP.summon_full_params(model):
        assert torch.allclose(model.module(inputs)[0], expected)
        with torch.no_grad():
            model.module.bias_hh_l0.zero_()
    changed = make()
    with torch.no_grad():
        changed.bias_hh_l0.zero_()
    assert torch.allclose(model(inputs)[0], changed(inputs)[0])


def test_lstm_keeps_its_own_references() -> None:
    run_ranks(both, 2, lstm_keeps_its_own_references)


def generates(rank: int, world_size: int, use_orig_params: bool, name: str) -> None:
    tsm.init()
    kind = MODELS[name]
    prompt = tokens(0, 0, 0)[:, :4]

    def generate(model: nn.Module) -> Tensor:
        return model.generate(prompt, max_new_tokens=6, do_sample=False, num_beams=2)

    expected = generate(kind().eval())
    model = FSDP(kind(), auto_wrap_policy=ModuleWrapPolicy(set(kind.units)), use_orig_params=use_orig_params).eval()
    for recurse in (True, False):
        with FSDP.summon_full_params(model, recurse=recurse, writeback=False), torch.no_grad():
            assert torch.equal(generate(model.module), expected)
    with FSDP.summon_full_params(model, recurse=False, writeback=False), torch.no_grad():
        # Ranks that need fewer tokens go on with the others, as with torch's class.
        first = model.module.generate(prompt, max_new_tokens=2 + 4 * rank, do_sample=False)
        assert first.shape[1] <= prompt.shape[1] + 2 + 4 * rank
    model.train()
    kind.loss(model, tokens(0, 0, rank)).backward()
    for recurse in (False, True):
        with FSDP.summon_full_params(model, recurse=recurse), torch.no_grad():
            assert torch.equal(generate(model.module), expected)
    kind.loss(model, tokens(0, 0, rank)).backward()


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generate(name: str) -> None:
    run_ranks(both, 2, generates, name)
