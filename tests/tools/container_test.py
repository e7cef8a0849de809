"""Dockerfile: what Docker would refuse or build wrongly, without Docker; and its steps, without a container."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = ROOT / "tools" / "container_steps.sh"
SHELL_STEP = re.compile(r"tools/container_steps\.sh ([a-z]+)")
KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD"}

Instruction = tuple[str, str]


def instructions(file: Path) -> list[Instruction]:
    """As Docker reads them: lines that end with a backslash go on, comments are lines of their own."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in joined)]


def ignored(path: str) -> bool:
    """By .dockerignore, whose last pattern that fits counts. (It has only names at the root, with a star.)"""
    top, left_out = Path(path.rstrip("/")).parts[0], False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#") and Path(top).match(pattern.removeprefix("!")):
            left_out = not pattern.startswith("!")
    return left_out


FILES = [ROOT / "Dockerfile", ROOT / "examples" / "sagemaker" / "Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_instructions_are_dockers(file: Path) -> None:
    found = instructions(file)
    assert {word for word, _ in found} <= KNOWN
    assert next(word for word, _ in found if word != "ARG") == "FROM"
    for word, rest in found:
        assert rest, word
        if word == "CMD":
            assert all(isinstance(part, str) for part in json.loads(rest))
        if word in ("ARG", "ENV"):
            assert re.fullmatch(r"[A-Z_]+=\S*", rest), rest


def test_what_is_copied_is_there() -> None:
    stages: list[str] = []
    for word, rest in instructions(FILES[0]):
        if word == "FROM":
            stages.append(rest.split()[-1])
            assert re.fullmatch(r"\S+ AS [a-z]+", rest), rest
        if word != "COPY":
            continue
        *sources, target = rest.split()
        if sources[0].startswith("--from="):
            assert sources.pop(0).removeprefix("--from=") in stages[:-1]
            continue
        for source in sources:
            assert (ROOT / source).exists() and not ignored(source), source
            assert (ROOT / source).is_dir() == source.endswith("/"), source
        assert len(sources) == 1 or target.endswith("/"), f"Docker wants a folder for several files: {rest}"


def test_each_step_is_one_of_the_script_in_its_order() -> None:
    """So that what is tested below is what Docker does."""
    order: dict[str, list[str]] = {}
    for word, rest in instructions(FILES[0]):
        if word == "FROM":
            stage = order.setdefault(rest.split()[-1], [])
        if word == "RUN":
            step = SHELL_STEP.fullmatch(rest)
            assert step is not None, rest
            stage.append(step[1])
    assert order == {"build": ["environment", "packages", "wheel"], "run": ["environment", "install", "check"]}


def test_the_torch_is_that_of_the_tests() -> None:
    [pinned] = re.findall(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    arguments = [rest for word, rest in instructions(FILES[0]) if word == "ARG" and rest.startswith("TORCH=")]
    assert arguments == [f"TORCH={pinned}"] * 2


def test_a_step_that_is_none_is_named() -> None:
    done = subprocess.run([STEPS, "instal"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "container_steps: unknown step 'instal'; see --help\n")
    assert "environment" in subprocess.run([STEPS, "--help"], capture_output=True, text=True, timeout=60).stdout


@pytest.mark.long
def test_the_steps_in_folders_of_their_own(tmp_path: Path) -> None:
    """Both stages in their order, each with a copy of what the Dockerfile copies into it and nothing else. The wheel is
    what goes from one to the other. (Packages are this machine's: `packages` finds that nothing is missing.)"""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TESSERAE") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    stage = tmp_path
    for word, rest in instructions(FILES[0]):
        if word == "FROM":
            stage = tmp_path / rest.split()[-1]
            environment |= {"TESSERAE_PREFIX": str(stage / "environment"), "WHEELS": str(tmp_path / "wheels")}
        elif word == "COPY" and not rest.startswith("--from="):
            *sources, target = rest.split()
            for source in sources:
                to = stage / "source" / target / ("" if source.endswith("/") else Path(source).name)
                to.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if source.endswith("/") else shutil.copy2
                copy(ROOT / source, to, **({"dirs_exist_ok": True} if source.endswith("/") else {}))
        elif word == "RUN":
            words = [stage / "source" / rest.split()[0], *rest.split()[1:]]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=7200, cwd=tmp_path)
            assert done.returncode == 0, f"{rest}\n{done.stdout}\n{done.stderr}"
    assert "works with torch" in done.stdout and "launcher" in done.stdout
