"""What compare.py compares: the cases (a model, ranks, a precision; A/gpt2 is A with the other model) and the
candidates (a program that trains it).
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Case:
    title: str
    dimension: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    ranks: int
    batch: int = 1
    precision: str = "fp32"
    model: str = "llama"  # of bench/transformer.py; or "gpt2"
    hosts: int = 1
    rate: str = ""  # of the link of each host, if there are several: as bench/hosts.sh takes it
    steps: int = 0  # timed steps a run, at the least, where a step is so short that two say nothing

    def arguments(self) -> list[str]:
        """The options that bench/peers.py and bench/step.cpp share."""
        return [
            word
            for name in ("dimension", "layers", "heads", "vocabulary", "sequence", "batch", "precision")
            for word in (f"--{name}", str(getattr(self, name)))
        ]


A = Case(
    "118 M parameters, 128 tokens a rank, 2 ranks, fp32",
    dimension=1024,
    layers=8,
    heads=16,
    vocabulary=8192,
    sequence=128,
    ranks=2,
)
CASES = {
    "A": A,
    "B": replace(A, title="118 M parameters, 128 tokens a rank, 4 ranks, fp32", ranks=4),
    "C": Case(
        "34 M parameters, 512 tokens a rank, 2 ranks, fp32",
        dimension=512,
        layers=8,
        heads=8,
        vocabulary=8192,
        sequence=512,
        ranks=2,
    ),
    "D": Case(
        "34 M parameters, 256 tokens a rank, 2 hosts x 2 ranks, 1 Gbit/s between them, fp32",
        dimension=512,
        layers=8,
        heads=8,
        vocabulary=8192,
        sequence=256,
        ranks=4,
        hosts=2,
        rate="1gbit",
    ),
    "E": replace(A, title="118 M parameters, 128 tokens a rank, 2 ranks, bf16", precision="bf16"),
    "L": Case(
        "3 M parameters, 64 tokens a rank, 2 ranks, fp32 (latency)",
        dimension=192,
        layers=6,
        heads=4,
        vocabulary=1024,
        sequence=64,
        ranks=2,
        steps=30,
    ),
    "tiny": Case(
        "0.3 M parameters, 32 tokens a rank, 2 ranks, fp32 (proves that the comparison runs, nothing else)",
        dimension=64,
        layers=4,
        heads=4,
        vocabulary=512,
        sequence=32,
        ranks=2,
    ),
    "tiny-hosts": Case(
        "0.3 M parameters, 32 tokens a rank, 2 hosts x 2 ranks, 100 Mbit/s (proves that it runs, nothing else)",
        dimension=64,
        layers=4,
        heads=4,
        vocabulary=512,
        sequence=32,
        ranks=4,
        hosts=2,
        rate="100mbit",
    ),
}


def add_model(parser: argparse.ArgumentParser, sequence: int) -> None:
    """Options for a model, by default that of case C with sequences so long."""
    for name in ("dimension", "layers", "heads", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, default=getattr(CASES["C"], name))
    parser.add_argument("--sequence", type=int, default=sequence)


def gpt2(case: Case, size: str) -> Case:
    """The same with the second model, which is that large then."""
    return replace(case, title=size + case.title[case.title.index(" M parameters") :], model="gpt2")


# Candidates that are measured together; each model has a table of its own.
SECOND = {"A": "109", "B": "109", "C": "30", "D": "30", "L": "3", "tiny": "0.2", "tiny-hosts": "0.2"}
CASES |= {f"{name}/gpt2": gpt2(CASES[name], size) for name, size in SECOND.items()}
FIRST_MODEL = tuple(name for name, case in CASES.items() if case.model == "llama")  # what programs in C++ train, too
MODELS = {"llama": "Llama style", "gpt2": "GPT-2 style"}

# name: what the table calls it
TITLES = {
    "plain": "no communication (PyTorch)",
    "ceiling": "ceiling: computation + 1/N of the optimizer (PyTorch)",
    "ours-plain": "no communication (C++)",
    "ours-ceiling": "ceiling: computation + 1/N of the optimizer (C++)",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp1-grad-op": "FSDP1, SHARD_GRAD_OP",
    "fsdp1-hybrid": "FSDP1, HYBRID_SHARD within hosts",
    "fsdp2": "FSDP2",
    "fsdp2-grad-op": "FSDP2, reshard_after_forward=False",
    "fsdp2-hybrid": "FSDP2, sharded within hosts",
    "fsdp2-prefetch": "FSDP2, explicit prefetch",
    "fsdp2-prefetch-grad-op": "FSDP2, explicit prefetch, reshard_after_forward=False",
    "fsdp2-prefetch-hybrid": "FSDP2, explicit prefetch, sharded within hosts",
    "fsdp2-shm": "FSDP2 over Tesserae's shared memory",
    "ours-python": "Tesserae, Python, FSDP1's script",
    "ours-python-hybrid": "Tesserae, Python, FSDP1's script, sharded within hosts",
    "ours-python2": "Tesserae, Python, FSDP2's script",
    "ours-python2-hybrid": "Tesserae, Python, FSDP2's script, sharded within hosts",
    "ours": "Tesserae, C++",
    "ours-int8": "Tesserae, C++, int8 between hosts",
}
# What names end with that bench/peers.py trains: more of its command line. `{local}` is the number of ranks on a host.
VARIANTS = {
    "-grad-op": ("--strategy", "SHARD_GRAD_OP"),
    "-hybrid": ("--strategy", "HYBRID_SHARD", "--degree", "{local}"),
    "-shm": ("--backend", "tesserae"),
    "-prefetch": ("--prefetch", "2"),
}
ON_ONE_HOST = (
    "plain",
    "ours-plain",
    "ddp",
    "fsdp1",
    "fsdp2",
    "fsdp2-prefetch",
    "fsdp2-prefetch-grad-op",
    "fsdp2-shm",
    "ours-python",
    "ours-python2",
    "ours",
)
IN_BF16 = ("ours-plain", "fsdp2", "ours-python", "ours-python2", "ours")  # slow where a CPU has no bf16 of its own
BETWEEN_HOSTS = (
    "plain",
    "ours-plain",
    "ddp",
    "fsdp1",
    "fsdp1-hybrid",
    "fsdp2",
    "fsdp2-prefetch",
    "fsdp2-prefetch-grad-op",
    "fsdp2-hybrid",
    "fsdp2-prefetch-hybrid",
    "fsdp2-shm",
    "ours-python",
    "ours-python-hybrid",
    "ours-python2",
    "ours-python2-hybrid",
    "ours",
    "ours:best",
    "ours-int8:best",
)
WITHOUT_COMMUNICATION = ("plain", "ours-plain")
# What no program runs, but report.py computes of a run without communication: there every rank updates the whole model,
# a sharded one of N ranks only 1/N of it.
CEILINGS = {"plain": "ceiling", "ours-plain": "ours-ceiling"}
REFERENCE = "fsdp2"
# Lines of FSDP2 as torch has it, over torch's own transport: what ours is held against is the best of them. First those
# that shard over all ranks, then those that shard within hosts.
FSDP2_FULL = ("fsdp2", "fsdp2-grad-op", "fsdp2-prefetch", "fsdp2-prefetch-grad-op")
FSDP2_HYBRID = ("fsdp2-hybrid", "fsdp2-prefetch-hybrid")
FSDP2 = FSDP2_FULL + FSDP2_HYBRID
FSDP1 = ("fsdp1", "fsdp1-grad-op", "fsdp1-hybrid")
OURS_PYTHON = ("ours-python", "ours-python-hybrid", "ours-python2", "ours-python2-hybrid")
BEST = ":best"  # stands for the layout of ours that was the fastest in a trial of all of them
WITH_LAYOUT = ("ours", "ours-int8")
QUANTISED = ("--parameter-wire", "int8", "--gradient-wire", "int8")


@dataclass(frozen=True)
class Goal:
    """What was asked of a case: tokens/s or memory of one candidate as a share of another's."""

    case: str
    candidate: str  # ending with BEST: under the layout that was chosen
    against: tuple[str, ...]  # the best of these
    bound: float
    memory: bool = False  # then the bound is the most; else the least


# Of each of the two scripts in Python, with each of the two models.
GOALS_OF_SCRIPTS = (
    ("A", FSDP2_FULL, 2.8, False),
    ("A", ("plain",), 0.92, False),
    ("A", ("ours",), 0.97, False),
    ("A", ("ddp",), 1.0, False),
    ("A", FSDP2_FULL, 0.80, True),
    ("B", FSDP2_FULL, 2.6, False),
    ("B", ("ddp",), 1.0, False),
    ("B", FSDP2_FULL, 0.70, True),
    ("C", FSDP2_FULL, 1.5, False),
    ("C", ("ddp",), 1.0, False),
    ("D", FSDP2_FULL, 3.2, False),
    ("D", FSDP2_HYBRID, 2.3, False),
    ("L", FSDP2_FULL, 3.0, False),
    ("L", ("ddp",), 1.0, False),
)
GOALS = (
    Goal("A", "ours", FSDP2_FULL, 2.6),
    Goal("A", "ours", ("ours-ceiling",), 0.95),
    Goal("A", "ours", FSDP2_FULL, 0.80, memory=True),
    Goal("B", "ours", FSDP2_FULL, 2.8),
    Goal("B", "ours", FSDP2_FULL, 0.70, memory=True),
    Goal("C", "ours", FSDP2_FULL, 1.45),
    Goal("D", f"ours{BEST}", FSDP2_FULL, 3.2),
    Goal("D", f"ours{BEST}", FSDP2_HYBRID, 2.3),
    Goal("E", "ours", FSDP2_FULL, 1.3),
    *(
        Goal(f"{case}{model}", f"{script}-hybrid" if case == "D" else script, against, bound, memory)
        for case, against, bound, memory in GOALS_OF_SCRIPTS
        for script in ("ours-python", "ours-python2")
        for model in ("", "/gpt2")
        if not (model and against == ("ours",))  # in C++ there is one model only
    ),
)


def candidates_of(case: Case, asked: Sequence[str] = ()) -> list[str]:
    """Those that were asked for, or the usual ones, as far as they have the case's model: in C++ there is one only."""
    usual = IN_BF16 if case.precision == "bf16" else BETWEEN_HOSTS if case.hosts > 1 else ON_ONE_HOST
    if case.model != "llama" and not asked:
        usual = tuple(name for name in usual if name != "fsdp2-shm")  # about a transport: one model is enough
    return [name for name in asked or usual if case.model == "llama" or is_python(name)]


def is_python(candidate: str) -> bool:
    return not candidate.startswith("ours") or candidate in OURS_PYTHON


def title(candidate: str) -> str:
    """`ours:ZERO_2` and `ours:2,2,4` are ours under another strategy or with those degrees P,G,O."""
    name, _, layout = candidate.partition(":")
    if layout[:1].isdigit():
        layout = "P={} G={} O={}".format(*layout.split(","))
    return f"{TITLES[name]}, {layout}" if layout else TITLES[name]


def is_candidate(candidate: str) -> bool:
    name, colon, layout = candidate.partition(":")
    return name in TITLES and name not in CEILINGS.values() and (not colon or (name in WITH_LAYOUT and bool(layout)))


def layouts(ranks: int) -> list[str]:
    """Every valid P,G,O: each divides the next, and the last the number of ranks."""
    dividing = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    return [f"{p},{g},{o}" for p in dividing for g in dividing for o in dividing if g % p == 0 and o % g == 0]


def command(candidate: str, step_program: Path, case: Case) -> list[str]:
    name, _, layout = candidate.partition(":")
    if name in WITH_LAYOUT:
        layout = layout or "FULL_SHARD"
        how = ["--degrees" if layout[0].isdigit() else "--strategy", layout]
        return [str(step_program), "--mode", "sharded", *how, *(QUANTISED if name == "ours-int8" else ())]
    if name == "ours-plain":
        return [str(step_program), "--mode", "plain"]
    mode, *endings = re.findall(r"^(?:ours-python2?|[a-z0-9]+)|-(?:grad-op|[a-z0-9]+)", name)
    peer = [sys.executable, str(HERE / "peers.py"), "--mode", mode.replace("ours-python", "tesserae")]
    if case.model != "llama":
        peer += ["--model", case.model]
    for ending in endings:
        peer += [word.format(local=case.ranks // case.hosts) for word in VARIANTS[ending]]
    if "-prefetch" in endings and case.model == "llama":  # as in ours; a tied head cannot be one
        peer.append("--head-unit")
    return peer


def newest_program(name: str) -> Path | None:
    """Of those that were built, in whatever build folder."""
    return max(ROOT.glob(f"build/*/bench/{name}"), key=lambda file: file.stat().st_mtime, default=None)


def find_tesserae() -> bool:
    """Makes `import tesserae` work: the one that is installed, else the newest below build/. False if there is none."""
    if importlib.util.find_spec("tesserae") is None and (package := newest_package()) is not None:
        sys.path.insert(0, str(package))
    return importlib.util.find_spec("tesserae") is not None


def newest_package() -> Path | None:
    """What PYTHONPATH must have for `import tesserae`: that of the build folder whose extension is the newest."""
    built = (file for file in ROOT.glob("build/*/python/tesserae/_C.*.so") if "wheel" not in file.parts[-4])
    newest = max(built, key=lambda file: file.stat().st_mtime, default=None)
    return newest.parents[1] if newest else None
