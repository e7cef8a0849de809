"""What `optimizer.step()` of torch.optim.AdamW costs a rank under our two faces in Python, beside the same kernel over
one flat tensor a unit: what a step without a call for each parameter could reach at best.

    python bench/optimizer_cost.py [--cases A,L] [--layers 22 --dimension 96] [--rounds 5] [--update-docs]

One process is rank 0 of two of torch's fake process group: no byte moves, and nothing else of the job takes the cores.
CPU time of the thread, which a busy machine disturbs less than wall time. In each round one forward and backward is
followed by a step of each implementation (loop, foreach, fused) in turn, on the same gradients. The flat tensors
have the sizes of the rank's parts of each unit, those with and without weight decay apart, and are updated by torch's
fused kernel, which the engine's own AdamW calls in the same way.

--layers and --dimension replace those of the cases: 22 layers of dimension 96 are case L in 201 parameters.
Writes bench/out/optimizer_cost.json; --update-docs puts the table between the markers `optimizer_cost` in
docs/performance.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import report
from cases import CASES, FIRST_MODEL, ROOT, Case, title
from host_cost_python import fake_group
from peers import MODELS, WRAP, default_feed_forward, shape_of
from transformer import batch_of

SCRIPTS = {"ours-python": "tesserae", "ours-python2": "tesserae2"}  # candidate: mode of peers.py
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},  # what torch has by default on a CPU
    "foreach": {"foreach": True, "fused": False},
    "fused": {"fused": True},
}


def options_of(case: Case) -> argparse.Namespace:
    """Those of peers.py that making a model and sharding it takes."""
    return argparse.Namespace(
        model=case.model,
        strategy="FULL_SHARD",
        degree=0,
        prefetch=0,
        head_unit=False,
        loads=False,
        tied=False,
        kv_heads=0,
        feed_forward=default_feed_forward(case.dimension),
        **{
            name: getattr(case, name)
            for name in ("dimension", "layers", "heads", "vocabulary", "sequence", "batch", "precision")
        },
    )


def decays(name: str) -> bool:
    return "norm" not in name and not name.endswith("bias")


def unit_of(name: str) -> str:
    """The block, or the root."""
    words = name.replace("_fsdp_wrapped_module.", "").split(".")
    return words[1] if words[0] == "blocks" else ""


def adamw(by_decay: dict[bool, list[Tensor]], **implementation: bool) -> torch.optim.AdamW:
    groups = [{"params": parameters, "weight_decay": 0.1 if decay else 0.0} for decay, parameters in by_decay.items()]
    return torch.optim.AdamW(groups, lr=1e-4, **implementation)


def flat_adamw(model: nn.Module) -> torch.optim.AdamW:
    """Over tensors of its own, as large as this rank's part of each unit."""
    sizes: defaultdict[tuple[bool, str], int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sizes[decays(name), unit_of(name)] += local.numel()
    by_decay: defaultdict[bool, list[Tensor]] = defaultdict(list)
    for (decay, _), size in sizes.items():
        flat = nn.Parameter(torch.randn(size) * 0.02)
        flat.grad = torch.randn(size) * 1e-3
        by_decay[decay].append(flat)
    return adamw(by_decay, fused=True)


def compute(model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
    model(tokens, targets).backward()


def cpu_ms(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e3


def measure(case: Case, script: str, rounds: int) -> dict:
    """Milliseconds of CPU time of each round."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    fake_group(2)
    options, device = options_of(case), torch.device("cpu")
    shape = shape_of(options)
    model = WRAP[SCRIPTS[script]](MODELS[case.model][0](shape, device), options, device)
    by_decay: defaultdict[bool, list[Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        by_decay[decays(name)].append(parameter)
    optimizers = {name: adamw(by_decay, **how) for name, how in IMPLEMENTATIONS.items()}
    optimizers["flat"] = flat_adamw(model)
    milliseconds: dict[str, list[float]] = {name: [] for name in ("computing", *optimizers)}
    for number in range(rounds + 1):  # the first makes what the others find
        tokens, targets = batch_of(shape, case.batch, number, 0, 2, device)
        times = {"computing": cpu_ms(functools.partial(compute, model, tokens, targets))}
        order = list(optimizers)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            times[name] = cpu_ms(optimizers[name].step)
        model.zero_grad(set_to_none=True)
        for name, taken in times.items() if number else ():
            milliseconds[name].append(taken)
    return {"parameters": sum(map(len, by_decay.values())), "ms": milliseconds}


def table(measured: dict[str, dict[str, dict]]) -> str:
    lines = [
        "| | | parameters | forward and backward | loop | foreach | fused | flat | saved by fused | by flat, too |",
        "|---|---|" + "--:|" * 8,
    ]
    for case, by_script in measured.items():
        for script, figures in by_script.items():
            middle = {name: statistics.median(times) for name, times in figures["ms"].items()}
            saved = (middle["loop"] - middle["fused"]) / (middle["computing"] + middle["loop"])
            by_flat = (middle["fused"] - middle["flat"]) / (middle["computing"] + middle["fused"])
            cells = " | ".join(f"{middle[name]:,.2f}" for name in ("computing", *IMPLEMENTATIONS, "flat"))
            lines.append(
                f"| {case} | {title(script)} | {figures['parameters']} | {cells} | {saved:.1%} | {by_flat:.1%} |"
            )
    return "ms of CPU time a step, and parts of a whole step:\n\n" + "\n".join(lines) + "\n"


def child(words: list[str]) -> dict:
    """In a process of its own: a model that is gone leaves memory behind that the next one would find."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(Path(__file__)), *words], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(run.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="A,L", help="of bench/compare.py")
    parser.add_argument("--layers", type=int, help="in place of the cases'")
    parser.add_argument("--dimension", type=int, help="in place of the cases'")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--script", choices=tuple(SCRIPTS), help="measure this one here, and print JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in FIRST_MODEL]:
        parser.error(f"no case of bench/compare.py with the first model: {', '.join(unknown)}")
    given = {name: value for name in ("layers", "dimension") if (value := getattr(options, name))}
    cases = {name: replace(CASES[name], **given) for name in names}
    if options.script:
        print(json.dumps(measure(cases[names[0]], options.script, options.rounds)), flush=True)
        os._exit(0)  # see leave() in peers.py

    about = report.about()
    report.warn_if_busy("optimizer_cost", about)
    shape = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    measured: dict[str, dict[str, dict]] = {name: {} for name in cases}
    for name, by_script in measured.items():
        for script in SCRIPTS:
            print(f"optimizer_cost: case {name}, {title(script)}", file=sys.stderr, flush=True)
            by_script[script] = child(["--cases", name, "--script", script, "--rounds", str(options.rounds), *shape])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "optimizer_cost.json").write_text(json.dumps({"about": about, "cases": measured}, indent=1) + "\n")
    text = f"{table(measured)}\n{report.describe(about, f'{options.rounds} rounds')}\n"
    print(text)
    if options.update_docs:
        report.update_performance("optimizer_cost", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
