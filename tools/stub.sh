#!/usr/bin/env bash
# tools/stub.sh [--fix]: python/tesserae/_C.pyi against what pybind11-stubgen makes of the extension. PYTHON and
# PYTHONPATH say which (`make stub` and the tests set them).
set -euo pipefail
cd "$(dirname "$0")/.."
stub=python/tesserae/_C.pyi
python=${PYTHON:-$(cat build/setup/python)}

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$python" -m pybind11_stubgen tesserae._C --exit-code -o "$made" >"$made/log" 2>&1 || {
  cat "$made/log"
  exit 1
}
{
  echo "# Made by pybind11-stubgen: \`make stub\`."
  cat "$made/tesserae/_C.pyi"
} >"$made/stub.pyi"
"$python" -m ruff format --quiet --isolated --line-length 120 "$made/stub.pyi"
if [ "${1:-}" = --fix ]; then
  cp "$made/stub.pyi" "$stub"
elif ! diff -u "$stub" "$made/stub.pyi"; then
  echo "stub: $stub is not what the extension offers; \`make stub\` puts it right"
  exit 1
fi
