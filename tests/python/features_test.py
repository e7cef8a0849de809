"""Features of torch that meet the FSDP class from outside, each against torch's own FSDP in the same ranks: the sharded
gradient scaler, torch.compile, communication hooks, checkpoint wrappers."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

import tesserae as tsm
from ranks import run_ranks

WIDTH, STEPS = 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))


def wrap(
    model: nn.Module,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    unit: type[nn.Module] = Block,
    ignored: Sequence[nn.Module] = (),
) -> FSDP:
    return FSDP(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        use_orig_params=True,
        ignored_modules=ignored,
        device_id=torch.device("cpu"),
    )


def loss_of(model: nn.Module, step: int) -> Tensor:
    random = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(3, WIDTH, generator=random)
    return F.cross_entropy(model(inputs), torch.randint(4, (3,), generator=random))


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    loss_of: Callable[[nn.Module, int], Tensor] = loss_of,
) -> float:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(model: nn.Module, steps: int = STEPS, loss_of: Callable[[nn.Module, int], Tensor] = loss_of) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return [take_step(model, optimizer, step, loss_of) for step in range(steps)]


def same_as_fsdp1(rank: int, world_size: int, run: Callable[[], list[float]]) -> None:
    theirs = run()
    tsm.init()
    assert run() == pytest.approx(theirs, rel=1e-5)


def scaled() -> list[float]:
    """Trains with a scaler; in the second step one rank's gradients overflow: all ranks must skip it."""
    model = wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0, growth_interval=2)
    seen = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        overflow = float("inf") if step == 1 and dist.get_rank() == dist.get_world_size() - 1 else 1.0
        scaler.scale(loss * overflow).backward()
        scaler.unscale_(optimizer)
        if step != 1:
            seen.append(model.clip_grad_norm_(1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [loss.item(), scaler.get_scale()]
    assert seen[4] == 512.0
    return seen


def test_sharded_grad_scaler() -> None:
    run_ranks(same_as_fsdp1, 2, scaled)


def clips_what_is_ignored(norm_type: float) -> list[float]:
    """Parameters that FSDP leaves alone count in the norm, once, and are clipped with the others."""
    model = make_model()
    model = wrap(model, ignored=[model[2]])
    (100 * loss_of(model, 0)).backward()
    norm = model.clip_grad_norm_(0.5, norm_type)
    return [norm.item(), *(p.grad.norm(norm_type).item() for p in model.module[2].parameters())]


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
def test_clipping_with_ignored_modules(norm_type: float) -> None:
    run_ranks(same_as_fsdp1, 2, functools.partial(clips_what_is_ignored, norm_type))


def norm_of_what_is_not_finite(norm_type: float) -> list[float]:
    model = make_model()
    model = wrap(model, ignored=[model[2]])
    loss_of(model, 0).backward()
    next(model.module[2].parameters()).grad.fill_(float("nan"))
    return [float(model.clip_grad_norm_(0.5, norm_type).isnan())]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_gradient_of_an_ignored_module_that_is_not_finite(norm_type: float) -> None:
    run_ranks(same_as_fsdp1, 2, functools.partial(norm_of_what_is_not_finite, norm_type))


def goes_at_once(rank: int, world_size: int) -> None:
    """Its units, and what is gathered, without a collector, which may run much later. Layers stay till then."""
    tsm.init()
    model = wrap(make_model())
    gc.collect()
    gc.disable()
    loss_of(model, 0).backward()
    units = [weakref.ref(unit) for unit in FSDP.fsdp_modules(model)]
    assert len(units) == 3
    del model
    assert [unit() for unit in units] == [None] * 3


def test_units_of_a_model_that_is_let_go_go_at_once() -> None:
    run_ranks(goes_at_once, 2)


class Either(nn.Module):
    """A block of which only one half has gradients, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), Block()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.one(x)
        return self.other(x) if both else x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Either() for _ in range(4))

    def forward(self, x: Tensor, halves: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, number not in halves)
        return x


def takes_branches(halves: tuple[int, ...]) -> list[float]:
    """The last rank leaves out half of some blocks: the others reduce all of these, and in the same order."""

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        last = dist.get_rank() == dist.get_world_size() - 1
        return model(inputs, halves if last else ()).square().mean()

    torch.manual_seed(0)
    return train(wrap(Branches(), unit=Either), loss_of=loss)


@pytest.mark.parametrize("halves", [(0,), (2,), (1, 3)])
def test_branches_that_only_some_ranks_take(halves: tuple[int, ...]) -> None:
    run_ranks(same_as_fsdp1, 2, functools.partial(takes_branches, halves))


class InBf16(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


def decay_of_matrices() -> list[float]:
    """A rank that holds all of a parameter sees its shape, as optimizers that look at it need; nobody else does."""
    numbers = []
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
        model = wrap(make_model(), strategy)
        shapes = [list(parameter.shape) for parameter in model.parameters()]
        assert any(len(shape) == 2 for shape in shapes) == (strategy == ShardingStrategy.NO_SHARD)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 10.0}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(loss.item())
        held = [state["exp_avg"].shape == parameter.shape for parameter, state in optimizer.state.items()]
        assert all(held) and [list(parameter.shape) for parameter in model.parameters()] == shapes
        if strategy == ShardingStrategy.FULL_SHARD:  # of which torch loads other exp_avg_sq than it has saved
            continue
        state = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
        numbers += [take_step(model, optimizer, STEPS), loss_of(model, STEPS).item()]
    return numbers


def test_parameters_that_a_rank_holds_whole_keep_their_shapes() -> None:
    run_ranks(same_as_fsdp1, 2, decay_of_matrices)


def shapes_on_the_dial(rank: int, world_size: int) -> None:
    tsm.init({"hybrid_shard_degree": 1})
    alone, turned = wrap(make_model()), wrap(make_model())
    shapes = [parameter.shape for parameter in turned.parameters()]
    assert any(len(shape) == 2 for shape in shapes)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (alone, turned)]
    for step, degree in enumerate([1, 2, 1, 2]):
        tsm.reshard(turned, optimizers[1], hybrid_shard_degree=degree)
        assert all((p.ndim == 1) == (degree > 1 or len(shape) == 1) for p, shape in zip(turned.parameters(), shapes))
        assert take_step(turned, optimizers[1], step) == pytest.approx(take_step(alone, optimizers[0], step), rel=1e-6)
        for parameter, state in optimizers[1].state.items():
            assert state["exp_avg"].shape == parameter.shape


def test_shapes_change_with_the_dial() -> None:
    run_ranks(shapes_on_the_dial, 2)


def norm_with_bf16() -> list[float]:
    """The norm of an ignored module's gradients is not rounded to their dtype."""
    model = make_model()
    model[2] = InBf16()
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.fill_(0.01)
    model = wrap(model, ignored=[model[2]])
    (100 * loss_of(model, 0)).backward()
    return [model.clip_grad_norm_(1e6).item()]


def test_clipping_with_an_ignored_module_in_bf16() -> None:
    run_ranks(same_as_fsdp1, 2, norm_with_bf16)


def compiled(whole: bool) -> list[float]:
    torch._dynamo.reset()
    model = make_model()
    if not whole:
        for block in list(model)[:2]:
            block.compile(backend="aot_eager")
        return train(wrap(model))
    return train(torch.compile(wrap(model), backend="aot_eager"))


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
def test_torch_compile(whole: bool) -> None:
    run_ranks(same_as_fsdp1, 2, functools.partial(compiled, whole))


def reduce_whole(seen: list[int], gradients: Tensor) -> None:
    seen.append(gradients.numel())
    dist.all_reduce(gradients)
    gradients.div_(dist.get_world_size())


def reduce_shard(seen: list[int], gradients: Tensor, mine: Tensor) -> None:
    seen.append(gradients.numel())
    dist.reduce_scatter_tensor(mine, gradients)
    mine.div_(dist.get_world_size())


def hooked(rank: int, world_size: int, strategy: ShardingStrategy) -> None:
    tsm.init()
    expected = train(wrap(make_model(), strategy))
    model, seen = wrap(make_model(), strategy), []
    model.register_comm_hook(seen, reduce_whole if strategy == ShardingStrategy.NO_SHARD else reduce_shard)
    assert train(model) == pytest.approx(expected, rel=1e-5)
    assert len(seen) == STEPS * 3  # every unit, every step
    assert min(seen) >= WIDTH * 4
    with pytest.raises(tsm.InvalidArgument, match="registered already"):
        model.register_comm_hook(seen, reduce_shard)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"])
def test_comm_hook(strategy: str) -> None:
    run_ranks(hooked, 2, ShardingStrategy[strategy])


def no_hook_for_a_hybrid(rank: int, world_size: int) -> None:
    tsm.init({"hybrid_shard_degree": 2})
    with pytest.raises(tsm.InvalidArgument, match="two steps"):
        wrap(make_model()).register_comm_hook([], reduce_shard)


def test_comm_hook_of_a_hybrid_is_an_error() -> None:
    run_ranks(no_hook_for_a_hybrid, 4)


def accumulated(rank: int, world_size: int) -> None:
    """Degrees that differ: within no_sync, too, a step begins with the values that the last one left."""

    def run(model: FSDP) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(STEPS):
            with model.no_sync():
                loss = loss_of(model, 2 * step)
                loss.backward()
            losses.append(loss.item())
            loss = loss_of(model, 2 * step + 1)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    expected = run(wrap(make_model()))
    tsm.init({"degrees": {"parameters": 1, "gradients": 2, "optimizer": 2}})
    assert run(wrap(make_model())) == pytest.approx(expected, rel=1e-5)


def test_accumulation_with_unequal_degrees() -> None:
    run_ranks(accumulated, 2)


def checkpointed() -> list[float]:
    model = wrap(make_model())
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    model.eval()
    with torch.no_grad():
        before = loss_of(model, 0).item()
    model.train()
    return [before, *train(model)]


def test_checkpoint_wrapper_and_eval() -> None:
    run_ranks(same_as_fsdp1, 2, checkpointed)


def refuses_to_train_what_was_frozen(rank: int, world_size: int) -> None:
    """One flat buffer has frozen parameters: they cannot be trained later, and nothing has changed by the attempt."""
    tsm.init()
    model = make_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    model = wrap(model)
    before = loss_of(model, 0).item()
    frozen = list(model.module[0].parameters())
    for parameter in frozen:
        parameter.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(tsm.InvalidArgument, match="was frozen when the model was sharded"):
            loss_of(model, 0)
    assert model.state_dict()["0.linear.weight"].shape == (WIDTH, WIDTH)
    for parameter in frozen:
        parameter.requires_grad_(False)
    loss = loss_of(model, 0)
    assert loss.item() == before
    loss.backward()


def test_what_was_frozen_is_not_trained() -> None:
    run_ranks(refuses_to_train_what_was_frozen, 2)
