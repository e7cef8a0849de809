"""The rules of docs/python.md for what happens around a step: exceptions in it, requires_grad toggled after wrapping,
several models in one process, masters cast to another dtype, parameters read while they are sharded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

import tesserae as tsm
from ranks import run_ranks

WIDTH = 24
FLAT_OR_NOT = pytest.mark.parametrize("use_orig_params", [True, False])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Trap(nn.Module):
    """Passes its input on, and raises in forward or in backward when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.raises_in: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.raises_in == "forward":
            raise KeyError("trap")
        x = x * 1
        if self.raises_in == "backward" and x.requires_grad:
            x.register_hook(self.spring)
        return x

    def spring(self, gradient: Tensor) -> None:
        raise KeyError("trap")


def make_model(seed: int = 0, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, 4))
    model.insert(2, Trap())
    return model


def shard(model: nn.Module, use_orig_params: bool = True, **arguments: object) -> FSDP:
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        **arguments,
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=random), torch.randint(4, (3,), generator=random)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    inputs, targets = batch(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def losses_with(prepare: Callable[[int, nn.Module], None], use_orig_params: bool, strategy: str) -> list[float]:
    """Losses of three good steps; `prepare` is called before each, with its number and the trap."""
    model = shard(make_model(), use_orig_params, sharding_strategy=ShardingStrategy[strategy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        prepare(step, model)
        losses.append(train_step(model, optimizer, step))
    return losses


def exception_leaves_the_next_step_clean(rank: int, world_size: int, use_orig_params: bool) -> None:
    tsm.init()

    def fall_into(where: str) -> Callable[[int, nn.Module], None]:
        def prepare(step: int, model: nn.Module) -> None:
            if step != 1:
                return
            trap = next(module for module in model.modules() if isinstance(module, Trap))
            trap.raises_in = where
            with pytest.raises(KeyError, match="trap"):
                F.cross_entropy(model(batch(9)[0]), batch(9)[1]).backward()
            trap.raises_in = None

        return prepare

    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        undisturbed = losses_with(lambda step, model: None, use_orig_params, strategy)
        assert losses_with(fall_into("forward"), use_orig_params, strategy) == undisturbed
        assert losses_with(fall_into("backward"), use_orig_params, strategy) == undisturbed


@FLAT_OR_NOT
def test_exception_leaves_the_next_step_clean(use_orig_params: bool) -> None:
    run_ranks(exception_leaves_the_next_step_clean, 2, use_orig_params)


def exception_in_no_sync(rank: int, world_size: int) -> None:
    """What was accumulated before it is forgotten with the step."""
    tsm.init()
    model = shard(make_model())
    inputs, targets = batch(0)
    trap = next(module for module in model.modules() if isinstance(module, Trap))
    with pytest.raises(KeyError), model.no_sync():
        F.cross_entropy(model(inputs), targets).backward()
        trap.raises_in = "backward"
        F.cross_entropy(model(inputs), targets).backward()
    trap.raises_in = None
    F.cross_entropy(model(inputs), targets).backward()
    after = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    fresh = shard(make_model())
    F.cross_entropy(fresh(inputs), targets).backward()
    torch.testing.assert_close(after, [p.grad for p in fresh.parameters() if p.grad is not None], rtol=0, atol=0)


def test_exception_in_no_sync() -> None:
    run_ranks(exception_in_no_sync, 2)


def made_trainable(rank: int, world_size: int, use_orig_params: bool) -> None:
    """A parameter that was frozen at wrapping has no gradient buffer: it cannot become trainable."""
    tsm.init()
    model = make_model()
    model[0].requires_grad_(False)
    model = shard(model, use_orig_params)
    model(batch(0)[0]).sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(tsm.InvalidArgument, match="(?s)frozen.*requires_grad|requires_grad.*frozen"):
        model(batch(1)[0])


@FLAT_OR_NOT
def test_made_trainable_after_wrapping(use_orig_params: bool) -> None:
    run_ranks(made_trainable, 2, use_orig_params)


def made_frozen(rank: int, world_size: int) -> None:
    """A parameter that is frozen after wrapping stays where it is; the others train on, and it may train again."""
    tsm.init()
    model = shard(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = dict(model.named_parameters())
    weights = {name: p for name, p in names.items() if p.numel() > 0 and "linear.weight" in name}
    train_step(model, optimizer, 0)
    for toggled in (False, True):
        for parameter in weights.values():
            parameter.requires_grad_(toggled)
        before = {name: parameter.detach().clone() for name, parameter in names.items()}
        train_step(model, optimizer, 1)
        for name, parameter in names.items():
            if parameter.numel() > 0 and "norm" not in name:
                assert torch.equal(parameter, before[name]) == (name in weights and not toggled), name


def test_made_frozen_after_wrapping() -> None:
    run_ranks(made_frozen, 2)


def teacher_and_student(rank: int, world_size: int) -> None:
    """Same losses as with torch's FSDP, for two roots that are used in turn, one of them without gradients."""

    def train() -> list[float]:
        teacher, student = shard(make_model(1)), shard(make_model(2, blocks=2), use_orig_params=False)
        optimizer = torch.optim.SGD([*teacher.parameters(), *student.parameters()], lr=0.1)
        losses = []
        for step in range(3):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(inputs).softmax(-1)
            loss = F.cross_entropy(student(inputs), wanted)
            loss.backward()
            if step == 1:  # and once both in one graph
                both = F.cross_entropy(teacher(inputs) + student(inputs), targets)
                both.backward()
                losses.append(both.item())
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train()
    tsm.init()
    assert train() == pytest.approx(expected, rel=1e-5)


def test_several_models_in_one_process() -> None:
    run_ranks(teacher_and_student, 2)


def upcast(rank: int, world_size: int, use_orig_params: bool) -> None:
    """What Accelerate does to a model loaded in bf16: then it trains as one that was cast to fp32 before wrapping."""
    tsm.init()
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        results = []
        for early in (True, False):
            model = make_model().to(torch.bfloat16)
            model = shard(
                model.float() if early else model,
                use_orig_params,
                mixed_precision=precision,
                sharding_strategy=strategy,
            )
            for unit in FSDP.fsdp_modules(model) if not early else ():
                assert unit._flat_param._fqns
                unit._flat_param.data = unit._flat_param.data.to(torch.float32)
                unit._handle._orig_param_dtype = torch.float32
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            losses = [train_step(model, optimizer, step) for step in range(3)]
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
            with FSDP.summon_full_params(model):
                weights = [p.detach().clone() for p in model.parameters()]
            results.append((losses, weights))
        assert results[0][0] == results[1][0]
        for one, other in zip(results[0][1], results[1][1], strict=True):
            assert one.dtype == other.dtype == torch.float32 and torch.equal(one, other)
        with pytest.raises(tsm.InvalidArgument, match="has run a step already"):
            model._handle._orig_param_dtype = torch.float64


@FLAT_OR_NOT
def test_upcast_before_the_first_step(use_orig_params: bool) -> None:
    run_ranks(upcast, 2, use_orig_params)


def read_while_sharded(rank: int, world_size: int) -> None:
    """With use_orig_params a parameter shows this rank's slice; without, the module's entry says how to read it."""
    tsm.init()
    model = shard(make_model())
    whole = make_model()
    model(batch(0)[0])
    shown = model.module[0].linear.weight
    assert isinstance(shown, nn.Parameter) and shown.dim() == 1 and shown.numel() < WIDTH * WIDTH
    counts = torch.tensor([p.numel() for p in model.parameters()])
    dist.all_reduce(counts)
    assert counts.tolist() == [p.numel() for p in whole.parameters()]

    flat = shard(make_model(), use_orig_params=False)
    flat(batch(0)[0])
    for read in (lambda weight: weight.sum(), lambda weight: weight.tolist()):
        with pytest.raises(RuntimeError, match=r"linear\.weight.*read while it is sharded.*summon_full_params"):
            read(flat.module[0].linear.weight)


def test_parameters_read_while_sharded() -> None:
    run_ranks(read_while_sharded, 2)
