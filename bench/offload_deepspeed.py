"""A peer of bench/offload.py: DeepSpeed's ZeRO-Infinity. The same transformer, fp32, recomputed blocks."""

from __future__ import annotations

import argparse
import functools
import os
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint

from initial import values_of
from transformer import Block, Shape, Transformer, batch_of


def configuration(folder: Path, shape: Shape, batch: int) -> dict:
    largest = shape.dimension * max(shape.feed_forward, shape.dimension)
    block = 4 * shape.dimension**2 + 3 * shape.dimension * shape.feed_forward
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 1 << 30,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": largest,
            "sub_group_size": largest,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": block,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": shape.dimension,
            "offload_param": {
                "device": "nvme",
                "nvme_path": str(folder),
                "buffer_count": 10,
                "buffer_size": largest,
                "max_in_cpu": 0,
                "pin_memory": False,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(folder),
                "buffer_count": 4,
                "pin_memory": False,
                "pipeline_read": False,
                "pipeline_write": False,
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("dimension", "layers", "heads", "feed-forward", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.manual_seed(3)
    shape = Shape(
        dimension=options.dimension,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.heads,
        feed_forward=options.feed_forward,
        vocabulary=257,
        sequence=256,
    )
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed("gloo")
    device = torch.device("cpu")
    config = configuration(options.folder, shape, options.tokens // 256)
    with deepspeed.zero.Init(config_dict_or_path=config, remote_device="nvme", dtype=torch.float32):
        model = Transformer(shape, device)
    print("ready", flush=True)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(values_of(name, parameter.shape, shape.layers))
    print("ready", flush=True)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=3e-4, weight_decay=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    print("ready", flush=True)
    for step in range(options.steps):
        begin = time.perf_counter()
        loss = engine(*batch_of(shape, options.tokens // 256, step, 0, 1, device))
        engine.backward(loss)
        engine.step()
        print("step", f"{time.perf_counter() - begin:.3f}", f"loss {loss.item():.3f}", step, flush=True)


if __name__ == "__main__":
    main()
