"""The C++ part of the site: what Doxygen read in a layer's public headers, as directives of Breathe's."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

MARKER = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)


class Reference:
    def __init__(self, xml: Path, headers: list[str]) -> None:
        self.headers = headers
        compounds = [ET.parse(file).getroot().find("compounddef") for file in sorted(xml.glob("*tesserae*.xml"))]
        self.compounds = [compound for compound in compounds if compound is not None]

    def fill(self, page: str) -> str:
        """`page` with its markers replaced. Throws ValueError if a layer with public headers has no marker."""
        layers = {header.split("/")[1] for header in self.headers}
        if layers != set(MARKER.findall(page)):
            raise ValueError(f"docs/api/cpp.md must have a marker for each of {sorted(layers)}, and no other")
        return MARKER.sub(lambda found: self.layer(found[1]), page)

    def layer(self, name: str) -> str:
        headers = [header for header in self.headers if header.split("/")[1] == name]
        return "\n".join(f"### {header}\n```{{eval-rst}}\n{self.header(header)}\n```" for header in headers)

    def header(self, header: str) -> str:
        entries = []  # line, directive
        for compound in self.compounds:
            kind, name = compound.get("kind"), compound.findtext("compoundname", "")
            if kind == "namespace":
                entries += [self.member(name, m) for m in compound.iter("memberdef") if self.place(m)[0] == header]
            elif kind in ("class", "struct") and self.place(compound)[0] == header and self.stands_alone(compound):
                members = "   :members:\n   :protected-members:\n   :undoc-members:\n"
                entries.append((self.place(compound)[1], f".. doxygen{kind}:: {name}\n{members}"))
        return "\n".join(directive for _, directive in sorted(entries))

    @staticmethod
    def place(element: ET.Element) -> tuple[str, int]:
        where = element.find("location")
        return ("", 0) if where is None else (where.get("file", ""), int(where.get("line", 0)))

    def stands_alone(self, compound: ET.Element) -> bool:
        """Not within another class, which shows it, and no specialization, which adds nothing for a reader."""
        name = compound.findtext("compoundname", "")
        outer = name.rpartition("::")[0]
        classes = {c.findtext("compoundname") for c in self.compounds if c.get("kind") in ("class", "struct")}
        return "<" not in name and outer not in classes

    def overloads(self, name: str) -> int:
        scope, _, plain = name.rpartition("::")
        spaces = [c for c in self.compounds if c.findtext("compoundname") == scope]
        return sum(m.findtext("name") == plain for space in spaces for m in space.iter("memberdef"))

    def member(self, scope: str, member: ET.Element) -> tuple[int, str]:
        kind, name = member.get("kind"), f"{scope}::{member.findtext('name')}"
        if kind == "function" and self.overloads(name) > 1:
            types = [re.sub(r"\s+", " ", "".join(t.itertext()).strip()) for t in member.findall("param/type")]
            name += f"({', '.join(types)})"
        return self.place(member)[1], f".. doxygen{kind}:: {name}\n"
