"""Accelerate and transformers.Trainer, as installed, on our FSDP1 and FSDP2 against torch's own: the same losses, norms
of gradients and weights, and checkpoints that either loads.

On a machine without an accelerator both leave FSDP aside; accelerate_on_cpu.py says what is replaced so that they do
not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from library_runs import LAYERS, Run, assert_same, is_ours, make_model, prepare, sequences, whole
from ranks import run_ranks


# ---- Accelerate ----
def accelerated(
    rank: int, world_size: int, ours: bool, kind: str, plugin: dict[str, Any], saved: str, loaded: str
) -> Run:
    """An epoch, save_state, a second epoch, load_state, and the second epoch again."""
    prepare(ours)
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[LAYERS[kind]], **plugin
        ),
        gradient_accumulation_steps=2,
    )
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(sequences(32), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert is_ours(model) == ours
    run = Run()

    def epoch() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.losses.append(accelerator.gather(loss.detach()).mean().item())

    epoch()
    accelerator.save_state(saved)
    epoch()
    run.weights = whole(model)
    accelerator.load_state(loaded)
    epoch()
    for name, weight in whole(model).items():
        torch.testing.assert_close(weight, run.weights[name], rtol=1e-4, atol=1e-5, msg=name)
    if ours or plugin["fsdp_version"] == 2:  # torch's FSDP1 dies: on the CPU it frees what it has "copied" there
        weights = whole(model)
        for name, weight in accelerator.get_state_dict(model).items():  # of rank 0
            if name in weights:  # not the other name of an embedding
                torch.testing.assert_close(weight, weights[name], rtol=0, atol=0, msg=name)
    return run


FULL, SHARDED = {"state_dict_type": "FULL_STATE_DICT"}, {"state_dict_type": "SHARDED_STATE_DICT"}
FSDP1 = {"fsdp_version": 1, "use_orig_params": True} | SHARDED
FSDP2 = {"fsdp_version": 2}
RECOMPUTED = {"activation_checkpointing": True}
PLUGINS = {
    "FSDP1": ("llama", FSDP1),
    "FSDP1, recomputed": ("gpt2", FSDP1 | RECOMPUTED),
    "FSDP2": ("llama", FSDP2 | SHARDED),
    "FSDP2, full": ("gpt2", FSDP2 | FULL),
    "FSDP2, recomputed": ("llama", FSDP2 | FULL | RECOMPUTED | {"reshard_after_forward": False}),
    "FSDP2, loaded by rank 0": ("gpt2", FSDP2 | SHARDED | {"cpu_ram_efficient_loading": True}),
}


@pytest.mark.parametrize(("kind", "plugin"), PLUGINS.values(), ids=PLUGINS)
def test_accelerate(kind: str, plugin: dict[str, Any], tmp_path: Path) -> None:
    folders = str(tmp_path / "theirs"), str(tmp_path / "ours")
    theirs = run_ranks(accelerated, 2, False, kind, plugin, folders[0], folders[0])
    assert_same(run_ranks(accelerated, 2, True, kind, plugin, folders[1], folders[0]), theirs)
    assert_same(run_ranks(accelerated, 2, False, kind, plugin, folders[0], folders[1]), theirs)


def loads_a_full_state_dict(rank: int, world_size: int, strategy: str, sync_module_states: bool, folder: str) -> None:
    """save_state, two steps, load_state: weights are those saved, to the bit, and the two steps are what they were."""
    prepare(ours=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, sharding_strategy=strategy, **FULL)
    plugin.sync_module_states = sync_module_states  # its constructor refuses True without a GPU
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = make_model("llama")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert is_ours(model)
    batches = [torch.utils.data.default_collate(sequences(12)[4 * i : 4 * i + 4]) for i in range(3)]

    def steps(first: int, last: int) -> dict[str, Tensor]:
        for batch in batches[first:last]:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    saved = steps(0, 1)
    accelerator.save_state(folder)
    further = steps(1, 3)
    accelerator.load_state(folder)
    assert_equal(whole(model), saved)
    assert_equal(steps(1, 3), further)


def assert_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("sync_module_states", [True, False])
def test_accelerate_loads_a_full_state_dict_on_all_ranks(
    strategy: str, sync_module_states: bool, tmp_path: Path
) -> None:
    """Its default with FSDP1. It asks `type(model) is FSDP`, and if not only rank 0 loads, or nobody. Ours alone:
    torch's FSDP1 dies, see above."""
    run_ranks(loads_a_full_state_dict, 2, strategy, sync_module_states, str(tmp_path))


# ---- transformers.Trainer ----
def trainer_runs(rank: int, world_size: int, ours: bool, fsdp: dict[str, Any], folder: str, resume: str | None) -> Run:
    prepare(ours)
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
        fsdp=True,
        fsdp_config=fsdp,
    )
    trainer = Trainer(make_model("llama"), arguments, train_dataset=sequences(64), eval_dataset=sequences(8))
    trainer.train(resume_from_checkpoint=resume)
    assert is_ours(trainer.model) == ours
    run = Run(weights=whole(trainer.model))
    for entry in trainer.state.log_history:
        run.losses += [entry[key] for key in ("loss", "eval_loss") if key in entry]
        run.norms += [entry["grad_norm"]] if "grad_norm" in entry else []
    trainer.save_model(folder)
    if rank == 0 and fsdp.get("state_dict_type") is None:
        for name, weight in load_file(Path(folder) / "model.safetensors").items():
            torch.testing.assert_close(weight, run.weights[name], msg=name)
    return run


V1 = {"version": 1, "sync_module_states": False, "state_dict_type": "SHARDED_STATE_DICT"}


@pytest.mark.parametrize("fsdp", [{}, V1], ids=["defaults", "version 1"])
def test_trainer(fsdp: dict[str, Any], tmp_path: Path) -> None:
    def run(ours: bool, folder: str, resume: str | None = None) -> list[Run]:
        checkpoint = None if resume is None else str(tmp_path / resume / "checkpoint-3")
        return run_ranks(trainer_runs, 2, ours, fsdp, str(tmp_path / folder), checkpoint)

    assert_same(run(True, "ours"), run(False, "theirs"))
    assert_same(run(True, "ours, resumed", "theirs"), run(False, "theirs, resumed", "ours"))
