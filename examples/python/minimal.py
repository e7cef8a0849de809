"""The smallest FSDP script on Tesserae: a multi-layer perceptron learns the outputs of a random one.

    torchrun --nproc-per-node 4 examples/python/minimal.py
    torchrun --nproc-per-node 2 examples/python/minimal.py --steps 200

Without the two lines that are marked, it trains with PyTorch's own FSDP, to the same losses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import tesserae as tsm  # line 1

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make_model(seed: int, blocks: int) -> nn.Sequential:
    """The same values on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(Path(__file__).with_suffix(".json")), help="of Tesserae: a JSON file")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="examples a rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    tsm.init(options.config)  # line 2
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)

    teacher = make_model(options.seed + 1, blocks=1).to(device)
    model = FSDP(
        make_model(options.seed, blocks=4),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    examples = torch.Generator(device).manual_seed(options.seed + 100 * dist.get_rank())
    for step in range(1, options.steps + 1):
        x = torch.randn(options.batch, WIDTH, generator=examples, device=device)
        with torch.no_grad():
            target = teacher(x)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step:3}  loss {mean.item() / dist.get_world_size():.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
