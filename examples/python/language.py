"""A language model of Hugging Face, from raw text to a folder that transformers loads: Llama, Qwen or GPT-NeoX.

    python examples/python/language.py                                  # 1 process
    torchrun --nproc-per-node 4 examples/python/language.py             # 4 processes
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/python/language.py --folder /shared/language           # on each of 2 hosts, which share the folder

It trains the model in --model-folder (config.json, safetensors, tokenizer.json); where there is none, it trains a
tokenizer and makes a small random model first. The text is Python's standard library unless --text names files. While
it trains, `tesserae dial runs/language --degree 1` changes the degree, and `touch runs/language/stop` ends it with a
checkpoint, from which --resume goes on. docs/recipes/language.md explains the rest.

In fp32 the losses are those of one process, at any number of ranks and any degree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import PreTrainedTokenizerFast as FastTokenizer
from transformers import get_cosine_schedule_with_warmup as cosine_schedule
from transformers.utils.logging import disable_progress_bar

import tesserae as tsm  # line 1

Model = PreTrainedModel | PeftModel
END, HEADS = "<|end|>", 4  # of a document; of the model that is made
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": HEADS // 2},
    "qwen": {"model_type": "qwen3", "num_key_value_heads": HEADS // 2, "tie_word_embeddings": True},
    "gpt-neox": {"model_type": "gpt_neox"},
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("text and model").add_argument
    add("--text", type=Path, nargs="+", metavar="FILE", help="what to train on (the source of Python's own library)")
    add("--model-folder", type=Path, metavar="FOLDER", help="a model of Hugging Face (FOLDER/model)")
    add("--family", choices=tuple(FAMILIES), default="llama", help="of the model that is made (llama)")
    add("--vocabulary", type=int, default=2048, help="tokens of the tokenizer that is made (2048)")
    add("--width", type=int, default=128, help="of the model that is made (128)")
    add("--layers", type=int, default=4, help="of the model that is made (4)")
    add("--lora", type=int, nargs="?", const=8, metavar="RANK", help="train adapters of this rank (8), not the model")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=100, help="in all (100)")
    add("--batch", type=int, default=16, help="sequences a step, of all ranks together (16)")
    add("--length", type=int, default=128, help="tokens of a sequence (128)")
    add("--lr", type=float, default=3e-3, help="at its highest: it rises for a tenth of the steps, then falls (3e-3)")
    add("--clip", type=float, default=1.0, help="norm of the gradient (1)")
    add("--bf16", action="store_true", help="compute in bf16; parameters and optimizer state stay fp32")
    add("--seed", type=int, default=1)
    add = parser.add_argument_group("the run").add_argument
    add("--folder", type=Path, default=Path("runs/language"), help="for all that is written (runs/language)")
    add("--resume", action="store_true", help="go on from the newest checkpoint of the run, if there is one")
    add("--log-every", type=int, default=10, metavar="STEPS", help="(10)")
    add("--evaluate-every", type=int, default=50, metavar="STEPS", help="(50)")
    add("--save-every", type=int, default=50, metavar="STEPS", help="(50)")
    add("--degree", type=int, default=0, help="ranks that share one copy of the state (0: all of them)")
    add("--turn", type=turn, action="append", default=[], metavar="STEP:DEGREE", help="may be given several times")
    add("--prompt", default="def main(", help="what the exported model continues")
    options = parser.parse_args()
    options.model_folder = options.model_folder or options.folder / "model"
    return options


def turn(text: str) -> tuple[int, int]:
    step, degree = text.split(":")
    return int(step), int(degree)


def start() -> torch.device:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # no launcher
    dist.init_process_group(backend, **alone)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    return torch.device("cuda", torch.cuda.current_device())


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def fail(text: str) -> NoReturn:
    """All ranks find out by themselves; the first one says it."""
    raise SystemExit(f"language.py: {text}" if dist.get_rank() == 0 else 1)


# ---- text ----
def read(files: list[Path] | None) -> list[str]:
    files = files or sorted(Path(os.__file__).parent.glob("*.py"))
    for file in files:
        if not file.is_file():
            fail(f"--text {file}: there is no such file")
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    if not any(texts):
        fail(f"--text {' '.join(map(str, files))}: there is no text in it")
    return texts


def make_folder(texts: list[str], options: argparse.Namespace) -> None:
    """A tokenizer of this text, and a small model with random weights that fits it."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=options.vocabulary, special_tokens=[END], show_progress=False)
    tokenizer = FastTokenizer(tokenizer_object=trained._tokenizer, eos_token=END)
    tokenizer.save_pretrained(options.model_folder)
    config = AutoConfig.for_model(
        **FAMILIES[options.family],
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        head_dim=options.width // HEADS,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=HEADS,
        max_position_embeddings=2 * options.length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(options.seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(options.model_folder)


def load_tokenizer(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        fail(f"{folder} has a model but no tokenizer.json; a new tokenizer would give its tokens other meanings")
    tokenizer, size = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder).vocab_size
    if len(tokenizer) > size:
        fail(f"{folder}: the tokenizer does not fit the model, it has {len(tokenizer)} tokens and the model {size}")
    return tokenizer


def load_tokens(texts: list[str], tokenizer: Tokenizer) -> Tensor:
    """All documents in one row. The first rank makes it, the others receive it."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        rows = tokenizer(texts, verbose=False)["input_ids"]
        box = [torch.tensor([token for row in rows for token in (*row, *end)])]
    dist.broadcast_object_list(box)
    return box[0]


def split(tokens: Tensor, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """What is trained on, and what is held out: the last twentieth in whole batches [n, batch, length], at most 8."""
    size = options.batch * options.length
    held_out = min(8, max(1, len(tokens) // 20 // size)) * size
    if len(tokens) - held_out < size:
        fail(f"the text is too short: {len(tokens):,} tokens, and two batches (--batch, --length) are {2 * size:,}")
    return tokens[:-held_out], tokens[-held_out:].view(-1, options.batch, options.length)


def batch_of(step: int, tokens: Tensor, options: argparse.Namespace) -> Tensor:
    """Of all ranks. It depends on the step alone, so there is no loader whose state a checkpoint would need."""
    random = torch.Generator().manual_seed(1_000_003 * options.seed + step)
    starts = torch.randint(len(tokens) - options.length + 1, (options.batch, 1), generator=random)
    return tokens[starts + torch.arange(options.length)]


# ---- model ----
def load_model(options: argparse.Namespace) -> tuple[Model, list[nn.Module]]:
    """And its blocks. The values are the same on all ranks."""
    model = AutoModelForCausalLM.from_pretrained(options.model_folder, dtype=torch.float32)
    if options.length > model.config.max_position_embeddings:
        fail(f"--length {options.length}: the model has {model.config.max_position_embeddings} positions")
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    if options.lora:
        torch.manual_seed(options.seed)
        sizes = {"r": options.lora, "lora_alpha": 2 * options.lora}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **sizes))
    return model, blocks


def shard(model: Model, blocks: list[nn.Module], bf16: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def count(parameters: Iterable[nn.Parameter]) -> str:
    return f"{sum(parameter.numel() for parameter in parameters):,}"


def loss_of(model: Model, batch: Tensor) -> Tensor:
    """Of this rank's sequences."""
    rows = batch.chunk(dist.get_world_size())[dist.get_rank()].to(next(model.parameters()).device)
    return model(input_ids=rows, labels=rows, use_cache=False).loss


def mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


@torch.no_grad()
def evaluate(model: Model, batches: Tensor) -> float:
    model.eval()
    loss = torch.stack([loss_of(model, batch) for batch in batches]).mean()
    model.train()
    return mean_over_ranks(loss)


def train(model: Model, training: Tensor, held_out: Tensor, options: argparse.Namespace) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    schedule = cosine_schedule(optimizer, options.steps // 10, options.steps)
    checkpoints, turns, first = options.folder / "checkpoints", dict(options.turn), 0
    if found := tsm.checkpoint.load(checkpoints, model, optimizer):
        if not options.resume:
            fail(f"{options.folder} has checkpoints: go on from there with --resume, or name another --folder")
        first = found.step
        rewind(options.folder / "metrics.jsonl", first)
        schedule.load_state_dict(found.extra["schedule"])
    preemption = tsm.preemption(file=str(options.folder / "stop"), every_seconds=1)
    say(f"{count(model.parameters())} parameters, {count(trained)} to train, on {len(training):,} tokens")

    model.train()
    reported, reported_at = first, time.perf_counter()
    for step in range(first + 1, options.steps + 1):
        loss, lr = loss_of(model, batch_of(step, training, options)), schedule.get_last_lr()[0]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, options.clip).full_tensor()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

        last = step == options.steps
        evaluates = last or step % options.evaluate_every == 0
        if evaluates or step % options.log_every == 0:
            record = {"step": step, "loss": mean_over_ranks(loss), "lr": lr, "grad_norm": norm.item()}
            tokens, seconds = (step - reported) * options.batch * options.length, time.perf_counter() - reported_at
            record["tokens_per_second"] = round(tokens / seconds)
            if evaluates:
                record["val_loss"] = evaluate(model, held_out)
                record["perplexity"] = math.exp(record["val_loss"])
            measured = tsm.metrics()  # docs/monitor.md; "slow": the ranks that hold the others up
            report(record | {"degrees": measured["job"]["degrees"], "slow": measured["slow"]}, options.folder)
            reported, reported_at = step, time.perf_counter()
        if step in turns:
            tsm.reshard(model, optimizer, hybrid_shard_degree=turns[step])
        stops = preemption.requested()
        if last or stops or step % options.save_every == 0:
            extra = {"schedule": schedule.state_dict()}
            tsm.checkpoint.async_save(checkpoints, model, optimizer, extra, step=step, keep=2)
        if stops:
            tsm.checkpoint.maybe_finalize_async_calls()
            preemption.exit()
    tsm.checkpoint.maybe_finalize_async_calls()


def report(record: dict[str, Any], folder: Path) -> None:
    say(json.dumps(record))
    if dist.get_rank() == 0:
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def rewind(file: Path, step: int) -> None:
    """What comes after the checkpoint comes again; and a line may have been cut off when its writer died."""
    if dist.get_rank() == 0 and file.exists():
        lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        file.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


# ---- what it was trained for ----
def export(model: Model, tokenizer: Tokenizer, folder: Path, lora: bool) -> None:
    """A folder of Hugging Face; that of a LoRA has the adapters, and says which model they belong to."""
    how = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=lora)
    whole = get_model_state_dict(model, options=how)  # on the first rank
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)
        tokenizer.save_pretrained(folder)


def generate(folder: Path, prompt: str, seed: int) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    begin = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**begin, max_new_tokens=40, do_sample=True, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(tokens[0])


def main() -> None:
    options = parse()
    device = start()
    tsm.init({"hybrid_shard_degree": options.degree, "run": {"folder": str(options.folder)}})  # line 2
    disable_progress_bar()
    if options.batch % dist.get_world_size():
        fail(f"--batch {options.batch}: that cannot be shared out among {dist.get_world_size()} ranks")
    texts = read(options.text)
    if dist.get_rank() == 0 and not (options.model_folder / "config.json").exists():
        make_folder(texts, options)
    dist.barrier()
    tokenizer = load_tokenizer(options.model_folder)
    training, held_out = split(load_tokens(texts, tokenizer), options)
    model, blocks = load_model(options)
    shard(model.to(device), blocks, options.bf16)
    train(model, training, held_out, options)
    export(model, tokenizer, options.folder / "export", lora=options.lora is not None)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        print(generate(options.folder / "export", options.prompt, options.seed))


if __name__ == "__main__":
    main()
