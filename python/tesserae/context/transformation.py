"""Puts context parallelism into a language model of Hugging Face: tsm.transform's part of it.

1. Every context rank is given the same whole sequences. Before the model's forward a rank takes its own positions of
   tokens, embeddings and labels; labels are shifted before, since what follows a token may be another rank's.
2. The cut travels as an argument through forward to attention, also where activations are computed again in backward.
   Attention is a function of ours in transformers' registry, so no mask is made.
3. After forward the loss is the mean over the real tokens of all ranks; logits are put together where no loss was
   computed from them in training.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tesserae import _C
from tesserae.context.causal_loss import IGNORED, has_causal_loss, next_tokens

FAMILIES = ("llama", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_neox", "gpt2")
ATTENTION = "tesserae_context"
SEQUENCE = "tesserae_sequence"  # the argument
MARK = "_tesserae_context"  # the attribute of a model that was cut


def check(model: nn.Module, parallel: _C.ContextParallel, tensor_degree: int) -> None:
    """Of a model that nothing was done to yet. Raises InvalidArgument where it is not known how to cut sequences."""
    settings = getattr(model, "config", None)
    kind, name = getattr(settings, "model_type", None), type(model).__name__
    if hasattr(model, MARK):
        raise _C.InvalidArgument(f"[tsm.transform] the sequences of this {name} are cut already; transform it once")
    if kind not in FAMILIES or not has_causal_loss(model):
        raise _C.InvalidArgument(
            f"[tsm.transform] how to cut the sequences of a {name} over {parallel.size} ranks is not known; known are "
            f"the language models of Hugging Face's {', '.join(FAMILIES)} with their own loss. A script's own "
            "attention works inside tsm.context_parallel(buffers, dims)"
        )
    for dropout in ("attention_dropout", "attn_pdrop"):
        if getattr(settings, dropout, 0.0):
            raise _C.InvalidArgument(
                f"[tsm.transform] {dropout} = {getattr(settings, dropout)}: dropout inside attention does not work "
                "with context_parallel_degree > 1; set it to 0 in the model's configuration"
            )
    if "sliding_attention" in (getattr(settings, "layer_types", None) or ()):
        raise _C.InvalidArgument(
            f"[tsm.transform] some layers of this {name} have sliding windows, others none (layer_types), and with "
            "context_parallel_degree > 1 all attend alike; set use_sliding_window=False in the model's configuration"
        )
    rope = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        raise _C.InvalidArgument(
            f"[tsm.transform] rotary positions of type {rope.get('rope_type', rope.get('type'))!r} depend on the "
            "longest position that a rank sees, and context ranks see different ones; take another type"
        )
    heads = settings.num_attention_heads  # type: ignore[union-attr]
    kv_heads = getattr(settings, "num_key_value_heads", None) or heads
    parallel.method_for(heads // tensor_degree, kv_heads // tensor_degree)


def install(model: nn.Module, parallel: _C.ContextParallel) -> None:
    """For a model that check() has let pass."""
    importlib.import_module("transformers").AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    if model.config._attn_implementation != ATTENTION:
        raise _C.InvalidArgument(
            f"[tsm.transform] {type(model).__name__} has an attention of its own, which transformers cannot exchange; "
            "use tsm.context_parallel(buffers, dims) around its forward"
        )
    setattr(model, MARK, _Cut(model, parallel, list(inspect.signature(model.forward).parameters)))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    sequence = kwargs.get(SEQUENCE)
    if sequence is None:
        raise _C.InvalidArgument(
            "[forward] a layer was called without the model around it, which cuts sequences over context ranks; call "
            "the model that tsm.transform returned"
        )
    if attention_mask is not None or dropout > 0.0 or kwargs.get("is_causal") is False:
        raise _C.InvalidArgument(
            "[forward] with context_parallel_degree > 1 attention is causal, and takes neither masks nor dropout"
        )
    out = _C.context_attention(query, key, value, sequence, scale=scaling, window=sliding_window or 0)
    return out.transpose(1, 2), None


class _Cut:
    """Of one model. Its hooks keep it."""

    def __init__(self, model: nn.Module, parallel: _C.ContextParallel, names: list[str]) -> None:
        self._parallel, self._names = parallel, names
        self._compared = False  # the tokens of a first batch, over the context ranks
        self._keep: int | Tensor = 0
        self._window = getattr(model.config, "sliding_window", None) or 0
        self._loss = model.loss_function  # check() knows it, or tensor parallelism has put its own there
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, with_kwargs=True)

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = {**dict(zip(self._names, args)), **kwargs}
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if tokens is None:
            return args, kwargs  # the model says what is missing
        batch, length = tokens.shape[:2]
        _refuse_outputs(given, model.config)
        _refuse_auxiliary_loss(given, model.config)
        self._refuse_own_loss(given, model)
        if length < self._parallel.size:
            raise _C.InvalidArgument(
                f"[forward] a sequence of {length} tokens cannot be cut over {self._parallel.size} context ranks"
            )
        if not self._compared and given.get("input_ids") is not None:
            self._parallel.require_same(tokens)
            self._compared = True
        mask = given.pop("attention_mask", None)
        _check_mask(mask, batch, length)
        # As transformers: with a mask, positions that begin again are no documents.
        documents = _documents(given.get("position_ids"), length) if mask is None else []
        sequence = _C.ContextSequence(self._parallel, length, window=self._window, documents=documents)
        if given.get("position_ids") is None:
            given["position_ids"] = sequence.positions(tokens.device).unsqueeze(0)
        else:
            given["position_ids"] = sequence.own(given["position_ids"], 1)
        self._cut_labels(given, sequence, mask)
        for name in ("input_ids", "inputs_embeds", "token_type_ids"):
            if given.get(name) is not None:
                given[name] = sequence.own(given[name], 1)
        self._keep = given.pop("logits_to_keep", 0)  # of the whole sequence's
        if isinstance(self._keep, Tensor) and self._keep.dim() > 1:
            raise _C.InvalidArgument("[forward] logits_to_keep: a number, or positions that are the same for all rows")
        given["use_cache"] = False
        given[SEQUENCE] = sequence
        return (), given

    def _refuse_own_loss(self, given: dict[str, Any], model: nn.Module) -> None:
        if given.get("labels") is not None and model.loss_function != self._loss:
            raise _C.InvalidArgument(
                f"[forward] the loss_function of this {type(model).__name__} was exchanged after tsm.transform, and "
                "with context_parallel_degree > 1 it would be given pieces of sequences; compute a loss of your own "
                "from the logits of a forward without labels"
            )

    @staticmethod
    def _cut_labels(given: dict[str, Any], sequence: _C.ContextSequence, mask: Tensor | None) -> None:
        labels = given.get("labels")
        if labels is None:
            return
        targets, ignored = given.get("shift_labels"), given.get("ignore_index", IGNORED)
        if targets is None:
            targets = next_tokens(labels, ignored)
        if mask is not None:
            _check_padding(mask, targets, ignored)
        if given.get("num_items_in_batch") is None:
            given["num_items_in_batch"] = (targets != ignored).sum()
        given["labels"], given["shift_labels"] = sequence.own(labels, 1), sequence.own(targets, 1)

    def _end(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        sequence = kwargs.get(SEQUENCE)
        if sequence is None:
            return None
        has_loss = kwargs.get("labels") is not None
        values = list(output) if isinstance(output, tuple) else dict(output.items())
        loss_at, logits_at = (0, 1 if has_loss else 0) if isinstance(values, list) else ("loss", "logits")
        if has_loss:
            loss = values[loss_at]
            values[loss_at] = sequence.mean(loss, torch.ones((), device=loss.device))
        has_logits = len(values) > logits_at if isinstance(values, list) else values.get("logits") is not None
        if has_logits and not (has_loss and torch.is_grad_enabled()):
            values[logits_at] = self._kept(sequence.whole(values[logits_at], 1))
        return tuple(values) if isinstance(values, list) else type(output)(**values)

    def _kept(self, logits: Tensor) -> Tensor:
        return logits[:, -self._keep or None :] if isinstance(self._keep, int) else logits[:, self._keep]


def _refuse_outputs(given: dict[str, Any], settings: Any) -> None:
    if given.get("past_key_values") is not None:
        raise _C.InvalidArgument(
            "[forward] past_key_values: caches of keys and values do not work with context_parallel_degree > 1; pass "
            "use_cache=False (to generate, too)"
        )
    for name in ("output_attentions", "output_hidden_states"):
        asked = given.get(name)
        if asked or (asked is None and getattr(settings, name, False)):
            raise _C.InvalidArgument(
                f"[forward] {name}: with context_parallel_degree > 1 a rank has those of its own positions only"
            )
    if given.get("cu_seq_lens_q") is not None and given.get("position_ids") is None:
        raise _C.InvalidArgument("[forward] cu_seq_lens_q: tell packed documents by position_ids that begin again at 0")


def _refuse_auxiliary_loss(given: dict[str, Any], settings: Any) -> None:
    asked = given.get("output_router_logits")
    if asked or (asked is None and getattr(settings, "output_router_logits", False)):
        raise _C.InvalidArgument(
            "[forward] output_router_logits: the auxiliary loss is of whole sequences, of which a rank has pieces with "
            "context_parallel_degree > 1; pass output_router_logits=False, or set it so in the model's configuration"
        )


def _check_mask(mask: Tensor | None, batch: int, length: int) -> None:
    """Padding behind the last token changes nothing that counts, where labels do not count it (_check_padding): causal
    attention does not look ahead."""
    if mask is None:
        return
    if mask.shape != (batch, length):
        raise _C.InvalidArgument(
            f"[forward] an attention_mask of shape {tuple(mask.shape)} cannot be cut over context ranks; masks are "
            "[batch, length]. Packed documents are told by position_ids that begin again at 0"
        )
    if bool((mask[:, 1:].bool() & ~mask[:, :-1].bool()).any()):
        raise _C.InvalidArgument(
            "[forward] an attention_mask with gaps or padding on the left cannot be cut over context ranks; pad on the "
            "right"
        )


def _check_padding(mask: Tensor, targets: Tensor, ignored: int) -> None:
    """Padding sees other padding here, which a mask would hide from it, so nothing may be predicted from there."""
    counted = int(((targets != ignored) & ~mask.bool().to(targets.device)).sum())
    if counted:
        raise _C.InvalidArgument(
            f"[forward] {counted} labels count the predictions of padding (positions whose attention_mask is 0), which "
            f"are others with context_parallel_degree > 1; set the labels of padding to {ignored}"
        )


def _documents(positions: Tensor | None, length: int) -> list[int]:
    """Where documents begin, by positions that begin again: as transformers reads packed batches."""
    if positions is None:
        return []
    if positions.shape[-1] != length:
        raise _C.InvalidArgument(
            f"[forward] position_ids of shape {tuple(positions.shape)} for sequences of {length} tokens"
        )
    begins = positions.reshape(-1, length)[:, 1:] != positions.reshape(-1, length)[:, :-1] + 1
    if not bool((begins == begins[:1]).all()):
        raise _C.InvalidArgument(
            "[forward] rows of a batch whose documents begin at different positions cannot be cut together; pack them "
            "into one row"
        )
    return [0, *(begins[0].nonzero().flatten() + 1).tolist()]
