"""load_state_dict_from_rank0 of tsm.transform where rank 0 has no values: no rank waits for them."""

from __future__ import annotations

import pytest

import expert_models
import tensor_models
from ranks import run_ranks

MODELS = {
    "tensor_parallel_degree": tensor_models.MODELS["llama"],
    "expert_parallel_degree": expert_models.MODELS["mixtral"],
}


def rank0_has_nothing(rank: int, world_size: int, axis: str, only_buffers: bool) -> None:
    import tesserae as tsm

    tsm.init({axis: world_size})
    model = MODELS[axis]()
    if only_buffers:
        for module in model.modules() if rank == 0 else ():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to("meta"))
    elif rank == 0:
        model.to("meta")
    with pytest.raises(tsm.InvalidArgument, match="rank 0's model is on the meta device; it must have its values"):
        tsm.transform(model, load_state_dict_from_rank0=True)


@pytest.mark.parametrize("axis", MODELS)
def test_all_ranks_raise(axis: str) -> None:
    run_ranks(rank0_has_nothing, 2, axis, False, deadline=30)


def test_buffers_have_values_too() -> None:
    run_ranks(rank0_has_nothing, 2, "tensor_parallel_degree", True, deadline=30)
