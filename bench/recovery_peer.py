"""A job that dies and is restarted, as people do it today: FSDP2, torchrun --max-restarts, and PyTorch's Distributed
Checkpoint saved beside training every so many steps. One life of a rank; bench/recovery_time.py starts and kills it.

    torchrun --nproc-per-node 4 --max-restarts 100 bench/recovery_peer.py --dimension 256 --layers 4 --heads 4 \\
        --vocabulary 1024 --sequence 64 --degree 2 --every 5 --folder /tmp/x --until $(($(date +%s) + 60))
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_state_dict

from checkpoint_peer import FIXED, Bench
from peers import leave


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Of this script's and recovery_script.py's command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dimension", "layers", "heads", "vocabulary", "sequence", "degree", "every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints and of steps.jsonl")
    parser.add_argument("--until", type=float, required=True, help="the machine's clock at which it ends")
    parser.set_defaults(device="cpu", **FIXED)
    return parser


def newest(folder: Path) -> Path | None:
    """A checkpoint without .metadata was not finished."""
    whole = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
    return max(whole, key=lambda path: int(path.name[5:]), default=None)


def step(bench: Bench, options: argparse.Namespace) -> bool:
    """One, of which the folder is told. False: it was the last one, for all ranks."""
    bench.step()
    go_on = [time.time() < options.until]
    dist.broadcast_object_list(go_on)
    if bench.rank == 0:
        with (options.folder / "steps.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": bench.steps, "time": time.time()}) + "\n")
    return go_on[0]


def main() -> None:
    options = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(options)
    found: list[Path | None] = [newest(options.folder)]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        state = bench.state()
        dcp.load(state, checkpoint_id=found[0])
        set_state_dict(
            bench.model, bench.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        bench.steps = int(found[0].name[5:])
    saving = None
    while step(bench, options):
        if bench.steps % options.every == 0:
            if saving is not None:
                saving.result()
            if bench.rank == 0:
                for old in sorted(options.folder.glob("step-*"), key=lambda path: int(path.name[5:]))[:-2]:
                    shutil.rmtree(old, ignore_errors=True)
            checkpoint = options.folder / f"step-{bench.steps}"
            saving = dcp.async_save(bench.state(), checkpoint_id=checkpoint, process_group=bench.background)
    if saving is not None:
        saving.result()
    leave()


if __name__ == "__main__":
    main()
