"""The experts of one rank: the module of a model of Hugging Face, with some of the matrices of its stacks.

The router, which is the model's own, has chosen before; its numbers are taken as they are. A token is a row for each of
its choices (GShard: Lepikhin et al., 2020, arXiv:2006.16668):

 1. Ranks tell each other how many rows they have for each expert; rows go to the ranks that have their experts.
 2. Each expert multiplies its rows; activations and biases are the model's own.
 3. Rows go back, and each token gets the sum of its own, weighted by the router.

Backward is the reverse. Every rank takes part in both, with and without tokens: all of this is collective.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tesserae import _C
from tesserae.tensor_parallel.parts import SplitModule, SplitParameter, split_module

STACKS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")  # [experts, ...]


class SplitExperts(SplitModule):
    """Derived from the class of a module of transformers that has stacks of all experts: see split_experts()."""

    _tesserae_mesh: _C.MeshFabric
    _tesserae_own_values: bool  # those that this rank's model had, which nobody has compared with rank 0's
    # Of transformers (integrations/moe.py).
    num_experts: int
    has_bias: bool
    is_transposed: bool  # stacks are [experts, in, out]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """[..., width] for hidden_states of that shape: what the experts `choice` [tokens, k] make of each token, times
        `weights` [tokens, k], added up (in fp32 at least). Collective over the expert axis, forward and backward.

        Raises InvalidArgument for choices that are no experts; CommError.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if torch.is_autocast_enabled(tokens.device.type):  # which does nothing to our products
            tokens = tokens.to(torch.get_autocast_dtype(tokens.device.type))
        plan = _C.plan_dispatch(choice, self.num_experts, self._tesserae_mesh)
        rows = _C.dispatch(tokens, plan)
        expert = None
        if self.has_bias:
            expert = torch.arange(len(plan.counts)).repeat_interleave(plan.counts).to(rows.device)
        rows = self._linear(rows, "gate_up_proj", plan.counts, expert)
        rows = self._linear(self._apply_gate(rows), "down_proj", plan.counts, expert)
        return _C.combine(rows, weights, plan).view(hidden_states.shape).to(hidden_states.dtype)

    @property
    def reset_parameters(self) -> None:  # type: ignore[override]
        """There is none: modules of transformers with stacks have none, and hasattr() is to say so."""
        raise AttributeError("reset_parameters")

    def _linear(self, rows: Tensor, name: str, counts: Tensor, expert: Tensor | None) -> Tensor:
        """`expert`: of this rank, of each row; None without biases."""
        stack = self._like(rows, getattr(self, name))
        made = _C.grouped_linear(rows, stack.transpose(1, 2) if self.is_transposed else stack, counts)
        if expert is None:
            return made
        return made + self._like(rows, getattr(self, f"{name}_bias")).index_select(0, expert)

    @staticmethod
    def _like(rows: Tensor, stack: Tensor) -> Tensor:
        """As autocast would cast it."""
        return stack.to(rows.dtype) if torch.is_autocast_enabled(rows.device.type) else stack


_classes: dict[type, type[SplitExperts]] = {}


def split_experts(module: torch.nn.Module, mesh: _C.MeshFabric, parallel: _C.Parallel) -> SplitExperts:
    """`module` is a SplitExperts from now on: the same object. Its parameters are still whole: see cut_parameters().

    Raises InvalidArgument, naming the degrees that would do, unless the expert-parallel degree divides its experts.
    """
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(f"Split{cls.__name__}", (SplitExperts, cls), {})
    degree, index = mesh.mesh.degree("expert"), mesh.mesh.index("expert", mesh.job.rank)
    _C.experts_of_rank(module.num_experts, degree)  # type: ignore[arg-type]
    split = _C.Split(0, degree, index, axis="expert")
    wholes = {name: getattr(module, name, None) for name in STACKS}
    splits = {name: SplitParameter(split, tuple(p.shape)) for name, p in wholes.items() if p is not None}
    split_module(module, _classes[cls], parallel, splits)
    assert isinstance(module, SplitExperts)
    module._tesserae_mesh = mesh
    return module
