"""Trains the transformer of bench/transformer.py, or that of gpt2.py, with PyTorch's own tools, or with the same FSDP1
script on Tesserae, and writes what one run cost as JSON.

Every peer gets what its documentation recommends: one unit a block, fused AdamW, a model that is made on the meta
device where it is sharded, and for DDP gradients that live in the buckets of a static graph. Ranks come from the
environment (torchrun, or bench/compare.py):

    torchrun --nproc-per-node 2 bench/peers.py --mode fsdp2 --dimension 256 --layers 4 --heads 4 --vocabulary 1024 \\
        --sequence 64

Modes: plain (every rank trains a copy of its own: no communication in a step), ddp, fsdp1, fsdp2, tesserae (fsdp1 after
tsm.init), tesserae2 (fsdp2 after tsm.init).
`--mode plain --data-ranks N` in one process trains on the batches of N ranks together: the reference for losses.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cases import find_tesserae
from gpt2 import Gpt2, Gpt2Block
from initial import OnMeta
from transformer import Block, Shape, Transformer, batch_of, parameter_count

Precision = contextlib.AbstractContextManager
MODELS: dict[str, tuple[type[OnMeta], type[nn.Module]]] = {"llama": (Transformer, Block), "gpt2": (Gpt2, Gpt2Block)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=tuple(WRAP), required=True)
    parser.add_argument("--model", choices=tuple(MODELS), default="llama", help="of transformer.py, or of gpt2.py")
    parser.add_argument(
        "--strategy",
        default="FULL_SHARD",
        choices=("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"),
        help="of fsdp1; fsdp2 takes FULL_SHARD, SHARD_GRAD_OP and HYBRID_SHARD",
    )
    parser.add_argument("--degree", type=int, default=0, help="ranks over which a HYBRID_SHARD shards")
    parser.add_argument("--prefetch", type=int, default=0, help="fsdp2: gather so many units ahead, explicitly")
    parser.add_argument("--head-unit", action="store_true", help="fsdp2: the head, not tied, is a unit of its own")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--dimension", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--kv-heads", type=int, default=0, help="0: as many as heads")
    parser.add_argument("--feed-forward", type=int, default=0, help="0: 8/3 of dimension, rounded up to 32, as in ours")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--sequence", type=int, required=True)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank and step")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument(
        "--data-ranks", type=int, default=0, help="train in one process on the batches of so many ranks"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "sim"), default="cpu", help="sim: tests/sim/python")
    parser.add_argument(
        "--backend",
        choices=("default", "tesserae"),
        default="default",
        help="what carries the bytes: Gloo (NCCL on cuda), or the backend that tesserae registers with torch",
    )
    parser.add_argument("--json", type=Path, help="where rank 0 writes its report; default: standard output")
    options = parser.parse_args()
    options.loads = False  # initial values, not those of a checkpoint
    return options


def backend_of(options: argparse.Namespace) -> str:
    if options.backend == "default":
        return {"cuda": "nccl", "sim": "cpu:gloo,sim:sim"}.get(options.device, "gloo")
    if not find_tesserae():
        unavailable("tesserae is neither installed nor built below build/")
    import tesserae  # noqa: F401  # registers it

    if not hasattr(dist.Backend, options.backend.upper()):
        unavailable("this build of tesserae registers no backend with torch.distributed")
    return f"cpu:{options.backend}"


def unavailable(why: str) -> NoReturn:
    """For compare.py: this candidate cannot run here, which is not the same as a run that broke."""
    print(f"peers: {why}", file=sys.stderr, flush=True)
    sys.exit(77)


def default_feed_forward(dimension: int) -> int:
    return -(-dimension * 8 // 3 // 32) * 32


def shape_of(options: argparse.Namespace) -> Shape:
    return Shape(
        dimension=options.dimension,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        feed_forward=options.feed_forward or default_feed_forward(options.dimension),
        vocabulary=options.vocabulary,
        sequence=options.sequence,
        tied=options.tied,
    )


def wrap_plain(model: OnMeta, options: argparse.Namespace, device: torch.device) -> nn.Module:
    model.fill(device)
    return model


def wrap_ddp(model: OnMeta, options: argparse.Namespace, device: torch.device) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    model.fill(device)
    ids = None if device.type == "cpu" else [device.index]
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, static_graph=True)


def wrap_fsdp1(model: OnMeta, options: argparse.Namespace, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={MODELS[options.model][1]})
    mesh, precision = None, None
    if options.degree:
        mesh = init_device_mesh(device.type, (dist.get_world_size() // options.degree, options.degree))
    if options.precision == "bf16":
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    strategy = ShardingStrategy[options.strategy]
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=strategy,
        device_mesh=mesh,
        mixed_precision=precision,
        device_id=device,
        param_init_fn=model.filler(device),
        use_orig_params=True,
    )


def init_tesserae() -> None:
    if not find_tesserae():
        unavailable("tesserae is neither installed nor built below build/")
    import tesserae

    tesserae.init()


def wrap_tesserae(model: OnMeta, options: argparse.Namespace, device: torch.device) -> nn.Module:
    init_tesserae()
    return wrap_fsdp1(model, options, device)


def wrap_tesserae2(model: OnMeta, options: argparse.Namespace, device: torch.device) -> nn.Module:
    init_tesserae()
    return wrap_fsdp2(model, options, device)


def wrap_fsdp2(model: OnMeta, options: argparse.Namespace, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    size = dist.get_world_size()
    if options.degree:
        degrees, names = (size // options.degree, options.degree), ("replicate", "shard")
    else:
        degrees, names = (size,), ("shard",)
    arguments: dict = {"mesh": init_device_mesh(device.type, degrees, mesh_dim_names=names)}
    if options.precision == "bf16":
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if options.strategy == "SHARD_GRAD_OP":
        arguments["reshard_after_forward"] = False
    for block in model.blocks:
        fully_shard(block, **arguments)
    units = [*model.blocks]  # in the order in which they are needed
    if options.head_unit:  # backward begins with it
        units.append(fully_shard(model.head, **arguments | {"reshard_after_forward": False}))
    fully_shard(model, **arguments)
    if options.prefetch:
        prefetch_explicitly(model, units, options.prefetch)
    model.fill_shards(device, with_values=not options.loads)
    return model


def prefetch_explicitly(root: nn.Module, units: list[nn.Module], ahead: int) -> None:
    """As FSDP2's tutorial does it. On a CPU, which has no streams, a gather runs beside the computation only if it is
    asynchronous, and that is for explicit prefetching only."""
    root._set_unshard_async_op(True)
    order = [root, *units]
    for at, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[at + 1 : at + 1 + ahead])
    root.set_modules_to_backward_prefetch(units[: -1 - ahead : -1])  # stays gathered after forward; hears of it first
    for at, unit in enumerate(units):
        unit.set_modules_to_backward_prefetch(units[max(at - ahead, 0) : at][::-1])


WRAP: dict[str, Callable[[OnMeta, argparse.Namespace, torch.device], nn.Module]] = {
    "plain": wrap_plain,
    "ddp": wrap_ddp,
    "fsdp1": wrap_fsdp1,
    "fsdp2": wrap_fsdp2,
    "tesserae": wrap_tesserae,
    "tesserae2": wrap_tesserae2,
}


def autocast(options: argparse.Namespace) -> Precision:
    """FSDP casts parameters by itself; DDP and the unwrapped model compute in bf16 through autocast, as is usual."""
    if options.precision == "bf16" and options.mode in ("plain", "ddp"):
        return torch.autocast(options.device, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Norms and biases do not decay. They are told by name: wrapped parameters have lost their shape."""

    def decays(name: str) -> bool:
        module, kind = name.split(".")[-2:]
        return "norm" not in module and kind != "bias"

    named = list(model.named_parameters())
    decay = [p for name, p in named if decays(name)]
    rest = [p for name, p in named if not decays(name)]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=3e-4,
        betas=(0.9, 0.95),
        fused=True,
    )


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def leave() -> NoReturn:
    """Ends this process at once: torch 2.13's own exit with a Gloo group open sometimes aborts and sometimes hangs."""
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def mean_over_ranks(values: Tensor, communicates: bool) -> list[float]:
    if communicates:
        dist.all_reduce(values)
        values = values / dist.get_world_size()
    return values.tolist()


def main() -> None:
    options = parse()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    on_accelerator = options.device != "cpu"
    if options.device == "sim":
        import tesserae_sim  # noqa: F401  # makes the device known
    device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", "0")) if on_accelerator else None)
    if on_accelerator:
        torch.accelerator.set_device_index(device.index)
    communicates = options.mode != "plain"
    if communicates or ranks > 1:  # without communication too: only so do all ranks' timed steps begin together
        dist.init_process_group(backend_of(options))

    base_rss = peak_rss()
    shape = shape_of(options)
    model = MODELS[options.model][0](shape, device)
    parameters = parameter_count(model)
    model = WRAP[options.mode](model, options, device)
    optimizer = make_optimizer(model)

    data_ranks = options.data_ranks or ranks
    tokens_per_step = options.batch * shape.sequence * data_ranks

    def batch(step: int) -> tuple[Tensor, Tensor]:
        seen = range(data_ranks) if options.data_ranks else [rank]
        parts = [batch_of(shape, options.batch, step, r, data_ranks, device) for r in seen]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([targets for _, targets in parts])

    losses, step_ms, forward_ms, optimizer_ms = [], [], [], []
    for step in range(options.warmup + options.steps):
        tokens, targets = batch(step)
        if step == options.warmup and dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        with autocast(options):
            loss = model(tokens, targets)
        forward_ms.append((time.perf_counter() - start) * 1e3)  # on a device: until it is queued
        loss.backward()
        if on_accelerator and not communicates:  # only the ceiling is computed from the two parts
            torch.accelerator.synchronize()
        computed = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_accelerator:
            torch.accelerator.synchronize()
        end = time.perf_counter()
        step_ms.append((end - start) * 1e3)
        optimizer_ms.append((end - computed) * 1e3)
        losses.append(loss.detach().float().cpu())

    means = mean_over_ranks(torch.stack(losses).to(device), communicates)
    timed = step_ms[options.warmup :]
    report = {
        "mode": options.mode,
        "model": options.model,
        "backend": dist.get_backend() if communicates else None,
        "strategy": options.strategy if options.mode not in ("plain", "ddp") else None,
        "ranks": ranks,
        "parameters": parameters,
        "precision": options.precision,
        "device": options.device,
        "tokens_per_step": tokens_per_step,
        "step_ms": timed,
        "forward_ms": forward_ms[options.warmup :],
        "optimizer_ms": optimizer_ms[options.warmup :],
        "tokens_per_second": tokens_per_step / statistics.median(timed) * 1e3,
        "losses": means,
        "base_rss_bytes": base_rss,
        "peak_rss_bytes": peak_rss(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        report["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    if rank == 0:
        text = json.dumps(report)
        options.json.write_text(text) if options.json else print(text)
    leave()


if __name__ == "__main__":
    main()
