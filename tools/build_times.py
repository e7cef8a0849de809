#!/usr/bin/env python3
"""tools/build_times.py [BUILD_FOLDER] [--jobs N]: the slowest jobs of the last build, from ninja's log.

Seconds are wall time while other jobs ran beside it. For a build from nothing without a compiler cache:

    rm -rf build/release && CCACHE_DISABLE=1 make program && tools/build_times.py
"""

import argparse
from pathlib import Path


def read_log(path: Path) -> dict[str, float]:
    """The seconds of each job by its (first) output; a job that ran again counts once, as it ran last."""
    seconds = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        begin, end, _, output, command = line.split("\t")
        # The outputs of one job share times and the hash of its command.
        seconds[begin, end, command] = (output, (int(end) - int(begin)) / 1000)
    newest = {}
    for output, taken in seconds.values():
        newest[output] = taken
    return newest


def short(output: str) -> str:
    """tesserae/comm/CMakeFiles/tesserae_comm.dir/Unity/unity_0_cxx.cxx.o -> tesserae_comm unity_0."""
    path = Path(output)
    target = next((part.removesuffix(".dir") for part in path.parts if part.endswith(".dir")), "")
    name = path.name.removesuffix(".o").removesuffix(".cxx").removesuffix("_cxx").removesuffix(".cpp")
    return f"{target} {name}" if target else output


def main() -> None:
    parser = argparse.ArgumentParser(description="The slowest jobs of the last build.")
    parser.add_argument("build", nargs="?", type=Path, default=Path("build/release"))
    parser.add_argument("--jobs", type=int, default=30, help="how many to list (default 30)")
    arguments = parser.parse_args()

    seconds = read_log(arguments.build / ".ninja_log")
    print(f"{len(seconds)} jobs, {sum(seconds.values()):.0f} s in all")
    for output, taken in sorted(seconds.items(), key=lambda entry: -entry[1])[: arguments.jobs]:
        print(f"{taken:7.1f}  {short(output)}")


if __name__ == "__main__":
    main()
