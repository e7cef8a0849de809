"""tsm.context_parallel: context parallelism for a script's own attention, through scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tesserae import _C
from tesserae.job.device import default_device
from tesserae.job.fabrics import context_degree, context_of

_torchs = functional.scaled_dot_product_attention


@contextmanager
def context_parallel(
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    *,
    window: int = 0,
    documents: Sequence[int] = (),
) -> Generator[_C.ContextSequence]:
    """Inside, this rank has its positions of whole sequences, and scaled_dot_product_attention reaches across ranks.

        with tsm.context_parallel([tokens, targets, positions], [1, 1, 0]) as sequence:
            logits = model(tokens, positions)
            losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = sequence.mean(losses, count)  # of all ranks' tokens, the same on all
            loss.backward()

    Each of `buffers` has every position along its dimension in `dims`, the same on all context ranks; inside it has
    this rank's, and afterwards again all. Give everything that depends on positions: tokens, targets, positions or
    tables of rotary embeddings. `window`: tokens attend to so many at most. `documents`: where packed documents begin,
    the first at 0. `sequence` has own() and whole() to cut and put together other tensors, and mean() for losses.

    Forward and backward of a step belong inside. All context ranks do the same in the same order. At a degree of 1,
    without window and documents, it changes nothing. Raises InvalidArgument: for dims that buffers do not have, for
    buffers of different lengths, given twice or that require gradients, and for attention with a mask, with dropout,
    with weights or across sequences.
    """
    if len(buffers) != len(dims) or not buffers:
        raise _C.InvalidArgument(
            f"[tsm.context_parallel] {len(buffers)} buffers and {len(dims)} dims; give a dim for each buffer"
        )
    for buffer, dim in zip(buffers, dims):
        if not -buffer.dim() <= dim < buffer.dim():
            raise _C.InvalidArgument(
                f"[tsm.context_parallel] a buffer of shape {tuple(buffer.shape)} has no dim {dim}; give the one along "
                "which its positions lie"
            )
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims)}
    if len(lengths) > 1:
        shapes = [tuple(buffer.shape) for buffer in buffers]
        raise _C.InvalidArgument(
            f"[tsm.context_parallel] buffers of shapes {shapes} differ in length along dims {list(dims)}"
        )
    if any(buffer.requires_grad for buffer in buffers):
        raise _C.InvalidArgument("[tsm.context_parallel] a buffer requires gradients; cut it by sequence.own()")
    if len({id(buffer) for buffer in buffers}) < len(buffers):
        raise _C.InvalidArgument("[tsm.context_parallel] a buffer was given twice; it is cut once for all who use it")
    sequence = _C.ContextSequence(context_of(default_device()), lengths.pop(), window=window, documents=list(documents))
    if context_degree() == 1 and not window and not documents:
        yield sequence
        return
    whole = [buffer.data for buffer in buffers]
    parts = [sequence.own(buffer.data, dim) for buffer, dim in zip(buffers, dims)]
    attention = _attention_across(sequence)
    before = functional.scaled_dot_product_attention
    try:
        for buffer, part in zip(buffers, parts):
            buffer.data = part
        functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
        with _Replaced(attention):
            yield sequence
    finally:
        functional.scaled_dot_product_attention = before
        for buffer, data in zip(buffers, whole):
            buffer.data = data


class _Replaced(TorchFunctionMode):
    """For those who have imported the function's name before. Attention that goes other ways is refused: it would be of
    this rank's positions alone."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is functional.multi_head_attention_forward and (kwargs or {}).get("need_weights", True):
            raise _C.InvalidArgument(
                "[multi_head_attention_forward] inside tsm.context_parallel there are no attention weights; call "
                "nn.MultiheadAttention with need_weights=False"
            )
        if getattr(func, "__name__", "") == "flex_attention":
            raise _C.InvalidArgument("[flex_attention] does not work inside tsm.context_parallel")
        return (self._attention if func is _torchs else func)(*args, **(kwargs or {}))


def _attention_across(sequence: _C.ContextSequence) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p > 0.0:
            raise _C.InvalidArgument(
                "[scaled_dot_product_attention] inside tsm.context_parallel attention takes neither a mask (say "
                "is_causal, window and documents) nor dropout"
            )
        if query.dim() != 4:
            raise _C.InvalidArgument(
                f"[scaled_dot_product_attention] queries of shape {tuple(query.shape)} inside tsm.context_parallel: "
                "tensors are [batch, heads, tokens, width]"
            )
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise _C.InvalidArgument(
                f"[scaled_dot_product_attention] {query.shape[1]} heads of queries and {key.shape[1]} of keys: pass "
                "enable_gqa=True"
            )
        return _C.context_attention(query, key, value, sequence, scale=scale, causal=is_causal)

    return scaled_dot_product_attention
