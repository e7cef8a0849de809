"""Trains a Llama of Hugging Face with tensor parallelism and writes what it cost as JSON: by tsm.transform and FSDP on
Tesserae, or by torch's parallelize_module (DTensor) with loss_parallel, and FSDP2 where there are data-parallel ranks.
bench/tensor_parallel.py runs both.

    torchrun --nproc-per-node 4 bench/tensor_parallel_train.py --side torch --tensor 2 --dimension 256 --layers 4 ...

Host cost of a layer: CPU time of the main thread, which is also that of backward, in a step of a model so narrow that
there is next to nothing to compute; waiting costs none. That of twice as many layers less that of as many, divided.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from cases import find_tesserae
from peers import leave, unavailable

Loss = Callable[[Tensor], Tensor]  # of tokens [batch, sequence]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=("ours", "torch"), required=True)
    parser.add_argument("--tensor", type=int, required=True, help="tensor-parallel degree")
    for name in ("dimension", "layers", "heads", "kv-heads", "feed-forward", "vocabulary", "sequence"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1, help="sequences a data-parallel rank and step")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def llama(options: argparse.Namespace, **changes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": options.vocabulary,
        "hidden_size": options.dimension,
        "intermediate_size": options.feed_forward,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "max_position_embeddings": options.sequence,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes, use_cache=False))


def ours(model: LlamaForCausalLM, tensor: int) -> tuple[nn.Module, Loss]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import tesserae as tsm

    tsm.init({"tensor_parallel_degree": tensor})
    model = tsm.transform(model)
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), use_orig_params=True
    )
    return sharded, lambda tokens: sharded(input_ids=tokens, labels=tokens).loss


def theirs(model: LlamaForCausalLM, tensor: int) -> tuple[nn.Module, Loss]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    column, row = ColwiseParallel(), RowwiseParallel()
    parallelize_module(
        model,
        mesh["tensor"],
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "model.layers.*.self_attn.q_proj": column,
            "model.layers.*.self_attn.k_proj": column,
            "model.layers.*.self_attn.v_proj": column,
            "model.layers.*.self_attn.o_proj": row,
            "model.layers.*.mlp.gate_proj": column,
            "model.layers.*.mlp.up_proj": column,
            "model.layers.*.mlp.down_proj": row,
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    if mesh["data"].size() > 1:  # else there is nothing to shard, and FSDP2 would only cost
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])

    class Trained(nn.Module):
        """Its loss has a backward of its own, which loss_parallel wants to be around."""

        def backward(self, tokens: Tensor) -> Tensor:
            with loss_parallel():
                logits = model(input_ids=tokens).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                loss.backward()
            return loss

    return model, Trained().backward


def step_of(side: str, loss: Loss, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], float]:
    def step(tokens: Tensor) -> float:
        value = loss(tokens)
        if side == "ours":
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return float(whole.detach())

    return step


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if options.side == "ours" and not find_tesserae():
        unavailable("tesserae is neither installed nor built below build/")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data_rank, data_ranks = rank // options.tensor, ranks // options.tensor
    prepare = ours if options.side == "ours" else theirs

    def tokens_of(step: int, vocabulary: int, sequence: int, batch: int) -> Tensor:
        random = torch.Generator().manual_seed(1000 * step + data_rank)
        return torch.randint(vocabulary, (batch, sequence), generator=random)

    host = {}
    for layers in (4, 8):
        narrow = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "vocab_size": 64}
        model, loss = prepare(llama(options, **narrow, num_attention_heads=4, num_key_value_heads=4), options.tensor)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step, seen = step_of(options.side, loss, optimizer), []
        for number in range(options.warmup + options.steps):
            tokens = tokens_of(number, 64, 8, 1)
            start = time.thread_time()
            step(tokens)
            seen.append(time.thread_time() - start)
        host[layers] = statistics.median(seen[options.warmup :])
        del model, loss, optimizer, step

    model, loss = prepare(llama(options), options.tensor)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in llama(options).parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step, losses, step_ms = step_of(options.side, loss, optimizer), [], []
    for number in range(options.warmup + options.steps):
        tokens = tokens_of(number, options.vocabulary, options.sequence, options.batch)
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(tokens))
        step_ms.append((time.perf_counter() - start) * 1e3)
    everyone = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(everyone)
    timed = step_ms[options.warmup :]
    tokens_per_step = options.batch * options.sequence * data_ranks
    report = {
        "side": options.side,
        "tensor": options.tensor,
        "ranks": ranks,
        "parameters": parameters,
        "tokens_per_step": tokens_per_step,
        "step_ms": timed,
        "tokens_per_second": tokens_per_step / statistics.median(timed) * 1e3,
        "host_us_per_layer": (host[8] - host[4]) / 4 * 1e6,
        "losses": (everyone / ranks).tolist(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch": torch.__version__,
    }
    if rank == 0:
        options.json.write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
