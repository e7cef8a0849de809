"""FSDP2 on Tesserae: a small GPT learns to repeat the first half of a random sequence.

    torchrun --nproc-per-node 4 examples/python/fully_shard.py
    torchrun --nproc-per-node 2 examples/python/fully_shard.py --steps 200

Without the two lines that are marked, it trains with PyTorch's own fully_shard, to the same losses.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import tesserae as tsm  # line 1

TOKENS, HALF, WIDTH, BATCH = 16, 6, 64, 16


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(2 * HALF, WIDTH)
        kind = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **kind) for _ in range(layers))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    tsm.init()  # line 2
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    torch.manual_seed(options.seed)  # the same values on every rank
    model = Gpt(layers=3).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    random = torch.Generator().manual_seed(options.seed + 100 * dist.get_rank())
    for step in range(1, options.steps + 1):
        half = torch.randint(TOKENS, (BATCH, HALF), generator=random).to(device)
        tokens = torch.cat([half, half], dim=1)
        logits = model(tokens[:, :-1])[:, HALF - 1 :]  # what the second half should be
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), half.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step:3}  loss {mean.item():.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
