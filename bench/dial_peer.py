"""What people do today to change the sharding degree: stop, and go on from a checkpoint. One process life of that, with
FSDP2 and PyTorch's Distributed Checkpoint (DCP); bench/dial.py runs one after the other.

    torchrun --nproc-per-node 4 bench/dial_peer.py --degree 4 --save /tmp/x ... && \\
    torchrun --nproc-per-node 4 bench/dial_peer.py --degree 2 --load /tmp/x ...

Times in the report are of the machine's clock (time.time()), so that they can be compared between lives.
"""

import time

born = time.time()  # before torch is imported

import argparse  # noqa: E402
import json  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import set_state_dict  # noqa: E402

from checkpoint_peer import Bench  # noqa: E402
from peers import leave  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dimension", "layers", "heads", "vocabulary", "sequence"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--degree", type=int, required=True, help="ranks over which the state is sharded")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--load", type=Path, help="the checkpoint to go on from")
    parser.add_argument("--save", type=Path, help="where to save after the last step")
    parser.add_argument(
        "--touch",
        type=int,
        default=0,
        help="MiB that each rank takes and gives back before it builds the model, and before its first step",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.loads = options.load is not None
    options.strategy, options.prefetch, options.head_unit, options.device = "FULL_SHARD", 0, False, "cpu"
    return options


def touch(mib: int) -> float:
    """Takes memory and gives it back, on all ranks at once, and returns how long that took: see bench/dial.py."""
    if mib == 0:
        return 0
    dist.barrier()
    start = time.time()
    memory = torch.ones(mib, 2**20, dtype=torch.uint8)
    dist.barrier()
    del memory
    return time.time() - start


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    touched = touch(options.touch)
    if options.degree == dist.get_world_size():
        options.degree = 0  # one dimension of the mesh is enough
    bench = Bench(options)
    report: dict = {"born": born, "touched": touched, "ready": time.time(), "steps": []}
    if options.load:
        state = bench.state()
        dcp.load(state, checkpoint_id=options.load)
        set_state_dict(
            bench.model, bench.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        report["loaded"] = time.time()
    report["touched_later"] = touch(options.touch)  # the first step makes gradients
    for _ in range(options.steps):
        dist.barrier()
        start = time.time()
        bench.step()
        dist.barrier()
        report["steps"].append([start, time.time()])
    if options.save:
        dcp.save(bench.state(), checkpoint_id=options.save)
        report["saved"] = time.time()
    report["parameters"] = bench.parameters
    if dist.get_rank() == 0:
        text = json.dumps(report, indent=1)
        options.json.write_text(text) if options.json else print(text)
    leave()


if __name__ == "__main__":
    main()
