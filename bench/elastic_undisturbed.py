"""What examples/python/elastic.py says, and what it comes to undisturbed, in one process: for those that disturb it."""

from __future__ import annotations

import re

import torch
from torch import nn


def losses_in(text: str) -> list[tuple[int, float]]:
    """Steps and their losses, in the order in which they were made: one that was made again comes twice."""
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss (\S+)\n", text)]


def processes_in(text: str, epoch: int) -> dict[int, int]:
    """Of the ranks that have met in that epoch, by rank."""
    found = re.findall(rf"epoch {epoch} rank (\d+) of \d+ process (\d+)\n", text)
    return {int(rank): int(process) for rank, process in found}


def last_epoch_in(text: str) -> int:
    return max((int(epoch) for epoch in re.findall(r"epoch (\d+) rank 0 of ", text)), default=0)


def undisturbed(steps: int, decay: float = 0.5) -> list[float]:
    """Losses of one process that trains as the script does. `decay`: of the rate, each 50 steps."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, decay)
    losses = []
    for step in range(steps):
        inputs, targets = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
