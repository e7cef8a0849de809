#!/usr/bin/env python3
"""The tree against docs/design.md: which folders there are, and who includes what.

A layer of tesserae/ includes only itself and layers above it in LAYERS; the program and the bindings stand below all of
them; tests and benchmarks may include anything. The Python package imports the standard library, torch and itself: what
a user must install besides is nothing; python_rooms.py has the order of its rooms. Run from anywhere; prints one line
per violation, exit status 1 if any.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import python_rooms

LAYERS = [
    "base",
    "os",
    "offload",
    "mesh",
    "comm",
    "launch",
    "preemption",
    "autograd",
    "tensor",
    "context",
    "shard",
    "optim",
    "experts",
    "model",
    "cost",
    "dial",
    "monitor",
    "watch",
    "plan",
    "probe",
    "checkpoint",
    "data",
    "snapshot",
    "config",
    "train",
    "doctor",
]
TOP = {"tesserae", "python", "cli", "tests", "bench", "examples", "docs", "cmake", "tools"}
TESTS = {*LAYERS, "support", "sim", "device", "parity", "cli", "bench", "python", "tools"}
PYTHON = {"tesserae", "bindings"}

# Only tesserae/os may call the operating system: its faulty twin can then fail any call in a test.
OS_HEADERS = re.compile(
    r"(sys|net|netinet|arpa|linux)/.*|"
    r"(aio|csignal|dirent|dlfcn|fcntl|glob|grp|ifaddrs|netdb|poll|pthread|pwd|sched|semaphore|signal|spawn|termios|"
    r"ucontext|unistd|wait)(\.h)?"
)
CUDA_HEADERS = re.compile(
    r"(cuda|nccl|cublas|cudnn).*\.h|(ATen|c10|torch/csrc)/cuda/.*|.*/ProcessGroupNCCL\.hpp|.*/NCCLUtils\.hpp"
)
# Each of these in a header makes every source that includes it compile 10 s longer.
WHOLE_TORCH = {"torch/torch.h", "torch/all.h", "torch/extension.h", "ATen/ATen.h"}

# What the Python package may import besides the standard library.
PACKAGES = {"torch", "tesserae"}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
LINK = re.compile(r"\btesserae::(\w+)")


def check_folder(path):
    """Why a file may not lie where it does; None if it may."""
    parts = Path(path).parts
    if len(parts) == 1 or parts[0].startswith("."):
        return None
    allowed = {"tesserae": set(LAYERS), "tests": TESTS, "python": PYTHON}.get(parts[0])
    if parts[0] not in TOP:
        return f"folder {parts[0]}/ is not in the design"
    if allowed is not None and len(parts) > 2 and parts[1] not in allowed:
        return f"folder {parts[0]}/{parts[1]}/ is not in the design"
    return python_rooms.check_folder(path)


def layers_for(path):
    """The layers that a file may use: None stands for all of them."""
    parts = Path(path).parts
    if parts[0] != "tesserae" or len(parts) < 3 or parts[1] not in LAYERS:
        return None
    return LAYERS[: LAYERS.index(parts[1]) + 1]


def check_include(path, quote, name):
    """What is wrong with one include of `path`; None if nothing is."""
    in_tests = path.startswith(("tests/", "bench/"))
    top, _, rest = name.partition("/")
    if top == "tesserae" and quote == "<":
        return f"<{name}>: our own headers are included with quotes"
    if quote == '"':
        if top not in ("tesserae", "cli", "python", "tests", "bench") or not rest:
            return f'"{name}": the include path is the path in the tree'
        if path.startswith("tesserae/") and top != "tesserae":
            return f'"{name}": the library includes only tesserae/'
        layer, allowed = rest.split("/")[0], layers_for(path)
        if top == "tesserae" and layer not in LAYERS and "/" in rest:
            return f'"{name}": no such layer'
        if top == "tesserae" and allowed and layer in LAYERS and layer not in allowed:
            return f'"{name}": layer {layer} is below {allowed[-1]}'
        return None
    if OS_HEADERS.fullmatch(name) and not in_tests and not path.startswith("tesserae/os/"):
        return f"<{name}>: only tesserae/os/ calls the operating system"
    if CUDA_HEADERS.fullmatch(name) and not in_tests and not path.startswith("tesserae/comm/transports/nccl"):
        return f"<{name}>: only tesserae/comm/transports/nccl* includes CUDA; elsewhere use c10::Stream, c10::Event"
    if name in WHOLE_TORCH and path.endswith(".h"):
        return f"<{name}>: headers include narrow torch headers"
    return None


def check_file(path, text):
    """All violations of one file."""
    found = []
    if path.endswith(".py"):
        return check_imports(path, text) if path.startswith("python/tesserae/") else []
    if path.endswith("CMakeLists.txt"):
        allowed = layers_for(path)
        for name in LINK.findall(text) if allowed else []:
            if name in LAYERS and name not in allowed:
                found.append(f"{path}: links tesserae::{name}, which is below {allowed[-1]}")
        return found
    if path.endswith(".h") and not re.search(r"^#pragma once$", text, re.MULTILINE):
        found.append(f"{path}: no #pragma once")
    for match in INCLUDE.finditer(text):
        if wrong := check_include(path, match[1], match[2]):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path}:{line}: {wrong}")
    return found


def check_imports(path, text):
    """What the Python package imports that it may not, line by line."""
    found = []
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level if node.level else node.module]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if not top:
                found.append(f"{path}:{node.lineno}: {name}: imports in the package are absolute")
            elif top not in PACKAGES and top not in sys.stdlib_module_names:
                found.append(f"{path}:{node.lineno}: {name}: the package imports the standard library and torch only")
    return found


def check_tree(root):
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True
    )
    paths = sorted(p for p in listed.stdout.splitlines() if (root / p).is_file())
    found = sorted({wrong for path in paths if (wrong := check_folder(path))})
    sources = [p for p in paths if p.endswith((".h", ".cpp", ".py", "CMakeLists.txt"))]
    texts = {path: (root / path).read_text() for path in sources}
    for path, text in texts.items():
        found += check_file(path, text)
    found += python_rooms.check({path: text for path, text in texts.items() if path.endswith(".py")})
    return found, len(sources)


def self_test():
    once = "#pragma once\n"
    cases = [  # path, text, part of the violation (None: there is none)
        ("tesserae/mesh/a.h", once + '#include "tesserae/base/error.h"\n', None),
        ("tesserae/mesh/a.h", once + '#include "tesserae/mesh/b.h"\n', None),
        ("tesserae/mesh/a.cpp", '#include "tesserae/comm/group.h"\n', "layer comm is below mesh"),
        ("tesserae/mesh/a.cpp", '#include "tesserae/none/group.h"\n', "no such layer"),
        ("tesserae/mesh/a.cpp", "#include <tesserae/base/error.h>\n", "with quotes"),
        ("tesserae/mesh/a.cpp", '#include "error.h"\n', "path in the tree"),
        ("tesserae/mesh/a.cpp", '#include "tests/support/x.h"\n', "only tesserae/"),
        ("tesserae/mesh/a.h", "#include <vector>\n", "no #pragma once"),
        ("tesserae/mesh/a.cpp", "  # include <unistd.h>\n", "operating system"),
        ("tesserae/mesh/a.cpp", "\n#include <sys/mman.h>\n", "a.cpp:2:"),
        ("tesserae/os/a.cpp", "#include <sys/mman.h>\n", None),
        ("tests/os/a_test.cpp", "#include <csignal>\n", None),
        ("cli/main.cpp", "#include <poll.h>\n", "operating system"),
        ("cli/main.cpp", '#include "tesserae/train/job.h"\n', None),
        ("tesserae/comm/transports/nccl.cpp", "#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>\n", None),
        ("tesserae/shard/a.cpp", "#include <c10/cuda/CUDAStream.h>\n", "only tesserae/comm/transports/nccl"),
        ("tesserae/model/a.h", once + "#include <torch/torch.h>\n", "narrow torch headers"),
        ("tesserae/model/a.cpp", "#include <torch/torch.h>\n", None),
        ("tesserae/mesh/CMakeLists.txt", "LINK tesserae::base", None),
        ("tesserae/mesh/CMakeLists.txt", "LINK tesserae::shard", "below mesh"),
        ("tests/mesh/CMakeLists.txt", "LINK tesserae::shard", None),
        ("python/bindings/shard.cpp", '#include "tesserae/train/job.h"\n#include "python/bindings/bindings.h"\n', None),
        ("python/bindings/shard.cpp", '#include "bindings.h"\n', "path in the tree"),
        ("python/bindings/shard.cpp", "#include <unistd.h>\n", "operating system"),
        ("python/tesserae/a.py", "import os.path\nfrom torch import nn\nfrom tesserae import _C\n", None),
        ("python/tesserae/a.py", "import json\nimport numpy as np\n", "a.py:2: numpy: the package imports"),
        ("python/tesserae/a.py", "def f():\n    from transformers import T5Config\n", "a.py:2: transformers"),
        ("python/tesserae/a.py", "from . import _C\n", "absolute"),
        ("tests/python/a_test.py", "import transformers\n", None),
    ]
    folders = [
        ("README.md", None),
        (".ci/run", None),
        ("tesserae/CMakeLists.txt", None),
        ("tesserae/os/a.cpp", None),
        ("tesserae/utils/a.cpp", "tesserae/utils/"),
        ("src/a.cpp", "src/"),
        ("tests/misc/a.cpp", "tests/misc/"),
        ("python/bindings/mesh.cpp", None),
        ("python/extra/a.py", "python/extra/"),
        ("python/tesserae/fsdp/a.py", None),
        ("python/tesserae/a.py", None),
        ("python/tesserae/extra/a.py", "python/tesserae/extra/"),
    ]
    results = [(path, check_file(path, text), wanted) for path, text, wanted in cases]
    results += python_rooms.self_test()
    results += [(path, [w] if (w := check_folder(path)) else [], wanted) for path, wanted in folders]
    failed = [
        f"{path}: wanted {wanted!r}, got {found}"
        for path, found, wanted in results
        if (found != [] if wanted is None else len(found) != 1 or wanted not in found[0])
    ]
    print("\n".join(failed) or f"layers: self-test of {len(results)} cases passed")
    return bool(failed)


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if arguments:
        print("usage: check_layers.py [--self-test]", file=sys.stderr)
        return 2
    found, count = check_tree(Path(__file__).resolve().parent.parent)
    print("\n".join(found) if found else f"layers: {count} files are in order")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
