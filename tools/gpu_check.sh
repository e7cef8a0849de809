#!/usr/bin/env bash
# tools/gpu_check.sh [--device cuda|sim] [--build DIR] 1|2|3|4|all: what Tesserae does on a machine with one GPU. Builds
# what a part needs against the torch of $TESSERAE_PYTHON (2.11 or later, with CUDA; default python3), without network.
#
#   1  correctness: lanes that are streams, NCCL with one rank, groups and training of four processes that share the GPU
#      (backend "staged"), `tesserae train` on that
#   2  speed at 1 B parameters in bf16: host cost; a step of ours, plain torch, FSDP1 and FSDP2: tokens/s, MFU, peak memory
#   3  pauses: an asynchronous save beside DCP's; turns of the dial with four ranks on the GPU; the model of part 2 with
#      activations, then all training state in memory of the host, beside none: time of a step, peak memory of the device
#   4  a profile of a step: trace.json.gz, and what took most of the device's time
#
# Each part takes less than nine minutes on 16 cores and writes part<N>.json to $OUT (if not set: bench/gpu/), logs beside
# the build. --device sim runs the same, tiny, on the simulated accelerator, where times say nothing. --build DIR: a build
# that is there, with all targets. Libraries that are not installed are brought along:
#   tools/gpu_check.sh --pack build/deps      on a Debian machine: download and unpack them, change nothing else
#   TESSERAE_DEPS=build/deps tools/gpu_check.sh 1
# Exit status: 0 all passed, 1 something failed, 2 usage, 3 no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  sed -n '2,/^set /p' "$0" | sed 's/^# \{0,1\}//; $d' >&2
  exit 2
}

pack() {
  local into=$1 scratch
  mkdir -p "$into"
  scratch=$(mktemp -d)
  local packages=(nlohmann-json3-dev libcli11-dev libxxhash-dev libgtest-dev libgmock-dev libbenchmark-dev)
  # The shared library behind libbenchmark-dev has the release in its name.
  mapfile -t -O 6 packages < <(apt-cache depends libbenchmark-dev | awk '$1 == "Depends:" && $2 ~ /^libbenchmark/ {print $2}')
  (cd "$scratch" && apt-get -o APT::Sandbox::User=root download "${packages[@]}" >/dev/null)
  for package in "$scratch"/*.deb; do dpkg -x "$package" "$into"; done
  rm -rf "$scratch" "$into/usr/share/doc" "$into/usr/share/man"
  echo "gpu_check: $(du -sh "$into" | cut -f 1) in $into: ${packages[*]}"
}

device=cuda given='' wanted=()
while [ $# -gt 0 ]; do
  case $1 in
    --pack) [ $# -eq 2 ] || usage; pack "$2"; exit ;;
    --device) device=${2:-}; shift 2 || usage ;;
    --build) given=${2:-}; shift 2 || usage ;;
    all) wanted=(1 2 3 4); shift ;;
    [1-4]) wanted+=("$1"); shift ;;
    *) usage ;;
  esac
done
[ ${#wanted[@]} -gt 0 ] || usage
case $device in cuda | sim) ;; *) usage ;; esac

python=${TESSERAE_PYTHON:-python3}
build=$(realpath -m "${given:-build/gpu}")
out=${OUT:-bench/gpu}
mkdir -p "$out"
logs=$build/gpu_check
mkdir -p "$logs"

if ! "$python" - "$device" >"$logs/machine.json" 2>"$logs/machine.log" <<'PYTHON'; then
import json, os, platform, sys, torch
machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
if sys.argv[1] == "cuda":
    gpu = torch.cuda.get_device_properties(0)
    machine |= {"device": gpu.name, "device_memory_bytes": gpu.total_memory, "cuda": torch.version.cuda,
                "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    size, times = 8192, 10
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        a @ b
    end.record()
    torch.cuda.synchronize()
    machine["bf16_flops_per_second"] = 2 * size**3 * times / begin.elapsed_time(end) * 1e3  # what MFU is a share of
else:
    machine["device"] = "simulated"
print(json.dumps(machine))
PYTHON
  echo "gpu_check: no $device device that $python's torch can use ($(tail -n 1 "$logs/machine.log"))" >&2
  exit 3
fi

# ---- steps of a part: each within its own limit and within what is left of the part ----
failures=0
check() {  # NAME LIMIT COMMAND...
  local name=$1 limit=$2 begin=$SECONDS left=$((525 - SECONDS + started)) status=0
  shift 2
  if [ "$limit" -gt "$left" ]; then limit=$left; fi
  if [ "$limit" -gt 5 ]; then
    tools/phase.sh "$name" "$logs/$name.log" timeout -k 5 "$limit" "$@" || status=$?
  else
    echo "$name: no time left"
    status=124
  fi
  printf '%s\t%s\t%s\t\n' "$name" "$status" "$((SECONDS - begin))" >>"$logs/checks"
  [ "$status" -eq 0 ] || [ "$status" -eq 77 ] || failures=$((failures + 1))
}
not_here() { printf '%s\t77\t0\t%s\n' "$1" "$2" >>"$logs/checks"; }  # NAME WHY

make_targets() {
  [ -z "$given" ] || return 0
  local options=() deps=${TESSERAE_DEPS:-}
  if [ -n "$deps" ]; then
    deps=$(realpath "$deps")
    options+=("-DCMAKE_PREFIX_PATH=$deps/usr;$deps" "-DCMAKE_INCLUDE_PATH=$deps/usr/include")
  fi
  check configure 60 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    "-DPython3_EXECUTABLE=$("$python" -c 'import sys; print(sys.executable)')" "${options[@]}"
  # A source that does not compile here costs its own program only.
  check build 400 cmake --build "$build" --parallel "$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)" --target "$@" -- -k 0
}

# One rank, as torchrun would start it; the build's Python packages.
alone=(env RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
  "PYTHONPATH=$build/python:$build/tests/sim/python")
free_port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
four=(env CUDA_VISIBLE_DEVICES=0)

if [ "$device" = cuda ]; then
  shape=(--dimension 2048 --layers 18 --heads 16 --vocabulary 32000 --sequence 2048 --batch 4 --precision bf16)
  small=(--dimension 1024 --layers 8 --heads 16 --vocabulary 8192 --sequence 256 --precision bf16)
  counts=(--steps 10 --warmup 3)
  offload_counts=(--steps 5 --warmup 2)
  host_cost=(--units 48 --repeats 9 --steps 20)
else
  shape=(--dimension 32 --layers 2 --heads 2 --vocabulary 64 --sequence 16)
  small=("${shape[@]}")
  counts=(--steps 2 --warmup 1)
  offload_counts=("${counts[@]}" --activation-size 1)
fi

part_1() {
  make_targets test_device test_device_nccl tesserae_program
  local test=("$build/tests/device/test_device")
  check lanes 60 env TESSERAE_TEST_DEVICE=$device "${test[@]}" --gtest_filter='DeviceLane.*'
  check parity 240 env TESSERAE_TEST_DEVICE=$device OMP_NUM_THREADS=1 "${test[@]}" --gtest_filter='DeviceParity.*'
  if [ "$device" = cuda ]; then
    check nccl 60 env TESSERAE_TEST_DEVICE=cuda "$build/tests/device/test_device_nccl"
    check groups 200 env TESSERAE_TEST_DEVICE=cuda OMP_NUM_THREADS=1 "${test[@]}" --gtest_filter='StagedGroup.*'
    check train 120 "${four[@]}" "$build/cli/tesserae" train examples/python-source.json \
      --set run.device=cuda run.backend=staged train.steps=60 train.sample_tokens=0
  else
    # The whole suite of groups is a test of its own; here it is shown that the command works.
    check groups 60 env OMP_NUM_THREADS=1 "${test[@]}" --gtest_filter='StagedGroup.DifferentSizes'
    not_here nccl "NCCL moves CUDA tensors"
    not_here train "the simulated device is in no program that ships"
  fi
}

part_2() {
  make_targets bench_host_cost bench_step tesserae_python
  if [ "$device" = cuda ]; then
    check host_cost 60 "$build/bench/bench_host_cost" --device cuda "${host_cost[@]}" --json "$logs/host_cost.json"
  else
    not_here host_cost "torch's C++ Module::to does not take parameters to the simulated device"
  fi
  for mode in plain sharded; do
    check "step_$mode" 90 "$build/bench/bench_step" --mode $mode --device $device --backend staged "${shape[@]}" \
      "${counts[@]}" --json "$logs/step_$mode.json"
  done
  for mode in plain fsdp1 fsdp2 tesserae tesserae2; do
    check "python_$mode" 90 "${alone[@]}" "MASTER_PORT=$(free_port)" "$python" bench/peers.py --mode $mode \
      --device $device "${shape[@]}" "${counts[@]}" --json "$logs/python_$mode.json"
  done
}

part_3() {
  make_targets bench_checkpoint bench_dial bench_step
  local folder
  folder=$(mktemp -d)
  # One rank: `async_call` is the pause.
  check checkpoint 120 "${alone[@]}" "$build/bench/bench_checkpoint" --device $device "${small[@]}" \
    --folder "$folder/ours" --saves 2 --steps 2 --json "$logs/checkpoint.json"
  check checkpoint_dcp 120 "${alone[@]}" "MASTER_PORT=$(free_port)" "$python" bench/checkpoint_peer.py --device $device \
    "${small[@]}" --folder "$folder/dcp" --saves 2 --steps 2 --json "$logs/checkpoint_dcp.json"
  rm -rf "$folder"
  check dial 150 "${four[@]}" "$build/bench/bench_dial" --nproc 4 --backend staged --device $device --degrees 4,2,1,4 \
    "${small[@]}" --steps 2 --warmup 1 --json "$logs/dial.json"
  # Whatever leaves, it is the same model, batch and number of steps.
  local leaves
  for leaves in none activations state; do
    local flags=()
    [ $leaves = none ] || flags=("--offload-$leaves")
    # The optimizer goes over state of the host with the processor.
    [ $leaves != state ] || flags+=(--threads "$(nproc)")
    check "offload_$leaves" 90 "$build/bench/bench_step" --device $device --backend staged "${shape[@]}" \
      "${offload_counts[@]}" "${flags[@]}" --json "$logs/offload_$leaves.json"
  done
  not_here dial_restart "FSDP2 has no backend for four ranks on one GPU; bench/dial.py restarts it on CPUs"
}

part_4() {
  make_targets tesserae_python
  for mode in fsdp2 tesserae2; do
    check "profile_$mode" 150 "${alone[@]}" "MASTER_PORT=$(free_port)" "$python" bench/profile_step.py --mode $mode \
      --device $device "${shape[@]}" --trace "$out/trace_$mode.json.gz" --json "$logs/profile_$mode.json"
  done
}

report() {  # PART
  "$python" - "$1" "$logs" "$out/part$1.json" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" <<'PYTHON'
import json, pathlib, sys

part, logs, target, commit = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4]
machine = json.loads((logs / "machine.json").read_text())
peak = machine.get("bf16_flops_per_second")
result = {"part": int(part), "machine": machine, "commit": commit, "checks": {}, "measured": {}}
for line in (logs / "checks").read_text().splitlines():
    name, status, seconds, why = line.split("\t")
    outcome = {"0": "passed", "77": "not here", "124": "out of time"}.get(status, f"failed with status {status}")
    log = logs / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    result["checks"][name] = {"outcome": outcome, "seconds": int(seconds)}
    if outcome != "passed":
        result["checks"][name]["why"] = why or lines[-20:]
    figures = logs / f"{name}.json"
    if outcome == "passed" and figures.exists():
        measured = json.loads(figures.read_text())
        if peak and "tokens_per_second" in measured:  # 6 operations a parameter and token; attention is not counted
            measured["mfu"] = 6 * measured["parameters"] * measured["tokens_per_second"] / peak
        result["measured"][name] = measured
target.write_text(json.dumps(result, indent=1) + "\n")
for name, check in result["checks"].items():
    print(f"{name:16} {check['outcome']}, {check['seconds']} s")
print(f"gpu_check: part {part} on {machine['device']} is in {target}")
PYTHON
}

for part in "${wanted[@]}"; do
  started=$SECONDS
  rm -f "$logs"/*.log "$logs/checks"
  find "$logs" -name '*.json' ! -name machine.json -delete
  "part_$part"
  report "$part"
done
echo "gpu_check: $failures failed, $SECONDS s"
[ "$failures" -eq 0 ]
