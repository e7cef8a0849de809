"""Shares the experts of a mixture of Hugging Face out over ranks, and cuts them over tensor-parallel ones:
tsm.transform's part of it.

1. The modules that have stacks of experts become SplitExperts where they stand (layers.py). Routers stay the model's
   own, whole on every rank; what else of a mixture is cut over tensor-parallel ranks has been before
   (tensor_parallel/families.py).
2. With load_state_dict_from_rank0 the first expert-parallel group takes rank 0's experts, one stack at a time.
3. Stacks are cut. FSDP makes those that are shared out units of their own, since fewer ranks shard them than what is
   around them.
4. Adapters of whole stacks (PEFT's LoRA with target_parameters) are refused, whenever they come: they would be made of
   this rank's part, and so would their gradients, while every rank has them whole.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from tesserae import _C
from tesserae.experts.layers import STACKS, SplitExperts, check_experts, split_experts
from tesserae.job.fabrics import expert_degree, is_first_of_same_experts, mesh_of, parallel_of, tensor_degree
from tesserae.job.state import state
from tesserae.tensor_parallel.from_rank0 import FromRank0
from tesserae.tensor_parallel.parts import cut_parameters
from tesserae.torch_compat.modules import own_modules, own_parameters

# By the model_type of a configuration: the class that has the stacks of a layer.
FAMILIES = {
    "mixtral": "MixtralExperts",
    "qwen2_moe": "Qwen2MoeExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "gpt_oss": "GptOssExperts",
}


def check(model: nn.Module, place: torch.device) -> list[nn.Module]:
    """The modules that have the experts, of a model that nothing was done to yet; [] where an expert-parallel degree
    does not ask for any. `place`: where FSDP computes. Collective over the job at the first call.

    Raises InvalidArgument for models that are not known, and unless the degrees divide their experts (naming those that
    would)."""
    degree, kind = expert_degree(), getattr(getattr(model, "config", None), "model_type", None)
    if any(isinstance(part, TorchFSDP) for part in model.modules()):
        raise _C.InvalidArgument("[tsm.transform] the model is wrapped by FSDP already; transform it before")
    if any(isinstance(part, SplitExperts) for part in model.modules()):
        raise _C.InvalidArgument("[tsm.transform] the model's experts are shared out already; transform a model once")
    if kind not in FAMILIES:
        if degree == 1:
            return []
        raise _C.InvalidArgument(
            f"[tsm.transform] where the experts of a {type(model).__name__} are is not known, and they are to "
            f"be shared out by expert_parallel_degree {degree}; known are Hugging "
            f"Face's {', '.join(FAMILIES)}. Take expert_parallel_degree 1 for others"
        )
    found = [part for part in model.modules() if type(part).__name__ == FAMILIES[kind]]
    if not all(_is_stack(part) for part in found) or (not found and degree > 1):
        raise _C.InvalidArgument(
            f"[tsm.transform] the {type(model).__name__} has {len(found)} modules of class {FAMILIES[kind]} "
            "with experts in stacks (gate_up_proj, down_proj), as transformers 5 makes them: there is nothing to "
            f"share out by expert_parallel_degree {degree}, or to cut by tensor_parallel_degree {tensor_degree()}"
        )
    for part in found:
        check_experts(part, degree, parallel_of(place))
    if any(_adapts(part, experts) for part in model.modules() for experts in found):
        raise _C.InvalidArgument(f"[tsm.transform] {_ADAPTED}")
    return found


def install(model: nn.Module, found: list[nn.Module], from_rank0: bool, place: torch.device) -> None:
    """`found`: by check(). `place`: where FSDP computes."""
    # 1.
    mesh, parallel = mesh_of(place), parallel_of(place)
    layers = [split_experts(part, mesh, parallel) for part in found]
    # 2.
    for layer in layers:
        layer._tesserae_own_values = not from_rank0 and not any(p.is_meta for p in layer.parameters())
    if from_rank0 and expert_degree() > 1:  # else tensor_parallel/transformation.py has
        group = state.ep_process_group  # on all ranks: torch counts the groups that a rank makes
        if is_first_of_same_experts():
            _take_from_rank0(layers, group, place)
    # 3.
    cut_parameters(model, layers)
    # 4.
    for parent in model.modules():
        for name, child in own_modules(parent).items():
            if isinstance(child, SplitExperts):
                parent.register_forward_pre_hook(functools.partial(_refuse_adapters, name=name, experts=child))


def _is_stack(module: nn.Module) -> bool:
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in STACKS[:2])


_ADAPTED = (
    "adapters of experts (LoRA with target_parameters) do not work where expert_parallel_degree or "
    "tensor_parallel_degree splits experts; leave target_parameters out, or train with both degrees 1"
)


def _refuse_adapters(parent: nn.Module, _: Any, name: str, experts: SplitExperts) -> None:
    """Before `parent`, which had the experts under that name, calls what is there by now."""
    child = own_modules(parent).get(name)
    if child is not experts and child is not None and any(_adapts(part, experts) for part in child.modules()):
        raise _C.InvalidArgument(f"[forward] {_ADAPTED}")


def _adapts(module: nn.Module, experts: nn.Module) -> bool:
    """Whether it is PEFT's wrapper of a parameter of these."""
    if not hasattr(module, "parameter_name") or not hasattr(module, "get_base_layer"):
        return False
    return any(part is experts for part in module.modules())  # FSDP may stand between


def _take_from_rank0(layers: list[SplitExperts], group: dist.ProcessGroup | None, place: torch.device) -> None:
    source = FromRank0(state.ep_rank == 0, functools.partial(dist.broadcast, group=group, group_src=0), place)
    source.require(parameter for layer in layers for parameter in layer.parameters())
    for layer in layers:
        for name in layer._tesserae_splits:
            value = own_parameters(layer)[name]
            assert value is not None
            own_parameters(layer)[name] = source.take(value)  # type: ignore[assignment]
