#!/usr/bin/env python3
"""Every public name is described.

C++: public is what the headers that tesserae/tesserae.h includes declare outside of `private:`. Each class, function,
variable, enumeration and alias of theirs has a comment, except what explains itself:
  - what is defaulted or deleted, destructors, and constructors of a class that is described: its comment says what
    one is made of;
  - members that override one which is described there;
  - overloads that stand right below one that is described: they share its comment;
  - variables that are declared in one statement with one that is described, or that a class keeps `protected`;
  - what a container or an iterator needs to be one: CONTAINER, and the members of a class named Iterator.
Python: public is `__all__` of MODULES, with the classes that docs/api/python.md lists; each of these and each public
method and property that they define has a docstring of its own or of the class they inherit from, and that page shows
each: by name, or with all of its module.

  check_docs.py --headers     the public headers, one a line
  check_docs.py --cpp XML     what Doxygen read in them
  check_docs.py --python      the package, which must be importable
Prints one line per violation, exit status 1 if any.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "tesserae",
    "tesserae.checkpoint",
    "tesserae.data",
    "tesserae.fsdp",
    "tesserae.delayed_param",
    "tesserae.grad_norm",
    "tesserae.logger",
    "tesserae.utils.module_utils",
    "tesserae.utils.process_group_utils",
    "tesserae.utils.utils",
    "tesserae.distributed.checkpoint.state_dict_loader",
    "tesserae.distributed.checkpoint.state_dict_saver",
)

CONTAINER = ("begin", "end", "size", "empty", "front", "back", "operator[]")


def version() -> str:
    found = re.search(r"project\(tesserae VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert found, "CMakeLists.txt has no version"
    return found[1]


# ---- C++ ----
def public_headers() -> list[str]:
    return re.findall(r'^#include "(tesserae/[^"]+)"', (ROOT / "tesserae/tesserae.h").read_text(), re.MULTILINE)


def has_text(element: ET.Element) -> bool:
    return any(
        "".join(found.itertext()).strip()
        for tag in ("briefdescription", "detaileddescription", "inbodydescription")
        for found in element.findall(tag)
    )


def text_of(element: ET.Element | None) -> str:
    return "" if element is None else "".join(element.itertext()).strip()


class Members:
    """Of one class, or of a file: in the order of the header."""

    def __init__(self, scope: str, members: list[ET.Element]) -> None:
        self.scope = scope
        self.members = sorted(members, key=self.line)
        self.described = {(text_of(m.find("name")), self.line(m)) for m in self.members if has_text(m)}

    @staticmethod
    def line(member: ET.Element) -> int:
        found = member.find("location")
        return int(found.get("line", 0)) if found is not None else 0

    def explains_itself(self, member: ET.Element) -> bool:
        name, arguments = text_of(member.find("name")), text_of(member.find("argsstring"))
        own = self.scope.rpartition("::")[2].partition("<")[0]
        if re.search(r"=\s*(default|delete)$", arguments) or name.startswith("~") or own == "Iterator":
            return True
        if name in CONTAINER or (name == own and not member.find("type").text):
            return True
        if member.find("reimplements") is not None or arguments.endswith("override"):
            return True
        line = self.line(member)
        if member.get("kind") == "variable":
            together = any(at == line for _, at in self.described)
            return together or member.get("prot") == "protected"
        return any(other == name and 0 < line - at <= self.lines_of(name, at) for other, at in self.described)

    def lines_of(self, name: str, line: int) -> int:
        """How far below its own line the next declaration may stand that shares its comment."""
        shared = 0
        for member in self.members:
            if text_of(member.find("name")) == name and self.line(member) > line:
                if self.line(member) - line > shared + 2:
                    break
                shared = self.line(member) - line
        return shared

    def undescribed(self) -> Iterator[str]:
        for member in self.members:
            if has_text(member) or self.explains_itself(member):
                continue
            where = member.find("location")
            assert where is not None
            name = f"{self.scope}::{text_of(member.find('name'))}".removeprefix("::")
            yield f"{where.get('file')}:{where.get('line')}: {name} is not described"


def undescribed_cpp(folder: Path) -> list[str]:
    found = set()
    for file in sorted(folder.glob("*.xml")):
        for compound in ET.parse(file).getroot().findall("compounddef"):
            kind, name = compound.get("kind"), text_of(compound.find("compoundname"))
            if compound.get("prot", "public") == "private" or kind not in ("class", "struct", "namespace", "union"):
                continue
            if kind != "namespace" and not has_text(compound) and not name.endswith("Iterator"):
                where = compound.find("location")
                if where is not None:
                    found.add(f"{where.get('file')}:{where.get('line')}: {name} is not described")
            members = [
                m for m in compound.iter("memberdef") if m.get("prot") != "private" and m.get("kind") != "friend"
            ]
            found |= set(Members(name, members).undescribed())
    return sorted(found, key=lambda line: (line.split(":")[0], int(line.split(":")[1])))


# ---- Python ----
def public_members(owner: type) -> Iterator[str]:
    for name, member in vars(owner).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, (property, staticmethod, classmethod))):
            yield name


def undescribed(qualified: str, thing: Any) -> list[str]:
    wrong = [] if inspect.getdoc(thing) else [qualified]
    if inspect.isclass(thing):
        wrong += [f"{qualified}.{name}" for name in public_members(thing) if not inspect.getdoc(getattr(thing, name))]
    return wrong


def classes_of_page(page: str) -> list[str]:
    return re.findall(r"^\.\. autoclass:: (tesserae\.[\w.]+)", page, re.MULTILINE)


def is_shown(module: str, name: str, thing: Any, page: str) -> bool:
    if inspect.ismodule(thing):
        return f".. automodule:: {thing.__name__}\n" in page
    if not inspect.isclass(thing) and not inspect.isroutine(thing):
        kind = type(thing)
        return f".. autoclass:: {kind.__module__}.{kind.__qualname__}\n" in page
    by_name = re.search(rf"^\.\. auto\w+:: {re.escape(f'{module}.{name}')}$", page, re.MULTILINE)
    return bool(by_name) or f".. automodule:: {module}\n   :members:" in page


def undescribed_python(page: str, load: Callable[[str], Any] = importlib.import_module) -> list[str]:
    wrong = []
    for name in MODULES:
        module = load(name)
        wrong += undescribed(name, module)
        if not hasattr(module, "__all__"):
            wrong.append(f"{name}: no __all__, so nobody knows what of it is public")
            continue
        for public in module.__all__:
            try:
                thing = getattr(module, public)
            except (AttributeError, ImportError) as error:
                wrong.append(f"{name}.{public}: in __all__, and not there: {error}")
                continue
            wrong += undescribed(f"{name}.{public}", thing)
            if not is_shown(name, public, thing, page):
                wrong.append(f"{name}.{public}: docs/api/python.md does not show it")
    for path in classes_of_page(page):
        module_name, _, name = path.rpartition(".")
        wrong += undescribed(path, getattr(load(module_name), name))
    return [f"{name} has no docstring" if ":" not in name else name for name in dict.fromkeys(wrong)]


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--headers"]:
            print("\n".join(public_headers()))
            return 0
        case ["--cpp", folder]:
            wrong, said = undescribed_cpp(Path(folder)), f"{len(public_headers())} C++ headers are described"
        case ["--python"]:
            wrong = undescribed_python((ROOT / "docs/api/python.md").read_text())
            said = f"{len(MODULES)} modules of Python are described"
        case _:
            print("usage: check_docs.py --headers | --cpp XML | --python", file=sys.stderr)
            return 2
    print("\n".join(wrong) if wrong else f"docs: {said}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
