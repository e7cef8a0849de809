"""The process that `tesserae run` makes the ranks of a script from, so that each host imports torch once.

   TESSERAE_FORK_SERVER=3 python -u -P -m tesserae.fork_server script.py [arguments of the script]

1. torch is imported, and of LIBRARIES what the script's first level imports: nothing of the script runs.
2. Where that has opened a device, or started threads, copies would be unfit: the server says so, and ends.
3. Each order is answered by a copy: tesserae/launch/fork_server.cpp has the protocol.
4. The copy runs the script as `python -u script.py` does: __main__, sys.argv, sys.path[0], the way it ends.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.abc import InspectLoader
from pathlib import Path
from types import TracebackType

from tesserae.job.main_module import run_as_main

# They may be imported before a fork: no thread of theirs, no device.
LIBRARIES = {"accelerate", "lightning", "numpy", "peft", "tesserae", "torch", "transformers"}
# What scripts import late without saying so: torch's compiler, with the first step of an optimizer, is a second of it.
LATE = "tesserae.smp.init"
HARMLESS = ("null", "zero", "full", "random", "urandom", "tty", "pts/", "ptmx", "console", "shm/")  # in /dev
ORDERS = "TESSERAE_FORK_SERVER"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
NAME = b"fork server"  # what ps, top and pgrep call it; its copies are called as any Python is


def imports_of(source: str) -> Iterator[tuple[str, list[str]]]:
    """The modules of LIBRARIES that a script imports when it begins, and the names that it wants of each."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        found: list[tuple[str, list[str]]] = []
        if isinstance(node, ast.Import):
            found = [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found = [(node.module, [alias.name for alias in node.names])]
        yield from (each for each in found if each[0].split(".")[0] in LIBRARIES)
        waiting.extend(ast.iter_child_nodes(node))


def source_of(words: list[str]) -> str:
    """Of the script, or of -m MODULE; empty where there is none to read: what is wrong is the rank's to say."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        file = words[0]
        if words[0] == "-m":
            spec = importlib.util.find_spec(words[1]) if "." not in words[1] else None
            file = spec.origin or "" if spec else ""
        return Path(file).read_text(encoding="utf-8")
    return ""


def load(words: list[str]) -> None:
    """1. What fails here fails in the rank, which says so."""
    importlib.import_module(LATE)
    with contextlib.suppress(Exception):
        for module, names in imports_of(source_of(words)):
            loaded = importlib.import_module(module)
            for name in names:
                getattr(loaded, name, None)  # some libraries load what is asked for


def prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def unfit(threads_of_torch: int) -> str:
    """2."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            file = os.readlink(f"/proc/self/fd/{number}")
            if file.startswith("/dev/") and not file.removeprefix("/dev/").startswith(HARMLESS):
                return f"the script's imports have opened {file}, which does not survive a fork"
    more = threads() - threads_of_torch
    return f"the script's imports have started {more} threads, which a fork does not copy" if more > 0 else ""


def serve(connection: socket.socket) -> None:
    """3. Returns in each copy, which is a rank then."""
    launcher = os.getppid()
    while True:
        order, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        if not order or not descriptors:
            sys.exit(0)  # nobody is there any more
        output = descriptors[0]
        try:
            child = os.fork()
            if child == 0:
                child = os.getpid()
                if os.fork() != 0:
                    os._exit(0)
                return become_rank(connection, order, output, parent=child, launcher=launcher)
            _, status = os.waitpid(child, 0)
            if status != 0:
                connection.send(b"no process can be made")
        except OSError as error:
            connection.send(f"no process can be made: {error}".encode())
        os.close(output)


def become_rank(connection: socket.socket, order: bytes, output: int, *, parent: int, launcher: int) -> None:
    """Never raises: the one who called it is the server's code."""
    try:
        os.setpgid(0, 0)
        while os.getppid() == parent:
            time.sleep(0.0005)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has ended, and no signal will come
            os._exit(127)
        os.dup2(output, 2)
        if order[:1] == b"o":
            os.dup2(output, 1)
        os.close(output)
        for variable in os.fsdecode(order[1:]).split("\0")[:-1]:
            name, _, value = variable.partition("=")
            os.environ[name] = value
        sys.modules["torch"].default_generator.seed()  # one of its own, as `random` sees to by itself
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        prctl(PR_SET_NAME, os.path.basename(sys.executable).encode())
        connection.send(str(os.getpid()).encode())
        connection.close()
    except BaseException:
        traceback.print_exc()
        os._exit(127)


def run(words: list[str]) -> None:
    """4."""
    sys.orig_argv = [sys.executable, "-u", *words]
    try:
        if words[0] == "-m":
            run_module(words[1], words[2:])
        else:
            run_file(words)
    except Exception as error:
        # As the interpreter does it, without the calls that only a copy has.
        error.__traceback__ = of_the_script(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def run_file(words: list[str]) -> None:
    file = os.path.abspath(words[0])
    sys.argv = words
    with open(words[0], "rb") as script:
        code = compile(script.read(), file, "exec", dont_inherit=True)
    run_as_main(code, file)


def run_module(name: str, arguments: list[str]) -> None:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or spec.origin is None or code is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    sys.argv = [spec.origin, *arguments]
    run_as_main(code, spec.origin, spec)


def of_the_script(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, run_as_main.__code__.co_filename):
        trace = trace.tb_next
    return trace


def main() -> None:
    words = sys.argv[1:]
    connection = socket.socket(fileno=int(os.environ.pop(ORDERS)))
    connection.set_inheritable(False)
    script = words[0] != "-m"
    sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])) if script else os.getcwd())
    before = threads()
    load(words)
    why = unfit(before)
    if why:
        connection.recv(1)  # what is left unread would end the connection before the answer is there
        connection.send(why.encode())
        sys.exit(0)
    prctl(PR_SET_NAME, NAME)
    gc.collect()
    gc.freeze()  # so that a collection writes to nothing that copies share
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads of the algebra's
        serve(connection)
    run(words)


if __name__ == "__main__":
    main()
