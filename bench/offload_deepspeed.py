"""A peer of bench/offload.py: DeepSpeed's ZeRO-Infinity on its CPU accelerator. The transformer of offload_peer.py in
fp32, one rank, ZeRO stage 3 with parameters and AdamW's state on the disk (libaio, O_DIRECT); recomputed blocks.

Made for DeepSpeed 0.19.8 and torch 2.13. It has an environment of its own and takes torch from ours:

    apt-get install libaio-dev
    python3 -m venv /tmp/ds
    echo "$PWD/.venv/lib/python3.11/site-packages" > /tmp/ds/lib/python3.11/site-packages/over.pth
    /tmp/ds/bin/pip install --no-deps hjson msgpack ninja py-cpuinfo einops wheel
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 /tmp/ds/bin/pip install --no-deps --no-build-isolation deepspeed==0.19.8
    MAX_JOBS=1 /tmp/ds/bin/python bench/offload_deepspeed.py /var/tmp --dimension 768 --layers 1 --heads 12 \
        --feed-forward 2048 --tokens 256 --steps 1   # once, without a limit: it builds four extensions in minutes

What it cannot put on the disk are gradients: stage 3 keeps all of them in one buffer in memory (and writes them to the
disk, too), so a third of the state is less than it can live in: 114M parameters need 0.9 GiB for 512 tokens. Two things
that would be in the way are avoided:
- Reading parameters ahead fails in the second step where blocks are recomputed ("param already assigned swap buffer
  id", DeepSpeed's issue 4072), so stage3_prefetch_bucket_size is 0.
- checkpoint(use_reentrant=False) gives wrong gradients, silently: on the CPU and with one rank a gathered parameter is
  a view of a swap buffer, which the next parameter gets while autograd's recomputed views are still to be used. With a
  copy there gradients are right.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint

from initial import values_of
from transformer import Shape, Transformer, batch_of

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    # Else glibc keeps what was freed, and the peak is twice as high.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


def configuration(folder: Path, shape: Shape, batch: int) -> dict:
    largest = shape.dimension * max(shape.feed_forward, shape.dimension)  # elements of a parameter
    on_disk = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "steps_per_print": 1 << 30,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": largest,
            "sub_group_size": shape.dimension**2,  # what the optimizer works on at a time
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 4 * largest,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": shape.dimension,
            "offload_param": {**on_disk, "buffer_count": 3, "buffer_size": largest, "max_in_cpu": 0},
            "offload_optimizer": {**on_disk, "buffer_count": 4},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 1, "overlap_events": True},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("dimension", "layers", "heads", "feed-forward", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    shape = Shape(
        dimension=options.dimension,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.heads,
        feed_forward=options.feed_forward,
        vocabulary=257,
        sequence=256,
    )
    device = torch.device("cpu")
    deepspeed.init_distributed("gloo")
    config = configuration(options.folder, shape, options.tokens // 256)
    with deepspeed.zero.Init(config_dict_or_path=config, remote_device="nvme", dtype=torch.float32):
        model = Transformer(shape, device)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(values_of(name, parameter.shape, shape.layers))
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=3e-4, weight_decay=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(options.steps):
        begin = time.perf_counter()
        loss = engine(*batch_of(shape, options.tokens // 256, step, 0, 1, device))
        engine.backward(loss)
        engine.step()
        print("step", f"{time.perf_counter() - begin:.3f}", f"loss {loss.item():.3f}", step, flush=True)
    torch.distributed.destroy_process_group()
    shutil.rmtree(options.folder / "zero_stage_3", ignore_errors=True)


if __name__ == "__main__":
    if not os.environ.items() >= ENVIRONMENT.items():  # glibc reads its own as a process starts
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja is there
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT, "PATH": path})
    main()
