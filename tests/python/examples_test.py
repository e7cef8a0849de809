"""Every script in examples/python trains on Tesserae, learns, and trains to the same losses on PyTorch's own FSDP when
its two lines are removed."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ranks import run_ranks
from tesserae.run import run_script

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples" / "python"
DEADLINE = 600  # seconds; each takes less than a minute

FP32 = 1e-5
BF16 = 2e-2  # reduced in another order, a weight may round to the other of two neighbours: 2^-8 of its value


@dataclass(frozen=True)
class Example:
    script: str
    ranks: int
    arguments: tuple[str, ...] = ()
    tolerance: float = FP32
    learns: float = 0.5  # the last loss is at most this share of the first
    runner: Path | None = None  # a script that runs this one
    smp: bool = False  # ours runs by `-m tesserae.run`

    def __str__(self) -> str:
        return " ".join([self.script, str(self.ranks), *self.arguments])


@functools.cache  # a run is the same every time: tests share it
def printed(example: Example, script: Path, smp: bool = False) -> str:
    """What all ranks of `script`, the example with or without Tesserae, print."""
    first, rest = (script, ()) if example.runner is None else (example.runner, (str(script),))
    arguments = (str(first), (*rest, *example.arguments), smp)
    return "".join(run_ranks(as_main, example.ranks, *arguments, init=False, deadline=DEADLINE))


ACCELERATE = HERE / "accelerate_on_cpu.py"
EXAMPLES_RUN = [
    Example("minimal.py", 4, learns=0.1),
    # The norm by which gradients are clipped differs from torch's in its last bit, of which a hundred steps make 3e-3
    # of the loss (torch's own FULL_SHARD and NO_SHARD differ by 2e-4 then). So: all steps without it, a few with it.
    Example("t5_summarization.py", 2, ("--precision", "fp32", "--clip", "1e9"), learns=0.2),
    Example("t5_summarization.py", 2, ("--precision", "fp32", "--documents", "256"), learns=0.7),
    Example(
        "t5_summarization.py", 4, ("--documents", "512", "--strategy", "SHARD_GRAD_OP"), tolerance=BF16, learns=0.9
    ),
    Example("sagemaker_style.py", 4, smp=True),
    Example("accelerate_fsdp.py", 2, runner=ACCELERATE),
    Example(
        "accelerate_fsdp.py",
        2,
        ("--mixed-precision", "bf16", "--dtype", "bfloat16", "--flat", "--accumulate", "2", "--words", "512"),
        runner=ACCELERATE,
        learns=1.0,
        tolerance=BF16,
    ),
    Example("fully_shard.py", 4),
    Example("trainer.py", 2, runner=ACCELERATE, learns=0.6),
    Example("trainer.py", 2, ("--fsdp-version", "1"), runner=ACCELERATE, learns=0.6),
]


def without_the_two_lines(script: Path) -> str:
    lines = script.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not re.search(r"# line [12]$", line.rstrip())]
    assert len(lines) - len(kept) == 2
    assert "tsm" not in "".join(kept)
    return "".join(kept)


def as_main(rank: int, world_size: int, script: str, arguments: tuple[str, ...], smp: bool) -> str:
    """What the script prints on this rank, which is as torchrun would have started it. (Its processes import all they
    need before: that takes most of the time under torchrun.)"""
    output = io.StringIO()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as Python does; tests have their own in front
    with contextlib.redirect_stdout(output):
        try:
            if smp:
                run_script(script, arguments)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
    return output.getvalue()


def losses(output: str) -> list[float]:
    found = [float(value) for value in re.findall(r"(?<!validation )\bloss (\d+\.\d+)", output)]
    assert len(found) >= 2, output
    return found


@pytest.mark.parametrize("example", EXAMPLES_RUN, ids=str)
def test_the_two_lines_change_no_loss(example: Example, tmp_path: Path) -> None:
    script = EXAMPLES / example.script
    plain = tmp_path / example.script
    plain.write_text(without_the_two_lines(script))

    ours, theirs = losses(printed(example, script, example.smp)), losses(printed(example, plain))

    assert ours == pytest.approx(theirs, rel=example.tolerance)
    assert ours[-1] <= example.learns * ours[0]


def test_torchrun_starts_the_same() -> None:
    example = EXAMPLES_RUN[0]
    script = str(EXAMPLES / example.script)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(example.ranks), script],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert losses(run.stdout) == losses(printed(example, EXAMPLES / example.script, example.smp))


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_help(script: Path) -> None:
    smp = script.name == "sagemaker_style.py"
    [text] = run_ranks(as_main, 1, str(script), ("--help",), smp, init=False)
    assert "torchrun" in text and "--seed" in text


@pytest.mark.parametrize(
    ("gpus", "processors", "processes", "threads"), [("a100:4", 32, "4", "8"), ("4", 2, "4", "1"), ("0", 32, "2", "16")]
)
def test_the_slurm_script_starts_one_torchrun_a_node(gpus: str, processors: int, processes: str, threads: str) -> None:
    """What srun would start, with Slurm's commands replaced: the options that torchrun gets are ones it knows."""
    script = EXAMPLES / "t5_summarization.slurm"
    stand_in = f"""
        scontrol() {{ echo first-node; echo second-node; }}
        srun() {{ printf '%s\\n' "$@" $OMP_NUM_THREADS; }}
        SLURM_JOB_NODELIST=nodes SLURM_JOB_NUM_NODES=2 SLURM_JOB_ID=7
        SLURM_GPUS_PER_NODE={gpus} SLURM_CPUS_PER_TASK={processors}
        set -- --epochs 1
        source """
    run = subprocess.run(["bash", "-c", stand_in + str(script)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    program, *arguments, given = run.stdout.split()
    assert given == threads

    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(arguments)
    assert program == "torchrun"
    assert (options.nnodes, options.nproc_per_node, options.rdzv_backend) == ("2", processes, "c10d")
    assert (options.rdzv_endpoint, options.rdzv_id) == ("first-node:15007", "7")
    assert Path(options.training_script).name == "t5_summarization.py"
    assert options.training_script_args == ["--epochs", "1"]
