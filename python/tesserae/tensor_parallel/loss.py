"""The loss of a language model from logits of which each rank has the columns of its tokens: they are never gathered.

In training, where forward is given labels, the head leaves logits split; the loss is computed from them in C++, and the
output has no logits (None: a part of them would be taken for all). Without labels, or without gradients, the head puts
logits together, and the model does what it always does: generation, evaluation, losses of the user's own.

Models whose forward calls model.loss_function get another function there. In T5's the loss is part of forward: labels
are taken out of the arguments before, as decoder_input_ids, and the loss is put into the output after it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tesserae import _C
from tesserae.context.causal_loss import IGNORED, has_causal_loss, next_tokens
from tesserae.tensor_parallel.layers import Head


def install(model: nn.Module, head: Head, parallel: _C.Parallel, loss_inside: bool) -> None:
    """For models of which it is known how they compute their loss; the head of any other always gathers."""
    generates = type(model).__name__.endswith("ForConditionalGeneration")
    if (generates if loss_inside else has_causal_loss(model)) and "labels" in _arguments(model):
        _Loss(model, head, parallel, loss_inside)


def _arguments(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


class _Loss:
    """Of one model. Its hooks keep it."""

    def __init__(self, model: nn.Module, head: Head, parallel: _C.Parallel, inside: bool) -> None:
        self._names = _arguments(model)
        self._head, self._parallel, self._inside = head, parallel, inside
        self._vocabulary = head._tesserae_splits["weight"].whole[0]
        self._labels: Tensor | None = None
        self._computed = False
        self._logits: Tensor | None = None  # of which the loss was computed: tuples have them in different places
        self._split_last = False  # what the last forward had of the head
        self._again = False  # the head computes it once more, in backward
        if not inside:
            self._otherwise = model.loss_function
            model.loss_function = self._causal  # type: ignore[assignment]
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, with_kwargs=True, always_call=True)
        head.register_forward_pre_hook(self._begin_again)
        head.register_forward_hook(self._end_again, always_call=True)

    def _begin_again(self, *_: Any) -> None:
        """A checkpointed head computes what it did: by then the model's forward has ended."""
        if self._split_last and self._head._tesserae_gathers and _C.in_backward():
            self._again, self._head._tesserae_gathers = True, False

    def _end_again(self, *_: Any) -> None:
        if self._again:
            self._again, self._head._tesserae_gathers = False, True

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        given = {**dict(zip(self._names, args)), **kwargs}
        labels = given.get("labels")
        self._head._tesserae_gathers = labels is None or not torch.is_grad_enabled()
        self._split_last = not self._head._tesserae_gathers
        self._computed = False
        if self._head._tesserae_gathers or not self._inside:
            return None
        self._labels = labels
        given["labels"] = None
        if given.get("decoder_input_ids") is None and given.get("decoder_inputs_embeds") is None:
            given["decoder_input_ids"] = model._shift_right(labels)  # type: ignore[operator]
        return (), given

    def _end(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        split, labels, logits = not self._head._tesserae_gathers, self._labels, self._logits
        self._head._tesserae_gathers, self._labels, self._logits = True, None, None
        if not split or output is None:  # None: forward has thrown
            return None
        if not self._inside and not self._computed:
            raise _C.InvalidArgument(
                f"[forward] a {type(model).__name__} was given labels and did not call its loss_function, so its loss "
                "is of a part of the vocabulary; compute the loss from the logits of a forward without labels"
            )
        if isinstance(output, tuple):
            if self._inside:
                return (self._mean(output[0], labels), *output[1:])
            return self._without_logits(output, logits)
        values = {name: value for name, value in output.items() if name != "logits"}
        if self._inside:
            values["loss"] = self._mean(output["logits"], labels)
        return type(output)(**values)

    @staticmethod
    def _without_logits(output: tuple, logits: Tensor | None) -> tuple:
        rest = tuple(value for value in output if value is not logits)
        if len(rest) != len(output) - 1:
            raise _C.InvalidArgument(
                "[forward] return_dict=False: which of the output are the logits, of a part of the vocabulary, is not "
                "known; leave return_dict out"
            )
        return rest

    def _causal(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As transformers' ForCausalLMLoss: each position predicts the next token."""
        if self._head._tesserae_gathers:
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels
            return self._otherwise(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                **kwargs,
            )
        self._computed, self._logits = True, logits
        if shift_labels is None:
            shift_labels = next_tokens(labels, ignore_index)
        return self._mean(logits, shift_labels, num_items_in_batch, ignore_index)

    def _mean(
        self, logits: Tensor, targets: Tensor | None, items: Tensor | int | None = None, ignored: int = IGNORED
    ) -> Tensor:
        assert targets is not None
        targets = targets.to(logits.device).reshape(logits.shape[:-1]).contiguous()
        losses = _C.vocabulary_cross_entropy(logits, targets, self._vocabulary, self._parallel, ignored)
        count = (targets != ignored).sum() if items is None else items
        return losses.sum() / (count.to(logits.device) if isinstance(count, Tensor) else count)
