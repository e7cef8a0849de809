#!/usr/bin/env python3
"""Links of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/: each leads to a file of the tree and, behind a #, to a
heading of it; and docs/index.md leads to every page.

Anchors are those that GitHub makes of headings, and the site makes the same. Links to other hosts are not followed.
With --site FOLDER: links of the HTML there, within it. Prints one line per violation, exit status 1 if any.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|(?:src|srcset|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
ONLY_FOR_THE_SITE = {"docs/index.md", "docs/readme.md", "docs/contributing.md"}


def pages() -> list[str]:
    """What git knows of, and what is new."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]
    return [path for path in paths if "/" not in path or path.startswith("docs/")]


def anchors(text: str) -> set[str]:
    """GitHub's: lower case, letters, digits, - and _ stay, a blank becomes -, and what comes again gets a number."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        name, number = slug, 0
        while name in found:
            number += 1
            name = f"{slug}-{number}"
        found.add(name)
    return found


def wrong_links(path: str, text: str, read) -> list[str]:
    """`read` gives the text of a file of the tree ("" of a folder or a picture), None if there is none."""
    wrong = []
    blank = FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    blank = re.sub(r"`[^`\n]*`", "", blank)
    for found in LINK.finditer(blank):
        target = found[1] or found[2]
        if re.match(r"[a-z]+:", target):
            continue
        where = f"{path}:{blank.count(chr(10), 0, found.start()) + 1}"
        file, _, anchor = target.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
        goal = read(there)
        if goal is None:
            wrong.append(f"{where}: there is no {there}")
        elif anchor and there.endswith(".md") and anchor not in anchors(goal):
            wrong.append(f"{where}: {there} has no heading #{anchor}")
    return wrong


def not_in_index(index: str, paths: list[str]) -> list[str]:
    linked = {os.path.normpath(f"docs/{found[1].partition('#')[0]}") for found in LINK.finditer(index) if found[1]}
    wanted = {path for path in paths if path.startswith("docs/")} - ONLY_FOR_THE_SITE
    return [f"{path}: docs/index.md has no link to it" for path in sorted(wanted - linked)]


def read(path: str) -> str | None:
    file = ROOT / path
    return None if not file.exists() else file.read_text() if file.suffix == ".md" else ""


def wrong_in_site(folder: Path) -> list[str]:
    """What the site's own HTML links within it, and is not there."""
    texts = {file.resolve(): file.read_text() for file in folder.rglob("*.html")}
    names = {file: set(re.findall(r"\bid=\"([^\"]+)\"", text)) for file, text in texts.items()}
    wrong = []
    for file, text in texts.items():
        for target in dict.fromkeys(re.findall(r"\b(?:href|src|srcset)=\"([^\"]+)\"", text)):
            path, _, anchor = target.partition("#")
            there = (file.parent / path.partition("?")[0]).resolve() if path else file
            if re.match(r"[a-z]+:|//", target):
                continue
            if not there.exists() or (anchor and there in names and anchor not in names[there]):
                wrong.append(f"{file.relative_to(folder.resolve())}: {target} is not in the site")
    return wrong


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--site":
        wrong = wrong_in_site(Path(arguments[1]))
        print("\n".join(wrong) if wrong else "links: those of the site lead somewhere")
        return bool(wrong)
    if arguments:
        print("usage: check_links.py [--site FOLDER]", file=sys.stderr)
        return 2
    paths = pages()
    wrong = [found for path in paths for found in wrong_links(path, (ROOT / path).read_text(), read)]
    wrong += not_in_index((ROOT / "docs/index.md").read_text(), paths)
    print("\n".join(wrong) if wrong else f"links: those of {len(paths)} pages lead somewhere")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
