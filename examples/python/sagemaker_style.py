"""A script as it was written for Amazon's SageMaker model parallelism library v2, run on Tesserae as it is.

`python -m tesserae.run` gives `import torch.sagemaker` its meaning, so not a line changes:

    torchrun --nproc-per-node 4 -m tesserae.run examples/python/sagemaker_style.py --hybrid-shard-degree 2

A small Llama learns to count: token t is followed by t + s, and s differs from sequence to sequence. Without the two
lines that are marked, it trains with PyTorch's own FSDP (HYBRID_SHARD over the same ranks), to the same losses.
"""

import torch.sagemaker as tsm  # line 1

# isort: split
import argparse
import contextlib
import functools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

VOCABULARY = 32
LARGEST_STRIDE = 5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hybrid-shard-degree", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5, help="steps in which the learning rate rises")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes a step")
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and backward pass")
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=12345)
    return parser.parse_args()


def sequences(count: int, length: int, random: torch.Generator) -> torch.Tensor:
    first = torch.randint(VOCABULARY, (count, 1), generator=random)
    stride = torch.randint(1, LARGEST_STRIDE + 1, (count, 1), generator=random)
    return (first + stride * torch.arange(length)) % VOCABULARY


def make_model(options: argparse.Namespace, device: torch.device) -> FSDP:
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )
    degree = options.hybrid_shard_degree
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if options.bf16 else None
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh(device.type, (dist.get_world_size() // degree, degree)),
        mixed_precision=precision,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        limit_all_gathers=True,
        device_id=device,
        use_orig_params=True,
    )


def main() -> None:
    options = parse()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    tsm.init({"hybrid_shard_degree": options.hybrid_shard_degree, "random_seed": options.seed})  # line 2
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    model = make_model(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / options.warmup, 0.5 * (1 + math.cos(math.pi * step / options.steps)))
    )
    random = torch.Generator().manual_seed(options.seed + dist.get_rank())
    for step in range(1, options.steps + 1):
        mean = torch.zeros((), device=device)
        for part in range(1, options.accumulate + 1):
            tokens = sequences(options.batch, options.sequence, random).to(device)
            with contextlib.nullcontext() if part == options.accumulate else model.no_sync():
                loss = model(input_ids=tokens, labels=tokens).loss / options.accumulate
                loss.backward()
            mean += loss.detach()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)

        dist.all_reduce(mean)
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step:3}  loss {mean.item() / dist.get_world_size():.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
