"""A script whose ranks may die: the others go on in the same processes, and the losses are those of a quiet run.

    tesserae run --nproc 4 --replacements 8 --spares 1 --min-ranks 2 examples/python/elastic.py --folder run
    kill -9 PROCESS                         # of any rank: it prints them
    tesserae scale run --ranks 2            # from another shell, any number that divides the 12 samples of a step

Three lines make it so; they are marked. With fewer ranks each takes more of a step's samples. torchrun starts it as
well, but there a loss ends the job.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tesserae as tsm

WIDTH, SAMPLES = 64, 12


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # in one piece, whoever else writes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the run: requests to it, and checkpoints")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--pause", type=float, default=0.05, help="seconds to wait before each step, so that there is time for a kill"
    )
    parser.add_argument("--deadline", type=float, default=60, help="seconds after which a silent rank is lost")
    parser.add_argument("--degree", type=int, default=0, help="ranks that share the state out (0: all)")
    parser.add_argument(
        "--memory-every", type=int, help="steps between copies in memory (0: none; by default 1, or 0 on several hosts)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    run = {"folder": str(options.folder), "deadline_seconds": options.deadline}
    tsm.init({"hybrid_shard_degree": options.degree, "run": run})

    def train(job) -> None:  # line 1: no init_process_group()
        say(f"epoch {job.epoch} rank {job.rank} of {job.world_size} process {os.getpid()}")
        torch.manual_seed(options.seed)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
        checkpoints = options.folder / "checkpoints"
        kept = {"folder": checkpoints, "memory_every": options.memory_every, "others": [scheduler]}
        for step in job.steps(model, optimizer, options.steps, **kept):  # line 2
            time.sleep(options.pause)
            batch = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
            inputs, targets = batch[:, job.samples.start : job.samples.stop]
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if job.rank == 0:
                say(f"step {step} loss {total.item() / job.world_size!r}")

    tsm.elastic(train, global_batch=SAMPLES)  # line 3
    say(f"process {os.getpid()} is done")


if __name__ == "__main__":
    main()
