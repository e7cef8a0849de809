"""Trains one model with FSDP1, FSDP2 and ours in turn and reports the most memory that each held; for memory_test.py.

Started by torchrun with heap.c preloaded: memory_run.py FILE BACKEND SIDE..., where ours runs over that backend and
is the last side. Rank 0 writes JSON: {case: {side: bytes}}, the largest of all ranks, and what one copy of the
parameters takes in bf16. Each case is trained twice, the smaller number counts. What is counted: from before the
model is made (so parameters, gradients and optimizer state are in it) to the end, at most, within the last steps (so
making the model, which holds it whole for a moment, is not).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

# A unit has 2 MiB: heap.c does not see what is mapped rather than allocated, from 4 MiB on.
WIDTH, BLOCKS, ROWS, STEPS = 256, 12, 16, 3
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))


def wrap_fsdp1(model: nn.Module, strategy: str, dtype: torch.dtype | None) -> nn.Module:
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def wrap_fsdp2(model: nn.Module, strategy: str, dtype: torch.dtype | None) -> nn.Module:
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard = functools.partial(
        fully_shard,
        mp_policy=precision,
        reshard_after_forward=strategy == "FULL_SHARD",
        mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)),
    )
    for block in model:
        if isinstance(block, Block):
            shard(block)
    return shard(model)


def shared() -> int:
    """This rank's share of the memory that ranks have in common, which heap.c does not see. What they have touched
    stays theirs, so it is read at the end."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # the head of a mapping: its addresses, ... and what is mapped
            counts = len(words) > 5 and words[5].startswith("/memfd:tesserae")
        elif counts and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total


def counted_heap() -> ctypes.CDLL:
    heap = ctypes.CDLL(None)
    heap.heap_held.restype = heap.heap_peak.restype = ctypes.c_long
    return heap


def fill_interned_strings() -> list[str]:
    """The interpreter's table of interned strings doubles when it is full, and then takes 2 MB more, which would be
    taken for the model's that is measured at that moment. It does so here, and has room for long."""
    heap, strings = counted_heap(), []
    before = heap.heap_held()
    while (now := heap.heap_held()) - before < 1 << 20:
        before = now
        strings.append(sys.intern(f"memory_run {len(strings)}"))
    return strings


def peak(wrap: Callable[..., nn.Module], strategy: str, dtype: torch.dtype | None, checkpoint: bool) -> int:
    heap = counted_heap()
    gc.collect()
    before = heap.heap_held()
    model = wrap(make_model(), strategy, dtype)
    if checkpoint:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    inputs = torch.randn(ROWS, WIDTH)
    for step in range(STEPS):
        if step == STEPS - 2:
            gc.collect()
            heap.heap_peak()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return heap.heap_peak() - before


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = list(itertools.product(STRATEGIES, PRECISIONS, (False, True)))
    every = {"fsdp1": wrap_fsdp1, "fsdp2": wrap_fsdp2, "ours": wrap_fsdp1}
    wraps = {side: every[side] for side in sys.argv[3:]}
    for side in wraps:  # the first use of each loads and caches things that stay
        if side == "ours":
            import tesserae as tsm
            from tesserae.job import fabrics

            fabrics.HOST_BACKEND = sys.argv[2]
            tsm.init()
        for dtype in PRECISIONS.values():  # where the processor has bf16, oneDNN makes kernels of its own for it
            peak(wraps[side], "FULL_SHARD", dtype, False)
    strings = fill_interned_strings()
    gc.freeze()  # what is loaded by now is no garbage: looking through it took a third of the whole time
    report: dict[str, dict[str, int]] = {}
    # Twice: libraries and the interpreter take some megabytes for a moment, now and then.
    for strategy, precision, checkpoint in 2 * cases:
        name = f"{strategy},{precision}" + ",checkpoint" * checkpoint
        of_sides = report.setdefault(name, {})
        for side, wrap in wraps.items():
            if side == "ours":
                tsm.init()
            else:
                tsm.uninstall()
            held = torch.tensor(peak(wrap, strategy, PRECISIONS[precision], checkpoint))
            if side == "ours":
                held += shared()
                assert (shared() > 0) == (sys.argv[2] == "shm"), "what carries the bytes is what was asked for"
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
            of_sides[side] = min(held.item(), of_sides.get(side, held.item()))
    if dist.get_rank() == 0:
        copy = 2 * sum(parameter.numel() for parameter in make_model().parameters())
        assert strings, "they lived until here"
        Path(sys.argv[1]).write_text(json.dumps({"cases": report, "bf16_copy": copy}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
