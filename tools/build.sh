#!/usr/bin/env bash
# tools/build.sh PRESET TARGET...: configures build/PRESET if need be and builds the targets. After tools/setup.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift

# Ninja runs CMake again by itself when a CMakeLists.txt changes; a changed preset, Python or torch is ours to notice.
key=$(cat build/setup/stamp CMakePresets.json | cksum)
if [ ! -f "build/$preset/build.ninja" ] || [ "$(cat "build/$preset/.configured" 2>/dev/null)" != "$key" ]; then
  tools/phase.sh configure "build/$preset-configure.log" \
    cmake --preset "$preset" "-DPython3_EXECUTABLE=$(cat build/setup/python)"
  echo "$key" >"build/$preset/.configured"
fi

# A source that includes torch takes up to 1.5 GB to compile.
memory_jobs=$(awk '/^MemAvailable/ {print int($2 / 1572864)}' /proc/meminfo 2>/dev/null || true)
jobs=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # which takes them for cores
if [ "${memory_jobs:-0}" -gt 0 ] && [ "$memory_jobs" -lt "$jobs" ]; then jobs=$memory_jobs; fi
# Said before it starts: a first build is minutes. 13 s of CPU a unit is a guess: three machines took 8, 13 and 20
# (docs/performance.md, Build time).
units=$(cd "build/$preset" && ninja -t commands "$@" | grep -oE -- '-o [^ ]+\.o ' | cut -d ' ' -f 2 |
  while read -r object; do [ -e "$object" ] || echo "$object"; done | wc -l)
seconds=$((units * 13 / ${JOBS:-$jobs}))
if [ "$seconds" -ge 60 ]; then
  echo "build      $units units on ${JOBS:-$jobs} cores: about $(((seconds + 30) / 60)) minutes (without a compiler cache)"
fi
tools/phase.sh build "build/$preset-build.log" cmake --build "build/$preset" --parallel "${JOBS:-$jobs}" --target "$@"
