"""The peer of bench/offload.py: what one writes without a library. A transformer of the same shape in PyTorch whose
parameters, gradients and AdamW state are tensors in files (torch.from_file, shared), so that the system writes pages
out and reads them again as memory needs; torch's fused AdamW; recomputed blocks."""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from transformer import Shape, Transformer, batch_of

count = 0


def mapped(folder: Path, like: torch.Tensor) -> torch.Tensor:
    global count
    count += 1
    path = folder / f"mapped-{count}"
    tensor = torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)
    path.unlink()
    return tensor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("dimension", "layers", "heads", "feed-forward", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.manual_seed(3)
    shape = Shape(
        dimension=options.dimension,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.heads,
        feed_forward=options.feed_forward,
        vocabulary=257,
        sequence=256,
    )
    device = torch.device("cpu")
    model = Transformer(shape, device)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = mapped(options.folder, parameter)
            if values.dim() > 1:
                values.normal_(std=0.02)
            else:
                values.fill_(1)
            setattr(module, name, torch.nn.Parameter(values))
    for parameter in model.parameters():
        parameter.grad = mapped(options.folder, parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": mapped(options.folder, parameter),
            "exp_avg_sq": mapped(options.folder, parameter),
        }
    for step in range(options.steps):
        begin = time.perf_counter()
        loss = model(*batch_of(shape, options.tokens // 256, step, 0, 1, device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.zero_()
        print("step", f"{time.perf_counter() - begin:.3f}", f"loss {loss.item():.3f}", step, flush=True)


if __name__ == "__main__":
    main()
