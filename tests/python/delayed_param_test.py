from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

import tesserae as tsm
from ranks import run_ranks
from tesserae.delayed_param import DelayedParamIniter
from tesserae.fsdp import construction
from tesserae.utils.module_utils import empty_module_params, move_buffers_to_device

FSDP = torch.distributed.fsdp.FullyShardedDataParallel
LLAMA = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    tie_word_embeddings=True, pad_token_id=0,
)  # fmt: skip
T5 = T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)


def llama() -> nn.Module:
    return LlamaForCausalLM(LLAMA)


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoderLayer(32, 4, 64), nn.BatchNorm1d(4))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def materialise(model: nn.Module, delayed: DelayedParamIniter) -> None:
    """As FSDP does for one unit: outer modules first, each that holds something on the meta device."""
    init = delayed.get_param_init_fn()
    for module in list(model.modules()):
        if any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            init(module)
    delayed.get_post_param_init_fn()(model)


def compare(model: nn.Module, reference: nn.Module) -> None:
    """Buffers are equal; parameters are draws of the same distribution."""
    for (name, ours), (_, theirs) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert ours.shape == theirs.shape
        spread = theirs.std().item() if theirs.numel() > 1 else 0.0
        assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=0.4 * spread + 1e-6), name
        assert ours.std().item() == pytest.approx(spread, rel=0.25, abs=1e-6), name


@pytest.mark.parametrize("make", [llama, t5, block])
def test_values_are_drawn_as_the_model_itself_draws_them(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    reference = make()
    model = on_meta(make)
    count = sum(p.numel() for p in model.parameters())
    delayed = DelayedParamIniter(model)
    with delayed.validate_params_and_buffers_inited():
        materialise(model, delayed)
    compare(model, reference)
    assert delayed.num_params_inited == count == sum(p.numel() for p in model.parameters())


def test_weights_are_tied_again() -> None:
    model = on_meta(llama)
    materialise(model, DelayedParamIniter(model))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight[LLAMA.pad_token_id].eq(0).all()
    DelayedParamIniter(model).get_post_param_init_fn()(nn.Linear(2, 2))  # which has no tie_weights: nothing happens


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros(2))


def to_twos(module: nn.Module) -> None:
    empty_module_params(module, torch.device("cpu"))
    move_buffers_to_device(module, torch.device("cpu"))
    module.scale.data.fill_(2)
    module.steps.fill_(1)


def test_a_method_of_the_script() -> None:
    model = on_meta(Scaled)
    delayed = DelayedParamIniter(model, init_method_using_config=to_twos)
    materialise(model, delayed)
    assert model.scale.tolist() == [2, 2, 2]


def test_a_module_that_nobody_can_initialise_is_named() -> None:
    model = on_meta(Scaled)
    with pytest.raises(TypeError, match="how to initialise a Scaled is not known.*pass init_method_using_config"):
        materialise(model, DelayedParamIniter(model))


def test_containers_have_nothing_to_initialise() -> None:
    """FSDP asks of every module."""
    model = on_meta(lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)))
    initialise = DelayedParamIniter(model).get_param_init_fn()
    for module in model.modules():
        initialise(module)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_what_was_left_out_is_named() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    delayed = DelayedParamIniter(model)
    with pytest.raises(AssertionError, match=r"still on the meta device: 1.weight, 1.bias"):
        with delayed.validate_params_and_buffers_inited():
            delayed.get_param_init_fn()(model[0])
    with delayed.validate_params_and_buffers_inited(enabled=False):
        pass
    with pytest.raises(AssertionError, match="0 parameters were initialised, but 6 were on the meta device"):
        with delayed.validate_params_and_buffers_inited():
            empty_module_params(model[1], torch.device("cpu"))


def test_parameters_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].weight = nn.Parameter(torch.zeros(2, 3))
    delayed = DelayedParamIniter(model)
    extra = nn.Parameter(torch.zeros(5))
    for _ in range(2):
        delayed.count_num_params(model[0])
        delayed.count_num_params(model[1], model[0].weight, extra)
    assert delayed.num_params_inited == 9 + 8 + 5


def wraps(rank: int, world_size: int, ours: bool, use_orig_params: bool) -> dict[str, Any]:
    """The statistics of full parameters of models that were made on the meta device and wrapped block by block."""
    if ours:
        tsm.init({"hybrid_shard_degree": 2})
    found = {}
    for make, layer in ((llama, LlamaDecoderLayer), (t5, T5Block)):
        torch.manual_seed(1)
        model = on_meta(make)
        delayed = DelayedParamIniter(model)
        fsdp = functools.partial(FSDP, post_param_init_fn=delayed.get_post_param_init_fn()) if ours else FSDP
        with delayed.validate_params_and_buffers_inited():
            model = fsdp(
                model, auto_wrap_policy=ModuleWrapPolicy({layer}), device_id=torch.device("cpu"),
                use_orig_params=use_orig_params, param_init_fn=delayed.get_param_init_fn(),
            )  # fmt: skip
        model.eval()
        with torch.no_grad():
            tokens = torch.arange(12).reshape(2, 6)
            extra = {"labels": tokens} if make is t5 else {}
            found[make.__name__] = model(input_ids=tokens, **extra).logits.std().item()
    return found


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_under_fsdp_the_values_are_those_of_one_process(use_orig_params: bool) -> None:
    ours, replica = run_ranks(wraps, 2, True, use_orig_params)
    assert ours == replica
    assert ours == pytest.approx(run_ranks(wraps, 2, False, use_orig_params)[0], rel=1e-5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.other = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def id_of_a_tied_weight(rank: int, world_size: int) -> None:
    tsm.init()
    model = on_meta(Tied)

    def init(module: nn.Module) -> None:
        if model.embedding.weight.is_meta:
            model.embedding.weight = model.head.weight = nn.Parameter(torch.ones(8, 4))
            model.other.weight = nn.Parameter(torch.ones(4, 4))

    # Where an object was that is gone, another one may be: it has the same id then. Here it always has.
    with mock.patch.object(construction, "id", lambda p: 7 if p.is_meta or p.numel() == 16 else id(p), create=True):
        sharded = FSDP(model, use_orig_params=True, param_init_fn=init)
    assert [parameter.dim() for parameter in sharded.parameters()] == [1, 1]  # slices, all of them


def test_a_new_parameter_may_have_the_id_of_a_tied_one_that_is_gone() -> None:
    run_ranks(id_of_a_tied_weight, 2)
