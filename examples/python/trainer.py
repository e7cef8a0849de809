"""The Trainer of Hugging Face with FSDP, on Tesserae: a GPT-2 of random weights learns to count.

    torchrun --nproc-per-node 4 examples/python/trainer.py
    torchrun --nproc-per-node 4 examples/python/trainer.py --fsdp-version 1 --bf16

Token t is followed by t + s, and s differs from sequence to sequence. The Trainer uses FSDP only where it finds an
accelerator. (tests/python/accelerate_on_cpu.py is how it is tested without one.) Without the two lines that are marked,
it trains with PyTorch's own FSDP, to the same losses.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import tesserae as tsm  # line 1

tsm.init()  # line 2

TOKENS, LENGTH = 32, 16


class Printer(TrainerCallback):
    def on_log(self, arguments, state, control, logs, **others) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step:3}  loss {float(logs['loss']):.7f}", flush=True)


def sequences(count: int, seed: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    first, stride = torch.randint(TOKENS, (2, count, 1), generator=random)
    tokens = (first + (1 + stride % 4) * torch.arange(LENGTH)) % TOKENS
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="sequences a rank and step")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(options.seed)  # the same values on every rank
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            fsdp=True,
            fsdp_config={"version": options.fsdp_version, "sync_module_states": False},
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            learning_rate=3e-3,
            bf16=options.bf16,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=options.seed,
        )
        data = sequences(64 * options.batch, options.seed)
        Trainer(model, arguments, train_dataset=data, callbacks=[Printer()]).train()


if __name__ == "__main__":
    main()
