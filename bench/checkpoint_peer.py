"""What saving and loading cost with PyTorch's Distributed Checkpoint (DCP) on FSDP2: the peer of bench/checkpoint.cpp,
with the same model, the same state and the same report.

Ranks come from the environment (torchrun, or bench/checkpoint.py):

    torchrun --nproc-per-node 4 bench/checkpoint_peer.py --dimension 256 --layers 4 --heads 4 --vocabulary 1024 \\
        --sequence 64 --folder /tmp/x

`save` syncs its files, as DCP does by default; `save_unsynced` does not (sync_files=False).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from peers import default_feed_forward, leave, make_optimizer, wrap_fsdp2
from transformer import Shape, Transformer, batch_of, parameter_count

# What Bench wants to know beside the model, where a script does not ask for it.
FIXED = {"loads": False, "strategy": "FULL_SHARD", "prefetch": 0, "head_unit": False}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dimension", "layers", "heads", "vocabulary", "sequence"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--saves", type=int, default=3, help="of each kind")
    parser.add_argument("--steps", type=int, default=3, help="after each asynchronous save")
    parser.add_argument("--device", choices=("cpu", "cuda", "sim"), default="cpu", help="sim: tests/sim/python")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(degree=0, **FIXED)
    options = parser.parse_args()
    return options


class Bench:
    """A model in training on one rank, and the clock that all ranks stop together."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        index = None if options.device == "cpu" else torch.accelerator.current_device_index()
        self.device = torch.device(options.device, index)
        self.shape = Shape(
            dimension=options.dimension,
            layers=options.layers,
            heads=options.heads,
            kv_heads=options.heads,
            feed_forward=default_feed_forward(options.dimension),
            vocabulary=options.vocabulary,
            sequence=options.sequence,
        )
        model = Transformer(self.shape, self.device)
        self.parameters = parameter_count(model)
        self.model: nn.Module = wrap_fsdp2(model, options, self.device)
        self.optimizer = make_optimizer(self.model)
        self.background = dist.new_group(backend="gloo")  # an asynchronous save deadlocks on the group of training
        self.report: defaultdict[str, list[float]] = defaultdict(list)
        self.steps = self.count = 0

    def step(self) -> None:
        tokens, targets = batch_of(self.shape, self.options.batch, self.steps, self.rank, self.ranks, self.device)
        self.model(tokens, targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def next_folder(self) -> Path:
        """A fresh one; the one before it goes, as with keep = 1."""
        if self.rank == 0:
            shutil.rmtree(self.options.folder / str(self.count), ignore_errors=True)
        self.count += 1
        return self.options.folder / str(self.count)

    def save(self, sync: bool) -> None:
        writer = dcp.FileSystemWriter(self.next_folder(), sync_files=sync)
        dcp.save(self.state(), storage_writer=writer)

    def save_asynchronously(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        future = dcp.async_save(self.state(), checkpoint_id=self.next_folder(), process_group=self.background)
        called = time.perf_counter()
        for index in range(self.options.steps):
            self.step()
            if index == 0:
                self.report["async_step"].append(time.perf_counter() - called)
        dist.barrier()
        self.report["async_call"].append(called - start)
        self.report["async_steps"].append(time.perf_counter() - start)
        future.result()

    def load(self) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=self.options.folder / str(self.count))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def measure(self, name: str, times: int, action: Callable[[], None]) -> None:
        for _ in range(times):
            dist.barrier()
            start = time.perf_counter()
            action()
            dist.barrier()
            self.report[name].append(time.perf_counter() - start)

    def run(self) -> dict:
        saves, steps = self.options.saves, self.options.steps
        for _ in range(2):
            self.step()
        self.measure("step", steps, self.step)
        for _ in range(saves):
            self.save_asynchronously()
        self.measure("save", saves, lambda: self.save(sync=True))
        self.measure("save_unsynced", saves, lambda: self.save(sync=False))
        self.measure("load", saves, self.load)
        bytes_written = sum(f.stat().st_size for f in (self.options.folder / str(self.count)).iterdir())
        return {**self.report, "ranks": self.ranks, "parameters": self.parameters, "bytes": bytes_written}


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if options.device == "sim":
        import tesserae_sim  # noqa: F401  # makes the device known
    if options.device != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    backends = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "sim": "cpu:gloo,sim:sim"}
    dist.init_process_group(backends[options.device])
    report = Bench(options).run()
    if dist.get_rank() == 0:
        text = json.dumps(report, indent=1)
        options.json.write_text(text) if options.json else print(text)
    leave()


if __name__ == "__main__":
    main()
