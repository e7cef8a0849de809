#!/usr/bin/env python3
"""PyTorch's own tests of FSDP1 and FSDP2: on torch's FSDP, and on Tesserae.

    python tools/torch_tests.py ~/pytorch       # a checkout of torch's sources, at the tag of the installed one
    python tools/torch_tests.py ~/pytorch --only test_fsdp_core.py --only test_fully_shard_init.py
    python tools/torch_tests.py ~/pytorch -k clip           # tests whose names have that

The wheels of torch do not have them, so they are read from a checkout, and nothing of it is kept.

  1. Each file is copied and turned from devices to the CPU and Gloo, with --ranks processes (TURNS, `turn`).
  2. It runs with torch as it is. What passes there is what counts: the rest asks for a device.
  3. These tests run again with tsm.init() called in each process before it imports torch's FSDP. Tests of a class may
     share their processes, which a failure ends: those that failed after another one run once more, alone.
  4. A table of the files; then each test that only torch passes, with the end of its error. `KNOWN` has the reasons of
     those that are expected to fail.

Writes build/torch_tests.json, with the outcome of every test. Exit status 1: another test than those of KNOWN fails.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("test/distributed/fsdp", "test/distributed/_composable/fsdp")
RANKS, ENGINE, LOG = "TORCH_TESTS_RANKS", "TORCH_TESTS_ENGINE", "TORCH_TESTS_LOG"  # told to the processes of a test

TURNS = (
    (r"torch\.(cuda|accelerator)\.device_count\(\)", r'int(__import__("os").environ["TORCH_TESTS_RANKS"])'),
    (
        r"\bdevice_id=((self\.)?rank|torch\.(cuda|accelerator)\.current_device(_index)?\(\))",
        'device_id=torch.device("cpu")',
    ),
    (r"torch\.(cuda|accelerator)\.current_device(_index)?\(\)", "0"),
    (r"torch\.accelerator\.current_accelerator\((check_available=True)?\)", 'torch.device("cpu")'),
    (r"torch\.(cuda|accelerator)\.synchronize\(\)", "torch.cpu.synchronize()"),
    (r"\bdevice_ids=\[[^]]*\]", "device_ids=None"),
    (r"\.cuda\((self\.rank)?\)", '.to("cpu")'),
    (r"""(["'])cuda(:\d)?\1""", '"cpu"'),
    (r"""(["'])nccl\1""", '"gloo"'),
)

# Python goes on after an error in here: the test would be one of torch's FSDP, and pass.
SITE = """
import os, traceback
try:
    import torch_tests
    torch_tests.turn()
except BaseException:
    traceback.print_exc()
    os._exit(70)
"""

# Why Tesserae does not pass a test.
PRIVATE = "it asks private parts of torch's FSDP, which Tesserae does not have"
COUNTS = "it counts calls of torch's collectives, which Tesserae does not make"
KNOWN = {
    "TestHooks::test_pre_backward_hook_registration_after_state_dict": PRIVATE,
    "TestHooks::test_pre_backward_hook_registration_cuda_first_False": PRIVATE,
    "TestHooks::test_pre_backward_hook_registration_cuda_first_True": PRIVATE,
    "TestHooks::test_register_functions_called_cuda_first_False_mixed_precision_False": PRIVATE,
    "TestHooks::test_register_functions_called_cuda_first_False_mixed_precision_True": PRIVATE,
    "TestHooks::test_register_functions_called_cuda_first_True_mixed_precision_False": PRIVATE,
    "TestHooks::test_register_functions_called_cuda_first_True_mixed_precision_True": PRIVATE,
    "TestFullyShardLazyInit::test_fully_shard_double_lazy_init": PRIVATE,
    "TestFullyShardLazyInit::test_fully_shard_is_root": PRIVATE,
    "TestFullyShardLazyInit::test_fully_shard_module_and_param_fqns": PRIVATE,
    "TestFullyShard1DTrainingCompose::test_partial_group_reshard_toggle": PRIVATE,
    "TestFullyShardFrozen::test_train_mixed_requires_grad_across_groups": COUNTS,
    "TestFullyShardFrozen::test_train_mixed_requires_grad_per_group": COUNTS,
    "TestFullyShardGradientAccumulation::test_gradient_accumulation": COUNTS,
    "TestFullyShardShareCommContext::test_share_comm_context": COUNTS,
    "TestFullyShardShardPlacementFnMultiThread::test_shard_placement_fn_contiguous_params_grads": (
        "parameters that are sharded by another dimension than the first are views, not contiguous"
    ),
}


def turn() -> None:
    """In every process of a test, before anything imports torch's FSDP."""
    import torch

    if os.environ[ENGINE] == "tesserae":
        import tesserae

        tesserae.init()

    from torch.distributed.fsdp import FullyShardedDataParallel

    wrap = FullyShardedDataParallel.__init__

    @functools.wraps(wrap)
    def wrap_here(self: Any, *args: Any, **kwargs: Any) -> None:  # torch's looks for a device, unless it is told
        if not kwargs.get("device_id"):
            kwargs["device_id"] = torch.device("cpu")
        wrap(self, *args, **kwargs)

    FullyShardedDataParallel.__init__ = wrap_here

    ranks = int(os.environ[RANKS])
    torch.accelerator.device_count = lambda: 64  # for the harness; files of tests ask for a number that is turned
    torch.cpu.device_count = lambda: ranks
    from torch.testing._internal import common_distributed

    def run_anyway(*args: Any, **kwargs: Any) -> Any:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = run_anyway
    common_distributed.requires_world_size = run_anyway
    common_distributed.MultiProcessTestCase.world_size = property(lambda self: ranks)
    # Ranks are copies of the process that has imported all of this, which has no threads: a test takes a tenth.
    fork = torch.multiprocessing.get_context("fork").Process
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
    from torch.testing._internal import common_fsdp

    common_fsdp.DEVICE_COUNT = ranks
    common_fsdp.FSDPTestContinuous.world_size = ranks
    common_fsdp.FSDPTestMultiThread = common_fsdp.FSDPTest  # ranks are processes, not threads of one


def pytest_runtest_logreport(report: Any) -> None:
    """This file as a plugin of pytest: a line for each test, at once, since what runs may not come to its end."""
    if report.when == "call" or report.outcome != "passed":
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.outcome == "failed":
            line["error"] = reason_of(str(report.longrepr))
        with open(os.environ[LOG], "a") as log:
            log.write(json.dumps(line) + "\n")


def reason_of(text: str) -> str:
    """The last line that names an error: of a rank's process, rather than of the test that says that one failed."""
    errors = re.findall(
        r"^(?:E +)?((?:[\w.]+\.)?\w*(?:Error|Exception|Mismatch|Argument|Lost|Timeout)\b.*)$", text, re.M
    )
    own = [line for line in errors if "exited with error code" not in line and "Caught exception" not in line]
    return (own or errors or text.strip().splitlines() or ["?"])[-1][:300]


def run(work: Path, files: list[Path], engine: str, tests: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Outcome by test, of `tests` or, where there are none, of all in `files`."""
    log = work / f"{engine}.jsonl"
    log.write_text("")
    environment = os.environ | {
        RANKS: str(args.ranks),
        ENGINE: engine,
        LOG: str(log),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(work), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(args.deadline),
    }
    for number, file in enumerate(files):
        chosen = [test for test in tests if test.startswith(file.name + "::")]
        if tests and not chosen:
            continue
        print(f"{engine:10} {number + 1}/{len(files)} {file.name}", file=sys.stderr, flush=True)
        output = work / f"{engine}-{file.stem}.log"
        output.unlink(missing_ok=True)
        run_file(output, file, chosen, environment, args)
        outcomes = outcomes_in(log)
        failed = [test for test in chosen if outcomes.get(test, {}).get("outcome") != "passed"]
        for test in failed[1:]:
            run_file(output, file, [test], environment, args)
    return outcomes_in(log)


def outcomes_in(log: Path) -> dict[str, Any]:
    """By test, the last of each."""
    return {line["test"]: line for line in map(json.loads, log.read_text().splitlines())}


def run_file(
    output: Path, file: Path, chosen: list[str], environment: dict[str, str], args: argparse.Namespace
) -> None:
    """Tests of one file, in a process of their own; none chosen: all."""
    asked = output.parent / "chosen"
    asked.write_text("\n".join(chosen or [file.name]))
    words = "-m pytest -q -p torch_tests -p no:cacheprovider --rootdir .".split() + [f"@{asked}"]
    if args.k:
        words += ["-k", args.k]
    name = f"{environment[ENGINE]}: {file.name}"
    try:
        with output.open("a") as log:
            begin = log.tell()
            status = subprocess.run(
                [sys.executable, *words],
                cwd=file.parent,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=args.limit,
            ).returncode
    except subprocess.TimeoutExpired:
        print(f"{name} took more than {args.limit} s, its other tests did not run", file=sys.stderr)
    else:
        if status not in (0, 1, 5):  # all passed, some failed, none has such a name
            print(f"{name} could not run: {reason_of(output.read_text()[begin:])}", file=sys.stderr)


def turned(source: Path, work: Path) -> Path:
    text = source.read_text()
    for pattern, becomes in TURNS:
        text = re.sub(pattern, becomes, text)
    to = work / source.name
    to.write_text(text)
    return to


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pytorch", type=Path, help="a checkout of PyTorch's sources")
    parser.add_argument("--only", action="append", help="a file of these tests (repeatable); default: all")
    parser.add_argument("-k", help="tests whose names match, as pytest has it")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a test (2)")
    parser.add_argument("--deadline", type=int, default=120, help="seconds that a test may take (120)")
    parser.add_argument("--limit", type=int, default=3600, help="seconds that a file may take (3600)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/torch_tests.json")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the turned files, and what pytest wrote")
    args = parser.parse_args()

    sources = sorted(file for folder in FOLDERS for file in (args.pytorch / folder).glob("test_*.py"))
    sources = [file for file in sources if not args.only or file.name in args.only]
    if not sources:
        print(f"torch_tests: no such tests in {args.pytorch}/{' or '.join(FOLDERS)}", file=sys.stderr)
        return 2

    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.keep or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        (work / "sitecustomize.py").write_text(SITE)
        files = [turned(file, work) for file in sources]
        theirs = run(work, files, "torch", [], args)
        passed = [test for test, line in theirs.items() if line["outcome"] == "passed"]
        ours = run(work, files, "tesserae", passed, args) if passed else {}

    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"torch": theirs, "tesserae": ours}, indent=1))
    return report(files, passed, ours, time.monotonic() - begin)


def report(files: list[Path], passed: list[str], ours: dict[str, Any], seconds: float) -> int:
    """Prints table and failures; the exit status."""

    def passes(test: str) -> bool:
        return ours.get(test, {}).get("outcome") == "passed"

    print("| file | torch passes | of these Tesserae |\n|---|--:|--:|")
    for file in files:
        of_file = [test for test in passed if test.startswith(file.name + "::")]
        if of_file:
            print(f"| {file.name} | {len(of_file)} | {sum(map(passes, of_file))} |")
    print(f"| all, in {seconds / 60:.0f} min | {len(passed)} | {sum(map(passes, passed))} |\n")
    unexpected = 0
    for test in passed:
        if passes(test):
            continue
        name = test.partition("::")[2]
        why = KNOWN.get(name)
        unexpected += why is None
        error = ours.get(test, {"error": "it did not come to its end"}).get("error", "skipped")
        print(f"{'known' if why else 'FAILED'}: {test}\n    {why or error}")
    return 1 if unexpected or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
