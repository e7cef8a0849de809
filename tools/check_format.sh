#!/usr/bin/env bash
# tools/check_format.sh [--fix] [FILE...]: C++ files (all that git knows) against .clang-format.
# clang-format's output differs between major versions, so that one is pinned: 14, Debian 12's. With only another one
# at hand the check is skipped, except where CI=true: there it must run.
set -euo pipefail
cd "$(dirname "$0")/.."
pinned=14

find_pinned() {
  local candidate
  for candidate in "clang-format-$pinned" clang-format build/setup/clang-format/bin/clang-format; do
    if PYTHONPATH=build/setup/clang-format "$candidate" --version 2>/dev/null | grep -q "version $pinned\."; then
      echo "$candidate"
      return
    fi
  done
}

mode=(--dry-run -Werror)
if [ "${1:-}" = --fix ]; then
  mode=(-i)
  shift
fi
tool=$(find_pinned)
if [ -z "$tool" ]; then
  found=$(clang-format --version 2>/dev/null || echo none)
  echo "format: skipped, clang-format $pinned is not here (found: $found); \`make setup\` installs it"
  [ "${CI:-}" = true ] && exit 1 || exit 0
fi
if [ $# -eq 0 ]; then
  mapfile -t files < <(git ls-files -co --exclude-standard -- '*.h' '*.cpp' | while read -r f; do [ -f "$f" ] && echo "$f"; done)
else
  files=("$@")
fi
[ ${#files[@]} -gt 0 ] || exit 0
export PYTHONPATH=build/setup/clang-format
if ! report=$("$tool" "${mode[@]}" --style=file "${files[@]}" 2>&1); then
  echo "$report" | sed -nE 's/^([^ :]+):([0-9]+):.*/\1 \2/p' | sort -u -k 1,1 | sed 's/ /:/; s/$/: not as clang-format writes it/'
  echo "format: \`make format\` puts it right"
  exit 1
fi
echo "format: ${#files[@]} files are in order"
