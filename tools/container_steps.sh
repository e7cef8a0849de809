#!/usr/bin/env bash
# tools/container_steps.sh STEP: the steps of Dockerfile, which does nothing that is not here, so that they run
# without Docker, too (tests/tools/container_test.py). Variables say where and with what:
#
#   TESSERAE_PREFIX   the environment that is made (default /opt/tesserae)
#   TORCH             its torch, as pip takes it (default: that of requirements.txt)
#   TORCH_INDEX       an index with that torch, https://download.pytorch.org/whl/cpu (default: pip's own settings)
#   WHEELS            where the wheel lies between the stages (default /wheels)
#
#   environment   an environment with that torch
#   packages      what building needs: tools/setup.sh knows it. Without a package manager it says what is missing
#   wheel         the wheel, built against that torch
#   install       the wheel into the environment, which needs no compiler
#   check         that it works: one step of a training in one process, and what `tesserae doctor` says of the machine
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
prefix=${TESSERAE_PREFIX:-/opt/tesserae}
wheels=${WHEELS:-/wheels}
torch=${TORCH:-$(sed -n 's/^torch==\([^ #]*\).*/\1/p' "$root/requirements.txt")}
index=()
if [ -n "${TORCH_INDEX:-}" ]; then index=(--index-url "$TORCH_INDEX"); fi

environment() {
  python3 -m venv "$prefix"
  "$prefix/bin/pip" install -q --no-cache-dir --no-compile "${index[@]}" "torch==$torch" numpy
}

packages() {
  TESSERAE_PYTHON=$prefix/bin/python "$root/tools/setup.sh"
}

wheel() {
  "$prefix/bin/pip" install -q --no-cache-dir 'scikit-build-core>=0.11'
  "$root/tools/cuda_headers.sh" "$prefix/bin/python" "${index[@]}"
  mkdir -p "$wheels"
  PATH=$prefix/bin:$PATH "$prefix/bin/pip" wheel -q --no-deps --no-build-isolation -w "$wheels" "$root"
  ls "$wheels"
}

install() {
  "$prefix/bin/pip" install -q --no-cache-dir --no-deps "$wheels"/tesserae-*.whl
}

check() {
  cd /
  PATH=$prefix/bin:$PATH python - <<'PROGRAM'
import os

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import tesserae as tsm

dist.init_process_group("gloo")
tsm.init()
model = torch.nn.Linear(4, 2)
fully_shard(model)
model(torch.ones(1, 4)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
dist.destroy_process_group()
print("tesserae", tsm.__version__, "works with torch", torch.__version__)
PROGRAM
  PATH=$prefix/bin:$PATH tesserae doctor
}

case ${1:-} in
  environment | packages | wheel | install | check) "$1" ;;
  -h | --help) sed -n '2,/^set /p' "$0" | sed 's/^# \{0,1\}//; $d' ;;
  *)
    echo "container_steps: unknown step '${1:-}'; see --help" >&2
    exit 2
    ;;
esac
