"""A trace of one training step of the transformer of bench/transformer.py under fully_shard, on Tesserae or on torch's
own, by torch.profiler: for chrome://tracing or https://ui.perfetto.dev.

    PYTHONPATH=build/release/python python bench/profile_step.py --dimension 256 --layers 2 --heads 4 \\
        --vocabulary 1024 --sequence 64 --trace /tmp/step.json
    ... --mode fsdp2 --device cuda --precision bf16

Writes the trace (compressed if its name ends in .gz), and to --json what took most of the device's time.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from peers import WRAP, backend_of, default_feed_forward, leave, make_optimizer
from transformer import Shape, Transformer, batch_of

WARMUP = 3
LISTED = 25


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dimension", "layers", "heads", "vocabulary", "sequence"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--mode", choices=("fsdp2", "tesserae2"), default="tesserae2")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda", "sim"), default="cpu")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.degree, options.loads, options.model, options.backend = 0, False, "llama", "default"
    options.strategy, options.prefetch, options.head_unit = "FULL_SHARD", 0, False
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_accelerator = options.device != "cpu"
    if options.device == "sim":
        import tesserae_sim  # noqa: F401  # makes the device known
    device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", "0")) if on_accelerator else None)
    if on_accelerator:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(backend_of(options))
    shape = Shape(
        dimension=options.dimension,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.heads,
        feed_forward=default_feed_forward(options.dimension),
        vocabulary=options.vocabulary,
        sequence=options.sequence,
    )
    model = WRAP[options.mode](Transformer(shape, device), options, device)
    optimizer = make_optimizer(model)

    def step(number: int) -> None:
        tokens, targets = batch_of(shape, options.batch, number, rank, ranks, device)
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_accelerator:
            torch.accelerator.synchronize()

    for number in range(WARMUP):
        step(number)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if options.device == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        step(WARMUP)
    if rank == 0:
        profiler.export_chrome_trace(str(options.trace))
        key = "self_device_time_total" if options.device == "cuda" else "self_cpu_time_total"
        rows = sorted(profiler.key_averages(), key=lambda row: getattr(row, key), reverse=True)[:LISTED]
        top = [{"name": row.key, "calls": row.count, "microseconds": getattr(row, key)} for row in rows]
        report = {"mode": options.mode, "device": options.device, "ranks": ranks, "top": top}
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    leave()


if __name__ == "__main__":
    main()
