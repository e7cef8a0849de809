"""A mixture of experts: Mixtral of Hugging Face (8 experts, top-2) trained by the same script, `fully_shard` on every
layer, with torch over Gloo and with Tesserae, experts shared out over 1, 2 and 4 ranks.

Rounds are interleaved: each starts every candidate afresh, one after the other. Ratios are taken round by round. Losses
of the first step must agree (1e-3), or the script stops. Routing is the model's own, or 95 % of tokens go to one expert
first (`skewed`).

torch has no expert parallelism that runs here: its all-to-all of DTensor and torchtitan's dispatch want a GPU. Its
experts are computed by transformers, sharded over all ranks.

    python bench/mixture.py                  # about 10 minutes
    python bench/mixture.py --quick          # proves in two minutes that it works
    python bench/mixture.py --ceiling        # what the model itself takes of a core, whoever shards it: half a minute

Writes bench/out/mixture.json; --update-docs puts the table between the markers `mixture` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import report
from cases import ROOT, find_tesserae
from launch import launch

CANDIDATES = ("torch", "ours-1", "ours-2", "ours-4")
NAMES = {
    "torch": "torch: FSDP2 over Gloo, explicit prefetch",
    "ours-1": "Tesserae, the same script",
    "ours-2": "Tesserae, E = 2",
    "ours-4": "Tesserae, E = 4",
}
LOSS_TOLERANCE = 1e-3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps a run, after two")
    for name, value in {"dimension": 256, "layers": 4, "width": 512, "vocabulary": 4096, "length": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--deadline", type=float, default=900, help="seconds a run")
    parser.add_argument("--ceiling", action="store_true", help="one process, no sharding, no communication: CPU time")
    parser.add_argument("--quick", action="store_true", help="a round of 2 steps of a smaller model")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.dimension, options.layers, options.length = 1, 2, 64, 2, 64
    return options


def make_model(options: argparse.Namespace):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.dimension,
        intermediate_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.dimension // 64,
        num_key_value_heads=options.dimension // 64,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def ceiling(options: argparse.Namespace) -> None:
    """CPU time, so that it does not matter who else computes."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(options)
    tokens = torch.randint(options.vocabulary, (2, options.length))

    def cpu(call, times: int) -> float:
        seconds = []
        for _ in range(times + 2):
            begin = time.process_time()
            call()
            seconds.append(time.process_time() - begin)
        return sorted(seconds[2:])[times // 2]

    count = tokens.numel()
    step = cpu(lambda: model(input_ids=tokens, labels=tokens).loss.backward(), options.steps * options.rounds)
    # An expert's rows, if all get as many: the products of which a step consists.
    rows, d, f = count * 2 // 8, options.dimension, options.width
    x, weight = torch.randn(rows, d), torch.randn(f, d)
    rate = 2 * rows * d * f / cpu(lambda: x @ weight.t(), 200)
    used = options.layers * (4 * d * d + 2 * 3 * d * f + 8 * d) + options.vocabulary * d
    print(f"forward and backward: {step:.3f} s of a core for {count} tokens, {count / step:,.0f} tokens/s a core")
    print(f"products alone: {rate / 1e9:.0f} GFLOP/s, {rate / (6 * used):,.0f} tokens/s a core")


def work(options: argparse.Namespace) -> None:
    """A rank. Rank 0 writes the report."""
    find_tesserae()
    import torch
    import torch.distributed as dist

    from peers import leave

    candidate, routing = options.worker.split(":")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = make_model(options)
    if candidate != "torch":
        import tesserae as tsm

        tsm.init({"expert_parallel_degree": int(candidate.split("-")[1])})
        model = tsm.transform(model)
    from torch.distributed.fsdp import fully_shard

    layers = list(model.model.layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    if candidate == "torch":
        for before, after in zip(layers, layers[1:]):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    if routing == "skewed":
        for layer in layers:
            layer.mlp.gate.register_forward_hook(_to_one_expert)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for step in range(options.steps + 2):
        torch.manual_seed(1000 * step + rank)
        tokens = torch.randint(options.vocabulary, (2, options.length))
        dist.barrier()
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        seconds.append(time.perf_counter() - begin)
        losses.append(total.item() / dist.get_world_size())
    if rank == 0:
        tokens_a_step = 2 * options.length * dist.get_world_size()
        timed = sorted(seconds[2:])
        speed = tokens_a_step / timed[len(timed) // 2]
        options.json.write_text(json.dumps({"loss": losses[0], "tokens_per_second": speed}))
    leave()


def _to_one_expert(router, args, output):
    """19 of 20 tokens choose expert 0 first."""
    import torch

    logits, scores, chosen = output
    first = torch.where(torch.arange(len(chosen)) % 20 != 0, torch.zeros_like(chosen[:, 0]), chosen[:, 0])
    second = torch.where(chosen[:, 1] == first, (first + 1) % logits.shape[-1], chosen[:, 1])
    return logits, scores, torch.stack([first, second], 1)


def measure(options: argparse.Namespace, candidate: str, routing: str) -> dict:
    command = [sys.executable, __file__, "--worker", f"{candidate}:{routing}"]
    for name in ("steps", "dimension", "layers", "width", "vocabulary", "length"):
        command += [f"--{name}", str(getattr(options, name))]
    return launch(command, options.ranks, options.deadline).report


def table(result: dict) -> str:
    lines = [
        "| | tokens/s | of torch's FSDP2 (lowest to highest round) | 95 % to one expert: times the balanced |",
        "|---|--:|--:|--:|",
    ]
    for candidate in CANDIDATES:
        rounds = [round_[candidate] for round_ in result["rounds"]]
        speed = report.Spread.of([one["balanced"]["tokens_per_second"] for one in rounds])
        ratio = report.Spread.of(
            [
                round_[candidate]["balanced"]["tokens_per_second"] / round_["torch"]["balanced"]["tokens_per_second"]
                for round_ in result["rounds"]
            ]
        )
        skew = report.Spread.of(
            [one["balanced"]["tokens_per_second"] / one["skewed"]["tokens_per_second"] for one in rounds]
        )
        lines.append(
            f"| {NAMES[candidate]} | {speed.median:,.0f} | {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) | "
            f"{skew.median:.2f} ({skew.low:.2f} to {skew.high:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    options = parse()
    if options.worker:
        return work(options)
    if options.ceiling:
        return ceiling(options)
    rounds: list[dict] = []
    for number in range(options.rounds):
        rounds.append({})
        for candidate in CANDIDATES if number % 2 == 0 else CANDIDATES[::-1]:
            rounds[-1][candidate] = {}
            for routing in ("balanced", "skewed"):
                print(f"mixture: round {number + 1}, {candidate}, {routing}", file=sys.stderr, flush=True)
                rounds[-1][candidate][routing] = measure(options, candidate, routing)
        for routing in ("balanced", "skewed"):
            losses = {candidate: rounds[-1][candidate][routing]["loss"] for candidate in CANDIDATES}
            if any(abs(loss / losses["torch"] - 1) > LOSS_TOLERANCE for loss in losses.values()):
                sys.exit(f"mixture: the first losses differ: {losses}")
    names = ("ranks", "dimension", "layers", "width", "vocabulary", "length")
    result = {"rounds": rounds, "model": {name: getattr(options, name) for name in names}}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "mixture.json").write_text(json.dumps(result, indent=1))
    text = table(result)
    print(text)
    if options.update_docs:
        report.update_performance("mixture", text)


if __name__ == "__main__":
    main()
