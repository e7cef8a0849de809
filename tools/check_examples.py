#!/usr/bin/env python3
"""Blocks of code in README.md, CONTRIBUTING.md and docs/: each is run by a test, checked, or says why it is not.

What a block is, its language says; a block without one is an error, and so is code that is indented instead.
  sh      Each command is one that there is: our program, scripts, targets and tests (with their options), files of the
          tree, or a program of FOREIGN. The shell can parse it.
  python  It compiles.
  json    It parses.
  text    What a program prints, or a drawing: nothing to check.
  others  (cpp, yaml, dockerfile, ...) must be run by a test.
A comment right above a block says more:
  <!-- runs: tests/x/y_test.py -->  that test runs it: it reads the page, or has the same text in it. Any language.
  <!-- not run: reason -->          nobody checks it, for that reason.
tests/tools/docs_blocks_test.py asks the program itself, the scripts and the package about what this can only look up.
Prints one line per violation, exit status 1 if any. With --list: how each block is checked.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import check_figures
from check_links import pages

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^([ >]*)(```+|~~~+)([^\n]*)\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!-- (runs|not run): *((?:(?!-->).)*?) *-->[ \t]*\n\s*\Z", re.DOTALL)
INDENTED = re.compile(r"(?:\A|\n[ \t]*\n|^#+ [^\n]*\n)((?:(?:    |\t)[^\n]*\n)+)", re.MULTILINE)
# Programs of others that pages may call.
FOREIGN = set(
    "apt-get aws bash cat cd chmod cmake conda cp cuda-gdb curl docker echo env eval exit export git head helm jq "
    "kill kubectl ln ls mkdir mpiexec mpirun mv nvidia-smi nvcc pip pgrep podman pre-commit prlimit ps py-spy rm rsync "
    "sacct salloc sbatch scancel scontrol scp sed set sinfo sleep source squeue srun ssh sudo sync tail tar tee "
    "time touch ulimit umount mount uv valgrind wget xargs".split()
)
KEYWORDS = {"do", "then", "else", "if", "elif", "while", "until", "!", "exec", "time", "sudo", "nohup", "env"}
SILENT = {"for", "done", "fi", "{", "}", "[", "[[", "case", "esac", "true", "false", ":", "in", "function"}
VERBS = set(re.findall(r"void add_(\w+)\(CLI::App&", (ROOT / "cli/verbs.h").read_text()))


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    marker: str  # "runs", "not run" or ""
    said: str  # behind the marker

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        language = found[3].strip().partition(" ")[0]
        if language.startswith("{"):  # a directive of the site
            continue
        marker = MARKER.search(text, 0, found.start())
        body = re.sub(rf"^{re.escape(found[1])}", "", found[4], flags=re.MULTILINE) if found[1] else found[4]
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, language, body, marker[1] if marker else "", marker[2] if marker else "")


def all_blocks() -> list[Block]:
    return [block for page in pages() if page != "CHANGELOG.md" for block in blocks_of(page, (ROOT / page).read_text())]


# ---- the shell ----
def commands_of(text: str) -> list[list[str]]:
    """The simple commands of a script as words, in order: those of pipes, lists, substitutions and `bash -c`, too."""
    text = re.sub(r"\$\(\([^)]*\)\)", "0", text.replace("\\\n", " "))
    text = re.sub(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n.*?^\2$", r"\3", text, flags=re.MULTILINE | re.DOTALL)
    found: list[list[str]] = []
    pending = ""
    for line in text.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=";&|()<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation goes on in the next line
            continue
        pending = ""
        found += simple_commands(words)
    return found


def simple_commands(words: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    skip = False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"[<>]+&?", word):
            if found[-1] and found[-1][-1].isdigit():
                found[-1].pop()
            skip = True
        elif re.fullmatch(r"[;&|()]+", word):
            found.append([])
        else:
            found[-1].append(word)
    return [inner for command in found for inner in unwrapped(command)]


def unwrapped(words: list[str]) -> list[list[str]]:
    """Without assignments and keywords before it; and what a launcher starts, as a command of its own."""
    while words and (words[0] in KEYWORDS or re.match(r"\w+=", words[0])):
        words = words[1:]
    words = [word for word in words if word not in ("$", "}", '"$@"', "&")]
    if not words or words[0] in SILENT or re.match(r"\w+=", words[0]):
        return []
    if words[0] == "bash" and "-c" in words[:-1]:
        return commands_of(words[words.index("-c") + 1])
    if words[0] == "bench/hosts.sh" and "--" in words:
        cut = words.index("--")
        return [words[:cut], *unwrapped(words[cut + 1 :])]
    if words[0] in FOREIGN:
        for at in range(1, len(words)):
            rest = words[at:]
            if is_ours(rest) or (words[0] in ("srun", "mpirun", "mpiexec") and rest[0] in ("torchrun", "bash")):
                return [words[:at], *unwrapped(rest)]
    if words[0] == "sbatch" and "examples/slurm/train.sbatch" in words:
        return [words, ["tesserae", "train", *words[words.index("examples/slurm/train.sbatch") + 1 :]]]
    return [words]


def is_ours(words: list[str]) -> bool:
    program = words[0]
    if program == "tesserae" or program.endswith("/cli/tesserae"):
        return len(words) > 1 and words[1] in VERBS
    if re.fullmatch(r"(?:\S*/)?python3?", program):
        return len(words) > 1 and (words[1].endswith(".py") or words[1] in ("-m", "-c"))
    return bool(re.match(r"(?:build/\w+/(?:tests|bench)/|tools/|bench/)", program))


def script_of(words: list[str]) -> tuple[str, list[str]] | None:
    """What `python` or `torchrun` runs ("-m NAME" for a module, "" for a program of its own), and its arguments."""
    if re.fullmatch(r"(?:\S*/)?python3?", words[0]):
        at = next((i for i, word in enumerate(words[1:], 1) if not word.startswith("-") or word in ("-m", "-c")), None)
    elif words[0] == "torchrun":
        at = next((i for i, w in enumerate(words) if w.endswith(".py") or w == "-m" or is_ours(words[i:])), None)
    else:
        return None
    if at is None:
        return None
    if words[at] == "-m":
        return f"-m {words[at + 1]}", words[at + 2 :]
    return words[at], words[at + 1 :]


def wrong_command(words: list[str], tree: check_figures.Tree) -> str | None:
    """What is wrong with it as far as the tree says; None: nothing."""
    program = words[0]
    if program == "tesserae" or program.endswith("/cli/tesserae"):
        verb = next((word for word in words[1:] if not word.startswith("-")), "")
        return None if verb in VERBS or set(words[1:]) <= {"--help", "--version"} else f"tesserae has no verb {verb!r}"
    if program == "make":
        return wrong_target(words[1:], tree.read("Makefile") or "")
    missing = next((word for word in words if is_of_tree(word) and not (ROOT / word).exists()), None)
    if missing:
        return f"there is no {missing}"
    if program in FOREIGN or program == "torchrun" or re.fullmatch(r"(?:\S*/)?python3?", program):
        found = script_of(words)
        words = ["python", found[0], *found[1]] if found and found[0].endswith(".py") else []
    elif not is_ours(words):
        return f"nobody knows the command {program!r}: a misspelling, or missing in FOREIGN of tools/check_examples.py"
    if test := re.match(r"build/\w+/tests/(\w+)/test_(\w+)$", words[0] if words else ""):
        rules = tree.read(f"tests/{test[1]}/CMakeLists.txt") or ""
        names = {test[2], test[2].removeprefix(f"{test[1]}_")}  # of a loop: tesserae_test(train_${name} ...)
        return None if any(re.search(rf"\b{name}\b", rules) for name in names) else f"there is no test {test[2]}"
    line = check_figures.COMMAND.search(" ".join(map(shlex.quote, words)))
    return tree.missing(line) if line else None


def wrong_target(words: list[str], makefile: str) -> str | None:
    for word in words:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^{re.escape(name)} *\?=" if is_variable else rf"^{re.escape(name)}:"
        if not word.startswith("-") and not re.search(pattern, makefile, re.MULTILINE):
            return f"the Makefile has no {'variable' if is_variable else 'target'} {name}"
    return None


def is_of_tree(word: str) -> bool:
    """Whether it names a file that the tree must have: not one that is made (build/, runs/), nor the reader's own."""
    return bool(re.fullmatch(r"(?:bench|cli|cmake|docs|examples|python|tesserae|tests|tools)/[\w./-]+", word)) and not (
        word.startswith("bench/out/")
    )


# ---- a block ----
def wrong_block(block: Block, tree: check_figures.Tree) -> list[str]:
    if block.marker == "not run":
        return [] if len(block.said.split()) >= 3 else [f"{block.where}: `not run` without a reason"]
    wrong = wrong_test(block, tree) if block.marker == "runs" else []
    if block.language == "":
        wrong.append(f"{block.where}: the block does not say what it is: sh, python, json, ..., or text for output")
    elif block.language in ("sh", "bash"):
        syntax = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        wrong += [f"{block.where}: {line}" for line in syntax.stderr.splitlines()]
        if not wrong:
            found = [wrong_command(words, tree) for words in commands_of(block.text)]
            wrong += [f"{block.where}: {text}" for text in found if text]
    elif block.language == "python":
        try:
            ast.parse(block.text)
        except SyntaxError as error:
            wrong.append(f"{block.where}: line {error.lineno} of the block: {error.msg}")
    elif block.language == "json":
        try:
            json.loads(block.text)
        except ValueError as error:
            wrong.append(f"{block.where}: {error}")
    elif block.language != "text" and not block.marker:
        wrong.append(
            f"{block.where}: {block.language} is not checked by itself: name the test that runs it, or say why"
        )
    return wrong


def wrong_test(block: Block, tree: check_figures.Tree) -> list[str]:
    """The test that a block names reads its page, or has the block's text."""
    path = block.said.split()[0] if block.said else ""
    source = tree.read(path) if path.startswith("tests/") else None
    if source is None:
        return [f"{block.where}: there is no test {path!r}"]
    page = Path(block.page)
    reads = page.name in source or (f'"{page.parent.name}"' in source and '.md"' in source)
    squeezed = re.sub(r"\s+", "", source)
    if not reads and re.sub(r"\s+", "", block.text) not in squeezed:
        return [f"{block.where}: {path} neither reads {block.page} nor has this text in it"]
    return []


def wrong_indented(page: str, text: str) -> list[str]:
    blank = FENCE.sub(lambda found: re.sub(r"[^\n]+", "-", found[0]), text)
    found = [m for m in INDENTED.finditer(blank) if not in_list(blank[: m.start()])]
    return [
        f"{page}:{blank.count(chr(10), 0, m.start(1)) + 1}: code that is indented: write ``` with its language"
        for m in found
    ]


def in_list(before: str) -> bool:
    last = before.rstrip().rsplit("\n\n", 1)[-1]
    return bool(re.match(r"\s*(?:[-*]|\d+\.) ", last)) or last.startswith("  ")


def how(block: Block) -> str:
    if block.marker:
        return f"{block.marker}: {block.said}"
    return {"text": "output", "sh": "commands exist, options are known"}.get(block.language, "parsed, names exist")


def main(arguments: list[str]) -> int:
    blocks = all_blocks()
    if arguments == ["--list"]:
        print("\n".join(f"{block.where}: {block.language}: {how(block)}" for block in blocks))
        return 0
    if arguments:
        print("usage: check_examples.py [--list]", file=sys.stderr)
        return 2
    tree = check_figures.Tree(lambda path: (ROOT / path).read_text() if (ROOT / path).is_file() else None)
    wrong = [found for block in blocks for found in wrong_block(block, tree)]
    wrong += [found for page in pages() for found in wrong_indented(page, (ROOT / page).read_text())]
    print("\n".join(wrong) if wrong else f"examples: {len(blocks)} blocks are run, checked or marked")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
