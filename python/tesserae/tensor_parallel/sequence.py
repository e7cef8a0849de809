"""Sequence parallelism of a known model (Korthikanti et al., 2022, arXiv:2205.05198): in training, between its split
layers, each tensor-parallel rank has a piece of the sequence, and keeps and computes only that of norms and dropout.

 1. What enters the first block of a stack is cut along the sequence, dimension 1; if the ranks do not divide its
    length, it is padded at its end.
 2. A norm works on the piece; what it gives is put together and, without padding, the same on all ranks: it is what
    column layers, and whatever follows the last norm, expect.
 3. A row layer gives the piece of its sum.
 4. Norms see a part of the tokens: gradients of their parameters are summed. Dropout between row layers and norms
    works on pieces, so each rank draws another mask.
 5. A mixture of experts sees whole sequences, routes them alike on all ranks, and gives the piece of what comes of it:
    its experts leave their sums to it; where there is a shared expert, too, both are whole, and are cut.
 6. In evaluation nothing is cut: generation has single tokens. What the first block of a stack decided holds for all of
    it until the next forward with gradients, also where activations are computed again in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tesserae import _C
from tesserae.tensor_parallel.layers import Row
from tesserae.tensor_parallel.stream import Stream
from tesserae.tensor_parallel.summed import parameters_of, summed
from tesserae.torch_compat.modules import own_modules


@dataclass(frozen=True)
class Names:
    """The last component of module names: the list of blocks; all norms on the residual stream, the one behind the last
    block among them; and in a mixture the experts, whose parent routes whole sequences."""

    blocks: str
    norms: tuple[str, ...]
    experts: str | None = None


def check(names: Names, model: nn.Module) -> None:
    """Raises InvalidArgument if the model has no stack of that name, or others replace its norms' forward."""
    if getattr(model, "use_kernels", False):
        raise _C.InvalidArgument(
            "[tsm.transform] sequence_parallel: kernels of the hub replace the norms' forward, which it needs; load "
            "the model with use_kernels=False"
        )
    if not _stacks(names, model):
        raise _C.InvalidArgument(
            f"[tsm.transform] sequence_parallel: {type(model).__name__} has no list of blocks named {names.blocks!r}"
        )


def install(names: Names, model: nn.Module, parallel: _C.Parallel, random: _C.SplitRandom) -> None:
    """Into a model that check() has seen."""
    for name in _stacks(names, model):
        owner = model.get_submodule(name.rpartition(".")[0])
        _install(names, owner, owner.get_submodule(names.blocks), Stream(parallel), random)


def _stacks(names: Names, model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if _last(name) == names.blocks and list(module.children())]


def _install(names: Names, owner: nn.Module, blocks: nn.Module, stream: Stream, random: _C.SplitRandom) -> None:
    first = next(blocks.children())

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (stream.enter(args[0], block.training), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": stream.enter(kwargs["hidden_states"], block.training)}

    first.register_forward_pre_hook(enter, with_kwargs=True)  # 1
    for name, module in owner.named_modules():
        if _last(name) in names.norms:
            _wrap_norm(module, stream)
    inside: set[nn.Module] = set()  # of mixtures
    for module in blocks.modules():
        experts = own_modules(module).get(names.experts) if names.experts is not None else None
        if experts is not None:
            inside.update(module.modules())
            _wrap_mixture(module, experts, stream)
    for module in blocks.modules():
        if isinstance(module, Row) and module not in inside:
            module._tesserae_stream = stream  # 3
        elif isinstance(module, nn.Dropout) and module.p > 0:
            _wrap_dropout(module, stream, random)


def _wrap_norm(norm: nn.Module, stream: Stream) -> None:
    compute, parameters = norm.forward, parameters_of(norm)

    def forward(hidden: Tensor) -> Tensor:
        if not stream.cut:
            return compute(hidden)
        with summed(norm, parameters, stream.parallel):  # 4
            piece = compute(hidden)
        return stream.put_together(piece)  # 2

    norm.forward = forward  # type: ignore[method-assign]


def _wrap_mixture(mixture: nn.Module, experts: nn.Module, stream: Stream) -> None:
    """5."""
    is_alone = not any(isinstance(part, Row) for part in mixture.modules())
    if is_alone:
        experts._tesserae_stream = stream  # type: ignore[assignment]
    piece_of = stream.piece_of_sum if is_alone else stream.piece_of

    def give_piece(_: nn.Module, args: Any, output: Any) -> Any:
        if not stream.cut:
            return None
        if isinstance(output, tuple):  # gpt-oss: with the weights of choices
            return piece_of(output[0]), *output[1:]
        return piece_of(output)

    mixture.register_forward_hook(give_piece)


def _wrap_dropout(dropout: nn.Module, stream: Stream, random: _C.SplitRandom) -> None:
    """Inside split computation (dropout.py) the generators are the rank's own already, and stay so."""
    compute = dropout.forward

    def forward(x: Tensor) -> Tensor:
        if not (stream.cut and dropout.training) or random.inside:
            return compute(x)
        random.begin()
        try:
            return compute(x)
        finally:
            random.end()

    dropout.forward = forward  # type: ignore[method-assign]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
