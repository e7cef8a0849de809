"""What it costs a job to be watched: the monitor's share of a step, and whether training notices who visits its page.

    python bench/watched.py                          # 4 minutes
    python bench/watched.py --rounds 2 --seconds 5

`tesserae train` with one rank of a small transformer and a page, on a processor of its own; visitors are on another.
  1. The threads of the monitor: the time of a processor that they take, a step (/proc). What the stopwatch costs the
     thread that trains, build/release/bench/bench_host_cost tells, by unit.
  2. Quiet periods and periods with visitors take turns, and the median step of each kind is compared: 100 browsers that
     ask what the page asks every second; and the same beside 20 readers that never end their request, 4 that send
     headers without an end, and 4 that ask for paths outside, as fast as they can. Beside a neighbour, which keeps the
     visitors' processor busy and asks nobody, is seen what the machine itself makes of that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launch import free_port
from train_run import newest_tesserae

ROOT = Path(__file__).resolve().parent.parent
OURS = {"tsm-monitor", "tsm-pulse"}
HEAD = b" HTTP/1.1\r\nHost: localhost\r\n"


def configuration(width: int, port: int) -> dict:
    return {
        "data": {"path": "python:stdlib", "sequence_length": 128},
        "model": {"dimension": width, "layers": 4, "heads": 4},
        "run": {"folder": "run", "seed": 3, "log_every": 100},
        "train": {"steps": 1_000_000, "batch_per_rank": 4, "eval_batches": 0},
        "monitor": {"port": port},
    }


class Job:
    def __init__(self, folder: Path, width: int, processor: int) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "job.json").write_text(json.dumps(configuration(width, self.port)))
        program = newest_tesserae()
        if program is None:
            raise SystemExit("build it first: make build")
        self.process = subprocess.Popen(
            [program, "train", "job.json"],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {processor}),
            stdout=(folder / "said.txt").open("w"),
            stderr=subprocess.STDOUT,
        )

    def steps(self) -> list[float]:
        """Milliseconds of each step so far."""
        if self.process.poll() is not None:
            raise SystemExit(f"the job ended:\n{(self.folder / 'said.txt').read_text()}")
        file = self.folder / "run/metrics.jsonl"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [json.loads(line)["step_ms"] for line in whole.splitlines()]

    def monitor_seconds(self) -> float:
        """That its threads have had of a processor."""
        total = 0.0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            if (task / "comm").read_text().strip() in OURS:
                total += int((task / "schedstat").read_text().split()[0]) / 1e9
        return total

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()


def ask(port: int, path: str) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
        one.sendall(f"GET {path}".encode() + HEAD + b"Connection: close\r\n\r\n")
        while one.recv(1 << 16):
            pass


def browser(port: int) -> None:
    while True:
        for path in ("/api/run", "/api/now", "/api/metrics?from=0", "/metrics"):
            ask(port, path)
        time.sleep(1)


def reads_nothing(port: int) -> None:
    while True:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
            for byte in b"GET / HTTP/1.1\r\nA: " + b"a" * 10_000:
                one.sendall(bytes([byte]))
                time.sleep(0.05)


def sends_headers(port: int) -> None:
    while True:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
            one.sendall(b"GET /" + HEAD)
            for _ in range(10_000):  # a gigabyte, if anybody reads it
                one.sendall(b"A: " + b"a" * 100_000 + b"\r\n")


def asks_for_more(port: int) -> None:
    while True:
        for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/api/timeline?from=99999999999999999999"):
            ask(port, path)


def computes(port: int) -> None:
    """Asks nobody: what is lost beside it is lost to the machine, whose processors share something."""
    while True:
        pass


def again(work: Callable[[int], None], port: int) -> None:
    while True:
        try:
            work(port)
        except OSError:  # hung up on
            time.sleep(0.01)


def visit(port: int, visitors: list[tuple[Callable[[int], None], int]], processor: int) -> None:
    os.sched_setaffinity(0, {processor})
    for work, many in visitors:
        for _ in range(many):
            threading.Thread(target=again, args=(work, port), daemon=True).start()
    while os.getppid() != 1:
        time.sleep(0.2)


@contextmanager
def visited(port: int, visitors: list[tuple[Callable[[int], None], int]], processor: int) -> Iterator[None]:
    process = multiprocessing.get_context("fork").Process(target=visit, args=(port, visitors, processor))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="periods of each kind (6)")
    parser.add_argument("--seconds", type=float, default=12, help="of a period (12)")
    parser.add_argument("--width", type=int, default=128, help="of the model: the length of a step")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/out/watched.json")
    arguments = parser.parse_args()
    kinds = {
        "quiet": [],
        "100 browsers": [(browser, 100)],
        "a neighbour": [(computes, 1)],
        "hostile": [(browser, 70), (reads_nothing, 20), (sends_headers, 4), (asks_for_more, 4)],
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    processors = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="tesserae-watched-") as name:
        job = Job(Path(name), arguments.width, processors[0])
        try:
            while len(job.steps()) < 40:
                time.sleep(0.2)
            for number in range(arguments.rounds):
                for kind, visitors in kinds.items():
                    with visited(job.port, visitors, processors[-1]):
                        time.sleep(1)
                        begin, worked, began = len(job.steps()), job.monitor_seconds(), time.monotonic()
                        time.sleep(arguments.seconds)
                        if number == 0 and kind == "quiet":
                            share = (job.monitor_seconds() - worked) / (time.monotonic() - began)
                        times[kind] += job.steps()[begin:-1]
                    time.sleep(1)
        finally:
            job.end()
    report: dict = {kind: {"steps": len(all), "median_ms": statistics.median(all)} for kind, all in times.items()}
    quiet = report["quiet"]["median_ms"]
    for kind, of in report.items():
        print(f"{kind:13} {of['median_ms']:8.2f} ms, {100 * (of['median_ms'] / quiet - 1):+.2f} %, {of['steps']} steps")
    report["monitor_share"] = share
    print(f"the monitor's threads: {100 * share:.3f} % of a processor")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
