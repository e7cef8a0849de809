"""PEFT's LoRA, as installed, on a frozen base that FSDP shards, ours against torch's own: the same losses, norms of
gradients and adapters, in memory and as PEFT saves them.

accelerate_on_cpu.py says what is replaced in Accelerate; nothing is in PEFT.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from library_runs import LAYERS, Run, assert_same, is_ours, make_model, prepare, sequences, whole
from ranks import run_ranks


def adapted(base: torch.dtype = torch.float32) -> PeftModel:
    """Adapters are in fp32, the base and the trained copy of its head in that dtype."""
    places = {"target_modules": ["q_proj", "v_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    model = make_model("llama").to(base)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **places))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def save_adapters(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """PEFT 0.21 finds none in blocks that FSDP1 has wrapped, whoever's it is: it does not know their names there."""
    if not isinstance(model, FSDPModule):
        model = adapted()
        model.load_state_dict(weights)
    model.save_pretrained(folder, state_dict=weights)


def assert_saved(folder: Path, run: Run) -> None:
    """The adapters that PEFT reads there are those of the run; the base is not in the file."""
    names = load_file(folder / "adapter_model.safetensors").keys()
    assert len(names) == 2 * 3 * 2 + 1  # A and B of three layers of two blocks, the head
    loaded = PeftModel.from_pretrained(make_model("llama"), folder).state_dict()
    for name, weight in run.weights.items():
        torch.testing.assert_close(loaded[name], weight, rtol=1e-4, atol=1e-5, msg=name)


# ---- by Accelerate ----
def accelerated(rank: int, world_size: int, ours: bool, plugin: dict[str, Any], folder: Path) -> Run:
    prepare(ours)
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[LAYERS["llama"]], **plugin
        )
    )
    model = adapted()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(sequences(24), batch_size=4))
    assert is_ours(model) == ours
    run = Run()

    def epoch() -> None:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            run.norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(accelerator.gather(loss.detach()).mean().item())

    epoch()
    accelerator.save_state(str(folder / "state"))
    epoch()
    run.weights = whole(model)
    accelerator.load_state(str(folder / "state"))
    epoch()
    for name, weight in whole(model).items():
        torch.testing.assert_close(weight, run.weights[name], rtol=1e-4, atol=1e-5, msg=name)
    if ours or plugin["fsdp_version"] == 2:  # torch's FSDP1 dies: on the CPU it frees what it has "copied" there
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            save_adapters(accelerator.unwrap_model(model), weights, folder)
    return run


PLUGINS = {
    "FSDP1": {"fsdp_version": 1, "use_orig_params": True, "state_dict_type": "SHARDED_STATE_DICT"},
    "FSDP2": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"},
}


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_accelerate(plugin: dict[str, Any], tmp_path: Path) -> None:
    theirs = run_ranks(accelerated, 2, False, plugin, tmp_path / "theirs")
    ours = run_ranks(accelerated, 2, True, plugin, tmp_path / "ours")
    assert_same(ours, theirs)
    assert_saved(tmp_path / "ours", ours[0])


# ---- by hand ----
def shard_blocks(model: PeftModel) -> nn.Module:
    for block in model.get_base_model().model.layers:
        fully_shard(block)
    return fully_shard(model)


def wrap_blocks(model: PeftModel) -> nn.Module:
    policy, cpu = ModuleWrapPolicy({LlamaDecoderLayer}), torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True)


def wrap_as_peft_says(model: PeftModel) -> nn.Module:
    """Each trained layer is a unit in that of its block, so that flat parameters are all trained or all frozen."""
    return FullyShardedDataParallel(
        model, auto_wrap_policy=fsdp_auto_wrap_policy(model), device_id=torch.device("cpu"), use_orig_params=False
    )


def clip(model: nn.Module) -> Tensor:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(0.5)
    return nn.utils.clip_grad_norm_(trainable(model), 0.5).full_tensor()


def batch(step: int, rank: int) -> dict[str, Tensor]:
    tokens = torch.stack([row["input_ids"] for row in sequences(32)[(2 * step + rank) * 4 :][:4]])
    return {"input_ids": tokens, "labels": tokens}


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).loss


def train(model: nn.Module, rank: int, loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor] = loss_of) -> Run:
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    run = Run()
    for step in range(4):
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        run.norms.append(clip(model).item())
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights = whole(model)
    return run


def by_hand(rank: int, world_size: int, ours: bool, shard: Callable, recompute: bool, folder: Path) -> Run:
    prepare(ours)
    model = adapted()
    if recompute:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    model = shard(model)
    assert is_ours(model) == ours
    run = train(model, rank)
    if shard is shard_blocks:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights = get_model_state_dict(model, options=options)
    else:
        weights = model.state_dict()
    if rank == 0:
        save_adapters(model, weights, folder)
    return run


@pytest.mark.parametrize(
    ("shard", "recompute"),
    [(shard_blocks, False), (shard_blocks, True), (wrap_blocks, True), (wrap_as_peft_says, False)],
)
def test_by_hand(shard: Callable, recompute: bool, tmp_path: Path) -> None:
    theirs = run_ranks(by_hand, 2, False, shard, recompute, tmp_path / "theirs")
    ours = run_ranks(by_hand, 2, True, shard, recompute, tmp_path / "ours")
    assert_same(ours, theirs)
    assert_saved(tmp_path / "theirs", theirs[0])
    assert_saved(tmp_path / "ours", ours[0])


def loss_against_reference(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """As TRL's DPO and GRPO: logits without the adapters between the forward that is trained and its backward."""
    logits = model(**inputs).logits
    inner = model.module if isinstance(model, FullyShardedDataParallel) else model
    with torch.no_grad(), inner.disable_adapter():
        reference = model(**inputs).logits
    return (logits - reference - 0.1).square().mean()


def against_reference(rank: int, world_size: int, ours: bool, shard: Callable) -> Run:
    prepare(ours)
    return train(shard(adapted()), rank, loss_against_reference)


@pytest.mark.parametrize("shard", [shard_blocks, wrap_blocks])
def test_reference_logits_before_the_backward(shard: Callable) -> None:
    theirs, ours = (run_ranks(against_reference, 2, each, shard) for each in (False, True))
    assert_same(ours, theirs)


def in_two_dtypes(rank: int, world_size: int, ours: bool) -> Run:
    prepare(ours)
    model = adapted(torch.bfloat16)
    assert {parameter.dtype for parameter in trainable(model)} == {torch.float32, torch.bfloat16}
    return train(shard_blocks(model), rank)


def test_base_in_bf16() -> None:
    theirs, ours = (run_ranks(in_two_dtypes, 2, each) for each in (False, True))
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-3)
        assert one.norms == pytest.approx(other.norms, rel=1e-2)
        for name, weight in other.weights.items():
            torch.testing.assert_close(one.weights[name], weight, rtol=2e-2, atol=1e-3, msg=name)
