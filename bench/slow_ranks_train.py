"""A usual FSDP script for bench/slow_ranks.py. Batches are slow to read on a rank while FOLDER/slow-RANK exists."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, Dataset

import tesserae as tsm

FOLDER = Path(sys.argv[1])
WIDTH, LAYERS, ROWS = int(sys.argv[2]), 6, 256


class Rows(Dataset):
    def __init__(self, rank: int) -> None:
        self.slow = FOLDER / f"slow-{rank}"

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow.exists():
            time.sleep(float(self.slow.read_text() or 0))
        return torch.randn(ROWS, WIDTH)


def main() -> None:
    dist.init_process_group("gloo")
    tsm.init({"run": {"folder": str(FOLDER / "run")}, "monitor": {"every_seconds": 0.1}})
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = FullyShardedDataParallel(nn.Sequential(*(FullyShardedDataParallel(layer) for layer in layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in DataLoader(Rows(dist.get_rank()), batch_size=None):
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (FOLDER / "end").exists():
            break
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
