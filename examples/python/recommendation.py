"""Recommendation: a DLRM predicts clicks from ids and numbers. Its embedding tables are sharded by rows, one unit each.

    python examples/python/recommendation.py                                           # 1 process
    torchrun --nproc-per-node 4 examples/python/recommendation.py                      # 4 processes
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/python/recommendation.py                                              # 2 hosts: this on both of them

The click log is made here: ids are skewed (Zipf: a few are in most lines), and whether a line is clicked is drawn from
a rule that is known. So the AUC on lines that training never sees can be compared with that of the rule itself, which
no model exceeds but by luck. Without the two lines that are marked, it trains with PyTorch's own fully_shard, to the
same losses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import recipe
import tesserae as tsm  # line 1

NUMBERS = 6  # dense features
HELD_OUT = 4000  # lines


class Log(NamedTuple):
    ids: Tensor  # [lines, tables]
    numbers: Tensor  # [lines, NUMBERS]
    clicks: Tensor  # [lines], 0 or 1
    chances: Tensor  # [lines]: what the rule says, which no model is told

    def part(self, lines: slice) -> Log:
        return Log(*(column[lines] for column in self))


def zipf(rows: int, shape: tuple[int, ...], exponent: float, random: torch.Generator) -> Tensor:
    """Ids of which the k-th most frequent one has a chance of 1 / k^exponent, times a constant. They are scattered over
    the table, as hashed ids are: else the rank with the first rows would have all the frequent ones."""
    chances = torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent
    drawn = torch.rand(shape, dtype=torch.float64, generator=random)
    frequency = torch.searchsorted(chances.cumsum(0) / chances.sum(), drawn).clamp(max=rows - 1)
    return torch.randperm(rows, generator=random)[frequency]


def make_log(lines: int, rows: list[int], exponent: float, seed: int) -> Log:
    """The rule: each id has a taste of two numbers and a popularity. The log-odds of a click are the popularities, a
    weighted sum of the numbers, and the products of the tastes of neighbouring tables."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.stack([zipf(count, (lines,), exponent, random) for count in rows], dim=1)
    numbers = torch.randn(lines, NUMBERS, generator=random)
    odds = numbers @ torch.linspace(0.6, -0.6, NUMBERS) - 0.7
    tastes: list[Tensor] = []
    for table, count in enumerate(rows):
        odds += 0.8 * torch.randn(count, generator=random)[ids[:, table]]
        tastes.append(torch.randn(count, 2, generator=random)[ids[:, table]])
    for one, other in zip(tastes, tastes[1:]):
        odds += 0.5 * (one * other).sum(1)
    chances = odds.sigmoid()
    return Log(ids, numbers, torch.bernoulli(chances, generator=random), chances)


class Dlrm(nn.Module):
    """An embedding for each id, a small network for the numbers, the products of all pairs of these, and a network that
    reads them."""

    def __init__(self, rows: list[int], width: int) -> None:
        super().__init__()
        tables = [nn.Embedding(count, width) for count in rows]
        for table in tables:
            nn.init.normal_(table.weight, std=0.1)
        self.tables = nn.ModuleList(tables)
        self.numbers = nn.Sequential(nn.Linear(NUMBERS, 32), nn.GELU(), nn.Linear(32, width))
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(pairs + (len(rows) + 1) * width, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """The log-odds of a click."""
        vectors = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        x = torch.stack([*vectors, self.numbers(numbers)], dim=1)
        one, other = torch.triu_indices(x.shape[1], x.shape[1], offset=1, device=x.device)
        return self.top(torch.cat([x.flatten(1), (x[:, one] * x[:, other]).sum(2)], dim=1)).squeeze(1)


def auc(scores: Tensor, clicks: Tensor) -> float:
    """How often a line that was clicked has a higher score than one that was not; equal scores count a half."""
    values, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]  # from 1; the mean of those that are equal
    clicked = clicks > 0
    positive, negative = int(clicked.sum()), int((~clicked).sum())
    return (ranks[clicked].sum().item() - positive * (positive + 1) / 2) / (positive * negative)


def main() -> None:
    parser = recipe.parser(__doc__, steps=60, batch=256, lr=0.1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 500, 200, 50], help="of each embedding table")
    parser.add_argument("--width", type=int, default=16, help="of an embedding (16)")
    parser.add_argument("--lines", type=int, default=25000, help="of the click log, to train on (25000)")
    parser.add_argument("--zipf", type=float, default=1.1, help="how skewed ids are; 0: all are as frequent (1.1)")
    options = parser.parse_args()

    device = recipe.start(options)
    tsm.init(recipe.settings(options))  # line 2
    log = make_log(options.lines + HELD_OUT, options.rows, options.zipf, options.seed)
    training, held_out = log.part(slice(options.lines)), log.part(slice(options.lines, None))
    recipe.say(f"auc of the rule {auc(held_out.chances, held_out.clicks):.4f}")

    model = Dlrm(options.rows, options.width).to(device)
    for table in model.tables:
        fully_shard(table)  # each rank has a part of its rows, of their gradients and of the optimizer's state
    fully_shard(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)  # leaves rows alone that have no gradient

    def evaluate() -> dict[str, float]:
        scores = recipe.predict(model, (held_out.ids, held_out.numbers), 4 * options.batch)
        return {"auc": auc(scores, held_out.clicks)}

    run = recipe.Run(model, optimizer, evaluate, options)
    for step, index in run.steps(options.lines):
        ids, numbers, clicks = (column[index].to(device) for column in training[:3])
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, numbers), clicks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.end(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
