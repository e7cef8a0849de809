"""`tesserae run` makes ranks by copying one Python that has imported torch: a script must not notice, and where copies
would be unfit there are none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tesserae as tsm
from ranks import free_port
from tesserae.launch import fork_server

PROGRAM = Path(tsm.__file__).absolute().parents[2] / "cli/tesserae"
ONE = ["--nproc", 1, "--max-restarts", 1]  # a rank for which there is a server
SAYS_WHAT_IT_SEES = """\
    import torch, json, os, pickle, random, numpy, sys
    from multiprocessing import get_context

    class Point:
        def __init__(self, x): self.x = x

    def double(point): return Point(2 * point.x)

    def opened():
        numbers = os.listdir("/proc/self/fd")  # one of them is of this
        links = [f"/proc/self/fd/{number}" for number in numbers if int(number) > 2]
        return sorted(os.readlink(link).split(":")[0] for link in links if os.path.lexists(link))

    if __name__ == "__main__":
        opened_first = opened()
        with get_context("spawn").Pool(1) as pool:  # which imports this file anew, and pickles what it has
            doubled = pool.map(double, [Point(4)])[0]
        rank = int(os.environ["RANK"])
        print(json.dumps({
            "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[:2],
            "loader": type(__loader__).__name__,
            "spec": __spec__ and __spec__.name, "package": __package__, "safe": sys.flags.safe_path,
            "original": sys.orig_argv[1:], "module": Point.__module__ == "__main__", "doubled": doubled.x,
            "buffered": not sys.stdout.write_through, "read": sys.stdin.read(), "leads": os.getpgid(0) == os.getpid(),
            "open": opened_first, "variables": sorted(os.environ), "threads": torch.get_num_threads(),
            "signals": [str(__import__("signal").getsignal(n)) for n in (2, 10, 13, 15)],
        }))
        copied = "fork_server" in open("/proc/self/cmdline").read()
        for line in range(2):
            drawn = random.random(), float(numpy.random.rand()), float(torch.rand(()))
            print(json.dumps([copied, *drawn, os.getpid(), os.getppid()]))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "TESSERAE_PYTHON": sys.executable, "TESSERAE_LOG": "info"}


def command(*words: object) -> list[str]:
    return [str(PROGRAM), "run", *map(str, words)]


def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=100, cwd=folder, env=environment(), input="typed"
    )


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return file


@pytest.mark.parametrize("words", [["script.py", "--lr", "3"], ["-m", "script", "x"]])
def test_a_script_sees_what_it_sees_without(tmp_path: Path, words: list[str]) -> None:
    script(tmp_path, SAYS_WHAT_IT_SEES)
    seen = []
    for options in [], ["--cold"]:
        done = run(tmp_path, *ONE, *options, *words)
        assert done.returncode == 0, done.stderr
        about, *drawn = map(json.loads, done.stdout.splitlines())
        assert drawn[0][0] is (not options), "it is a copy, or is not"
        seen.append(about)
    assert seen[0] == seen[1]
    assert seen[0]["doubled"] == 8 and not seen[0]["buffered"]


def test_ranks_share_no_random_numbers_and_no_output(tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc", 3, script(tmp_path, SAYS_WHAT_IT_SEES))
    assert done.returncode == 0, done.stderr
    others = re.findall(r"^rank ([12]): (\[.*\])$", done.stderr, re.MULTILINE)
    assert sorted(rank for rank, _ in others) == ["1", "1", "2", "2"]
    drawn = [json.loads(line) for line in [*done.stdout.splitlines()[1:], *(line for _, line in others)]]
    assert all(copied for copied, *_ in drawn)
    assert len({number for _, *numbers, _, _ in drawn for number in numbers}) == 18
    assert len({process for *_, process, _ in drawn}) == 3
    assert len({parent for *_, parent in drawn}) == 1, "all are the launcher's children"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (
            "import torch, atexit, sys, threading, time\natexit.register(print, 'last')\n"
            "threading.Thread(target=lambda: [time.sleep(0.3), print('late')]).start()\nsys.exit(7)",
            7,
            "",
        ),
        ("import torch\ndef fails(): raise ValueError('too big')\nfails()", 1, "ValueError: too big"),
        ("import torch\nif True: (", 1, "SyntaxError"),
        ("import torch, signal\nsignal.raise_signal(signal.SIGINT)", 130, "KeyboardInterrupt"),
        ("import torch, sys\nsys.excepthook = lambda *error: print(error[2].tb_lineno)\n\nopen('/nowhere')", 1, ""),
    ],
)
def test_a_script_ends_as_it_does_without(tmp_path: Path, text: str, status: int, said: str) -> None:
    ended = [run(tmp_path, *ONE, *options, script(tmp_path, text)) for options in ([], ["--cold"])]
    assert [done.returncode for done in ended] == [status, status]
    said_why = re.compile(r"^tesserae: each rank loads what it needs.*\n|0x\w+", re.MULTILINE)
    copied, cold = (said_why.sub("", done.stderr) for done in ended)
    assert copied == cold and said in copied and "fork_server" not in copied
    assert ended[0].stdout == ended[1].stdout


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    text = "import torch, os, time\nos.write(2, f'process {os.getpid()}\\n'.encode())\ntime.sleep(600)"
    with subprocess.Popen(
        command("--nproc", 2, script(tmp_path, text)), stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:  # fmt: skip
        yield process
        process.kill()


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_nothing_outlives_a_launcher_that_is_killed(job: subprocess.Popen[str]) -> None:
    assert job.stderr
    ranks = [int(job.stderr.readline().split()[-1]) for _ in range(2)]
    processes = children(job.pid)
    assert set(ranks) < set(processes) and len(processes) == 3, "two ranks, and what they were copied from"
    job.kill()
    deadline = time.monotonic() + 60
    while any(map(is_there, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_there, processes))


def test_signals_reach_the_ranks(job: subprocess.Popen[str]) -> None:
    assert job.stderr
    for _ in range(2):
        job.stderr.readline()
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM


def test_a_signal_ends_it_while_libraries_are_imported(tmp_path: Path) -> None:
    script(tmp_path, "import os, time\nos.write(2, b'imports\\n')\ntime.sleep(600)", "torch.py")
    with subprocess.Popen(
        command("--nproc", 2, script(tmp_path, "import torch")), stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:  # fmt: skip
        assert process.stderr and process.stderr.readline() == "imports\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("library", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "1 threads run",
        ),
        ("import subprocess\nchild = subprocess.Popen(['sleep', '600'])", "have started processes"),
        ("import socket\nends = socket.socketpair()", "have opened socket"),
        ("raise OSError('no licence')", "what the script imports raises OSError"),
        ("import os\nos._exit(3)", "exited with code 3"),
        ("default_generator = None", "AttributeError: 'NoneType' object has no attribute 'seed'"),  # in the copy
        (
            "import os\nclass default_generator:\n    def seed(): os.kill(os.getpid(), 9)",
            "a rank was lost before it began",
        ),
    ],
)
def test_where_copies_would_be_unfit_each_rank_imports(tmp_path: Path, library: str, why: str) -> None:
    torch = f"""\
        import os
        class accelerator: current_accelerator = staticmethod(lambda check_available: None)
        if 'RANK' not in os.environ: exec({library!r}, globals())
    """
    script(tmp_path, torch, "torch.py")
    text = "import torch, os\nprint('trains as', os.environ['RANK'], flush=True)"
    done = run(tmp_path, *ONE, script(tmp_path, text))
    assert (done.returncode, done.stdout) == (0, "trains as 0\n"), done.stderr
    assert re.search(rf"^tesserae: each rank loads what it needs, as by --cold: .*{re.escape(why)}", done.stderr, re.M)


def test_what_a_script_sets_before_it_imports_torch_counts(tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    script(tmp_path / "vendor", "vendored = True", "tqdm.py")
    text = """\
        import os, sys
        os.environ["OMP_NUM_THREADS"] = "2"
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "vendor"))
        import torch, tqdm
        print(torch.get_num_threads(), tqdm.vendored)
    """
    done = run(tmp_path, *ONE, script(tmp_path, text))
    assert (done.returncode, done.stdout) == (0, "2 True\n"), done.stderr
    assert "the script does not begin with imports of torch or tesserae" in done.stderr


def test_a_lost_server_is_no_loss(tmp_path: Path) -> None:
    text = """\
        import os, signal, time
        from pathlib import Path
        import torch
        import tesserae as tsm

        def train(job):
            print("epoch", job.epoch, flush=True)
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in job.steps(model, optimizer, 3):
                if step == 1 and job.epoch == 0:
                    launcher = os.getppid()
                    processes = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
                    for process in sorted(map(int, processes)):  # the server is the eldest
                        os.kill(process, signal.SIGKILL)
                model(torch.ones(4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        tsm.elastic(train, backend="gloo", global_batch=1)
    """
    done = run(tmp_path, "--nproc", 1, "--replacements", 1, script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert "epoch 1" in done.stdout, done.stdout
    assert "as by --cold: killed by signal 9 (Killed)" in done.stderr


def test_a_host_whose_imports_take_long_is_not_lost(tmp_path: Path) -> None:
    script(
        tmp_path,
        "import sys, time\nif any('fork_server' in word for word in sys.orig_argv): time.sleep(6)",
        "sitecustomize.py",
    )
    file = script(tmp_path, """\
        import torch
        import tesserae as tsm

        def train(job):
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in job.steps(model, optimizer, 2):
                model(torch.ones(4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            print("trained as", job.rank, "of", job.world_size, flush=True)

        tsm.elastic(train, backend="gloo", global_batch=2)
        """)  # fmt: skip
    (tmp_path / "shared").mkdir()
    options = ["--nproc", 1, "--replacements", 1, "--min-ranks", 1, "--shared", tmp_path / "shared", "--hosts", 2]
    options += ["--address", "127.0.0.1", "--port", free_port(), "--host-deadline", 2]
    slow = environment() | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    hosts = [
        subprocess.Popen(command(*options, "--host", host, file), env=variables, **pipes)
        for host, variables in enumerate([environment(), slow])
    ]
    for host, process in enumerate(hosts):
        output, errors = process.communicate(timeout=240)
        assert (process.returncode, output) == (0, f"trained as {host} of 2\n"), errors


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""A script."""\nfrom __future__ import annotations\nimport os, torch.nn as nn', [("torch.nn", [])]),
        (
            "import torch\nfrom torch.distributed.fsdp import a, b",
            [("torch", []), ("torch.distributed.fsdp", ["a", "b"])],
        ),
        ("from transformers import Trainer\nimport tesserae as tsm", [("tesserae", [])]),
        ("import torch, mine, tesserae", [("torch", [])]),
        ("import mine\nimport torch", []),
        ("from . import mine\nimport torch", []),
        ("import os\nos.environ['A'] = 'b'\nimport torch", []),
        ("import torch\nif True:\n    import numpy\nimport tesserae", [("torch", [])]),
        ("def later(): import torch", []),
    ],
)
def test_what_a_script_begins_with(source: str, expected: list[tuple[str, list[str]]]) -> None:
    assert fork_server.first_imports(source) == expected


def test_what_imports_leave_open_is_told_from_what_was_there() -> None:
    before = fork_server.descriptors()
    with open("/dev/null") as _:
        assert fork_server.unfit(before, 1) == "the script's imports have opened /dev/null"
        assert "opened" not in fork_server.unfit(fork_server.descriptors(), 1)
