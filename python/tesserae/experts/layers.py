"""The experts of one rank: the module of a model of Hugging Face, with some of the matrices of its stacks.

The router, which is the model's own, has chosen before; its numbers are taken as they are. A token is a row for each of
its choices (GShard: Lepikhin et al., 2020, arXiv:2006.16668):

 1. Ranks tell each other how many rows they have for each expert; rows go to the ranks that have their experts.
 2. Each expert multiplies its rows; activations and biases are the model's own.
 3. Rows go back, and each token gets the sum of its own, weighted by the router.

Backward is the reverse. Every rank takes part in both, with and without tokens: all of this is collective.

With tensor parallelism the ranks of a tensor group have the same tokens, and choose alike; each has its part of the
hidden layer of the experts (Shoeybi et al., 2019, arXiv:1909.08053). Experts give summands of what a token gets, and so
of the gradients of tokens and weights, which are summed: one sum in forward, one in backward, one of the weights'.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tesserae import _C
from tesserae.tensor_parallel.parts import SplitParameter, SplitWithoutReset, split_module
from tesserae.tensor_parallel.stream import Stream

STACKS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")  # [experts, ...]


class SplitExperts(SplitWithoutReset):
    """Derived from the class of a module of transformers that has stacks of all experts: see split_experts()."""

    _tesserae_mesh: _C.MeshFabric
    _tesserae_stream: Stream | None = None  # of the module around it, which sums where that is cut
    _tesserae_own_values: bool  # those that this rank's model had, which nobody has compared with rank 0's
    # Of transformers (integrations/moe.py).
    num_experts: int
    has_bias: bool
    is_transposed: bool  # stacks are [experts, in, out]
    is_concatenated: bool  # gates first, then what they multiply; else the two by turns
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """[..., width] for hidden_states of that shape: what the experts `choice` [tokens, k] make of each token, times
        `weights` [tokens, k], added up (in fp32 at least). Collective over the expert and the tensor axis, forward and
        backward.

        Raises InvalidArgument for choices that are no experts; CommError.
        """
        parallel, stream = self._tesserae_parallel, self._tesserae_stream
        tokens = _C.copy_to_parallel(hidden_states.reshape(-1, hidden_states.shape[-1]), parallel)
        weights = _C.copy_to_parallel(weights, parallel)
        if torch.is_autocast_enabled(tokens.device.type):  # which does nothing to our products
            tokens = tokens.to(torch.get_autocast_dtype(tokens.device.type))
        plan = _C.plan_dispatch(choice, self.num_experts, self._tesserae_mesh)
        rows = _C.dispatch(tokens, plan)
        expert = None
        if self.has_bias:
            expert = torch.arange(len(plan.counts)).repeat_interleave(plan.counts).to(rows.device)
        rows = self._linear(rows, "gate_up_proj", plan.counts, expert)
        rows = self._linear(self._apply_gate(rows), "down_proj", plan.counts, expert)
        made = _C.combine(rows, weights, plan)
        if stream is None or not stream.cut:
            made = _C.reduce_from(made, parallel)
        return made.view(hidden_states.shape).to(hidden_states.dtype)

    def _linear(self, rows: Tensor, name: str, counts: Tensor, expert: Tensor | None) -> Tensor:
        """`expert`: of this rank, of each row; None without biases."""
        stack = self._like(rows, getattr(self, name))
        made = _C.grouped_linear(rows, stack.transpose(1, 2) if self.is_transposed else stack, counts)
        if expert is None:
            return made
        bias, parallel = self._like(rows, getattr(self, f"{name}_bias")), self._tesserae_parallel
        if name == "down_proj" and parallel.size > 1:
            # It is added to summands: by one rank. The others are told its gradient, which all of them need.
            bias = _C.copy_to_parallel(bias, parallel) * float(parallel.index == 0)
        return made + bias.index_select(0, expert)

    @staticmethod
    def _like(rows: Tensor, stack: Tensor) -> Tensor:
        """As autocast would cast it."""
        return stack.to(rows.dtype) if torch.is_autocast_enabled(rows.device.type) else stack


_classes: dict[type, type[SplitExperts]] = {}


def split_experts(module: torch.nn.Module, mesh: _C.MeshFabric, parallel: _C.Parallel) -> SplitExperts:
    """`module` is a SplitExperts from now on: the same object. Its parameters are still whole: see cut_parameters()."""
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(f"Split{cls.__name__}", (SplitExperts, cls), {})
    by_expert = _C.Split(0, mesh.mesh.degree("expert"), mesh.mesh.index("expert", mesh.job.rank), axis="expert")
    splits = {}
    for name, dim in _hidden_dims(module).items():
        blocks = 2 if name.startswith("gate_up") and module.is_concatenated else 1
        by_hidden = parallel.split(dim, blocks) if dim is not None else _C.Split()
        split = SplitParameter(_C.Splits(by_expert, by_hidden), tuple(getattr(module, name).shape))
        if not split.split.whole:
            splits[name] = split
    split_module(module, _classes[cls], parallel, splits)
    assert isinstance(module, SplitExperts)
    module._tesserae_mesh = mesh
    return module


def check_experts(module: torch.nn.Module, degree: int, parallel: _C.Parallel) -> None:
    """Raises InvalidArgument, naming the degrees that would do, unless the expert-parallel degree divides the experts
    of `module`, and the tensor-parallel ranks their hidden layer."""
    _C.experts_of_rank(module.num_experts, degree)  # type: ignore[arg-type]
    hidden = module.down_proj.shape[_hidden_dims(module)["down_proj"]]  # type: ignore[index,union-attr]
    _C.size_of_part("the hidden layer of experts:", hidden, parallel)


def _hidden_dims(module: torch.nn.Module) -> dict[str, int | None]:
    """Of each of its stacks the dimension of the experts' hidden layer; None: it has none."""
    if_there_is_one = {
        "gate_up_proj": 2 if module.is_transposed else 1,
        "down_proj": 1 if module.is_transposed else 2,
        "gate_up_proj_bias": 1,
        "down_proj_bias": None,
    }
    return {name: dim for name, dim in if_there_is_one.items() if getattr(module, name, None) is not None}
