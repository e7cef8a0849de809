#!/usr/bin/env bash
# tools/phase.sh NAME LOG COMMAND...: runs one phase of set-up or build with a quiet screen.
# The command's output goes to LOG. On a terminal one live line shows the newest [done/all] of ninja and the elapsed
# time; elsewhere a line every 30 s. If the command fails, the end of the log follows and its status is ours.
set -euo pipefail
name=$1 log=$2
shift 2
mkdir -p "$(dirname "$log")"

"$@" >"$log" 2>&1 </dev/null &
child=$!
trap 'kill "$child" 2>/dev/null; wait "$child" 2>/dev/null; exit 130' INT TERM

progress() { grep -oE '^\[[0-9]+/[0-9]+\]' "$log" 2>/dev/null | tail -n 1 || true; }
live() { [ -t 1 ]; }

next_line=30
while kill -0 "$child" 2>/dev/null; do
  if live; then
    printf '\r\033[K%-10s %s %d s' "$name" "$(progress)" "$SECONDS"
  elif [ "$SECONDS" -ge "$next_line" ]; then
    printf '%-10s %s %d s\n' "$name" "$(progress)" "$SECONDS"
    next_line=$((SECONDS + 30))
  fi
  if [ "$SECONDS" -lt 2 ]; then sleep 0.1; else sleep 1; fi
done
status=0
wait "$child" || status=$?
if live; then printf '\r\033[K'; fi

if [ "$status" -eq 0 ]; then
  printf '%-10s done, %d s\n' "$name" "$SECONDS"
  exit 0
fi
printf '%-10s FAILED (status %d, %d s). From %s:\n' "$name" "$status" "$SECONDS" "$log"
# ninja goes on with other jobs after the first failure: what it says about that one is worth more than the log's end.
failed=$(grep -n -m 1 -E '^FAILED:|CMake Error' "$log" | cut -d : -f 1 || true)
tail -n "+${failed:-1}" "$log" | if [ -n "$failed" ]; then head -n 60; else tail -n 40; fi
exit "$status"
