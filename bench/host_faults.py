"""Disturbs a training job on two emulated hosts (bench/hosts.sh: root, iproute2), as networks and hosts do, and
compares it with the same job left alone.

    python bench/host_faults.py                                        # all of it, ten minutes
    python bench/host_faults.py --faults cut --seconds 1 5 --layouts 2,2,2
    python bench/host_faults.py --faults host-killed --deadline 20
    python bench/host_faults.py --faults host-killed first-host-succeeded --layouts 4,4,4 --memory 1

Four ranks, two on each host, fp32. Faults:
  cut            the cable of the second host is pulled after a step, and put back after so many seconds (--seconds)
  cut-for-good   the same, for longer than run.deadline_seconds; put back once all ranks have ended. Then the job is
                 started again with --resume auto
  host-killed    the cable is pulled, and all processes of the second host are killed; the job may have fewer ranks
                 (recovery.min_ranks) and is started as in pods, by one `tesserae train` on each host
  host-cut-off   the same job; the cable is pulled for longer than the deadline and put back when the first host has
                 gone on
  rank-killed, rank-stopped  the same job; a rank of the second host is lost, the cable stays
  rank-replaced  the same; the job replaces ranks (recovery.replacements)
  host-waited    the same job; the cable is put back before (the first of --seconds)
  first-host-killed  the same job; all processes of the first host are killed, behind a pulled cable. Then the job is
                 started again with --resume auto
  first-host-succeeded  the same, with a folder that both hosts see (recovery.shared): the second one goes on

A line is printed for each as soon as it is known; the exit status is 1 if any went otherwise than docs/faults.md
promises.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launch import HOSTS, UNAVAILABLE, Unavailable
from recovery import ROOT, last_step, lines

RANKS, HOSTS_OF_JOB = 4, 2
# What the training operator gives the process of a pod, from what bench/hosts.sh gives it.
AS_A_POD = (
    f"export PET_NNODES=$WORLD_SIZE PET_NODE_RANK=$RANK PET_NPROC_PER_NODE={RANKS // HOSTS_OF_JOB}; "
    'unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE; exec "$0" "$@"'
)
SAVED_EVERY = 5
SAVED = f"checkpoint.every_steps={SAVED_EVERY}"
PLAIN = "model.dropout=0"  # masks belong to ranks
SURVIVES = [PLAIN, SAVED, f"recovery.min_ranks={RANKS // HOSTS_OF_JOB}"]
REPLACES = [PLAIN, SAVED, "recovery.replacements=1"]
LAYOUTS = ["2,2,2", "4,4,4"]  # P,G,O: each host has all of the state; it has half of it
# Each rank's own output and exit status, whatever becomes of the others. Hosts stand as long as somebody wants them.
KEPT = (
    '[ -z "$RTO_MAX" ] || sysctl -q net.ipv4.tcp_rto_max_ms="$RTO_MAX" net.ipv4.tcp_retries2=255; '
    '"$@" >"$0/rank-$RANK.txt" 2>&1; echo $? >"$0/rank-$RANK.status"; while [ -e "$0/stay" ]; do sleep 0.1; done'
)


@dataclass
class Outcome:
    fault: str
    layout: str
    seconds: float = 0.0  # of the fault
    statuses: list[int] = field(default_factory=list)  # by rank
    steps_lost: int = 0
    seconds_to_next_step: float | None = None  # after the fault was over
    worst_loss: float | None = None  # relative difference to the undisturbed run
    ended_after: list[float] = field(default_factory=list)  # seconds from the fault to the end of each rank
    errors: list[str] = field(default_factory=list)  # the last of each rank that failed
    wrong: list[str] = field(default_factory=list)  # what is not as promised


class Job:
    """A command as the ranks of two hosts, or as what starts the ranks of each. Leaving the `with` block ends it."""

    def __init__(self, command: list[str], folder: Path, arguments: argparse.Namespace, a_host: int = 2):
        self.folder, self.processes = folder, a_host * HOSTS_OF_JOB
        folder.mkdir()
        doors = folder / "doors"
        where = ["--hosts", str(HOSTS_OF_JOB), "--ranks", str(a_host), "--rate", arguments.rate]
        if a_host == 1:
            command = ["sh", "-c", AS_A_POD, *command]
        self.process = subprocess.Popen(
            [str(HOSTS), *where, "--to-the-end", "--doors", str(doors), "--", "sh", "-c", KEPT, str(folder), *command],
            env=os.environ | {"OMP_NUM_THREADS": "1", "RTO_MAX": arguments.rto_max},
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: doors.exists() or self.process.poll() is not None, 60, "the hosts")
        if self.process.poll() is not None:
            said = self.process.stderr.read() if self.process.stderr else ""
            raise Unavailable(said.strip()) if self.process.returncode == UNAVAILABLE else RuntimeError(said)
        self.doors = dict(line.split() for line in doors.read_text().splitlines())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def cable(self, host: int, to: str) -> None:
        """Pulls it (down), or puts it back (up)."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the job has ended:\n{self.said(0)}")
        inside = ["nsenter", "--target", self.doors["switch"], "--net"]
        subprocess.run([*inside, "ip", "link", "set", f"port{host}", to], check=True)

    def said(self, rank: int) -> str:
        file = self.folder / f"rank-{rank}.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def status(self, rank: int) -> int | None:
        file = self.folder / f"rank-{rank}.status"
        text = file.read_text() if file.exists() else ""
        return int(text) if text.endswith("\n") else None

    def statuses(self) -> list[int | None]:
        return [self.status(rank) for rank in range(self.processes)]

    def inside(self, host: int) -> dict[int, str]:
        """The processes of a host, and what they are called, but for the one that holds it."""
        holder = self.doors[f"host{host}"]
        network, found = os.readlink(f"/proc/{holder}/ns/net"), {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or folder.name == holder:
                continue
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if os.readlink(folder / "ns/net") == network:
                    found[int(folder.name)] = (folder / "comm").read_text().strip()
        return found

    def ranks_of(self, host: int) -> set[int]:
        return {process for process, name in self.inside(host).items() if name.startswith("tesserae:")}

    def kill_host(self, host: int) -> None:
        for process in self.inside(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """How long it took. RuntimeError if it takes longer than `seconds`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise RuntimeError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.01)
    return time.monotonic() - start


def configuration(folder: Path, arguments: argparse.Namespace) -> Path:
    (folder / "text.txt").write_text("".join(f"the square of {i % 997} is {(i % 997) ** 2}\n" for i in range(20000)))
    job = {
        "run": {"folder": str(folder / "run"), "log_every": 1000},
        "model": {"dimension": 64, "layers": 2, "heads": 2, "dropout": 0.1},
        "data": {"path": str(folder / "text.txt"), "sequence_length": 64},
        "train": {"steps": arguments.steps, "batch_per_rank": 2, "eval_batches": 1},
        "optimizer": {"lr": 1e-3, "warmup_steps": 3},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def command(arguments: argparse.Namespace, job: Path, run: Path, layout: str, *settings: str) -> list[str]:
    degrees = dict(zip(("parameters", "gradients", "optimizer"), map(int, layout.split(",")), strict=True))
    made = [str(arguments.program), "train", str(job)]
    for setting in (f"run.folder={run}", f"degrees={json.dumps(degrees)}", *settings):
        made += ["--set", setting]
    return made


def deadline(arguments: argparse.Namespace) -> str:
    return f"run.deadline_seconds={arguments.deadline}"


def step_after(job: Job, run: Path, reached: int, seconds: float) -> float:
    """How long it takes until a step after that one is over, or the job."""
    return wait_until(lambda: last_step(run) > reached or job.process.poll() is not None, seconds, "a step")


def compare(outcome: Outcome, run: Path, alone: Path, steps: int) -> None:
    got, expected = lines(run), lines(alone)
    outcome.steps_lost = steps - len({line["step"] for line in got})
    if [line["step"] for line in got] != list(range(1, steps + 1)):
        outcome.wrong.append(f"not every step once: {[line['step'] for line in got]}")
    outcome.worst_loss = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(got, expected, strict=False))
    if outcome.worst_loss > 1e-6:
        outcome.wrong.append(f"losses differ by {outcome.worst_loss:.1e}")


def with_memory(settings: list[str], arguments: argparse.Namespace) -> list[str]:
    return [*settings, *([f"checkpoint.memory_every_steps={arguments.memory}"] if arguments.memory else [])]


def note_steps_lost(outcome: Outcome, steps_back: Iterable[int], arguments: argparse.Namespace) -> None:
    """None may be where others hold all of the state; those since the newest copies in memory of another host."""
    outcome.steps_lost = sum(steps_back)
    # A host may be lost while copies of the newest snapshot travel.
    may_be = 0 if outcome.layout == "2,2,2" else 2 * arguments.memory or SAVED_EVERY
    if outcome.steps_lost > may_be:
        outcome.wrong.append("finished steps were lost")


def undisturbed(arguments: argparse.Namespace, config: Path, folder: Path, layout: str, *settings: str) -> Path:
    """The run of that job left alone, made when it is first asked for."""
    run = folder / "-".join(["alone", layout, *settings])
    if not run.exists():
        with Job(command(arguments, config, run, layout, *settings), Path(f"{run}-said"), arguments) as job:
            job.process.wait(300)
            if job.process.returncode != 0:
                raise RuntimeError(f"the undisturbed job failed:\n{job.said(0)}")
    return run


def at_step(job: Job, run: Path, step: int) -> None:
    """Once that many steps are over."""
    wait_until(lambda: last_step(run) >= step or job.process.poll() is not None, 120, f"step {step}")
    if job.process.poll() is not None:
        raise RuntimeError(f"the job has ended before it was disturbed:\n{job.said(0)}")


def cut(outcome: Outcome, arguments: argparse.Namespace, config: Path, folder: Path) -> None:
    """Shorter than the deadline: the job waits, and goes on."""
    run, alone = folder / "run", undisturbed(arguments, config, folder.parent, outcome.layout)
    with Job(command(arguments, config, run, outcome.layout), folder / "said", arguments) as job:
        at_step(job, run, arguments.at)
        job.cable(1, "down")
        time.sleep(outcome.seconds)
        stood_at = last_step(run)
        job.cable(1, "up")
        outcome.seconds_to_next_step = step_after(job, run, stood_at, 300)
        job.process.wait(300)
        note_end(outcome, job)
    if any(outcome.statuses):
        outcome.wrong.append(f"statuses {outcome.statuses}")
    if stood_at >= arguments.steps:
        outcome.wrong.append("the cut came too late")
    compare(outcome, run, alone, arguments.steps)


def cut_for_good(outcome: Outcome, arguments: argparse.Namespace, config: Path, folder: Path) -> None:
    """Longer than the deadline: all ranks end, each names ranks of the other host, and none writes any more."""
    run, alone = folder / "run", undisturbed(arguments, config, folder.parent, outcome.layout)
    saved = [deadline(arguments), SAVED]
    made = command(arguments, config, run, outcome.layout, *saved)
    with Job(made, folder / "said", arguments) as job:
        (job.folder / "stay").touch()
        at_step(job, run, arguments.at)
        job.cable(1, "down")
        start = time.monotonic()
        ended: dict[int, float] = {}

        def all_have_ended() -> bool:
            for rank, status in enumerate(job.statuses()):
                if status is not None:
                    ended.setdefault(rank, time.monotonic() - start)
            return len(ended) == RANKS

        wait_until(all_have_ended, arguments.deadline + 120, "the end of all ranks")
        outcome.seconds = time.monotonic() - start
        outcome.ended_after = [round(ended[rank], 1) for rank in range(RANKS)]
        note_end(outcome, job)
        left = written(run)
        job.cable(1, "up")
        time.sleep(1)
        (job.folder / "stay").unlink()
        if written(run) != left:
            outcome.wrong.append("something was written after all ranks had ended")
    outcome.wrong += [f"rank {rank} ended well" for rank, status in enumerate(outcome.statuses) if status == 0]
    for rank, error in enumerate(outcome.errors):
        named = {int(number) for number in re.findall(r"\d+", error.rpartition("no sign of life from")[2])}
        if not named or any((rank < 2) == (other < 2) for other in named):
            outcome.wrong.append(f"rank {rank} does not name ranks of the other host: {error}")
    stood_at = last_step(run)
    with Job([*made, "--resume", "auto"], folder / "again", arguments) as job:
        resumed(outcome, job)
    compare(outcome, run, alone, arguments.steps)
    outcome.steps_lost = stood_at % SAVED_EVERY


def survives(outcome: Outcome, arguments: argparse.Namespace, config: Path, folder: Path) -> None:
    """The first host goes on without the second, in the same processes; or both do, if it was not for long."""
    run, alone = folder / "run", undisturbed(arguments, config, folder.parent, outcome.layout, PLAIN)
    settings = with_memory(SURVIVES, arguments) + ([] if outcome.fault == "host-waited" else [deadline(arguments)])
    with Job(command(arguments, config, run, outcome.layout, *settings), folder / "said", arguments, a_host=1) as job:
        at_step(job, run, arguments.at)
        before = job.ranks_of(0)
        if outcome.fault.startswith("rank"):
            how = signal.SIGKILL if outcome.fault == "rank-killed" else signal.SIGSTOP
            os.kill(max(job.ranks_of(1)), how)
        else:
            job.cable(1, "down")
        start = time.monotonic()
        if outcome.fault == "host-killed":
            job.kill_host(1)
        if outcome.fault == "host-waited":
            time.sleep(arguments.seconds[0])
            outcome.seconds = arguments.seconds[0]
            job.cable(1, "up")
            start = time.monotonic()
        reached = last_step(run)
        step_after(job, run, reached, arguments.deadline + 120)
        outcome.seconds_to_next_step = time.monotonic() - start
        after = job.ranks_of(0)
        if outcome.fault == "host-cut-off":
            job.cable(1, "up")
            outcome.seconds = time.monotonic() - start
            wait_until(lambda: job.status(1) is not None, 60, "the end of the second host's processes")
            outcome.ended_after = [round(time.monotonic() - start, 1)]
        job.process.wait(300)
        note_end(outcome, job)
        said = [job.said(host) for host in range(HOSTS_OF_JOB)]
    if not before or before != after:
        outcome.wrong.append("the ranks of the first host have not kept their processes")
    expected = {"host-killed": [0, -1], "host-cut-off": [0, 3]}.get(outcome.fault, [0, 0])
    if outcome.statuses != expected:
        outcome.wrong.append(f"statuses {outcome.statuses}, not {expected}; it said {said[0][-800:]} {said[1][-800:]}")
    compare(outcome, run, alone, arguments.steps)
    scalings = json.loads((run / "summary.json").read_text()).get("scalings", [])
    note_steps_lost(outcome, (scaling.get("steps_back", 0) for scaling in scalings), arguments)


def rank_replaced(outcome: Outcome, arguments: argparse.Namespace, config: Path, folder: Path) -> None:
    """The launcher of its host starts a new process; all others go on in theirs, to the bit."""
    run, alone = folder / "run", undisturbed(arguments, config, folder.parent, outcome.layout, PLAIN)
    made = command(arguments, config, run, outcome.layout, *with_memory(REPLACES, arguments))
    with Job(made, folder / "said", arguments, a_host=1) as job:
        at_step(job, run, arguments.at)
        before = [job.ranks_of(host) for host in range(HOSTS_OF_JOB)]
        victim = max(before[1])
        os.kill(victim, signal.SIGKILL)
        outcome.seconds_to_next_step = step_after(job, run, last_step(run), 120)
        after = [job.ranks_of(host) for host in range(HOSTS_OF_JOB)]
        job.process.wait(300)
        note_end(outcome, job)
        said = job.said(0)
    if after[0] != before[0] or len(after[1]) != len(before[1]) or after[1] & before[1] != before[1] - {victim}:
        outcome.wrong.append(f"ranks were the processes {before}, now {after}; it said {said[-800:]}")
    if outcome.statuses != [0, 0]:
        outcome.wrong.append(f"statuses {outcome.statuses}; it said {said[-800:]}")
    compare(outcome, run, alone, arguments.steps)
    note_steps_lost(outcome, map(int, re.findall(r"(\d+) steps back", said)), arguments)
    if outcome.worst_loss != 0:
        outcome.wrong.append("losses are not the same to the bit")


def first_host_succeeded(outcome: Outcome, arguments: argparse.Namespace, config: Path, folder: Path) -> None:
    """The second host's launcher takes over, and its ranks go on in their processes."""
    run, alone = folder / "run", undisturbed(arguments, config, folder.parent, outcome.layout, PLAIN)
    shared = folder / "shared"
    shared.mkdir()
    settings = [*with_memory(SURVIVES, arguments), deadline(arguments), f"recovery.shared={shared}"]
    with Job(command(arguments, config, run, outcome.layout, *settings), folder / "said", arguments, a_host=1) as job:
        at_step(job, run, arguments.at)
        before = job.ranks_of(1)
        job.cable(0, "down")
        job.kill_host(0)
        start = time.monotonic()
        step_after(job, run, last_step(run), arguments.deadline + 120)
        outcome.seconds_to_next_step = time.monotonic() - start
        after = job.ranks_of(1)
        job.process.wait(300)
        note_end(outcome, job)
        said = job.said(1)
    if not before or before != after:
        outcome.wrong.append(f"ranks were the processes {before}, now {after}")
    if outcome.statuses != [-1, 0] or "host 1 decides from now on" not in said:
        outcome.wrong.append(f"statuses {outcome.statuses}: {said[-800:]}")
    if list(shared.iterdir()):
        outcome.wrong.append(f"left behind: {list(shared.iterdir())}")
    compare(outcome, run, alone, arguments.steps)
    scalings = json.loads((run / "summary.json").read_text()).get("scalings", [])
    note_steps_lost(outcome, (scaling.get("steps_back", 0) for scaling in scalings), arguments)


def first_host_killed(outcome: Outcome, arguments: argparse.Namespace, config: Path, folder: Path) -> None:
    """Nobody is left to decide: the second host's processes end."""
    run, alone = folder / "run", undisturbed(arguments, config, folder.parent, outcome.layout, PLAIN)
    made = command(arguments, config, run, outcome.layout, *SURVIVES, deadline(arguments))
    with Job(made, folder / "said", arguments, a_host=1) as job:
        at_step(job, run, arguments.at)
        job.cable(0, "down")
        job.kill_host(0)
        took = wait_until(lambda: job.status(1) is not None, arguments.deadline + 120, "the end of the second host")
        outcome.ended_after = [round(took, 1)]
        note_end(outcome, job)
        said = job.said(1)
    if outcome.statuses != [-1, 3] or "nothing was heard of the job's first host" not in said:
        outcome.wrong.append(f"statuses {outcome.statuses}: {said[-800:]}")
    stood_at = last_step(run)
    with Job([*made, "--resume", "auto"], folder / "again", arguments, a_host=1) as job:
        resumed(outcome, job)
    compare(outcome, run, alone, arguments.steps)
    outcome.steps_lost = stood_at % SAVED_EVERY


def resumed(outcome: Outcome, job: Job) -> None:
    """Waits for the job that goes on from the newest checkpoint."""
    job.process.wait(300)
    if job.process.returncode != 0:
        outcome.wrong.append(f"--resume auto: {job.said(0)[-500:]}")


def written(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file of a run."""
    files = {}
    for file in sorted(run.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            state = file.stat()
            files[str(file)] = (state.st_size, state.st_mtime_ns)
    return files


def note_end(outcome: Outcome, job: Job) -> None:
    outcome.statuses = [-1 if status is None else status for status in job.statuses()]
    for rank, status in enumerate(outcome.statuses):
        said = [line for line in job.said(rank).splitlines() if line.startswith("tesserae: ") and "[" in line]
        outcome.errors.append(said[-1] if status and said else "")


FAULTS: dict[str, Callable[[Outcome, argparse.Namespace, Path, Path], None]] = {
    "cut": cut,
    "cut-for-good": cut_for_good,
    "host-killed": survives,
    "host-cut-off": survives,
    "host-waited": survives,
    "rank-killed": survives,
    "rank-stopped": survives,
    "rank-replaced": rank_replaced,
    "first-host-killed": first_host_killed,
    "first-host-succeeded": first_host_succeeded,
}


def outcomes(arguments: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    config = configuration(folder, arguments)
    for layout in arguments.layouts:
        for fault in arguments.faults:
            for seconds in arguments.seconds if fault == "cut" else [0.0]:
                outcome = Outcome(fault, layout, seconds)
                place = folder / "now"
                place.mkdir()
                try:
                    FAULTS[fault](outcome, arguments, config, place)
                except RuntimeError as error:
                    outcome.wrong.append(str(error))
                if arguments.keep and outcome.wrong:
                    shutil.copytree(place, arguments.keep / f"{fault}-{seconds:g}-{layout}", dirs_exist_ok=True)
                shutil.rmtree(place)
                yield outcome


def row(outcome: Outcome) -> str:
    went_on = outcome.seconds_to_next_step
    ended = f"{min(outcome.ended_after)} to {max(outcome.ended_after)}" if outcome.ended_after else ""
    return (
        f"| {outcome.fault} | {outcome.layout} | {outcome.seconds:.1f} | {outcome.steps_lost} | "
        f"{'' if went_on is None else f'{went_on:.2f}'} | {ended} | "
        f"{'' if outcome.worst_loss is None else f'{outcome.worst_loss:.1e}'} | "
        f"{'as promised' if not outcome.wrong else '; '.join(outcome.wrong)} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/cli/tesserae")
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=sorted(FAULTS))
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="P,G,O of 4 ranks")
    parser.add_argument("--seconds", nargs="+", type=float, default=[1, 5, 30], help="of cuts that heal")
    parser.add_argument("--deadline", type=float, default=10.0, help="run.deadline_seconds where a fault outlasts it")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--at", type=int, default=13, help="the step after which the job is disturbed")
    parser.add_argument("--rate", default="1gbit", help="of each link")
    parser.add_argument("--memory", type=int, default=0, help="checkpoint.memory_every_steps of jobs that go on (0)")
    parser.add_argument(
        "--rto-max", default="", help="net.ipv4.tcp_rto_max_ms of the hosts (Linux 6.15; then tcp_retries2 is 255)"
    )
    parser.add_argument("--json", type=Path, help="also write the outcomes there")
    parser.add_argument("--keep", type=Path, help="keep there what ranks said where something went wrong")
    arguments = parser.parse_args()
    print("| fault | P,G,O | seconds | steps lost | to the next step, s | ranks ended after, s | losses differ by | |")
    print("|---|---|--:|--:|--:|--:|--:|---|", flush=True)
    found = []
    try:
        with tempfile.TemporaryDirectory(prefix="tesserae-host-faults-") as folder:
            for outcome in outcomes(arguments, Path(folder)):
                print(row(outcome), flush=True)
                found.append(outcome)
    except Unavailable as reason:
        print(reason, file=sys.stderr)
        return UNAVAILABLE
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in found], indent=1) + "\n")
    return 1 if any(outcome.wrong for outcome in found) else 0


if __name__ == "__main__":
    sys.exit(main())
