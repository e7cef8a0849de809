#!/usr/bin/env bash
# tools/test.sh PYTEST CTEST: both sets of tests, side by side: each a command line. Either leaves most of a core idle,
# waiting for ranks to start and for deadlines to pass. What pytest writes is seen at once, what ctest writes after it
# (from $TEST_LOG). The status is 0 only if both passed; a failure of one does not end the other.
set -euo pipefail
cd "$(dirname "$0")/.."
log=${TEST_LOG:-build/ctest.log}
mkdir -p "$(dirname "$log")"
: >"$log"  # what runs in the background may come to it after tail

# A group of its own: what runs in the background is deaf to Ctrl-C, so that its end is for us to bring about.
setsid bash -euo pipefail -c "$2" >"$log" 2>&1 </dev/null &
ctest=$!
trap 'kill -- "-$ctest" 2>/dev/null; exit 130' INT TERM

failed=()
bash -euo pipefail -c "$1" || failed+=("pytest, status $?")
echo "== pytest has ended ($((SECONDS / 60)) min $((SECONDS % 60)) s); ctest, beside it:"
tail -n +1 -f --pid="$ctest" "$log"
wait "$ctest" || failed+=("ctest, status $?")
echo "== ctest has ended ($((SECONDS / 60)) min $((SECONDS % 60)) s)"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'test: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
