"""A usual FSDP script for bench/slow_ranks.py: its rows are in a file that it maps.

    slow_ranks_train.py FOLDER WIDTH

FOLDER/at-RANK has the process and the number of the step that it is in, two integers of 8 bytes; batches are slow to
read on a rank while FOLDER/slow-RANK exists; all end with FOLDER/end."""

from __future__ import annotations

import mmap
import os
import struct
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
WIDTH, LAYERS, ROWS, RUN = int(sys.argv[2]), 6, 1024, 128
FILE = 1 << 27  # bytes of each rank's rows


class Rows(Dataset):
    def __init__(self, rank: int) -> None:
        self.slow, file = FOLDER / f"slow-{rank}", FOLDER / f"rows-{rank}"
        with file.open("wb") as written:  # by this process: its pages count as this process's memory
            for _ in range(FILE >> 22):
                written.write(torch.randn(1 << 20).numpy())
            os.fsync(written.fileno())
        self.all = torch.from_file(str(file), shared=False, size=FILE // 4 // WIDTH * WIDTH).view(-1, WIDTH)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow.exists():
            time.sleep(float(self.slow.read_text() or 0))
        begins = torch.randint(len(self.all) // RUN, (ROWS // RUN,)) * RUN
        return torch.cat([self.all[begin : begin + RUN] for begin in begins.tolist()])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tsm.init({"run": {"folder": str(FOLDER / "run")}, "monitor": {"every_seconds": 0.1}})
    torch.manual_seed(rank)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = FullyShardedDataParallel(nn.Sequential(*(FullyShardedDataParallel(layer) for layer in layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = DataLoader(Rows(rank), batch_size=None)
    (FOLDER / f"at-{rank}").write_bytes(bytes(16))
    with (FOLDER / f"at-{rank}").open("r+b") as file:
        at = mmap.mmap(file.fileno(), 16)
    for step, batch in enumerate(rows, 1):
        struct.pack_into("qq", at, 0, os.getpid(), step)
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
