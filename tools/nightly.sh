#!/usr/bin/env bash
# tools/nightly.sh [--list] [NAME=COMMAND...]: what is too long for each change, one part after the other (default: all
# of PARTS below; hours). A part that fails does not end the night. build/nightly.md has each part's result and time as
# soon as it has ended, build/nightly/NAME.log what it wrote. Fails if one of them did, or could not run.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${NIGHTLY_FOLDER:-build/nightly} report=${NIGHTLY_FOLDER:-build/nightly}.md

fuzz='make build && cmake --build build/release --target fuzz_checkpoint && mkdir -p build/nightly/corpus &&
  build/release/tests/checkpoint/fuzz_checkpoint -max_total_time=1800 build/nightly/corpus tests/checkpoint/fuzz/corpus'
# What tests/launch starts jobs with: without it they are skipped, and say so.
long='tools/slurm_test_cluster.sh install || true; make long'
PARTS=("parity=make parity" "long=$long" "asan=make test PRESET=asan" "tsan=make test PRESET=tsan"
  "fuzz=$fuzz" "docs=make docs" "torch=tools/other_torch.sh")

if [ "${1:-}" = --list ]; then
  printf '%s\n' "${PARTS[@]%%=*}"
  exit 0
fi
if [ $# -eq 0 ]; then set -- "${PARTS[@]}"; fi

mkdir -p "$folder"
{
  echo "# $(git rev-parse --short HEAD), $(date -u +%F)"
  echo
  echo "| part | result | minutes |"
  echo "|---|---|--:|"
} >"$report"
failed=() number=0
for part in "$@"; do
  name=${part%%=*} number=$((number + 1)) start=$SECONDS result=passed
  echo "== $name ($number/$#, $((start / 60)) min so far)"
  tools/phase.sh "$name" "$folder/$name.log" bash -euo pipefail -c "${part#*=}" || result="failed, status $?"
  if [ "$result" != passed ]; then failed+=("$name"); fi
  echo "| $name | $result | $(awk "BEGIN {printf \"%.1f\", ($SECONDS - $start) / 60}") |" >>"$report"
done
cat "$report"
if [ ${#failed[@]} -gt 0 ]; then
  echo "nightly: failed: ${failed[*]}" >&2
  exit 1
fi
