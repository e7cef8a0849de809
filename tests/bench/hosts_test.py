"""bench/hosts.sh: hosts that are namespaces. Needs root and iproute2; exits with 77 where they are missing.

python tests/bench/hosts_test.py [--step-program build/release/bench/bench_step]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from cases import newest_program  # noqa: E402

HOSTS = ROOT / "bench" / "hosts.sh"
SKIP = 77
MODEL = ["--dimension", "64", "--layers", "2", "--heads", "2", "--vocabulary", "512", "--sequence", "16"]

# Rank 0 listens, rank 1 sends BYTES; either end prints nothing.
TRANSFER = """
import os, socket, sys, time
size = int(sys.argv[1])
if os.environ["RANK"] == "0":
    listener = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    connection, _ = listener.accept()
    while size > 0 and (part := connection.recv(1 << 20)):
        size -= len(part)
    sys.exit(size > 0)
for attempt in range(100):
    try:
        connection = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
connection.settimeout(None)
connection.sendall(bytes(size))
"""


def hosts(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HOSTS), *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, itself not among them."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [below for child in children for below in descendants(child)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Hosts(unittest.TestCase):
    step_program: Path | None = newest_program("bench_step")

    def report_of(self, *arguments: str) -> tuple[dict, subprocess.CompletedProcess[str]]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            done = hosts("--report", str(report), *arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(report.read_text()), done

    def test_ranks_find_torchruns_variables_and_a_host_name_of_their_own(self) -> None:
        script = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $(hostname)"'
        done = hosts("--hosts", "3", "--ranks", "2", "--", "bash", "-c", script)
        expected = [f"{rank} 6 {rank % 2} 2 {rank // 2} host{rank // 2}" for rank in range(6)]
        self.assertEqual(sorted(done.stdout.splitlines()), expected, done.stderr)

    def test_hosts_know_each_other_by_name_share_files_and_no_memory(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            look = "for host in host0 host1; do getent ahostsv4 $host | grep 'STREAM host'; done; ls /dev/shm; pwd"
            script = f'touch "{folder}/$RANK" "/dev/shm/hosts_test_$RANK"; {look}'
            done = hosts("--", "bash", "-c", script)
            self.assertEqual(sorted(file.name for file in Path(folder).iterdir()), ["0", "1"])
        addresses = [[f"10.77.0.{host + 1}", "STREAM", f"host{host}"] for host in (0, 1)] * 2
        memory = [["hosts_test_0"], ["hosts_test_1"]]
        expected = sorted([*addresses, *memory, [os.getcwd()], [os.getcwd()]])
        self.assertEqual(sorted(line.split() for line in done.stdout.splitlines()), expected, done.stderr)
        self.assertEqual(list(Path("/dev/shm").glob("hosts_test_*")), [])

    def test_a_link_carries_no_more_than_its_rate_and_nearly_that(self) -> None:
        rate, size = 40e6, 8_000_000
        report, _ = self.report_of("--rate", "40mbit", "--", sys.executable, "-c", TRANSFER, str(size))
        burst = 131072
        self.assertGreaterEqual(report["sent_bytes"][1], size)
        self.assertLessEqual((report["sent_bytes"][1] - burst) * 8, rate * report["seconds"])
        self.assertGreater(size * 8, 0.5 * rate * report["seconds"], "the link is far slower than it was asked to be")

    def test_ranks_of_two_hosts_train_over_the_link_and_those_of_one_host_beside_it(self) -> None:
        if self.step_program is None:
            self.skipTest("bench_step is not built")
        sent = {}
        for layout in ("2,2,2", "4,4,4"):
            with tempfile.TemporaryDirectory() as folder:
                file = str(Path(folder, "step.json"))
                command = [str(self.step_program), *MODEL, "--degrees", layout, "--steps", "3", "--json", file]
                report, _ = self.report_of("--ranks", "2", "--rate", "100mbit", "--", *command)
                step = json.loads(Path(file).read_text())
            self.assertEqual(step["ranks"], 4)
            sent[layout] = sum(report["sent_bytes"])
            burst = 2 * 131072
            self.assertLessEqual((max(report["sent_bytes"]) - burst) * 8, 100e6 * report["seconds"])
            # A step reduces every gradient across the link: each host sends at least half of them, in fp32.
            steps = 3 + 2
            self.assertGreater(min(report["sent_bytes"]), steps * step["parameters"] * 4 / 2)
        # In each step and host: the gradients cross the link once if what is sharded stays inside the hosts; else they
        # do by half, and so does each gather (of which the root needs one, inner units two). Once for the host, not for
        # each of its ranks, which would be twice as much.
        whole = 2 * steps * step["parameters"] * 4
        self.assertGreater(sent["2,2,2"], whole)
        self.assertGreater(sent["4,4,4"], sent["2,2,2"])
        self.assertLess(sent["4,4,4"], 1.75 * whole)

    def test_the_first_failure_ends_the_other_ranks_and_is_the_exit_status(self) -> None:
        start = time.monotonic()
        done = hosts("--", "bash", "-c", 'if [ "$RANK" = 1 ]; then exit 9; fi; sleep 100')
        self.assertEqual(done.returncode, 9)
        self.assertLess(time.monotonic() - start, 30)

    def test_to_the_end_the_others_go_on(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            script = f'if [ "$RANK" = 1 ]; then exit 9; fi; sleep 1; touch "{folder}/done"; exit "$RANK"'
            done = hosts("--hosts", "3", "--to-the-end", "--", "bash", "-c", script)
            self.assertEqual(done.returncode, 9, done.stderr)
            self.assertTrue(Path(folder, "done").exists())

    def test_a_cable_may_be_pulled_and_put_back(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            doors, carrier = Path(folder, "doors"), "/sys/class/net/eth0/carrier"
            # Rank 1's host sees its link go and come.
            see = f'until [ "$(cat {carrier})" = $0 ]; do sleep 0.02; done'
            script = f"[ $RANK = 0 ] || for wanted in 0 1; do bash -c '{see}' $wanted; touch {folder}/$wanted; done"
            sysfs = "mount -t sysfs sysfs /sys && "  # of the host's own namespace
            process = subprocess.Popen([str(HOSTS), "--doors", str(doors), "--", "bash", "-c", sysfs + script])
            try:
                for wanted, to in (("0", "down"), ("1", "up")):
                    deadline = time.monotonic() + 30
                    while not doors.exists() and time.monotonic() < deadline:
                        time.sleep(0.02)
                    switch = dict(line.split() for line in doors.read_text().splitlines())["switch"]
                    pull = ["nsenter", "--target", switch, "--net", "ip", "link", "set", "port1", to]
                    subprocess.run(pull, check=True)
                    while not Path(folder, wanted).exists() and time.monotonic() < deadline:
                        time.sleep(0.02)
                    self.assertTrue(Path(folder, wanted).exists())
                self.assertEqual(process.wait(30), 0)
            finally:
                process.terminate()
                process.wait(30)

    def test_nothing_is_left_behind_however_it_ends(self) -> None:
        for how in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with self.subTest(how):
                process = subprocess.Popen(
                    [str(HOSTS), "--", "sleep", "1000"],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
                )
                try:
                    deadline = time.monotonic() + 30
                    while len(started := descendants(process.pid)) < 5 and time.monotonic() < deadline:
                        time.sleep(0.1)  # a switch, two hosts, two ranks
                    self.assertGreaterEqual(len(started), 5)
                    process.send_signal(how)
                    try:
                        process.wait(30)
                    except subprocess.TimeoutExpired:
                        those = ",".join(map(str, (process.pid, *started)))
                        states = ["ps", "-o", "pid,ppid,stat,wchan:24,args", "-p", those]
                        self.fail(f"still runs:\n{subprocess.run(states, capture_output=True, text=True).stdout}")
                    deadline = time.monotonic() + 10
                    while any(map(alive, started)) and time.monotonic() < deadline:
                        time.sleep(0.05)
                    self.assertEqual([pid for pid in started if alive(pid)], [])
                finally:
                    process.kill()

    def test_mistakes_are_said_before_anything_is_made(self) -> None:
        for arguments, word in (
            (["--rate", "1gib", "--", "true"], "1gib"),
            (["--hosts", "0", "--", "true"], "--hosts 0"),
            (["--hoste", "2", "--", "true"], "--hoste"),
            (["--hosts", "2"], "no command"),
        ):
            done = hosts(*arguments)
            self.assertEqual(done.returncode, 64)
            self.assertIn(word, done.stderr)


def main() -> int:
    if "--step-program" in sys.argv:
        at = sys.argv.index("--step-program")
        Hosts.step_program = Path(sys.argv[at + 1])
        del sys.argv[at : at + 2]
    probe = hosts("--", "true")
    if probe.returncode == SKIP:
        print(probe.stderr, file=sys.stderr)
        return SKIP
    return 0 if unittest.main(exit=False, verbosity=2).result.wasSuccessful() else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
