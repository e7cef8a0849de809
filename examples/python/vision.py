"""Vision: a small ViT learns to tell images apart that lie in a folder for each class, sharded by fully_shard.

    python examples/python/vision.py                                                   # 1 process
    torchrun --nproc-per-node 4 examples/python/vision.py                              # 4 processes
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/python/vision.py                                                      # 2 hosts: this on both of them

IMAGES/CLASS/NAME.png, as for torchvision's ImageFolder. If the folder is missing, it is made: circles, squares,
triangles and crosses of any colour, size and place. The accuracy is that on every fifth image, which training never
sees. Without the two lines that are marked, it trains with PyTorch's own fully_shard, to the same losses.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import recipe
import tesserae as tsm  # line 1

try:
    from PIL import Image
except ImportError as error:
    raise SystemExit(f"Pillow reads the images, and is not installed here ({error}): pip install pillow") from error

SIZE, PATCH = 16, 4  # pixels
SHAPES = ("circle", "cross", "square", "triangle")
HELD_OUT = 5  # one image of so many


def draw(shape: str, random: torch.Generator) -> Tensor:
    """An image of that shape, as [height, width, colour] in bytes."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=random).item()

    radius = between(4.5, 7.5)
    x0, y0 = (between(radius, SIZE - 1 - radius) for _ in range(2))
    y, x = torch.meshgrid(torch.arange(SIZE) - y0, torch.arange(SIZE) - x0, indexing="ij")
    if shape == "circle":
        inside = x**2 + y**2 < radius**2
    elif shape == "square":
        inside = torch.maximum(x.abs(), y.abs()) < 0.85 * radius
    elif shape == "cross":
        inside = torch.minimum(x.abs(), y.abs()) < 0.3 * radius
        inside &= torch.maximum(x.abs(), y.abs()) < radius
    else:
        inside = (y < 0.8 * radius) & (y > math.sqrt(3) * x.abs() - radius)
    dark, light = 0.4 * torch.rand(3, generator=random), 0.6 + 0.4 * torch.rand(3, generator=random)
    image = torch.where(inside[..., None], light, dark) + 0.05 * torch.randn(SIZE, SIZE, 3, generator=random)
    return (255 * image).clamp(0, 255).to(torch.uint8)


def draw_folder(folder: Path, count: int) -> None:
    """Makes the folder as a whole or not at all: another host may be drawing the same one."""
    unfinished = folder.with_name(f"{folder.name}.{os.uname().nodename}.{os.getpid()}")
    random = torch.Generator().manual_seed(0)
    for number in range(count):
        shape = SHAPES[number % len(SHAPES)]
        (unfinished / shape).mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw(shape, random).numpy()).save(unfinished / shape / f"{number:05}.png")
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(unfinished)


class Images:
    """The images of a folder; `split` says which of them."""

    def __init__(self, folder: Path, split: str) -> None:
        self.classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
        files = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted((folder / name).glob("*.png"))
        ]
        if len(self.classes) < 2 or len(files) < 2 * HELD_OUT:
            raise SystemExit(f"{folder}: expected IMAGES/CLASS/NAME.png; found {len(files)} images, {self.classes}")
        held_out = split == "held out"
        files = [file for number, file in enumerate(files) if (number % HELD_OUT == HELD_OUT - 1) == held_out]
        self.paths = [path for path, _ in files]
        self.labels = torch.tensor([label for _, label in files])

    def read(self, index: Tensor) -> Tensor:
        """[images, colour, height, width] from -1 to 1."""
        images = []
        for each in index.tolist():
            with Image.open(self.paths[each]) as image:
                pixels = image.convert("RGB").resize((SIZE, SIZE))
            images.append(torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8).view(SIZE, SIZE, 3))
        return torch.stack(images).permute(0, 3, 1, 2) / 127.5 - 1


class Vit(nn.Module):
    def __init__(self, classes: int, width: int, layers: int) -> None:
        super().__init__()
        half = nn.Conv2d(3, width // 2, 3, stride=2, padding=1)  # two small strides learn faster than one large one
        self.patches = nn.Sequential(half, nn.GELU(), nn.Conv2d(width // 2, width, 3, stride=2, padding=1))
        self.places = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, width))
        kind: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 2 * width, **kind) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def main() -> None:
    parser = recipe.parser(__doc__, steps=60, batch=64, lr=2e-3)
    parser.add_argument("--images", type=Path, default=Path("images"), help="a folder of class folders (images)")
    parser.add_argument("--drawn", type=int, default=1200, help="images to draw if that folder is missing (1200)")
    parser.add_argument("--width", type=int, default=32, help="of the ViT (32)")
    parser.add_argument("--layers", type=int, default=2, help="of the ViT (2)")
    options = parser.parse_args()

    device = recipe.start(options)
    tsm.init(recipe.settings(options))  # line 2
    if not options.images.exists() and dist.get_node_local_rank(fallback_rank=0) == 0:
        draw_folder(options.images, options.drawn)
    dist.barrier()
    training, held_out = Images(options.images, "training"), Images(options.images, "held out")
    unseen = held_out.read(torch.arange(len(held_out.labels)))

    model = Vit(len(training.classes), options.width, options.layers).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    def evaluate() -> dict[str, float]:
        answers = recipe.predict(model, (unseen,), options.batch).argmax(1)
        return {"accuracy": (answers == held_out.labels).float().mean().item()}

    run = recipe.Run(model, optimizer, evaluate, options)
    for step, index in run.steps(len(training.labels)):
        images, labels = training.read(index).to(device), training.labels[index].to(device)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.end(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
