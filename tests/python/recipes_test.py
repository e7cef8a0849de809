"""The recipes: every command of their pages runs as it stands there, and what the pages say of it holds.

Of each recipe: one process, with and without the two lines; four ranks; a run that ends early and goes on; a run whose
dial the script turns, and `tesserae dial` while it trains. Commands that a page marks as larger are only parsed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import get_args_parser

import tesserae as tsm
import tesserae.checkpoint
import tesserae.dial.turning
import tesserae.monitor.watching
import tesserae.smp.init  # noqa: F401  (these four: so that the ranks, which are forked, need not import them)
from examples_test import without_the_two_lines
from ranks import run_ranks
from tesserae import _C

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "python"
PROGRAM = Path(_C.__file__).parents[2] / "cli" / "tesserae"
FP32 = 1e-5
DEADLINE = 300.0  # seconds; a run takes less than ten
PRINTED = 1e-7  # losses are printed with seven digits after the point
SLOW = 0.3  # seconds that each step lasts until `tesserae dial` has its answer


@dataclass(frozen=True)
class Recipe:
    name: str
    figure: str
    chance: float  # what it is without learning anything
    at_least: float  # what the default run must reach

    def __str__(self) -> str:
        return self.name


RECIPES = [
    Recipe("vision", "accuracy", chance=0.25, at_least=0.75),
    # The numbers alone, weighted as in the rule, give 0.67: above that are the embeddings.
    Recipe("recommendation", "auc", chance=0.5, at_least=0.75),
    Recipe("molecules", "r2", chance=0.0, at_least=0.85),
]


@dataclass
class Ran:
    """What a command of a page did."""

    output: str
    lines: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl
    dial: str = ""  # what `tesserae dial` said

    @property
    def printed(self) -> list[float]:
        return [float(value) for value in re.findall(r"\bloss (\d+\.\d+)", self.output)]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    def figure(self, name: str) -> float:
        return float(re.findall(rf"\b{name} (-?\d+\.\d+)$", self.output, re.MULTILINE)[-1])


def commands(recipe: Recipe) -> list[str]:
    """Those in the page's blocks of shell commands, in their order; then the larger ones of its table of figures."""
    page = (ROOT / "docs" / "recipes" / f"{recipe.name}.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    return lines + [f"{command}  # larger" for command in re.findall(r"^\| `([^`]*)` \(larger\)", page, re.MULTILINE)]


def is_larger(command: str) -> bool:
    return "# larger" in command


# ---- in a rank ----
def as_main(rank: int, world_size: int, script: str, arguments: list[str], folder: str, slow_until: str) -> str:
    """What the script prints on this rank, in `folder`, as if Python had started it."""
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    if slow_until:
        slow_down(Path(slow_until))
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                output.write(f"\nended with {end.code}")
                wait_for_all(world_size)
    return output.getvalue()


def wait_for_all(ranks: int) -> None:
    """One that ends while others still connect to it fails them with another error than its own."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.add("ended", 1)
    deadline = time.monotonic() + 10
    while store.add("ended", 0) < ranks and time.monotonic() < deadline:
        time.sleep(0.01)


def slow_down(until: Path) -> None:
    """Steps last long enough for somebody to turn the dial between them."""
    import recipe

    end: Callable[..., None] = recipe.Run.end

    def slow_end(self: Any, step: int, loss: torch.Tensor) -> None:
        end(self, step, loss)
        if not until.exists():
            time.sleep(SLOW)

    recipe.Run.end = slow_end


# ---- in the test ----
def run(script: Path, ranks: int, arguments: list[str], folder: Path, slow_until: Path | None = None) -> str:
    parameters = (str(script), arguments, str(folder), str(slow_until or ""))
    environment = {"PYTHONWARNINGS": "ignore"}
    outputs = run_ranks(as_main, ranks, *parameters, init=False, deadline=DEADLINE, environment=environment)
    return "".join(outputs)


def launch(command: str, folder: Path, slow_until: Path | None = None) -> Ran:
    """Runs `python SCRIPT ...` or `torchrun --nproc-per-node N SCRIPT ...` of a page."""
    program, *rest = shlex.split(command, comments=True)
    ranks = 1
    if program == "torchrun":
        option, count, *rest = rest
        assert option == "--nproc-per-node", command
        ranks = int(count)
    else:
        assert program == "python", command
    script, *arguments = rest
    output = run(ROOT / script, ranks, arguments, folder, slow_until)
    metrics = folder / arguments[arguments.index("--folder") + 1] / "metrics.jsonl" if "--folder" in arguments else None
    return Ran(output, [json.loads(line) for line in metrics.read_text().splitlines()] if metrics else [])


def launch_and_dial(command: str, dial: str, folder: Path) -> Ran:
    """Runs a script, and `tesserae dial RUN ...` as soon as its run folder has a socket."""
    program, *arguments = shlex.split(dial, comments=True)
    assert (program, arguments[0]) == ("tesserae", "dial"), dial
    answered = folder / "answered"
    answers: list[subprocess.CompletedProcess[str]] = []

    def ask() -> None:
        end = time.monotonic() + DEADLINE
        while not (folder / arguments[1] / "dial.sock").exists() and time.monotonic() < end:
            time.sleep(0.05)
        answers.append(
            subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, cwd=folder, timeout=DEADLINE)
        )
        answered.touch()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        ran = launch(command, folder, slow_until=answered)
    finally:
        asking.join()
    assert answers[0].returncode == 0, answers[0]
    ran.dial = answers[0].stdout
    return ran


@dataclass
class Page:
    recipe: Recipe
    folder: Path
    one: Ran
    plain: Ran  # one process without the two lines
    undisturbed: Ran  # four processes
    ended: Ran
    resumed: Ran
    turned: Ran


@pytest.fixture(scope="module", params=RECIPES, ids=str)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Runs every command of the page, once."""
    recipe: Recipe = request.param
    folder = tmp_path_factory.mktemp(recipe.name)
    one, four, ended, resumed, turned, dial = (c for c in commands(recipe) if not is_larger(c))
    copy = folder / "plain"
    copy.mkdir()
    shutil.copy(EXAMPLES / "recipe.py", copy)
    (copy / f"{recipe.name}.py").write_text(without_the_two_lines(EXAMPLES / f"{recipe.name}.py"))

    yield Page(
        recipe,
        folder,
        one=launch(one, folder),
        plain=Ran(run(copy / f"{recipe.name}.py", 1, ["--steps", "30"], folder)),
        undisturbed=launch(f"{four.partition('#')[0]} --folder undisturbed", folder),  # where all losses are
        ended=launch(ended, folder),
        resumed=launch(resumed, folder),
        turned=launch_and_dial(turned, dial, folder),
    )


def test_losses_are_those_of_one_process(page: Page) -> None:
    assert len(page.one.printed) > 5
    assert len(page.plain.printed) == 4  # of steps 1, 10, 20, 30
    assert page.one.printed[:4] == pytest.approx(page.plain.printed, rel=FP32, abs=PRINTED)
    assert page.undisturbed.printed == pytest.approx(page.one.printed, rel=FP32, abs=PRINTED)


def test_it_learns(page: Page) -> None:
    """The figure on held-out examples: far above what chance gives."""
    recipe = page.recipe
    assert recipe.at_least > recipe.chance
    for ran in (page.one, page.undisturbed, page.resumed, page.turned):
        assert ran.figure(recipe.figure) >= recipe.at_least
        assert ran.figure(recipe.figure) == pytest.approx(page.one.figure(recipe.figure), abs=0.01)


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(page: Page) -> None:
    steps = len(page.undisturbed.lines)
    done = len(page.ended.lines)
    assert 0 < done < steps
    assert f"goes on after step {done}" in page.resumed.output
    assert [line["step"] for line in page.resumed.lines] == list(range(1, steps + 1))
    assert page.resumed.losses == page.undisturbed.losses
    assert page.resumed.lines[-1][page.recipe.figure] == page.undisturbed.lines[-1][page.recipe.figure]


def test_a_turned_dial_changes_no_loss(page: Page) -> None:
    assert page.turned.losses == pytest.approx(page.undisturbed.losses, rel=FP32)
    degrees = [line["degrees"][0] for line in page.turned.lines]
    asked = re.findall(r"turned from degree (\d) to (\d) in", page.turned.output)
    assert [after for _, after in asked] == ["2", "4"]
    assert {1, 2, 4} <= set(degrees), "1 is what the command line asked for"
    assert "P=1 G=1 O=1" in page.turned.dial
    for number, line in enumerate(page.turned.lines):
        if "turned" in line:
            assert degrees[number + 1 : number + 2] in ([line["turned"]["after"][0]], [])


def test_metrics_are_lines_of_json(page: Page) -> None:
    for line in page.undisturbed.lines:
        assert {"step", "loss", "step_ms", "examples_per_second", "degrees", "slow"} <= line.keys()
        assert line["degrees"] == [4, 4, 4]
        assert line["step_ms"] > 0
    assert page.recipe.figure in page.undisturbed.lines[-1]


def test_only_gradients_of_tables_travel_within_a_host(page: Page) -> None:
    """`traffic` of the monitor, with the figure that docs/recipes/recommendation.md gives."""
    now = json.loads((page.folder / "undisturbed" / "monitor" / "now.json").read_text())
    sent = [dict(zip(now["traffic"]["verbs"], row, strict=True)) for row in now["traffic"]["bytes"]]
    assert [each["all_gather"] for each in sent] == [0] * 4
    # A rank tells twice a second, so of a run of seconds not all may have been heard.
    reduced = [each["reduce_scatter"] for each in sent if each["reduce_scatter"] > 0]
    assert reduced
    if page.recipe.name == "recommendation":
        text = re.sub(r"\s+", " ", (ROOT / "docs" / "recipes" / "recommendation.md").read_text())
        said = re.search(r"sends ([\d,]+) bytes for reductions", text)
        assert said
        # Over the steps between two reports of a rank; another step may have begun in between.
        assert statistics.median(reduced) == pytest.approx(int(said[1].replace(",", "")), rel=0.05)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_larger_commands_parse(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    larger = [command for command in commands(recipe) if is_larger(command)]
    assert any("--nnodes 2" in command for command in larger)
    assert any("--steps" in command for command in larger)
    for command in larger:
        program, *arguments = shlex.split(command, comments=True)
        if program == "torchrun":
            options = get_args_parser().parse_args(arguments)
            script, arguments = options.training_script, options.training_script_args
        else:
            script, *arguments = arguments
        assert script == f"examples/python/{recipe.name}.py"
        # --help ends the script after its options before were understood.
        [output] = run_ranks(as_main, 1, str(ROOT / script), [*arguments, "--help"], str(ROOT), "", init=False)
        assert "usage:" in output and "error:" not in output, output


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("molecules.py", ["--turn", "40"], "'40' is not STEP:DEGREE"),
        ("molecules.py", ["--turn", "0:2"], "step and degree begin at 1"),
        ("molecules.py", ["--turn", "5:3"], "--turn 5:3: the degree must divide the 2 ranks"),
        ("molecules.py", ["--batch", "33"], "--batch 33: it must be a multiple of the number of ranks, which is 2"),
        ("molecules.py", ["--molecules", "40"], "--batch 64: there are 40 examples in all"),
        ("vision.py", ["--images", "."], "expected IMAGES/CLASS/NAME.png"),
        ("recipe.py", [], "run vision.py"),
    ],
)
def test_errors_say_what_to_do(script: str, arguments: list[str], words: str, tmp_path: Path) -> None:
    assert words in run(EXAMPLES / script, 2, arguments, tmp_path)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    first = ["--steps", "2", "--folder", "run"]
    assert "step    2" in run(EXAMPLES / "molecules.py", 1, first, tmp_path)
    assert "nothing to do" in run(EXAMPLES / "molecules.py", 1, first, tmp_path)
    refused = run(EXAMPLES / "molecules.py", 1, [*first, "--seed", "2"], tmp_path)
    assert "give the same options, or another --folder" in refused


def molecules() -> dict[str, Any]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return runpy.run_path(str(EXAMPLES / "molecules.py"))
    finally:
        sys.path.remove(str(EXAMPLES))


def test_molecules_are_valid_and_their_property_is_the_formula() -> None:
    names = molecules()
    most = {"C": 4, "N": 3, "O": 2, "S": 2, "F": 1, "Cl": 1, "Br": 1}
    draw = random.Random(7)
    for _ in range(500):
        smiles = names["make_molecule"](draw)
        molecule = names["read_molecule"](smiles)
        used: Counter[int] = Counter()
        for one, other, order in molecule.bonds:
            used.update({one: order, other: order})
        assert all(used[number] <= most[atom.capitalize()] for number, atom in enumerate(molecule.atoms)), smiles
    known = {
        "CCO": (0, 0.3 - 0.445),
        "c1ccccc1": (1, 2.4 + 0.5),
        "c1ccc2ccccc2c1": (2, 4.0 + 1.0),
        "C#N": (0, -0.3 - 0.735),
    }
    for smiles, (rings, value) in known.items():
        molecule = names["read_molecule"](smiles)
        assert molecule.rings() == rings
        assert names["property_of"](molecule) == pytest.approx(value)
    for wrong in ("C(", "c1ccccc", "CXC"):
        with pytest.raises(ValueError, match="does not end|none of"):
            names["read_molecule"](wrong)


def bytes_of_tables(rank: int, world_size: int, rows: int, width: int) -> list[int]:
    """The elements of a table that this rank has: of the parameter, the gradient and the optimizer's state."""
    tsm.init()
    table = nn.Embedding(rows, width)
    fully_shard(table)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    table(torch.arange(4)).sum().backward()
    optimizer.step()
    parts = [table.weight, table.weight.grad, optimizer.state[table.weight]["sum"]]
    return [part.to_local().numel() for part in parts]


def test_rows_of_a_table_are_shared_out() -> None:
    rows, width = 10, 3
    parts = run_ranks(bytes_of_tables, 4, rows, width)
    assert parts == [[3 * width] * 3, [3 * width] * 3, [3 * width] * 3, [width] * 3]
