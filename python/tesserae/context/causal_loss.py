"""The usual loss of transformers' causal language models: who has it, and which token each position predicts."""

from __future__ import annotations

from torch import Tensor, nn

IGNORED = -100  # the label of tokens that do not count


def has_causal_loss(model: nn.Module) -> bool:
    """Of these alone it is known what forward does with labels: a loss of the user's own wants whole logits of all
    tokens."""
    loss = getattr(getattr(model, "loss_function", None), "__name__", "")
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) and loss == "ForCausalLMLoss"


def next_tokens(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """As ForCausalLMLoss shifts labels: each position predicts what follows it, and the last one nothing."""
    return nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
