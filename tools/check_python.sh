#!/usr/bin/env bash
# tools/check_python.sh [--fix] [FILE...]: Python files (all that git knows) against ruff, its rules in pyproject.toml.
# ruff's layout differs between versions, so the one in requirements-dev.txt is asked for. Without it the check is
# skipped, except where CI=true: there it must run.
set -euo pipefail
cd "$(dirname "$0")/.."
pinned=$(sed -n 's/^ruff==//p' requirements-dev.txt)

find_pinned() {
  local candidate
  for candidate in "$(dirname "$(cat build/setup/python 2>/dev/null || echo ruff)")/ruff" .venv/bin/ruff ruff; do
    if [ "$("$candidate" --version 2>/dev/null)" = "ruff $pinned" ]; then
      echo "$candidate"
      return
    fi
  done
}

lint=(check --quiet --output-format concise) format=(format --quiet --check --output-format concise)
if [ "${1:-}" = --fix ]; then
  lint=(check --quiet --fix) format=(format --quiet)
  shift
fi
tool=$(find_pinned)
if [ -z "$tool" ]; then
  echo "python: skipped, ruff $pinned is not here; \`make setup\` installs it"
  [ "${CI:-}" = true ] && exit 1 || exit 0
fi
if [ $# -eq 0 ]; then
  mapfile -t files < <(git ls-files -co --exclude-standard -- '*.py' | while read -r f; do [ -f "$f" ] && echo "$f"; done)
else
  files=("$@")
fi
[ ${#files[@]} -gt 0 ] || exit 0
status=0
"$tool" "${lint[@]}" "${files[@]}" || status=1
"$tool" "${format[@]}" "${files[@]}" || status=1
if [ $status -ne 0 ]; then
  echo "python: \`make format\` puts right what can be put right by itself"
  exit 1
fi
echo "python: ${#files[@]} files are in order"
