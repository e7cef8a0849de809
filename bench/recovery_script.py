"""A script whose ranks die and that goes on by itself: tsm.with_recovery, under torchrun, with fully_shard and
checkpoints in memory of the host. The counterpart of recovery_peer.py; bench/recovery_time.py starts it and kills its
ranks.

    torchrun --nproc-per-node 4 bench/recovery_script.py --dimension 256 --layers 4 --heads 4 --vocabulary 1024 \\
        --sequence 64 --degree 2 --every 5 --folder /tmp/x --memory /dev/shm/x --until $(($(date +%s) + 60))
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from cases import find_tesserae
from checkpoint_peer import Bench
from recovery_peer import parser_of

if not find_tesserae():
    sys.exit("recovery_script: build first: make build")
import tesserae as tsm


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--memory", type=Path, required=True, help="of checkpoints, on a file system in memory")
    options = parser.parse_args()

    def train() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        bench = Bench(options)
        found = tsm.checkpoint.load(options.memory, bench.model, bench.optimizer)
        bench.steps = found.step if found else 0
        while True:
            bench.step()
            go_on = [time.time() < options.until]
            dist.broadcast_object_list(go_on)
            if bench.rank == 0:
                with (options.folder / "steps.jsonl").open("a") as lines:
                    lines.write(json.dumps({"step": bench.steps, "time": time.time()}) + "\n")
            if not go_on[0]:
                return
            if bench.steps % options.every == 0:
                tsm.checkpoint.async_save(options.memory, bench.model, bench.optimizer, step=bench.steps, keep=2)

    tsm.init()
    tsm.with_recovery(train, restarts=1000)
    os._exit(0)


if __name__ == "__main__":
    main()
