"""What the recipes share: their common options, checkpoints and resume, metrics, turns of the dial.

    torchrun --nproc-per-node 4 examples/python/vision.py --folder runs/vision --turn 40:2

Copy this file together with the recipe that you take.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tesserae as tsm


class Turn(NamedTuple):
    """After that step the training state is sharded over so many ranks."""

    step: int
    degree: int


def turn(text: str) -> Turn:
    """STEP:DEGREE of the command line."""
    try:
        step, degree = (int(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not STEP:DEGREE, two whole numbers such as 40:2") from None
    if step < 1 or degree < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: step and degree begin at 1")
    return Turn(step, degree)


def parser(text: str | None, *, steps: int, batch: int, lr: float) -> argparse.ArgumentParser:
    """The options that every recipe has, with the defaults of this one."""
    shared = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = shared.add_argument
    after = "after that step shard over so many ranks; may be given several times"
    add("--steps", type=int, default=steps, help=f"train up to this step ({steps})")
    add("--batch", type=int, default=batch, help=f"examples a step, of all ranks together ({batch})")
    add("--lr", type=float, default=lr, help=f"learning rate ({lr:g})")
    add("--seed", type=int, default=1, help="of values at the start, data and their order (1)")
    add(
        "--folder", type=Path, help="the run folder: checkpoints, metrics.jsonl, the dial. A run goes on where it ended"
    )
    add("--save-every", type=int, default=50, metavar="STEPS", help="save after so many steps, and at the end (50)")
    add("--evaluate-every", type=int, default=0, metavar="STEPS", help="besides at the end (0: only there)")
    add("--turn", type=turn, default=[], action="append", metavar="STEP:DEGREE", help=after)
    return shared


def start(options: argparse.Namespace) -> torch.device:
    """Joins the other processes, and says where this one computes. Without torchrun or srun it is the only one."""
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ranks = dist.get_world_size()
    if options.batch < 1 or options.batch % ranks:
        raise SystemExit(f"--batch {options.batch}: it must be a multiple of the number of ranks, which is {ranks}")
    for after in options.turn:
        if ranks % after.degree:
            raise SystemExit(f"--turn {after.step}:{after.degree}: the degree must divide the {ranks} ranks")
    torch.manual_seed(options.seed)  # the same values on every rank
    if not cuda:
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    return torch.device("cuda", torch.cuda.current_device())


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """For tsm.init."""
    return {"run": {"folder": str(options.folder)}} if options.folder else {}


class Run:
    """The steps of a training, from the last checkpoint on, and what happens between them. `evaluate` says how good the
    model is, in figures with a name."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluate: Callable[[], dict[str, float]],
        options: argparse.Namespace,
    ) -> None:
        self.model, self.optimizer, self.evaluate, self.options = model, optimizer, evaluate, options
        self.first = self._resume() if options.folder else 0  # steps that are done
        earlier = [each for each in sorted(options.turn) if each.step <= self.first]
        if earlier:
            tsm.reshard(model, optimizer, hybrid_shard_degree=earlier[-1].degree)
        if self.first >= options.steps:
            say(f"nothing to do: {options.folder} has a checkpoint of step {self.first}, --steps is {options.steps}")

    def _resume(self) -> int:
        found = tsm.checkpoint.load(self.options.folder / "checkpoints", self.model, self.optimizer)
        self._keep_lines(found.step if found else 0)
        if found is None:
            return 0
        wanted = self._identity()
        if found.extra != wanted:
            raise SystemExit(
                f"the checkpoint {found.path} is of {found.extra}, this run of {wanted}: give the same options, or "
                "another --folder"
            )
        say(f"goes on after step {found.step} ({found.path})")
        return found.step

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.options.seed, "batch": self.options.batch}

    def _keep_lines(self, last: int) -> None:
        """Steps after the checkpoint come again: their lines go. So does one that was cut off when its writer died."""
        file = self.options.folder / "metrics.jsonl"
        if dist.get_rank() or not file.exists():
            return
        lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        rest = file.with_suffix(".new")
        rest.write_text("".join(line for line in lines if json.loads(line)["step"] <= last))
        rest.replace(file)

    def steps(self, examples: int) -> Iterator[tuple[int, Tensor]]:
        """Each step with the indices of the examples that this rank trains on: a share of the step's batch. The order
        depends on seed and step alone, so it is the same for all numbers of ranks, and after a resume."""
        batches = examples // self.options.batch
        if not batches:
            raise SystemExit(f"--batch {self.options.batch}: there are {examples} examples in all")
        for step in range(self.first + 1, self.options.steps + 1):
            epoch, batch = divmod(step - 1, batches)
            order = torch.randperm(examples, generator=torch.Generator().manual_seed(1000 * self.options.seed + epoch))
            self.began = time.perf_counter()
            yield (
                step,
                order[batch * self.options.batch :][: self.options.batch][dist.get_rank() :: dist.get_world_size()],
            )
        tsm.checkpoint.maybe_finalize_async_calls()  # the last save is complete

    def end(self, step: int, loss: Tensor) -> None:
        """After the optimizer's step, on all ranks: writes what was measured, evaluates, turns the dial, saves."""
        options, last = self.options, step == self.options.steps
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        seconds = time.perf_counter() - self.began
        line: dict[str, Any] = {"step": step, "loss": mean.item(), "step_ms": 1000 * seconds}
        line["examples_per_second"] = options.batch / seconds
        figures = self.evaluate() if last or (options.evaluate_every and step % options.evaluate_every == 0) else {}
        line |= figures
        if step == 1 or step % 10 == 0 or figures:
            say(f"step {step:4}  loss {line['loss']:.7f}" + "".join(f"  {k} {v:.4f}" for k, v in figures.items()))
        for after in options.turn:
            if after.step == step:
                turned = tsm.reshard(self.model, self.optimizer, hybrid_shard_degree=after.degree)
                line["turned"] = {"before": turned.before, "after": turned.after, "seconds": turned.seconds}
                say(f"turned from degree {turned.before[0]} to {turned.after[0]} in {1000 * turned.seconds:.0f} ms")
        if not options.folder:
            return
        if dist.get_rank() == 0:
            if tsm.is_initialized():
                known = tsm.metrics()
                line["degrees"] = known["job"]["degrees"]  # with which the step ran
                line["slow"] = known["slow"]  # ranks that the others wait for, and why
            with (options.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        if last or step % options.save_every == 0:
            folder = options.folder / "checkpoints"
            tsm.checkpoint.async_save(folder, self.model, self.optimizer, self._identity(), step=step, keep=2)


def predict(model: nn.Module, inputs: tuple[Tensor, ...], batch: int) -> Tensor:
    """What the model says of all examples, on every rank: each rank computes a share of every batch."""
    device = next(model.parameters()).device
    count, ranks = len(inputs[0]), dist.get_world_size()
    padded = torch.arange(-(-count // batch) * batch) % count  # every rank makes the same calls
    answers: list[Tensor] = []
    model.eval()
    with torch.no_grad():
        for index in padded.split(batch):
            mine = model(*(values[index[dist.get_rank() :: ranks]].to(device) for values in inputs))
            whole = mine.new_zeros(batch, *mine.shape[1:])
            whole[dist.get_rank() :: ranks] = mine
            dist.all_reduce(whole)
            answers.append(whole)
    model.train()
    return torch.cat(answers)[:count].cpu()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser(__doc__, steps=100, batch=64, lr=1e-3).parse_args()
    raise SystemExit("this is what the recipes share: run vision.py, recommendation.py or molecules.py")
