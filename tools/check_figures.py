#!/usr/bin/env python3
"""No figure without a command: what README.md, docs/performance.md and docs/faults.md say was measured, anybody can
measure again. And no command in any document of docs/ that is not there.

 1. A section (from one heading of the second or third level to the next) in which a figure has a unit of time, of
    memory or of speed, a percentage or "times", names a command: in a code span or a code block.
 2. What a table's markers (<!-- name:begin -->) are filled in by, stands in its section: the script that has that name
    in it, or a target of make.
 3. Every command of these and all other documents of docs/ is there: script, program or target; and the options that
    it is given.

Prints one line per violation, exit status 1 if any.
"""

import re
import sys
from pathlib import Path

DOCUMENTS = ("README.md", "docs/performance.md", "docs/faults.md")
HEADING = re.compile(r"^#{1,3} .*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
MARKER = re.compile(r"<!-- ([\w-]+):begin -->")
UNIT = r"(?:[mµ]?s|min|h|[kKMG]i?B|[kKMG]?B/s|tokens/s|times|x|%)"
FIGURE = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+)?(?: to \d[\d,.]*)? ?{UNIT}(?![\w`])")
TABLE_UNIT = re.compile(r"^\|.*\b(?:ms|µs|seconds|MiB|tokens/s)\b.*\|$", re.MULTILINE)
COMMAND = re.compile(
    r"(?:^|(?<=[\s(;]))(?:python3? (?P<script>(?:bench|tools|tests)/[\w/]+\.py)"
    r"|(?P<tool>(?:bench|tools)/[\w/]+\.(?:sh|py))"
    r"|build/\w+/bench/bench_(?P<bench>\w+)|build/\w+/tests/(?P<layer>\w+)/(?P<test>test_\w+)"
    r"|(?P<program>build/\w+/cli/tesserae)|make (?P<target>[a-z-]+))(?P<rest>[^\n;|&]*)"
)
OPTION = re.compile(r"(?<=\s)(--[a-z][\w-]*)")


def sections(text):
    """Heading and text of each, and the line on which it begins."""
    starts = [0] + [found.start() for found in HEADING.finditer(FENCE.sub(lambda f: "\0" * len(f[0]), text))]
    for begin, end in zip(starts, starts[1:] + [len(text)]):
        body = text[begin:end]
        yield body.partition("\n")[0].lstrip("# "), body, text.count("\n", 0, begin) + 1


def commands_of(body):
    """What may be run, in code spans and blocks, with a span or a line that was broken put together again."""
    blocks = [block.replace("\\\n", " ") for block in FENCE.findall(body)]
    spans = [re.sub(r"\s+", " ", span) for span in SPAN.findall(FENCE.sub("", body))]
    return [found for text in blocks + spans for found in COMMAND.finditer(text)]


def has_figures(body):
    prose = SPAN.sub("", FENCE.sub("", body))
    return bool(FIGURE.search(prose) or TABLE_UNIT.search(prose))


class Tree:
    """What there is to run. `read` gives the text of a file, None if there is none."""

    def __init__(self, read):
        self.read = read

    def missing(self, command):
        """What of the command is not there; None if all of it is."""
        sources, name = self.sources(command)
        if not sources:
            return f"there is no {name}"
        if command["target"] or command["program"]:
            return None  # make has no options of ours, those of the program are checked by its own tests
        allowed = "".join(sources) + "--gtest_filter --help"
        for option in OPTION.findall(command["rest"].partition(" -- ")[0]):
            if not re.search(re.escape(option) + r"(?![\w-])", allowed):
                return f"{name} has no option {option}"
        return None

    def sources(self, command):
        """The texts in which the command's options are, none if it is not there; and what to call it."""
        if path := command["script"] or command["tool"]:
            return [text for text in [self.read(path)] if text is not None], path
        if command["bench"]:
            made = f"tesserae_bench({command['bench']} SOURCES "
            rules = self.read("bench/CMakeLists.txt") or ""
            listed = rules.partition(made)[2].partition(" LINK")[0].split()
            return [self.read(f"bench/{source}") or "" for source in listed], f"bench_{command['bench']}"
        if command["test"]:
            rules = self.read(f"tests/{command['layer']}/CMakeLists.txt") or ""
            name = command["test"].removeprefix("test_")
            in_a_loop = f"{command['layer']}_${{name}}" in rules  # foreach(name a b) ... LAYER_${name}
            names = [name, name.removeprefix(f"{command['layer']}_")] if in_a_loop else [name]
            there = any(re.search(rf"\b{each}\b", rules) for each in names)
            return [rules] if there else [], f"{command['layer']}/{command['test']}"
        if command["target"]:
            rules = self.read("Makefile") or ""
            there = re.search(rf"^{command['target']}:", rules, re.MULTILINE)
            return [rules] if there else [], f"target {command['target']}"
        return ["tesserae"], "tesserae"

    def fills(self, command, marker):
        """Whether the command writes between those markers."""
        if command["target"]:
            return "bench" in command["target"]
        return any(f'"{marker}"' in text for text in self.sources(command)[0]) if command["script"] else False


def check(path, text, tree, measures=True):
    """`measures`: it is one of DOCUMENTS."""
    found = []
    for heading, body, line in sections(text):
        commands = commands_of(body)
        where = f"{path}:{line}: {heading!r}"
        found += [f"{where}: {wrong}" for command in commands if (wrong := tree.missing(command))]
        if not measures:
            continue
        measuring = [c for c in commands if not c["program"] and c["target"] not in ("setup", "demo", "build", "check")]
        for marker in MARKER.findall(body):
            if not any(tree.fills(command, marker) for command in measuring):
                found.append(f"{where}: nothing beside <!-- {marker}:begin --> says what fills it in")
        if has_figures(body) and not measuring:
            found.append(f"{where}: figures, and no command that measures them")
    return found


def self_test():
    files = {
        "bench/a.py": 'parser.add_argument("--rounds")\nupdate(document, "a", text)\n',
        "bench/CMakeLists.txt": "tesserae_bench(step SOURCES step.cpp LINK tesserae::train)\n",
        "bench/step.cpp": 'app.add_option("--nproc")',
        "tests/comm/CMakeLists.txt": "tesserae_test(comm)\n",
        "tests/train/CMakeLists.txt": "foreach(name data dial)\n  tesserae_test(train_${name})\n",
        "Makefile": "bench: build\nsetup:\n",
    }
    measured = "## Speed\nA step takes 3.5 ms.\n"
    cases = [  # text, part of the violation (None: there is none)
        (measured + "`python bench/a.py --rounds 3`\n", None),
        (measured + "```\nmake bench  # all\n```\n", None),
        (measured + "`build/release/bench/bench_step --nproc 2`\n", None),
        (measured + "(`build/release/tests/comm/test_comm --gtest_filter='A*'`)\n", None),
        (measured + "`python\nbench/a.py`\n", None),
        (measured, "no command"),
        (measured + "`make setup`\n", "no command"),
        (measured + "### Other\n`make bench`\n", "no command"),
        (measured + "`python bench/b.py`\n", "no bench/b.py"),
        (measured + "`python bench/a.py --steps 3`\n", "no option --steps"),
        (measured + "`build/release/bench/bench_stop --nproc 2`\n", "no bench_stop"),
        (measured + "`build/release/tests/comm/test_wire`\n", "no comm/test_wire"),
        (measured + "`make bunch`\n", "no target bunch"),
        ("## A\nIt is 2.9 times as fast, or 30 % of it.\n", "no command"),
        ("## A\n| ms a step |\n|--:|\n| 12 |\n", "no command"),
        ("## A\n4 ranks, 2 hosts, torch 2.13, 1e-5, [2](#a), `16 MiB`.\n", None),
        ("## A\n```\nsleep 3 s\n```\n", None),
        ("## A\n`python bench/a.py`\n<!-- a:begin -->\n<!-- a:end -->\n", None),
        ("## A\n`make bench`\n<!-- b:begin -->\n<!-- b:end -->\n", None),
        ("## A\n`python bench/a.py`\n<!-- b:begin -->\n<!-- b:end -->\n", "<!-- b:begin -->"),
        ("## A\n`build/release/tests/train/test_train_dial`, `python bench/a.py --help`\n", None),
        ("## A\n`build/release/tests/train/test_train_dish`\n", "no train/test_train_dish"),
    ]
    tree = Tree(files.get)
    results = [(text, check("a.md", text, tree), wanted) for text, wanted in cases]
    failed = [
        f"{text!r}: wanted {wanted!r}, got {found}"
        for text, found, wanted in results
        if (found != [] if wanted is None else not found or wanted not in found[0])
    ]
    print("\n".join(failed) or f"figures: self-test of {len(results)} cases passed")
    return bool(failed)


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if arguments:
        print("usage: check_figures.py [--self-test]", file=sys.stderr)
        return 2
    root = Path(__file__).resolve().parent.parent
    tree = Tree(lambda path: (root / path).read_text() if (root / path).is_file() else None)
    others = {str(path.relative_to(root)) for path in (root / "docs").glob("*.md") if not path.is_symlink()}
    found = [
        wrong
        for path in (*DOCUMENTS, *sorted(others - {*DOCUMENTS}))
        for wrong in check(path, (root / path).read_text(), tree, measures=path in DOCUMENTS)
    ]
    said = (
        f"figures: {len(DOCUMENTS)} documents say how theirs were measured, the commands of {len(others) + 1} are there"
    )
    print("\n".join(found) if found else said)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
