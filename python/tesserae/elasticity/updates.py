"""Which steps of a loop end with an update of the parameters. Between two of them a script accumulates gradients, which
nobody saves: there is no going on from there."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tesserae.torch_compat.parameters import version_of


class Updates:
    """Of one model, on this rank: optimizers of torch's tell of their steps, and whatever else writes parameters in
    place changes their versions."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stepped = False
        self._versions = self._read()
        own = weakref.ref(self)

        def stepped(*_: Any) -> None:
            if (updates := own()) is not None:
                updates._stepped = True

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def any(self) -> bool:
        """Whether there was one since the last call."""
        versions, before = self._read(), self._versions
        stepped, self._stepped = self._stepped, False
        self._versions = versions
        return stepped or versions != before

    def _read(self) -> int:
        return sum(version_of(p) for p in self._model.parameters() if p.requires_grad)
