"""Lightning's Trainer, as installed, with its FSDPStrategy and its ModelParallelStrategy (fully_shard) on ours against
torch's own: the same losses, norms of gradients and weights, and checkpoints that either goes on from.

ModelParallelStrategy takes the CPU as it is. FSDPStrategy is refused there twice:
  1. by the Trainer, which wants a GPU for `type(strategy) is FSDPStrategy`: a subclass is let through;
  2. by torch's FSDP1: the strategy gives it `device_id=root_device.index`, which is None of a CPU, and without a device
     FSDP1 looks for an accelerator. The subclass gives the device itself. Where the script wraps by hand (`wrap` of
     torch, within the strategy's settings), the script does, and the subclass adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import tesserae as tsm
from library_runs import Run, assert_same, is_ours, make_model, sequences, whole
from ranks import run_ranks


class Fsdp1(FSDPStrategy):
    """1."""


class Fsdp1OnCPU(FSDPStrategy):
    """2."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        arguments = {"cpu_offload": self.cpu_offload, "mixed_precision": self.mixed_precision_config} | self.kwargs
        wrapped = FullyShardedDataParallel(
            model, sharding_strategy=self.sharding_strategy, device_id=self.root_device, **arguments
        )
        return super()._setup_model(wrapped)  # finds it wrapped, and does the rest


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model("llama")
        self.run = Run()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(**batch).loss
        self.run.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("loss of validation", self.model(**batch).loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.run.losses.append(self.trainer.callback_metrics["loss of validation"].item())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WrappedTask(Task):
    """FSDPStrategy wraps it."""

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        self.run.norms.append(self.trainer.model.clip_grad_norm_(0.5).item())


class HandWrappedTask(Task):
    def configure_model(self) -> None:
        self.model = wrap(self.model, device_id=torch.device("cpu"))

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        self.run.norms.append(self.model.clip_grad_norm_(0.5).item())


class ShardedTask(Task):
    """ModelParallelStrategy leaves that to the script."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        self.run.norms.append(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5).full_tensor().item())


class SplitTask(Task):
    """The same on a mesh of two axes. Its optimizer takes parameters of both meshes one by one, its gradients are not
    clipped: torch.nn.utils.clip_grad_norm_ wants one mesh."""

    def configure_model(self) -> None:
        columns = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        columns |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in self.model.model.layers:
            parallelize_module(layer, self.device_mesh["tensor_parallel"], columns | rows)
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


@dataclass
class Case:
    task: type[Task]
    strategy: type[Strategy]
    arguments: dict[str, Any]
    ranks: int = 2


UNITS = {"auto_wrap_policy": {LlamaDecoderLayer}}
ONE_AXIS, TWO_AXES = ({"data_parallel_size": 2, "tensor_parallel_size": size} for size in (1, 2))
SHARDED, FULL = {"state_dict_type": "sharded"}, {"state_dict_type": "full"}
CASES = {
    "FSDP1": Case(WrappedTask, Fsdp1OnCPU, UNITS | SHARDED | {"activation_checkpointing_policy": {LlamaDecoderLayer}}),
    "FSDP1, flat parameters": Case(WrappedTask, Fsdp1OnCPU, UNITS | SHARDED | {"use_orig_params": False}),
    "FSDP1, wrapped by hand": Case(HandWrappedTask, Fsdp1, UNITS | SHARDED),
    "FSDP2": Case(ShardedTask, ModelParallelStrategy, ONE_AXIS),
    "FSDP2, split layers, full": Case(
        SplitTask, ModelParallelStrategy, TWO_AXES | {"save_distributed_checkpoint": False}, ranks=4
    ),
}


def trained(rank: int, world_size: int, ours: bool, case: Case, saved: str | None, resumed: str | None) -> Run:
    """Two epochs of two steps, a checkpoint after each; or the second, from another run's first checkpoint."""
    if ours:
        tsm.init()
    task = case.task()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=case.strategy(**case.arguments),
        max_epochs=2,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        enable_checkpointing=saved is not None,
        callbacks=[ModelCheckpoint(saved, "{epoch}", save_top_k=-1)] if saved is not None else [],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader(sequences(32), batch_size=4), DataLoader(sequences(8), batch_size=4)
    trainer.fit(task, *batches, ckpt_path=None if resumed is None else f"{resumed}/epoch=0.ckpt")
    assert any(is_ours(part) for part in trainer.model.modules()) == ours
    task.run.weights = whole(trainer.model)
    return task.run


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lightning(case: Case, tmp_path: Path) -> None:
    def run(ours: bool, saved: str | None, resumed: str | None = None) -> list[Run]:
        folders = [str(tmp_path / name) if name is not None else None for name in (saved, resumed)]
        return run_ranks(trained, case.ranks, ours, case, *folders)

    theirs = run(False, "theirs")
    assert_same(run(True, "ours"), theirs)
    on_ours = run(True, None, "theirs")
    assert [each.losses for each in on_ours] == [pytest.approx(each.losses[5:], rel=1e-5) for each in theirs]
    assert_same(on_ours, run(False, None, "ours"))


def test_full_state_dicts_of_fsdp1(tmp_path: Path) -> None:
    """torch's FSDP1 cannot save them here: on the CPU it frees what it has "copied" there. It loads ours."""
    case = Case(WrappedTask, Fsdp1OnCPU, UNITS | FULL)
    ours = run_ranks(trained, 2, True, case, str(tmp_path), None)
    theirs = run_ranks(trained, 2, False, case, None, str(tmp_path))
    assert [run.losses for run in theirs] == [pytest.approx(run.losses[5:], rel=1e-5) for run in ours]
    assert_same(run_ranks(trained, 2, True, case, None, str(tmp_path)), theirs)
