#!/usr/bin/env bash
# tools/pytest.sh BUILD SECONDS [ARGUMENT...]: the tests in Python against what BUILD has, within so many seconds.
# Only a build that was configured without Python (the sanitizers') has none to run: a package that is missing for any
# other reason is an error, not a reason to leave them out.
set -euo pipefail
build=$(realpath "$1")
seconds=$2
shift 2
cd "$(dirname "$0")/.."

if grep -qiE '^TESSERAE_PYTHON:[A-Z]+=(OFF|0|NO|N|FALSE)$' "$build/CMakeCache.txt"; then
  echo "pytest: left out, $build was configured without Python"
  exit 0
fi
if ! compgen -G "$build/python/tesserae/_C.*.so" >/dev/null; then
  echo "pytest: no extension in $build/python/tesserae: \`make build\` makes it, TESSERAE_PYTHON=OFF does without" >&2
  exit 1
fi
# A test that hangs is killed by its own deadline; this is for the session as a whole, which first says where it is.
exec timeout --foreground --signal=ABRT --kill-after=30 "$seconds" \
  env PYTHONPATH="$build/python" "$(cat build/setup/python)" -m pytest -q "$@"
