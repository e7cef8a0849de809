"""Blocks of code in the pages, asked of those who know: the program parses its command lines, argparse of a script its
options, gtest its filters, the package its names and configurations. tools/check_examples.py has the rule, and looks up
what needs no build."""

from __future__ import annotations

import argparse
import ast
import fnmatch
import importlib
import importlib.util
import inspect
import io
import json
import multiprocessing
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.run
import torch.utils.data  # noqa: F401  (these two: so that the processes, which are forked, need not import them)

import tesserae as tsm
from tesserae import _C

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_examples  # noqa: E402
import check_figures  # noqa: E402
from check_examples import Block  # noqa: E402

BUILD = Path(_C.__file__).absolute().parents[2]
BLOCKS = [block for block in check_examples.all_blocks() if block.marker != "not run"]
COMMANDS = [
    (block, words)
    for block in BLOCKS
    if block.language in ("sh", "bash")
    for words in check_examples.commands_of(block.text)
]
TREE = check_figures.Tree(lambda path: (ROOT / path).read_text() if (ROOT / path).is_file() else None)
IN_PYTHON = ("tokenize",)  # verbs that hand their arguments on to a module of the package
# Packages that a page may import and a test does not have.
READERS = {"xxhash", "wandb", "mlflow", "deepspeed", "smdebug", "sagemaker", "megatron", "boto3", "torchtitan"}
PROBE = "--this-option-does-not-exist"


def ran(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, **options)


# ---- the program ----
def of_program() -> list[tuple[Block, list[str]]]:
    return [(block, words) for block, words in COMMANDS if words[0].rpartition("/")[2] == "tesserae"]


def own_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Without those of the script that the program starts."""
    scripts = [at for at, word in enumerate(words) if words[0] == "run" and word.endswith(".py")]
    return words[: scripts[0]] if scripts else words


def readers_files(folder: Path) -> None:
    """Files that pages name and a reader has: each with what is in one of that name."""
    tiny = json.loads((ROOT / "examples/tiny.json").read_text())
    for name in ("job.json", "train.json", "my.json"):
        (folder / name).write_text(json.dumps(tiny))
    (folder / "config.json").write_text(json.dumps(tiny))
    (folder / "machine.json").write_text("{}")
    for name in ("examples", "bench"):
        (folder / name).symlink_to(ROOT / name)


def test_the_program_understands_its_command_lines(tmp_path: Path) -> None:
    """An option that there is not makes CLI11 complain of nothing but that option, before anything is done. Those of
    `tesserae train` test_configurations_of_trainings_are_valid tries, those of IN_PYTHON are a script's."""
    readers_files(tmp_path)
    lines = {tuple(w[1:]): b for b, w in of_program() if w[1] not in ("train", *IN_PYTHON) and "--help" not in w}
    assert len(lines) > 20

    def wrong(line: tuple[tuple[str, ...], Block]) -> str | None:
        words, block = line
        for _ in words:
            done = ran(BUILD / "cli" / "tesserae", *own_words(words), PROBE, cwd=tmp_path)
            if done.returncode == 2 and done.stderr.startswith(f"The following argument was not expected: {PROBE}\n"):
                return None
            if not (missing := re.search(r": (Path|File) does not exist: (\S+)", done.stderr)):
                break
            path = tmp_path / missing[2]  # the reader has it
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch() if missing[1] == "File" else path.mkdir(exist_ok=True)
        return f"{block.where}: tesserae {' '.join(words)}: {done.stderr.strip()}"

    with ThreadPoolExecutor(2) as pool:
        assert [found for found in pool.map(wrong, lines.items()) if found] == []


def test_configurations_of_trainings_are_valid(tmp_path: Path) -> None:
    """With their options, and with what --set changes in them."""
    readers_files(tmp_path)
    lines = {}
    for block, words in of_program():
        if words[1] == "train" and len(words) > 2 and not words[2].startswith("$"):
            # Folders of the reader's machine are not looked for.
            words = [re.sub(r"(offload\.folder=)/.*", rf"\1{tmp_path}", word) for word in words]
            lines[tuple(words[1:])] = block
    assert len(lines) > 8

    def wrong(line: tuple[tuple[str, ...], Block]) -> str | None:
        words, block = line
        ranks = () if "--nproc" in words else ("--nproc", "4")
        done = ran(BUILD / "cli" / "tesserae", *words, *ranks, "--dry-run", cwd=tmp_path)
        return f"{block.where}: {' '.join(words)}: {done.stderr.strip()}" if done.returncode else None

    with ThreadPoolExecutor(2) as pool:
        assert [found for found in pool.map(wrong, lines.items()) if found] == []


def test_json_is_what_the_program_reads(tmp_path: Path) -> None:
    """A block of JSON is a configuration, or a part of one, unless it is marked."""
    for block in BLOCKS:
        if block.language == "json" and not block.marker:
            configuration = json.loads((ROOT / "examples/tiny.json").read_text())
            merge(configuration, json.loads(block.text))
            (tmp_path / "job.json").write_text(json.dumps(configuration))
            done = ran(BUILD / "cli" / "tesserae", "train", "job.json", "--nproc", "4", "--dry-run", cwd=tmp_path)
            # Keys and values are checked before the reader's data are looked for.
            looked = "data.path: there is no file or folder" in done.stderr
            assert done.returncode == 0 or looked, f"{block.where}: {done.stderr}"


def merge(into: dict[str, Any], what: dict[str, Any]) -> None:
    for key, value in what.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


# ---- tests and scripts ----
def test_filters_of_tests_match_some() -> None:
    filters: dict[Path, list[tuple[Block, str]]] = defaultdict(list)
    wrong = []
    for block, words in COMMANDS:
        if not re.match(r"build/\w+/tests/", words[0]):
            continue
        binary = BUILD / words[0].split("/", 2)[2]
        if not binary.is_file():
            wrong.append(f"{block.where}: {words[0]} was not built")
        for word in words[1:]:
            if word.startswith("--gtest_filter="):
                wanted = word.partition("=")[2].partition("-")[0].split(":")
                filters[binary] += [(block, pattern) for pattern in wanted]
    assert len(filters) > 5
    with ThreadPoolExecutor(2) as pool:
        for binary, names in zip(filters, pool.map(names_of_tests, filters), strict=True):
            for block, pattern in filters[binary]:
                if not fnmatch.filter(names, pattern):
                    wrong.append(f"{block.where}: {binary.name} has no test {pattern}")
    assert wrong == []


def names_of_tests(binary: Path) -> list[str]:
    """Suite.Test of each."""
    names, suite = [], ""
    for line in ran(binary, "--gtest_list_tests").stdout.splitlines():
        name = line.partition("#")[0].rstrip()
        if name.endswith(".") and not name.startswith(" "):
            suite = name
        elif name.startswith("  "):
            names.append(suite + name.strip())
    return names


class Parsed(BaseException):
    """What is thrown where a script's arguments have been understood."""


def parse_all(script: str, lines: list[list[str]]) -> list[str]:
    """What argparse says against any of these arguments of a script, in a process of its own."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        parse(self, args, namespace)
        raise Parsed

    argparse.ArgumentParser.parse_args = stop  # type: ignore[assignment,method-assign]
    wrong = []
    for arguments in lines:
        said = io.StringIO()
        sys.argv = [script, *arguments]
        try:
            with redirect_stderr(said), redirect_stdout(said):
                if script.startswith("-m "):
                    runpy.run_module(script[3:], run_name="__main__")
                else:
                    sys.path.insert(0, str((ROOT / script).parent))
                    runpy.run_path(str(ROOT / script), run_name="__main__")
            said.write("it ended without reading its arguments")
        except Parsed:
            continue
        except SystemExit as end:
            if not end.code and {"--help", "-h"} & set(arguments):
                continue
        except ModuleNotFoundError as error:
            unknown = [word for word in arguments if word.startswith("--") and f'"{word}"' not in source_of(script)]
            if error.name in READERS and not unknown:  # the reader has it: then its text must have the options
                continue
            said.write(f"{error!r}; options that its text lacks: {unknown}")
        except Exception as error:
            said.write(repr(error))
        wrong.append(f"{script} {' '.join(arguments)}: {said.getvalue().strip()}")
    return wrong


def scripts() -> dict[str, list[list[str]]]:
    """Ours, with the arguments that pages give them."""
    found: dict[str, list[list[str]]] = defaultdict(list)
    for _, words in COMMANDS:
        if words[0] == "torchrun":
            options = torch.distributed.run.get_args_parser().parse_args(words[1:])  # ends the test where it cannot
            script, arguments = options.training_script, list(options.training_script_args)
            script = f"-m {script}" if options.module else script
        elif words[0].rpartition("/")[2] == "tesserae" and words[1] in IN_PYTHON:
            script, arguments = f"-m tesserae.{words[1]}", words[2:]
        elif script_words := check_examples.script_of(words):
            script, arguments = script_words
        else:
            continue
        of_tree = script.startswith("-m tesserae.") or (script.endswith(".py") and check_examples.is_of_tree(script))
        if of_tree and arguments not in found[script]:
            found[script].append(arguments)
    return found


def source_of(script: str) -> str:
    path = ROOT / "python" / (script[3:].replace(".", "/") + ".py") if script.startswith("-m ") else ROOT / script
    return path.read_text()


def takes_arguments(script: str) -> bool:
    return "parse_args(" in source_of(script) or "from recipe import" in source_of(script)


@pytest.mark.parametrize("script", sorted(script for script in scripts() if takes_arguments(script)))
def test_scripts_understand_their_options(script: str) -> None:
    lines = scripts()[script]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(parse_all, (script, lines)) == []


def test_scripts_without_options_are_given_none() -> None:
    plain = {script: lines for script, lines in scripts().items() if not takes_arguments(script)}
    assert [
        (script, line)
        for script, lines in plain.items()
        for line in lines
        if line and "sys.argv" not in (ROOT / script).read_text()
    ] == []


# ---- Python ----
class Names(ast.NodeVisitor):
    """What a block says of the package that is not so."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"tsm": tsm, "tesserae": tsm}
        self.wrong: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            module = self.module(alias.name)
            if module is not None:
                self.names[alias.asname or alias.name.partition(".")[0]] = (
                    module if alias.asname else sys.modules[module.__name__.partition(".")[0]]
                )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self.module(node.module or "")
        for alias in node.names:
            if module is None:
                continue
            if not hasattr(module, alias.name) and not importlib.util.find_spec(f"{module.__name__}.{alias.name}"):
                self.wrong.append(f"{node.module} has no {alias.name}")
            else:
                self.names[alias.asname or alias.name] = getattr(module, alias.name, None)

    def module(self, name: str) -> ModuleType | None:
        """None for those of others: that they are installed is all that is looked at."""
        ours = name.replace("torch.sagemaker", "tesserae")
        top = ours.partition(".")[0]
        try:
            if top in ("tesserae", "torch") or top in sys.stdlib_module_names:
                return importlib.import_module(ours)
            if importlib.util.find_spec(top) is None and top not in READERS:
                self.wrong.append(f"no module {top}")
        except ImportError as error:
            self.wrong.append(f"import {name}: {error}")
        return None

    def value(self, node: ast.expr) -> Any:
        """What a dotted name stands for, None where that is not known."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if owner is tsm.state:
                owner = type(owner)
            if isinstance(owner, (ModuleType, type)):
                if not hasattr(owner, node.attr):
                    self.wrong.append(f"{ast.unparse(node)}: {owner.__name__} has no {node.attr}")
                return getattr(owner, node.attr, None)
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.value(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self.value(node.func)
        if callable(called) and str(getattr(called, "__module__", "")).startswith("tesserae"):
            self.check_call(node, called)
        self.generic_visit(node)

    def check_call(self, node: ast.Call, called: Any) -> None:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        spread = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
        if not spread and not any(isinstance(a, ast.Constant) and a.value is ... for a in given):
            try:
                inspect.signature(called).bind(*node.args, **{str(k.arg): k.value for k in node.keywords})
            except TypeError as error:
                self.wrong.append(f"{ast.unparse(node)}: {error}")
        if called is tsm.init and node.args:
            try:
                _C.validate_init_config(json.dumps(ast.literal_eval(node.args[0])))
            except tsm.InvalidArgument as error:
                self.wrong.append(str(error))
            except ValueError:
                pass  # no literal: a name of the script's


def wrong_names(text: str) -> list[str]:
    names = Names()
    names.visit(ast.parse(text))
    return list(dict.fromkeys(names.wrong))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=lambda block: block.where)
def test_python_names_what_there_is(block: Block) -> None:
    assert wrong_names(block.text) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('import tesserae as tsm\ntsm.init({"hybrid_shard_degree": 2})\nprint(tsm.state.dp_rank)', None),
        ("from torch.distributed.fsdp import fully_shard\nfully_shard(model)", None),
        ("import torch.sagemaker as tsm\ntsm.transform(model)", None),
        ('tsm.init({"hybrid_shard_degrees": 2})', "hybrid_shard_degree"),
        ("tsm.reshards(model)", "has no reshards"),
        ("tsm.reshard(model, optimizer, degree=2)", "unexpected keyword argument 'degree'"),
        ("tsm.state.tp_ranc", "has no tp_ranc"),
        ("from tesserae.checkpoint import store", "has no store"),
    ],
)
def test_a_wrong_name_is_found(text: str, wrong: str | None) -> None:
    found = wrong_names(text)
    assert found == [] if wrong is None else len(found) == 1 and wrong in found[0]


# ---- the rule itself ----
def block_of(language: str, text: str, above: str = "") -> list[str]:
    page = f"# A page\n{above}```{language}\n{text}\n```\n"
    return [w for b in check_examples.blocks_of("README.md", page) for w in check_examples.wrong_block(b, TREE)]


@pytest.mark.parametrize(
    ("language", "text", "above", "wrong"),
    [
        ("sh", "make demo DEMO_ARGS='--set a=1' && kill -9 $(pgrep -n tesserae)   # while it trains", "", None),
        ("sh", "srun -N 2 bash -c 'RANK=1 exec python \"$@\"' rank train.py | tee log 2>&1", "", None),
        ("sh", "for i in 1 2; do\n  build/release/tests/comm/test_comm --gtest_filter='A*:B'\ndone", "", None),
        ("sh", "torchrun --nproc-per-node 2 examples/python/fully_shard.py", "", None),
        ("text", "anything $( at all", "", None),
        ("sh", "whatever it is", "<!-- not run: needs a cluster of its own -->\n", None),
        ("cpp", "void train() {", "<!-- runs: tests/train/readme_test.cpp -->\n", None),
        ("", "ls", "", "does not say what it is"),
        ("sh", "make demon", "", "no target demon"),
        ("sh", "make demo DEMO_ARG=1", "", "no variable DEMO_ARG"),
        ("sh", "echo $(tesserea train)", "", "'tesserea'"),
        ("sh", "srun -N 2 tesserae train && tesserae trains x", "", "no verb 'trains'"),
        ("sh", "tail -f examples/nothing.json", "", "no examples/nothing.json"),
        ("sh", "python bench/compare.py --case A", "", "no option --case"),
        ("sh", "build/release/tests/comm/test_com", "", "no test com"),
        ("sh", "if true; then echo", "", "syntax error"),
        ("python", "def f(:", "", "line 1 of the block"),
        ("json", "{1: 2}", "", "Expecting property name"),
        ("yaml", "a: 1", "", "name the test that runs it"),
        ("yaml", "a: 1", "<!-- not run: no -->\n", "without a reason"),
        ("cpp", "int x;", "<!-- runs: tests/nowhere_test.cpp -->\n", "no test 'tests/nowhere_test.cpp'"),
        ("cpp", "int quite_another;", "<!-- runs: tests/base/error_test.cpp -->\n", "neither reads README.md"),
    ],
)
def test_the_rule_of_blocks(language: str, text: str, above: str, wrong: str | None) -> None:
    found = block_of(language, text, above)
    assert found == [] if wrong is None else found and wrong in found[0]


def test_a_marker_is_of_the_block_below_it() -> None:
    page = "<!-- runs: a -->\n```sh\nls\n```\ntext\n<!-- not run: for a reason -->\n\n```sh\nls\n```\n```sh\nls\n```\n"
    found = [(block.marker, block.said) for block in check_examples.blocks_of("a.md", page)]
    assert found == [("runs", "a"), ("not run", "for a reason"), ("", "")]


def test_code_that_is_indented_is_found() -> None:
    indented = "# A\n\n    tesserae train\n"
    assert check_examples.wrong_indented("a.md", indented) == [
        "a.md:3: code that is indented: write ``` with its language"
    ]
    assert check_examples.wrong_indented("a.md", "- one\n\n    goes on\n\n```sh\n\n    ls\n```\n") == []
