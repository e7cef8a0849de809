#!/usr/bin/env bash
# tools/other_torch.sh [--torch VERSION] [--index URL] [--all]: the tests with another torch than that of
# requirements.txt. Part of `make nightly`.
#
#   1. build/torch-VERSION/venv: an environment with that torch (default: the oldest that is supported) and what tests
#      need, from pip's index. From PyPI that is one with CUDA (5 GB, once); no GPU is needed.
#   2. The library, the program, the Python module, and the C++ tests of comm, shard and optim are built against it.
#   3. `tesserae doctor`, those C++ tests, and the Python tests that use most of torch's private names: FSDP1's and
#      FSDP2's face, state dicts, checkpoints, parity (--all: all of tests/python).
# The last lines, also in build/torch-VERSION/result.md, say what passed and failed, and what it took.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=$(sed -n 's/^dependencies = \["torch>=\([0-9.]*\)"\]$/\1.0/p' pyproject.toml)
index=()
python_tests=(backend checkpoint checkpoint_formats dcp delayed_param fully_shard fully_shard_axes fully_shard_errors
  fully_shard_steps init optim_state_dict parity state_dict summon torch_class torch_compat)
while [ $# -gt 0 ]; do
  case $1 in
    --torch) torch=$2; shift 2 ;;
    --index) index=(--index-url "$2"); shift 2 ;;
    --all) python_tests=(); shift ;;
    -h | --help) sed -n '2,/^set /p' "$0" | sed 's/^# \{0,1\}//; $d'; exit 0 ;;
    *) echo "other_torch: unknown argument $1; see --help" >&2; exit 2 ;;
  esac
done

build=build/torch-$torch
python=$PWD/$build/venv/bin/python
result=$build/result.md
mkdir -p "$build"
: >"$result"
say() { echo "other_torch: $1: $2, $((SECONDS - begin)) s" | tee -a "$result"; }

begin=$SECONDS
key=$(echo "$torch" "${index[@]}" | cksum - requirements-dev.txt)
if [ "$(cat "$build/installed" 2>/dev/null)" != "$key" ]; then
  rm -rf "$build/venv" "$build/installed"
  python3 -m venv "$build/venv"
  # Without a bytecode of torch's 2,000 modules, most of which are never imported.
  "$python" -m pip install -q --no-compile "${index[@]}" "torch==$torch" numpy
  "$python" -m pip install -q --no-compile -r requirements-dev.txt "torch==$torch"
  tools/cuda_headers.sh "$python" "${index[@]}"
  echo "$key" >"$build/installed"
fi
say "torch $("$python" -c 'import torch; print(torch.__version__)')" installed

begin=$SECONDS
cmake -S . -B "$build/tree" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DPython3_EXECUTABLE=$python" >"$build/configure.log" ||
  { tail -n 20 "$build/configure.log" >&2; exit 1; }
# To the end, whatever fails: each place that another torch wants otherwise is then in one log.
cmake --build "$build/tree" --parallel "${JOBS:-$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)}" \
  --target cli/tesserae python/all test_comm test_shard test_optim -- -k 0 >"$build/build.log" ||
  { grep -E 'error:|FAILED' "$build/build.log" >&2; exit 1; }
say build done

begin=$SECONDS
"$build/tree/cli/tesserae" doctor >"$build/doctor.log" || { cat "$build/doctor.log" >&2; exit 1; }
say "tesserae doctor" passed

status=0
begin=$SECONDS
ctest --test-dir "$build/tree" --output-on-failure -LE 'parity_full|gpu' -R '^(comm|shard|optim)$' >"$build/ctest.log" ||
  { status=1; tail -n 60 "$build/ctest.log" >&2; }
say "C++ tests of comm, shard and optim" "$(sed -n 's/^\([0-9]*% tests passed.*\)/\1/p' "$build/ctest.log")"

begin=$SECONDS
files=("${python_tests[@]/#/tests/python/}")
files=("${files[@]/%/_test.py}")
PATH=$PWD/$build/venv/bin:$PATH PYTHONPATH=$build/tree/python "$python" -m pytest -q -p no:cacheprovider \
  -m 'not parity_full and not long' "${files[@]:-tests/python}" >"$build/pytest.log" 2>&1 ||
  { status=1; tail -n 60 "$build/pytest.log" >&2; }
summary=$(grep -E '^[0-9].* in [0-9.]+s|^=.* in [0-9.]+s' "$build/pytest.log" | tail -n 1 | tr -d =)
say "Python tests" "${summary:-did not end, see $build/pytest.log}"
exit $status
