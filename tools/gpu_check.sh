#!/usr/bin/env bash
# tools/gpu_check.sh: on a machine with one CUDA GPU, builds against the torch of its Python (2.11 or later, with CUDA),
# runs the tests and benchmarks that make sense there, and writes bench/gpu/<name of the GPU>.json. Takes less than nine
# minutes on 16 cores: each part gets a share of that, and what did not fit is said in the file.
#
# Needs no network. Libraries that are not installed there are brought along:
#   tools/gpu_check.sh --pack build/deps      on a Debian machine: download and unpack them, change nothing else
#   TESSERAE_DEPS=build/deps tools/gpu_check.sh
# TESSERAE_PYTHON names the Python. Exit status: 0 all passed, 1 something failed, 2 usage, 3 no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

pack() {
  local into=$1 scratch
  mkdir -p "$into"
  scratch=$(mktemp -d)
  local packages=(nlohmann-json3-dev libcli11-dev libgtest-dev libgmock-dev libbenchmark-dev)
  # The shared library behind libbenchmark-dev has the release in its name.
  mapfile -t -O 5 packages < <(apt-cache depends libbenchmark-dev | awk '$1 == "Depends:" && $2 ~ /^libbenchmark/ {print $2}')
  (cd "$scratch" && apt-get -o APT::Sandbox::User=root download "${packages[@]}" >/dev/null)
  for package in "$scratch"/*.deb; do dpkg -x "$package" "$into"; done
  rm -rf "$scratch" "$into/usr/share/doc" "$into/usr/share/man"
  echo "gpu_check: $(du -sh "$into" | cut -f 1) in $into: ${packages[*]}"
}

case "${1:-}" in
  "") ;;
  --pack)
    [ $# -eq 2 ] || { echo "usage: gpu_check.sh --pack DIR" >&2; exit 2; }
    pack "$2"
    exit ;;
  *)
    echo "usage: gpu_check.sh [--pack DIR]" >&2
    exit 2 ;;
esac

python=${TESSERAE_PYTHON:-python3}
build=build/gpu
report=$build/report
rm -rf "$report"
mkdir -p "$report"

if ! "$python" - >"$report/machine.json" 2>"$report/machine.log" <<'PYTHON'; then
import json, os, platform, torch
gpu = torch.cuda.get_device_properties(0)
print(json.dumps({
    "gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory, "gpus": torch.cuda.device_count(),
    "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
}))
PYTHON
  echo "gpu_check: no CUDA GPU that $python's torch can use ($(tail -n 1 "$report/machine.log"))" >&2
  exit 3
fi

# ---- parts: each within its own limit and within what is left of the whole ----
failures=0
part() {  # NAME LIMIT COMMAND...
  local name=$1 limit=$2 begin=$SECONDS left=$((525 - SECONDS)) status=0
  shift 2
  if [ "$limit" -gt "$left" ]; then limit=$left; fi
  if [ "$limit" -gt 5 ]; then
    tools/phase.sh "$name" "$report/$name.log" timeout -k 5 "$limit" "$@" || status=$?
  else
    echo "$name: no time left"
    status=124
  fi
  echo "$name $status $((SECONDS - begin))" >>"$report/parts"
  [ "$status" -eq 0 ] || failures=$((failures + 1))
  return "$status"
}

configure() {
  local options=() deps=${TESSERAE_DEPS:-}
  if [ -n "$deps" ]; then
    deps=$(realpath "$deps")
    options+=("-DCMAKE_PREFIX_PATH=$deps/usr;$deps")
  fi
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    "-DPython3_EXECUTABLE=$("$python" -c 'import sys; print(sys.executable)')" "${options[@]}"
}
export -f configure
export python build

tests() {  # NAME LIMIT ctest options...
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" ctest --test-dir "$build" --output-on-failure --no-tests=error \
    --output-junit "$PWD/$report/$name.xml" "$@" || true
}

if part configure 60 bash -ec configure; then
  # A source that does not compile here costs its own test only.
  part build 300 cmake --build "$build" --parallel "$(nproc)" -- -k 0 || true
  tests gpu_tests 150 -L gpu
  for benchmark in step host_cost; do
    part "bench_$benchmark" 120 "$build/bench/bench_$benchmark" --device cuda --json "$report/bench_$benchmark.json" || true
  done
  # What needs no GPU, against this torch and Python: with the time that is left.
  tests cpu_tests 300 -LE 'gpu|parity_full' --parallel "$(($(nproc) / 4 + 1))"
fi

"$python" - "$report" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" <<'PYTHON'
import json, pathlib, re, sys
from xml.etree import ElementTree

report, commit = pathlib.Path(sys.argv[1]), sys.argv[2]
machine = json.loads((report / "machine.json").read_text())
result = {"machine": machine, "commit": commit, "parts": {}, "tests": {}, "benchmarks": {}}
for line in (report / "parts").read_text().splitlines():
    name, status, seconds = line.split()
    outcome = {"0": "passed", "124": "out of time"}.get(status, f"failed with status {status}")
    result["parts"][name] = {"outcome": outcome, "seconds": int(seconds)}
for path in sorted(report.glob("*_tests.xml")):
    cases = ElementTree.parse(path).getroot().iter("testcase")
    outcomes = {case.get("name"): case.get("status") for case in cases}
    result["tests"][path.stem] = {
        "passed": sum(status == "run" for status in outcomes.values()),
        "not_passed": {name: status for name, status in sorted(outcomes.items()) if status != "run"},
    }
for path in sorted(report.glob("bench_*.json")):
    result["benchmarks"][path.stem.removeprefix("bench_")] = json.loads(path.read_text())
slug = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
target = pathlib.Path("bench/gpu") / f"{slug}.json"
target.parent.mkdir(parents=True, exist_ok=True)
target.write_text(json.dumps(result, indent=1) + "\n")
print(f"gpu_check: figures of {machine['gpu']} are in {target}")
PYTHON
echo "gpu_check: $failures of $(wc -l <"$report/parts") parts did not pass, $SECONDS s"
[ "$failures" -eq 0 ]
