"""Disturbs a Python script that trains inside tsm.elastic (examples/python/elastic.py) on two emulated hosts
(bench/hosts.sh: root, iproute2), one `tesserae run` on each, and compares its losses with an undisturbed run's.

    python bench/elastic_hosts.py                            # all of it, seven minutes
    python bench/elastic_hosts.py --faults rank --degrees 2

Four ranks, two on each host. Faults:
  rank        a rank of the second host is killed: its launcher starts another one
  first-rank  rank 0 is killed: the same
  fewer       a rank of the second host is killed, and none takes its place: on with 3 ranks, or 2 where the degree is 2
  host        the cable of the second host is pulled, and all its processes are killed: on with the first one's ranks
  first-host  the same of the first host, whose launcher decides: the second one's takes over, on with its ranks

All fall between two steps, while the script waits. With two replicas (degree 2) nothing is copied beside steps, without
(0) each step is, to the folder that the hosts share. A line is printed for each; the exit status is 1 if any went
otherwise than docs/faults.md promises: the ranks that are left keep their processes, the losses are those of an
undisturbed run within 1e-6, and with two replicas no step is made again, without at most one.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from elastic_undisturbed import last_epoch_in, losses_in, processes_in, undisturbed
from host_faults import HOSTS_OF_JOB, Job, wait_until
from launch import UNAVAILABLE, Unavailable
from recovery import ROOT

SCRIPT = ROOT / "examples/python/elastic.py"
PAUSE = 0.3  # before each step, in seconds
FAULTS = {"rank": 1, "first-rank": 1, "fewer": 0, "host": 0, "first-host": 0}  # and how often lost ranks are replaced


class Script:
    """What that script says, as far as it has said it."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def text(self) -> str:
        return "".join(self._job.said(host) for host in range(HOSTS_OF_JOB))

    def losses(self) -> list[tuple[int, float]]:
        return losses_in(self.text())

    def last_step(self) -> int:
        return max((step for step, _ in self.losses()), default=-1)

    def last_epoch(self) -> int:
        return last_epoch_in(self.text())

    def ranks(self, epoch: int) -> dict[int, int]:
        return processes_in(self.text(), epoch)

    def wait_for(self, step: int, seconds: float) -> None:
        wait_until(lambda: self.last_step() >= step or self._job.process.poll() is not None, seconds, f"step {step}")


def disturb(fault: str, degree: int, folder: Path, arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """A row of the table, and what is not as promised."""
    shared, run = folder / "shared", folder / "run"
    shared.mkdir()
    command = [str(arguments.program), "run", "--replacements", str(FAULTS[fault]), "--min-ranks", "2"]
    command += ["--spares", str(arguments.spares), "--shared", str(shared)]
    command += ["--host-deadline", str(arguments.deadline), str(SCRIPT)]
    command += ["--folder", str(run), "--steps", str(arguments.steps), "--pause", str(PAUSE)]
    command += ["--deadline", str(arguments.deadline), "--degree", str(degree)]
    if degree == 0:
        command += ["--memory-every", "1"]  # what a lost rank held, nobody else does
    wrong: list[str] = []
    with Job(command, folder / "said", arguments, a_host=1) as job:
        script = Script(job)
        script.wait_for(arguments.at, 120)
        before = script.ranks(0)
        time.sleep(PAUSE / 2)
        if fault.endswith("host"):
            lost = 0 if fault == "first-host" else 1
            job.cable(lost, "down")
            job.kill_host(lost)
            victims = {2 * lost, 2 * lost + 1}
        else:
            victims = {0 if fault == "first-rank" else 3}
            os.kill(before[min(victims)], signal.SIGKILL)
        start, reached = time.monotonic(), script.last_step()
        script.wait_for(reached + 2, arguments.deadline + 120)
        took = time.monotonic() - start
        after = script.ranks(script.last_epoch())
        job.process.wait(300)
        statuses = [job.status(host) for host in range(HOSTS_OF_JOB)]
        said, losses = script.text(), script.losses()
    left = {process for rank, process in before.items() if rank not in victims}
    kept = left & set(after.values())
    # Three ranks cannot share out by two: then one of those that are left has no place.
    if len(kept) != (2 if fault == "fewer" and degree == 2 else len(left)):
        wrong.append(f"ranks were the processes {before}, then {after}")
    if statuses != {"host": [0, None], "first-host": [None, 0]}.get(fault, [0, 0]):
        wrong.append(f"statuses {statuses}: {said[-1500:]}")
    made = [step for step, _ in losses]
    if sorted(set(made)) != list(range(arguments.steps)):
        wrong.append(f"not every step was made: {made}")
    expected = undisturbed(arguments.steps)
    worst = max((abs(loss - expected[step]) / abs(expected[step]) for step, loss in losses), default=1.0)
    if worst > 1e-6:
        wrong.append(f"losses differ by {worst:.1e}")
    again = len(made) - len(set(made))
    if again > (0 if degree == 2 else 1):
        wrong.append(f"{again} steps were made again")
    if list(shared.iterdir()):
        wrong.append(f"left behind: {list(shared.iterdir())}")
    row = f"| {fault} | {degree} | {len(kept)} of {len(left)} | {again} | {took:.2f} | {worst:.1e} |"
    return row, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/cli/tesserae")
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=list(FAULTS))
    parser.add_argument(
        "--degrees", nargs="+", type=int, default=[2, 0], help="ranks that share the state out (0: all)"
    )
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds after which a silent host is lost")
    parser.add_argument("--spares", type=int, default=1, help="processes on each host that wait to replace one")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--at", type=int, default=20, help="the step after which the job is disturbed")
    parser.add_argument("--rate", default="1gbit", help="of each link")
    arguments = parser.parse_args()
    arguments.rto_max = ""
    os.environ["TESSERAE_PYTHON"] = sys.executable
    print("| fault | degree | others kept their process | steps made again | to the second new step, s | ", end="")
    print("losses differ by | |\n|---|--:|--:|--:|--:|--:|---|", flush=True)
    failed = False
    try:
        for degree in arguments.degrees:
            for fault in arguments.faults:
                with tempfile.TemporaryDirectory(prefix="tesserae-elastic-hosts-") as name:
                    row, wrong = disturb(fault, degree, Path(name), arguments)
                failed = failed or bool(wrong)
                print(row, "; ".join(wrong) or "as promised", "|", flush=True)
    except Unavailable as reason:
        print(reason, file=sys.stderr)
        return UNAVAILABLE
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
