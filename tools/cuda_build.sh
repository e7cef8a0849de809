#!/usr/bin/env bash
# tools/cuda_build.sh [--torch VERSION] [--index URL] [--only]: builds against a torch with CUDA on a machine that needs
# no GPU, and runs the CPU tests with it: what is written for GPUs compiles, links and has NCCL.
#
#   1. build/cuda/venv: an environment with that torch (default 2.11.0, the oldest that is supported; PyPI's torch for
#      Linux brings CUDA) and the headers of CUDA's compiler, from pip's index (4 to 5 GB, once).
#   2. Everything is built in build/cuda; a missing header is an error there, NCCL is not left out.
#   3. `tesserae doctor` says that NCCL is in; the CPU tests run (--only: those of comm, shard and optim; else all).
# Says what each part took in time and on disk. Not part of .ci/run.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.11.0
index=()
only=
while [ $# -gt 0 ]; do
  case $1 in
    --torch) torch=$2; shift 2 ;;
    --index) index=(--index-url "$2"); shift 2 ;;
    --only) only=yes; shift ;;
    -h | --help) sed -n '2,/^set /p' "$0" | sed 's/^# \{0,1\}//; $d'; exit 0 ;;
    *) echo "cuda_build: unknown argument $1; see --help" >&2; exit 2 ;;
  esac
done

build=build/cuda
python=$build/venv/bin/python
took() { echo "cuda_build: $1: $((SECONDS - begin)) s, $(du -sh "$2" | cut -f 1) in $2"; }

begin=$SECONDS
mkdir -p $build
if [ "$(cat $build/torch 2>/dev/null)" != "$torch" ]; then
  rm -rf $build/venv $build/torch
  python3 -m venv $build/venv
  $python -m pip install -q "${index[@]}" "torch==$torch" numpy
  cuda=$($python -c 'import torch; print(torch.version.cuda or "")')
  [ -n "$cuda" ] || { echo "cuda_build: torch $torch of this index has no CUDA; --index names another" >&2; exit 1; }
  tools/cuda_headers.sh $python "${index[@]}"
  echo "$torch" > $build/torch
fi
took "torch $torch" $build/venv

begin=$SECONDS
cmake -S . -B $build/tree -G Ninja -DCMAKE_BUILD_TYPE=Release "-DPython3_EXECUTABLE=$PWD/$python" > $build/configure.log ||
  { tail -n 20 $build/configure.log >&2; exit 1; }
targets=(all)
tests=()
if [ -n "$only" ]; then
  targets=(cli/tesserae python/all test_comm test_shard test_optim)
  tests=(-R '^(comm|shard|optim)$')
fi
cmake --build $build/tree --target "${targets[@]}"
took build $build/tree

begin=$SECONDS
$build/tree/cli/tesserae doctor | tee $build/doctor.log
grep -q '^good *NCCL *in this build' $build/doctor.log || { echo "cuda_build: NCCL is not in" >&2; exit 1; }
ctest --test-dir $build/tree --output-on-failure -LE 'parity_full|gpu' "${tests[@]}"
took tests $build/tree
