"""The site: `make docs` builds it from these pages, the C++ headers and the Python package (tools/docs.sh)."""

import os
import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs/site"), str(ROOT / "tools")]

import check_docs  # noqa: E402
from cpp_reference import Reference  # noqa: E402

OUTSIDE = {"readme": "README.md", "contributing": "CONTRIBUTING.md"}

project = "Tesserae"
project_copyright = "the authors of Tesserae"
version = release = check_docs.version()
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"Tesserae {version}"
exclude_patterns = ["images", "site"]
source_suffix = {".md": "markdown"}

# Pages are read on GitHub too: links to headings are written as it makes them.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
# A block of shell may begin with `#SBATCH`, and one of Python leave out what `...` stands for.
suppress_warnings = ["misc.highlighting_failure"]

breathe_projects = {"tesserae": os.environ["TESSERAE_DOXYGEN_XML"]}
breathe_default_project = "tesserae"
breathe_default_members = ("members",)
cpp_id_attributes = ["TORCH_API"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

# Names in signatures that belong to others, and those of ours that are no part of the interface.
nitpicky = True
nitpick_ignore_regex = [("cpp:.*", ".*"), ("py:.*", r"(?!tesserae\.).*"), ("py:.*", r"tesserae\.job\.config\..*")]


def add_cpp_reference(app: Sphinx, page: str, source: list[str]) -> None:
    if page == "api/cpp":
        source[0] = Reference(Path(breathe_projects["tesserae"]), check_docs.public_headers()).fill(source[0])


def add_index(app: Sphinx, page: str, source: list[str]) -> None:
    """The contents of the site are the links of index.md: each of its sections becomes a part of the sidebar."""
    if page != "index":
        return
    sections = re.split(r"^(?=## )", source[0], flags=re.MULTILINE)
    for number, section in enumerate(sections):
        pages = re.findall(r"\]\(([\w./-]+)\.md\)", section)
        if section.startswith("## ") and pages:
            caption = section.partition("\n")[0].removeprefix("## ")
            entries = "\n".join(dict.fromkeys(pages))
            sections[number] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n\n"
    source[0] = "".join(sections)


def put_links_right(app: Sphinx, page: str, source: list[str]) -> None:
    """README.md and CONTRIBUTING.md are pages. What else a page links outside of docs/ is a file of the tree:
    TESSERAE_REPOSITORY says where that can be read, else the site has a copy."""
    base = os.environ.get("TESSERAE_REPOSITORY", "").rstrip("/")
    folder = (ROOT / "docs" / page).parent
    if page in OUTSIDE:
        app.env.note_dependency(str(ROOT / OUTSIDE[page]))
        text = (ROOT / OUTSIDE[page]).read_text()
        folder, source[0] = ROOT, re.sub(r'((?:src|srcset)=")docs/', r"\1", text)  # copy_images puts these there

    def link(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return found[0]
        path = target.relative_to(ROOT).as_posix()
        if path.startswith("docs/"):
            path = path.removeprefix("docs")
        elif path in OUTSIDE.values():
            path = f"/{path.lower()}"
        elif base:
            path = f"{base}/{path}"
        elif path.endswith(".md"):
            return found[1]  # taken for a page, which the site does not have
        else:
            path = f"/../{path}"
        return f"[{found[1]}]({path}{found[3] or ''})"

    source[0] = re.sub(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)", link, source[0])


def put_docstring_right(app: Sphinx, kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text: `code` in backticks, examples indented, and no markup beside these."""
    found = []
    for part in re.split(r"^((?:    .*\n|\n(?=    ))+)", "\n".join(lines) + "\n", flags=re.MULTILINE):
        if part.startswith("    ") or part.startswith("\n    "):
            found.append(f"\n::\n\n{part}\n")
        else:
            spans = part.split("`")
            spans[::2] = [re.sub(r"([*|_\\])", r"\\\1", span) for span in spans[::2]]
            found.append("``".join(spans))
    lines[:] = "".join(found).splitlines()


def copy_images(app: Sphinx, error: Exception | None) -> None:
    """For those that a page names in HTML, which Sphinx does not read."""
    if error is None:
        shutil.copytree(ROOT / "docs/images", app.outdir / "images", dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("source-read", put_links_right)
    app.connect("source-read", add_index)
    app.connect("source-read", add_cpp_reference)
    app.connect("autodoc-process-docstring", put_docstring_right)
    app.connect("build-finished", copy_images)
