"""Trains a T5 to summarise, sharded with FSDP: the way HPC centres teach it, on Tesserae.

The documents are made here, so nothing is downloaded: a document is filler in which three words tell who did what and
where, and its summary is those three. Every rank makes the same data set, and DistributedSampler gives each its part.

    torchrun --nproc-per-node 2 examples/python/t5_summarization.py
    torchrun --nproc-per-node 4 examples/python/t5_summarization.py --strategy HYBRID_SHARD --epochs 4
    sbatch examples/python/t5_summarization.slurm                                             # several nodes

Without the two lines that are marked, it trains with PyTorch's own FSDP, to the same losses.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import tesserae as tsm  # line 1

tsm.init()  # line 2

PAD, END = 0, 1
WORDS, LENGTH = 8, 24  # words of each kind; words of a document
WHO, WHAT, WHERE, FILLER, VOCABULARY = (2 + kind * WORDS for kind in range(5))
TOPICS = (WHO, WHAT, WHERE)
PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16),
    "pure-bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
}


class Reports(Dataset):
    """Documents of filler words that tell, somewhere, who did what and where; the summary is those three words."""

    def __init__(self, documents: int, seed: int):
        random = torch.Generator().manual_seed(seed)
        shape = (documents, len(TOPICS))
        topics = torch.randint(WORDS, shape, generator=random) + torch.tensor(TOPICS)
        places = torch.rand(documents, LENGTH, generator=random).argsort(1)[:, : len(TOPICS)]
        self.documents = torch.randint(FILLER, VOCABULARY, (documents, LENGTH), generator=random)
        self.documents.scatter_(1, places, topics)
        self.summaries = torch.cat([topics, torch.full((documents, 1), END)], dim=1)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        document = self.documents[index]
        return {"input_ids": document, "attention_mask": torch.ones_like(document), "labels": self.summaries[index]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--documents", type=int, default=1024, help="in the training set")
    parser.add_argument("--batch", type=int, default=32, help="documents a rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--gamma", type=float, default=0.8, help="the learning rate shrinks by this after each epoch")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the gradient")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16")
    parser.add_argument("--strategy", default="FULL_SHARD", choices=tuple(ShardingStrategy.__members__))
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    parser.add_argument("--cpu-offload", action="store_true")
    parser.add_argument("--save", type=Path, help="where rank 0 writes the whole state dict")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def start() -> torch.device:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if not cuda:
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_node_local_rank())
    return torch.device("cuda", torch.cuda.current_device())


def config() -> T5Config:
    return T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,  # a cache would be filled twice where activations are recomputed
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )


def make_model(options: argparse.Namespace, device: torch.device) -> FSDP:
    torch.manual_seed(options.seed)
    model = FSDP(
        T5ForConditionalGeneration(config()),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        sharding_strategy=ShardingStrategy[options.strategy],
        mixed_precision=PRECISIONS[options.precision],
        cpu_offload=CPUOffload(offload_params=options.cpu_offload),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,
        device_id=device,
    )
    if not options.no_checkpointing:
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, T5Block)
        )
    return model


def mean_over_ranks(total: Tensor) -> float:
    """total: [sum, count] of this rank."""
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def train(
    model: FSDP, loader: DataLoader, optimizer: torch.optim.Optimizer, clip: float, device: torch.device
) -> float:
    model.train()
    total = torch.zeros(2, device=device)
    for batch in loader:
        batch = {name: values.to(device) for name, values in batch.items()}
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(clip)
        optimizer.step()
        total += torch.stack([loss.detach().float(), torch.ones((), device=device)])
    return mean_over_ranks(total)


def evaluate(model: FSDP, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """The loss, and the share of summary words that are right."""
    model.eval()
    losses, words = torch.zeros(2, device=device), torch.zeros(2, device=device)
    with torch.no_grad():
        for batch in loader:
            batch = {name: values.to(device) for name, values in batch.items()}
            output = model(**batch)
            right = output.logits.argmax(-1) == batch["labels"]
            losses += torch.stack([output.loss.float(), torch.ones((), device=device)])
            words += torch.stack([right.sum(), torch.tensor(right.numel(), device=device)])
    return mean_over_ranks(losses), mean_over_ranks(words)


def whole_state(model: FSDP, device: torch.device) -> dict[str, Tensor]:
    """The state dict of the model as it was before wrapping, on the host; empty on all ranks but the first."""
    how = FullStateDictConfig(
        offload_to_cpu=device.type != "cpu",  # torch's own FSDP loses what is there already
        rank0_only=True,
    )
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, how):
        return model.state_dict()


def summarize(state: dict[str, Tensor], data: Reports, count: int) -> None:
    """Prints what a T5 with these values makes of the first documents."""
    model = T5ForConditionalGeneration(config()).eval()
    model.load_state_dict(state)
    documents = torch.stack([data[index]["input_ids"] for index in range(count)])
    with torch.no_grad():
        summaries = model.generate(input_ids=documents, max_new_tokens=len(TOPICS) + 1, do_sample=False)
    for index, summary in enumerate(summaries.tolist()):
        print(
            f"document {documents[index].tolist()}\n summary {summary[1:]}, expected {data.summaries[index].tolist()}"
        )


def main() -> None:
    options = parse()
    device = start()
    model = make_model(options, device)
    say(f"{sum(p.numel() for p in model.parameters()):,} of the parameters live on rank 0 of {dist.get_world_size()}")

    def load(documents: int, seed: int, shuffle: bool) -> DataLoader:
        data = Reports(documents, seed)
        return DataLoader(data, batch_size=options.batch, sampler=DistributedSampler(data, shuffle=shuffle))

    training, validation = load(options.documents, options.seed, True), load(128, options.seed + 1, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=options.gamma)
    for epoch in range(1, options.epochs + 1):
        training.sampler.set_epoch(epoch)
        loss = train(model, training, optimizer, options.clip, device)
        validation_loss, accuracy = evaluate(model, validation, device)
        scheduler.step()
        say(f"epoch {epoch}  loss {loss:.7f}  validation loss {validation_loss:.7f}  words right {accuracy:.1%}")
    state = whole_state(model, device)
    if dist.get_rank() == 0:
        summarize(state, validation.dataset, 2)
        if options.save:
            torch.save(state, options.save)
            print(f"wrote {options.save}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
