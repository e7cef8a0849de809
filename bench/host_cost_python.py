"""What FSDP1 and FSDP2 cost the host per unit and step, torch's and ours, in Python, when no byte is moved: the
counterpart of bench/host_cost.cpp.

64 units, each a linear layer of width 8 with bias, fully sharded over 8 ranks of torch's own fake process group,
against the same modules unsharded. Modes are interleaved and the order rotates. `step` is forward and backward; the
optimizer (fused AdamW) is a line of its own.

    python bench/host_cost_python.py [--units 64] [--repeats 7] [--steps 20] [--device cuda] [--json FILE]

Tesserae is the one that can be imported, or else the newest below build/; without either, the peers are measured alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cases import find_tesserae

WIDTH = 8


class Unit(nn.Linear):
    """A class of its own, so that a wrapping policy finds it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def make_model(units: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(Unit() for _ in range(units))).to(device)


def wrap_fsdp1(model: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Unit})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True)


def wrap_fsdp2(model: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap_tesserae(model: nn.Module, device: torch.device) -> nn.Module:
    """The script of FSDP1 after tsm.init(); uninstalled again, so that the peers stay what they are."""
    import tesserae as tsm

    tsm.init()
    sharded = wrap_fsdp1(model, device)
    tsm.uninstall()
    return sharded


def wrap_tesserae2(model: nn.Module, device: torch.device) -> nn.Module:
    """The same with FSDP2's script."""
    import tesserae as tsm

    tsm.init()
    sharded = wrap_fsdp2(model, device)
    tsm.uninstall()
    return sharded


MODES: dict[str, Callable[[nn.Module, torch.device], nn.Module]] = {
    "plain": lambda model, device: model,
    "fsdp1": wrap_fsdp1,
    "fsdp2": wrap_fsdp2,
    "tesserae": wrap_tesserae,
    "tesserae2": wrap_tesserae2,
}


class Subject:
    """One mode's model, its optimizer, and what its steps took."""

    def __init__(self, mode: str, units: int, device: torch.device):
        self.model = MODES[mode](make_model(units, device), device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.step_us: list[float] = []
        self.optimizer_us: list[float] = []
        self.cpu_us: list[float] = []

    def train(self, x: Tensor, steps: int) -> None:
        forward_backward = optimizer = cpu = 0.0
        for _ in range(steps):
            start, cpu_start = time.perf_counter(), time.process_time()
            self.model(x).sum().backward()
            synchronize(x.device)
            middle = time.perf_counter()
            cpu += time.process_time() - cpu_start
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            synchronize(x.device)
            forward_backward += middle - start
            optimizer += time.perf_counter() - middle
        self.step_us.append(forward_backward / steps * 1e6)
        self.optimizer_us.append(optimizer / steps * 1e6)
        self.cpu_us.append(cpu / steps * 1e6)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def fake_group(ranks: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def costs(subject: Subject, plain: Subject, units: int) -> dict[str, float]:
    def of(which: Subject, kind: str) -> float:
        return statistics.median(getattr(which, kind)[1:])  # the first repeat warmed up

    report = {kind: of(subject, kind) for kind in ("step_us", "cpu_us", "optimizer_us")}
    report["fastest_us"] = min(subject.step_us[1:])
    for kind, name in (("step_us", ""), ("cpu_us", "cpu_"), ("optimizer_us", "optimizer_")):
        report[f"{name}per_unit_us"] = (of(subject, kind) - of(plain, kind)) / units
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="a repeat")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    fake_group(options.ranks)
    modes = [mode for mode in MODES if not mode.startswith("tesserae") or find_tesserae()]
    subjects = {mode: Subject(mode, options.units, device) for mode in modes}
    x = torch.randn(4, WIDTH, device=device)
    for repeat in range(options.repeats + 1):
        order = list(subjects.values())
        for subject in order[repeat % len(order) :] + order[: repeat % len(order)]:
            subject.train(x, options.steps)

    report: dict = {
        "units": options.units,
        "ranks": options.ranks,
        "device": options.device,
        "torch": torch.__version__,
    }
    for mode, subject in subjects.items():
        report[mode] = cost = costs(subject, subjects["plain"], options.units)
        print(
            f"{mode:9} step {cost['step_us']:8.0f} us, over plain {cost['per_unit_us']:6.1f} us a unit "
            f"({cost['cpu_per_unit_us']:.1f} us of CPU time); "
            f"optimizer {cost['optimizer_us']:7.0f} us, over plain {cost['optimizer_per_unit_us']:.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # see leave() in peers.py


if __name__ == "__main__":
    main()
