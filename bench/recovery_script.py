"""A script whose ranks die and that goes on by itself, with fully_shard and state in memory of the host: under torchrun
by tsm.with_recovery, in new processes; with --elastic under `tesserae run` by tsm.elastic, in the same ones. The
counterpart of recovery_peer.py; bench/recovery_time.py starts it and kills its ranks.

    torchrun --nproc-per-node 4 bench/recovery_script.py --dimension 256 --layers 4 --heads 4 --vocabulary 1024 \\
        --sequence 64 --degree 2 --every 5 --folder /tmp/x --memory /dev/shm/x --until $(($(date +%s) + 60))
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from cases import find_tesserae
from checkpoint_peer import Bench
from recovery_peer import parser_of, step

if not find_tesserae():
    sys.exit("recovery_script: build first: make build")
import tesserae as tsm


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--memory", type=Path, help="of checkpoints, on a file system in memory; not with --elastic")
    parser.add_argument("--elastic", action="store_true")
    options = parser.parse_args()
    if options.memory is None and not options.elastic:
        parser.error("give --memory, or --elastic")

    def train_elastic(job) -> None:
        torch.set_num_threads(1)
        (options.folder / f"rank-{job.rank}.process").write_text(str(os.getpid()))
        bench = Bench(options)
        for number in job.steps(bench.model, bench.optimizer, 1 << 30, memory_every=options.every):
            bench.steps = number
            if not step(bench, options):
                return

    def train() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        bench = Bench(options)
        found = tsm.checkpoint.load(options.memory, bench.model, bench.optimizer)
        bench.steps = found.step if found else 0
        while step(bench, options):
            if bench.steps % options.every == 0:
                tsm.checkpoint.async_save(options.memory, bench.model, bench.optimizer, step=bench.steps, keep=2)

    tsm.init()
    if options.elastic:
        tsm.elastic(train_elastic)
    else:
        tsm.with_recovery(train, restarts=1000)
    os._exit(0)


if __name__ == "__main__":
    main()
