"""Hugging Face Accelerate with its FSDP plugin, on Tesserae: a GPT-NeoX learns to reverse words.

    accelerate launch --use_fsdp --num_processes 4 examples/python/accelerate_fsdp.py
    torchrun --nproc-per-node 4 examples/python/accelerate_fsdp.py --mixed-precision bf16

Accelerate uses its FSDP plugin only where it finds an accelerator; on a machine without one it leaves the plugin aside,
and this script stops. (tests/python/accelerate_on_cpu.py is how it is tested there.) Without the two lines that are
marked, it trains with PyTorch's own FSDP, to the same losses.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import tesserae as tsm  # line 1

tsm.init()  # line 2

LETTERS, LENGTH = 16, 6
SEPARATOR = LETTERS
IGNORED = -100


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--words", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16, help="words a rank and backward pass")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model as loaded")
    parser.add_argument("--strategy", default="FULL_SHARD", choices=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def make_accelerator(options: argparse.Namespace) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        reshard_after_forward=options.strategy,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPTNeoXLayer"],
        backward_prefetch="BACKWARD_PRE",
        limit_all_gathers=True,
        use_orig_params=not options.flat,
        activation_checkpointing=True,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
    )
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision, fsdp_plugin=plugin, gradient_accumulation_steps=options.accumulate
    )
    if accelerator.distributed_type != DistributedType.FSDP:
        raise SystemExit(f"Accelerate chose {accelerator.distributed_type} and not FSDP: it found no accelerator")
    return accelerator


def reversals(count: int, seed: int) -> TensorDataset:
    """[word, separator, the word backwards], and labels that ask for the last part only."""
    words = torch.randint(LETTERS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    tokens = torch.cat([words, torch.full((count, 1), SEPARATOR), words.flip(1)], dim=1)
    labels = tokens.clone()
    labels[:, : LENGTH + 1] = IGNORED
    return TensorDataset(tokens, labels)


def make_model(dtype: torch.dtype) -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        vocab_size=LETTERS + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2 * LENGTH + 1,
        use_cache=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return GPTNeoXForCausalLM(config).to(dtype)


def train(
    model: torch.nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> float:
    model.train()
    losses: list[Tensor] = []
    for tokens, labels in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=labels).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().float())
    return accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()


def main() -> None:
    options = parse()
    set_seed(options.seed)
    accelerator = make_accelerator(options)
    loader = DataLoader(reversals(options.words, options.seed), batch_size=options.batch, shuffle=True)
    model = accelerator.prepare(make_model(getattr(torch, options.dtype)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader, optimizer = accelerator.prepare(loader, optimizer)
    for epoch in range(1, options.epochs + 1):
        accelerator.print(f"epoch {epoch}  loss {train(model, loader, optimizer, accelerator):.7f}")
    accelerator.print(
        f"{sum(isinstance(module, FSDP) for module in model.modules())} FSDP units, parameters in "
        f"{', '.join(sorted({str(p.dtype) for p in model.parameters()}))}"
    )

    with tempfile.TemporaryDirectory() as folder:  # rank 0's, for an example on one host
        paths = [folder]
        torch.distributed.broadcast_object_list(paths)
        accelerator.save_state(paths[0])
        accelerator.load_state(paths[0])
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:  # alone: it removes the folder when it has counted
            print(f"saved and loaded {len(list(Path(paths[0]).rglob('*.distcp')))} shards")
    accelerator.end_training()


if __name__ == "__main__":
    main()
