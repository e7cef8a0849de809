"""The Python package against docs/design.md, section 5: the order of its rooms, and what may know torch's insides.

A file of python/tesserae imports from its own room and from rooms above it in ROOMS; what lies in the package itself
(what scripts import) stands below all of them. No file imports itself through others: imports inside functions and
for type checkers count. Only torch_compat/ uses names that are private to torch. Code names no kind of accelerator: it
asks torch (torch.accelerator, torch.get_device_module, the backend of a device). check_layers.py calls check().
"""

import ast
import re
import sys
from collections.abc import Iterator

PACKAGE = "python/tesserae/"
ROOMS = [
    "torch_compat",
    "job",
    "recovery",
    "offload",
    "planning",
    "context",
    "tensor_parallel",
    "experts",
    "fsdp",
    "fully_shard",
    "checkpoint",
    "dial",
    "monitor",
    "elasticity",
    "smp",
    "launch",
]
# Folders for the import paths of SMP v2's scripts: re-exports, like the files in the package itself.
DOORS = ["distributed", "utils"]
# The extension and what it was built against: every room may import them.
BUILT = {"tesserae._C", "tesserae._build"}
# Names with an underscore that are neither ours nor torch's.
OTHERS = {
    "_apply_gate",  # of transformers' experts
    "_fields",  # of a named tuple
    "_attn_implementation",  # of transformers' configurations and models
    "_init_weights",
    "_is_hf_initialized",
    "_shift_right",
}

# What nn.Module keeps for itself; attributes of ours may have the same names.
OF_MODULES = {"_parameters", "_buffers", "_modules"}

# Kinds of devices: what works with one of them by its name does not with the others.
ACCELERATORS = {"cuda", "hpu", "mps", "npu", "xpu"}

Files = dict[str, ast.Module]


def check(texts: dict[str, str]) -> list[str]:
    """All violations of the package whose files have these texts, one line each."""
    files = {path: ast.parse(text, path) for path, text in texts.items() if path.startswith(PACKAGE)}
    modules = {module_of(path): path for path in files}
    graph = {path: list(imports_of(tree, modules)) for path, tree in files.items()}
    found = [wrong for path, edges in graph.items() for line, name in edges if (wrong := check_order(path, line, name))]
    found += check_cycles({path: {modules[n] for _, n in edges if n in modules} for path, edges in graph.items()})
    ours = own_names(files)
    for path, tree in files.items():
        if room_of(path) != "torch_compat":
            found += [f"{path}:{line}: {wrong}" for line, wrong in sorted(set(private_names(tree, ours)))]
        found += [f"{path}:{line}: {wrong}" for line, wrong in sorted(set(accelerators(tree)))]
    return found


def check_folder(path: str) -> str | None:
    """Why a file of the package may not lie where it does; None if it may."""
    room, slash, _ = path.removeprefix(PACKAGE).partition("/")
    if path.startswith(PACKAGE) and slash and room not in ROOMS + DOORS:
        return f"folder {PACKAGE}{room}/ is not in the design"
    return None


def module_of(path: str) -> str:
    return path.removeprefix("python/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def room_of(path: str) -> str | None:
    """None: the package itself."""
    first = path.removeprefix(PACKAGE).partition("/")[0]
    return first if first in ROOMS else None


# ---- who imports whom ----
def imports_of(tree: ast.Module, modules: dict[str, str]) -> Iterator[tuple[int, str]]:
    """(line, module) for everything of tesserae that a file imports, wherever it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules or name in BUILT else node.module for name in below]
        elif isinstance(node, ast.Call) and _is_import_call(node.func):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "tesserae" and name not in BUILT:
                yield node.lineno, name


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def check_order(path: str, line: int, name: str) -> str | None:
    mine = room_of(path)
    if mine is None:
        return None
    room = name.split(".")[1] if "." in name else None
    if room not in ROOMS:
        return f"{path}:{line}: {name}: a room does not import what scripts import"
    if ROOMS.index(room) > ROOMS.index(mine):
        return f"{path}:{line}: {name}: room {room} is below {mine}"
    return None


def check_cycles(graph: dict[str, set[str]]) -> list[str]:
    """One line for each group of files that import each other, with a shortest way round."""
    found, settled = [], set()
    for start in sorted(graph):
        if start in settled:
            continue
        circle = _way(graph, start, start)
        if circle:
            settled.update(circle)
            names = " -> ".join(path.removeprefix(PACKAGE) for path in circle)
            found.append(f"{start}: imports itself: {names}")
    return found


def _way(graph: dict[str, set[str]], start: str, end: str) -> list[str] | None:
    came: dict[str, str] = {}
    front = [start]
    while front:
        reached = []
        for path in front:
            for following in sorted(graph[path]):
                if following == end:
                    way = [end, path]
                    while way[-1] != start:
                        way.append(came[way[-1]])
                    return way[::-1]
                if following not in came and following != start:
                    came[following] = path
                    reached.append(following)
        front = reached
    return None


# ---- torch's private names ----
def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(files: Files) -> set[str]:
    """What the other rooms define with an underscore in front. torch_compat/ gives everything a name without one."""
    names = {"_C", "_build"}
    for tree in (tree for path, tree in files.items() if room_of(path) != "torch_compat"):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add(node.attr)
    return names


def private_names(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """(line, what) for every use of a name that is private to torch."""
    torchs, standard = set(), set()  # local names
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                full = f"{module}.{alias.name}" if module else alias.name
                top = full.partition(".")[0]
                local = alias.asname or (alias.name if module else top)
                if top == "torch":
                    torchs.add(local)
                    if any(map(is_private, full.split("."))):
                        yield node.lineno, f"{full} is private to torch: only torch_compat/ uses it"
                elif top in sys.stdlib_module_names:
                    standard.add(local)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            name, root = node.attr, _root(node)
            kept_by_module = name in OF_MODULES and not (isinstance(node.value, ast.Name) and root == "self")
            if root in torchs or kept_by_module or (root not in standard and not _known(name, ours)):
                yield node.lineno, f"{ast.unparse(node)} is private to torch: only torch_compat/ uses it"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and is_private(name) and not _known(name, ours):
                yield node.lineno, f"{ast.unparse(node)}: {name} is private to torch: only torch_compat/ uses it"


def accelerators(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) for every kind of accelerator that code names; docstrings may give examples."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ACCELERATORS:
            name = ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            name = node.value if ACCELERATORS & set(re.findall("[a-z]+", node.value)) else ""
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            name = next((name for name in names if ACCELERATORS & set(name.split("."))), "")
        else:
            continue
        if name:
            yield node.lineno, f"{name!r} names a kind of accelerator: ask torch.accelerator (job/device.py)"


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _known(name: str, ours: set[str]) -> bool:
    return name in ours or name in OTHERS or name.startswith("_tesserae")


# ---- what the checks must find ----
def self_test() -> list[tuple[str, list[str], str | None]]:
    """(what, violations, part of the one that there must be; None: there must be none)."""
    base = {
        "fsdp/unit.py": "def _mine(): pass\n",
        "torch_compat/modules.py": "from torch.nn import _parts\n\ndef parts(m): return m._parameters, m._all\n",
        "checkpoint/__init__.py": "from tesserae.checkpoint import save\n",
        "checkpoint/save.py": "from tesserae.fsdp import unit\n",
    }
    cases: list[tuple[dict[str, str], str | None]] = [
        ({}, None),
        # The order of rooms.
        ({"dial/a.py": "from tesserae import _C\nfrom tesserae.fsdp import unit\n"}, None),
        ({"fsdp/a.py": "from tesserae.checkpoint import save\n"}, "a.py:1: tesserae.checkpoint.save: room"),
        ({"fsdp/a.py": "from tesserae.checkpoint.save import x\n"}, "room checkpoint is below fsdp"),
        ({"fsdp/a.py": "def f():\n    import tesserae.checkpoint.save\n"}, "a.py:2: tesserae.checkpoint.save: room"),
        ({"fsdp/a.py": 'importlib.import_module("tesserae.smp.init")\n'}, "room smp is below fsdp"),
        ({"fsdp/a.py": "import tesserae\n"}, "tesserae: a room does not import what scripts import"),
        ({"fsdp/a.py": "from tesserae import init\n"}, "tesserae: a room does not import what scripts import"),
        ({"fsdp/a.py": "from tesserae import run\n", "run.py": ""}, "tesserae.run: a room does not"),
        ({"fsdp/a.py": "from tesserae.utils import x\n", "utils/__init__.py": ""}, "tesserae.utils: a room does not"),
        ({"__init__.py": "from tesserae.smp.init import init\n", "smp/init.py": ""}, None),
        ({"convert.py": "import tesserae\n", "__init__.py": ""}, None),
        # Circles.
        (
            {"fsdp/a.py": "from tesserae.fsdp import b\n", "fsdp/b.py": "from tesserae.fsdp.a import x\n"},
            "fsdp/a.py: imports itself: fsdp/a.py -> fsdp/b.py -> fsdp/a.py",
        ),
        (
            {"fsdp/a.py": "from tesserae.fsdp import b\n", "fsdp/b.py": "def f():\n    import tesserae.fsdp.a\n"},
            "imports itself",
        ),
        (
            {
                "fsdp/a.py": "from tesserae.fsdp import b\n",
                "fsdp/b.py": "if TYPE_CHECKING:\n    from tesserae.fsdp.a import X\n",
            },
            "imports itself",
        ),
        (
            {
                "fsdp/a.py": "import tesserae.fsdp.b\nimport tesserae.fsdp.c\n",
                "fsdp/b.py": "import tesserae.fsdp.c\n",
                "fsdp/c.py": "import tesserae.fsdp.unit\n",
            },
            None,
        ),
        ({"__init__.py": "import tesserae.convert\n", "convert.py": "import tesserae\n"}, "imports itself"),
        # Names that are private to torch.
        ({"fsdp/a.py": "from torch import nn\nfrom tesserae.fsdp.unit import _mine\n_mine()._x = self._mine\n"}, "._x"),
        ({"fsdp/a.py": "from torch.distributed.fsdp._init_utils import x\n"}, "a.py:1: torch.distributed.fsdp._init_"),
        ({"fsdp/a.py": "from torch.nn.utils import _x\n"}, "torch.nn.utils._x is private to torch"),
        ({"fsdp/a.py": "import torch._dynamo\n"}, "torch._dynamo is private to torch"),
        ({"fsdp/a.py": "import torch\n\nf = torch._dynamo.disable\n"}, "a.py:3: torch._dynamo is private to torch"),
        ({"fsdp/a.py": "from torch import nn\nnn.Module._mine(x)\n"}, "nn.Module._mine is private to torch"),
        ({"fsdp/a.py": "f = module._parameters\n"}, "module._parameters is private to torch"),
        ({"fsdp/a.py": "f = module._all\n"}, "module._all is private to torch"),
        ({"fsdp/a.py": "class A:\n    def f(self):\n        self._all = 1\n        return self._all\n"}, None),
        ({"fsdp/a.py": "class A:\n    def f(self):\n        self._parameters = {}\n"}, None),
        ({"fsdp/a.py": 'getattr(x, "_all", None)\n'}, "_all is private to torch"),
        # Kinds of accelerators.
        ({"fsdp/a.py": "import torch\nn = torch.cuda.device_count()\n"}, "'torch.cuda' names a kind of accelerator"),
        ({"fsdp/a.py": "from torch.cuda import device_count\n"}, "'torch.cuda' names a kind of accelerator"),
        ({"fsdp/a.py": 'def f(kind="xpu"):\n    pass\n'}, "a.py:1: 'xpu' names a kind of accelerator"),
        ({"fsdp/a.py": 'def f():\n    """As torch.cuda."""\n    return "barracuda"\n'}, None),
        ({"fsdp/a.py": "import os\nos._exit(1)\nx._mine()\nx.__dict__\nx._tesserae_mark = 1\n"}, None),
    ]
    results = []
    for files, wanted in cases:
        found = check({PACKAGE + name: text for name, text in {**base, **files}.items()})
        results.append((f"rooms: {files}", found, wanted))
    return results
