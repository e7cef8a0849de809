"""The pages and what they say of the interface: links lead somewhere, every public name is described."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_docs  # noqa: E402
import check_links  # noqa: E402

PAGES = {"docs/a.md": "# A page\n## Two `words`, again\n## Again\n## Again\n", "docs/b.png": "", "README.md": "# R\n"}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](a.md) ![b](b.png) [c](../README.md#r) [d](https://example.org/x)", None),
        ("[a](a.md#two-words-again) [b](a.md#again) [c](a.md#again-1) [d](#here)\n# Here", None),
        ("`[a](nowhere.md)`\n```\n[a](nowhere.md)\n```\n", None),
        ("text\n[a](nowhere.md)", "docs/p.md:2: there is no docs/nowhere.md"),
        ('<img src="c.png">', "docs/p.md:1: there is no docs/c.png"),
        ("[a](a.md#again-2)", "docs/p.md:1: docs/a.md has no heading #again-2"),
        ("[a](#there)\n# Here", "docs/p.md:1: docs/p.md has no heading #there"),
    ],
)
def test_a_link_leads_to_a_file_and_a_heading(text: str, wrong: str | None) -> None:
    read = {**PAGES, "docs/p.md": text}.get
    assert check_links.wrong_links("docs/p.md", text, read) == ([wrong] if wrong else [])


def test_the_index_has_every_page() -> None:
    pages = ["README.md", "docs/index.md", "docs/a.md", "docs/api/cpp.md"]
    assert check_links.not_in_index("[a](a.md#again)", pages) == ["docs/api/cpp.md: docs/index.md has no link to it"]


def test_names_of_python_are_described() -> None:
    assert check_docs.undescribed_python((ROOT / "docs/api/python.md").read_text()) == []


def test_a_name_without_a_docstring_is_found() -> None:
    class Public:
        """Described."""

        def method(self) -> None: ...

        @property
        def known(self) -> int:
            """Described."""
            return 0

        def _private(self) -> None: ...

    def plain() -> None: ...

    module = SimpleNamespace(__doc__="A module.", __all__=["Public", "plain", "gone"], Public=Public, plain=plain)
    page = ".. autoclass:: tesserae.Public\n"
    wrong = check_docs.undescribed_python(page.replace("tesserae.P", "x.P"), lambda name: module)
    assert "tesserae.Public: docs/api/python.md does not show it" in wrong
    wrong = check_docs.undescribed_python(page, lambda name: module)
    assert "tesserae.Public: docs/api/python.md does not show it" not in wrong
    assert "tesserae.plain has no docstring" in wrong
    assert "tesserae.Public.method has no docstring" in wrong
    assert any(line.startswith("tesserae.gone: in __all__, and not there") for line in wrong)
    assert not any("known" in line or "_private" in line or "Public has" in line for line in wrong)


HEADER = """
namespace n {
/// Described.
class A {
 public:
  A(int x);
  /// Described.
  int f();
  int f(int x);

  int g();
  int h = 0;  ///< described
  int i = 0;
  bool operator==(const A&) const = default;

 private:
  int j = 0;
};
struct B {};
/// Described.
struct C : A {};
void k();
}
"""


def test_a_name_of_c_without_a_comment_is_found(tmp_path: Path) -> None:
    doxygen(tmp_path, [tmp_path / "a.h"], HEADER)
    found = [line.rpartition(": ")[2] for line in check_docs.undescribed_cpp(tmp_path / "xml")]
    assert found == [f"{name} is not described" for name in ("n::A::g", "n::A::i", "n::B", "n::k")]


def test_names_of_c_are_described(tmp_path: Path) -> None:
    headers = check_docs.public_headers()
    assert len(headers) > 10
    doxygen(tmp_path, [ROOT / header for header in headers])
    assert check_docs.undescribed_cpp(tmp_path / "xml") == []


def doxygen(folder: Path, headers: list[Path], text: str = "") -> None:
    assert shutil.which("doxygen"), "Doxygen is missing: `make setup` installs it where it may"
    if text:
        headers[0].write_text(text)
    settings = (ROOT / "docs/site/Doxyfile").read_text()
    settings += f"INPUT = {' '.join(map(str, headers))}\nOUTPUT_DIRECTORY = {folder}\n"
    (folder / "Doxyfile").write_text(settings)
    done = subprocess.run(["doxygen", "Doxyfile"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_the_site_is_built() -> None:
    """With whatever is wrong in any page as an error."""
    import tesserae

    build = Path(tesserae.__file__).absolute().parents[2]
    environment = os.environ | {"PYTHONPATH": ""}
    words = [ROOT / "tools/docs.sh", os.path.relpath(build, ROOT)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    index = (ROOT / "build/docs/html/index.html").read_text()
    for page in ("python.html", "api/cpp.html", "api/python.html", "contributing.html"):
        assert page in index
    reference = (ROOT / "build/docs/html/api/cpp.html").read_text()
    assert "shard_model" in reference and "Returns at once; the refresh overlaps" in reference
