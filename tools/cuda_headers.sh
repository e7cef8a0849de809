#!/usr/bin/env bash
# tools/cuda_headers.sh PYTHON [pip options]: where that Python's torch has CUDA, installs the headers of CUDA's compiler
# beside it (crt/host_defines.h, nv/target), which torch does not bring and NCCL's need. Tens of megabytes.
set -euo pipefail
python=$1
shift
cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")')
[ -n "$cuda" ] || exit 0
# Up to 12 the names carry CUDA's version.
suffix=
if [ "${cuda%%.*}" -lt 13 ]; then suffix=-cu${cuda%%.*}; fi
"$python" -m pip install -q "$@" "nvidia-cuda-nvcc$suffix==$cuda.*" "nvidia-cuda-cccl$suffix==$cuda.*" ||
  echo "cuda_headers: they are not on the index; CUDA_HOME or /usr/local/cuda must have them" >&2
