"""The process that `tesserae run` makes the ranks of a script from, so that each host imports torch once.

    python -u tesserae/launch/fork_server.py script.py [arguments of the script]

 1. What the script does first is done here: the imports of LIBRARIES with which it begins. One that begins with
    anything else (sets a variable that an import reads, say, or a path) does all of it in its ranks.
 2. What copies would not have, or would have in common, must not be there: threads, children, descriptors, devices.
    The launcher is told that the server is ready, or why there is none.
 3. Each order is answered by a copy: tesserae/launch/fork_server.cpp has the protocol.
 4. The copy goes on with the script as `python -u script.py` does: __main__, sys.argv, sys.path[0], the way it ends.

It imports nothing but the standard library by itself, since the script may not want more.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

# They may be imported before a fork, and do not ask which rank they are in.
LIBRARIES = {"numpy", "tesserae", "torch"}
# They may come later than torch: nothing that it reads is theirs to set.
BESIDE = {"accelerate", "datasets", "lightning", "peft", "tqdm", "transformers", *sys.stdlib_module_names}
# What scripts that use tesserae import late without saying so: torch's compiler, with the first step of an optimizer,
# is a second of it.
LATE = "tesserae.smp.init"
ORDERS = "TESSERAE_FORK_SERVER"
READY, DONE = b"ready", b"ok"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
NAME = b"fork server"  # what ps, top and pgrep call it; its copies are called as any Python is


def first_imports(source: str) -> list[tuple[str, list[str]]]:
    """With which modules of LIBRARIES a script begins, and the names that it wants of each."""
    found: list[tuple[str, list[str]]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rank says so
        body = ast.parse(source).body
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # what it says of itself
        if isinstance(node, ast.Import):
            modules: list[tuple[str, list[str]]] = [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules = [(node.module, [alias.name for alias in node.names])]
        else:
            return found
        for module, names in modules:
            package = module.split(".")[0]
            if package in LIBRARIES:
                found.append((module, names))
            elif package not in BESIDE:
                return found
    return found


def source_of(words: list[str]) -> str:
    """Of the script, or of -m MODULE; empty where there is none to read, or a package comes before it."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # what is wrong is the rank's to say
        if words[0] != "-m":
            return Path(words[0]).read_text(encoding="utf-8")
        spec = importlib.util.find_spec(words[1]) if "." not in words[1] else None
        if spec and spec.origin and spec.submodule_search_locations is None:
            return Path(spec.origin).read_text(encoding="utf-8")
    return ""


def load(source: str) -> str:
    """1. Why there is nothing to load, or empty."""
    try:
        imports = first_imports(source)
        packages = {module.split(".")[0] for module, _ in imports}
        if "torch" not in packages and "tesserae" not in packages:
            return "the script does not begin with imports of torch or tesserae"
        for module, names in imports:
            loaded = importlib.import_module(module)
            for name in names:
                getattr(loaded, name, None)
        if "tesserae" in packages and "environ" not in source and "putenv" not in source:
            before = dict(os.environ)
            importlib.import_module(LATE)
            for name in set(os.environ) - set(before):
                del os.environ[name]
    except Exception as error:  # the rank meets it, too
        return f"what the script imports raises {type(error).__name__}"
    return ""


def descriptors() -> set[str]:
    """Those that are open, and what they are."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # one of them is of the list itself
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def unfit(opened: set[str], threads: int) -> str:
    """2. Why there can be no copies, or empty. `opened`, `threads`: what there was before the imports."""
    torch = sys.modules["torch"]
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
        return f"the script's imports have begun to use {accelerator.type}, whose driver does not survive a fork"
    for descriptor in sorted(descriptors() - opened):
        return f"the script's imports have opened {descriptor.split(' ', 1)[1]}"
    with open("/proc/self/maps") as maps:
        for line in maps:
            file = (*line.split(maxsplit=5), "")[5].strip()  # of five fields, nothing is mapped there
            if file.startswith("/dev/") and not file.startswith(("/dev/shm", "/dev/zero")):
                return f"the script's imports have mapped {file}"
    tasks = os.listdir("/proc/self/task")
    if any(Path(f"/proc/self/task/{task}/children").read_text() for task in tasks):
        return "the script's imports have started processes"
    # The pool of numpy's algebra is made anew in a copy.
    pool = next((os.environ[name] for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") if name in os.environ), "")
    allowed = int(pool) if pool.isdigit() else os.cpu_count() or 1
    if threads > 1 or threading.active_count() > 1 or len(tasks) > max(allowed, 1):
        return f"{len(tasks) - 1} threads run beside the script's imports"
    return ""


def serve(connection: socket.socket) -> None:
    """3. Returns in each copy, which is a rank then."""
    launcher = os.getppid()
    while True:
        order, given, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if len(given) != 2:
            sys.exit(0)  # nobody is there any more
        output, answer = given
        child = None
        try:
            child = os.fork()
        except OSError as error:
            os.write(answer, f"no process can be made: {error}".encode())
        if child == 0:
            connection.close()
            return make_rank(order, output, answer, launcher)
        os.close(output)
        os.close(answer)
        if child is not None:
            os.waitpid(child, 0)


def make_rank(order: bytes, output: int, answer: int, launcher: int) -> None:
    """In the server's child, which makes the rank and ends."""
    parent = os.getpid()
    try:
        rank = os.fork()
    except OSError as error:
        os.write(answer, f"no process can be made: {error}".encode())
        os._exit(1)
    if rank != 0:
        os.write(answer, f"{rank}\n".encode())
        os._exit(0)
    try:
        become_rank(order, output, parent, launcher)
        os.write(answer, DONE)
        os.close(answer)
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(answer, traceback.format_exc().strip().rpartition("\n")[2].encode())
        os._exit(127)


def become_rank(order: bytes, output: int, parent: int, launcher: int) -> None:
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
    multiprocessing.current_process().authkey = os.urandom(32)
    prctl(PR_SET_NAME, os.path.basename(sys.executable).encode())


def prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value)


def run(words: list[str]) -> None:
    """4."""
    sys.orig_argv = [sys.executable, "-u", *words]
    try:
        if words[0] == "-m":
            run_module(words[1], words[2:])
        else:
            run_file(words)
    except (Exception, KeyboardInterrupt):
        show = sys.excepthook

        def show_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            """Without the calls that only a copy has."""
            trace = of_the_script(trace)
            show(kind, error.with_traceback(trace), trace)

        sys.excepthook = show_script
        raise


def run_file(words: list[str]) -> None:
    file = os.path.join(os.getcwd(), words[0])
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


def run_as_main(code: CodeType, file: str, spec: ModuleSpec | None = None) -> None:
    """Runs `code` of `file` as the module __main__, which it stays. `spec` is what workers that are spawned import in
    its place, and the package to which its relative imports refer; none: they run `file`, as of `python file`."""
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=file,
        __spec__=spec,
        __package__=spec.parent if spec else None,
        __loader__=spec.loader if spec else SourceFileLoader("__main__", file),
        __cached__=None,
        __annotations__={},
        __builtins__=sys.modules["builtins"],
    )
    # multiprocessing, which torch has imported by now, calls it so, too: what workers send back is looked up there.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(code, main.__dict__)


def of_the_script(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def main() -> None:
    opened, threads = descriptors(), len(os.listdir("/proc/self/task"))
    words = sys.argv[1:]
    connection = socket.socket(fileno=int(os.environ.pop(ORDERS)))
    connection.set_inheritable(False)
    if not sys.flags.safe_path:  # else Python has put this file's folder nowhere, and would not the script's
        sys.path[0] = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
    why = load(source_of(words)) or unfit(opened, threads)
    connection.send(why.encode() or READY)
    if why:
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
