"""What PyTorch's Distributed Checkpoint (DCP) does with flipped bits: saves a small state, flips one bit of one of its
files at a time, loads, and counts what happens.

    python bench/checkpoint_flips.py --flips 10000

`detected`: loading throws. `silent`: it returns other values than were saved. `harmless`: the right values in spite of
it. Ours under the same treatment is a test: Damage.TenThousandBitFlipsAreAllDetected.
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def state(value: float) -> dict[str, torch.Tensor]:
    shapes = {"embedding": (31, 13), "weight": (29, 7), "bias": (29,)}
    generator = torch.Generator().manual_seed(1)
    return {name: torch.rand(shape, generator=generator) * value for name, shape in shapes.items()}


def outcome(folder: str, expected: dict[str, torch.Tensor]) -> str:
    loaded = state(0)
    try:
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    except BaseException:  # whatever it is: the damage was noticed
        return "detected"
    same = all(torch.equal(loaded[name].view(torch.int32), expected[name].view(torch.int32)) for name in expected)
    return "harmless" if same else "silent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    flips = parser.parse_args().flips
    warnings.filterwarnings("ignore")
    expected, choose = state(1), random.Random(1)
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(expected, checkpoint_id=folder, no_dist=True)
        files = sorted(path for path in Path(folder).iterdir())
        sizes = [path.stat().st_size for path in files]
        for _ in range(flips):
            path = choose.choices(files, sizes)[0]
            data = bytearray(original := path.read_bytes())
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
            path.write_bytes(data)
            counts[outcome(folder, expected)] += 1
            path.write_bytes(original)
    total = sum(counts.values())
    print(
        f"torch {torch.__version__}, {total} flips: "
        + ", ".join(
            f"{name} {counts[name]} ({counts[name] / total:.1%})" for name in ("detected", "silent", "harmless")
        )
    )


if __name__ == "__main__":
    main()
