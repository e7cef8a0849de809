#!/usr/bin/env bash
# tools/wheels.sh [--torch VERSION]... [--index URL] [--out FOLDER] [--python PYTHON]: builds a wheel for each torch.
#
# A wheel belongs to the torch that it was built against, so there is one for each, told apart by a local version as
# torch does it: tesserae-0.1.0+torch2.13cpu. For each torch:
#   1. a fresh environment with that torch, from the index (default: pip's own settings); one that is not there is
#      said and left out: exit status 3 at the end if nothing else failed;
#   2. the wheel, built against it without isolation, and tagged by the newest symbol of the C library that it needs
#      (manylinux_2_N: older systems refuse it instead of failing at the first import);
#   3. the wheel is installed into another fresh environment with that torch, without a compiler on the path, and tried:
#      import, one step of training in one process, `tesserae doctor`.
# Versions are as pip takes them: 2.13.0, 2.13.0+cpu, 2.11.0+cu130. Default: the torch of requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

torches=()
index=()
out=dist
python=${PYTHON:-python3}
while [ $# -gt 0 ]; do
  case $1 in
    --torch) torches+=("$2"); shift 2 ;;
    --index) index=(--index-url "$2"); shift 2 ;;
    --out) out=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    -h | --help) sed -n '2,/^set /p' "$0" | sed 's/^# \{0,1\}//; $d'; exit 0 ;;
    *) echo "wheels: unknown argument $1; see --help" >&2; exit 2 ;;
  esac
done
if [ ${#torches[@]} = 0 ]; then
  torches=("$(sed -n 's/^torch==\([^ #]*\).*/\1/p' requirements.txt)")
fi

# "2_34": of all that is compiled in a wheel.
newest_glibc() {
  rm -rf "$work/unpacked" && mkdir "$work/unpacked" && (cd "$work/unpacked" && python3 -m zipfile -e "$1" .)
  find "$work/unpacked" -name '*.so' -o -path '*/bin/tesserae' -size +100k | xargs objdump -T |
    grep -o 'GLIBC_2\.[0-9]*' | sed 's/GLIBC_2\.//' | sort -n | tail -n 1 | sed 's/^/2_/'
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
status=0
for torch in "${torches[@]}"; do
  echo "== torch $torch"
  "$python" -m venv "$work/build"
  if ! "$work/build/bin/pip" install -q "${index[@]}" "torch==$torch" > "$work/log" 2>&1; then
    echo "wheels: torch $torch cannot be installed, left out: $(tail -n 1 "$work/log")" >&2
    rm -rf "$work/build"
    status=3
    continue
  fi
  "$work/build/bin/pip" install -q 'scikit-build-core>=0.11' wheel
  tools/cuda_headers.sh "$work/build/bin/python" "${index[@]}"
  full=$("$work/build/bin/python" -c 'import torch; print(torch.__version__)')
  label=$(echo "torch$full" | sed -E 's/^(torch[0-9]+\.[0-9]+)[^+]*/\1/; s/\+//; s/[^a-z0-9.]//g')
  begin=$SECONDS
  rm -rf "$work/tree" && mkdir "$work/tree" && git archive HEAD | tar -x -C "$work/tree"
  sed -i "/^regex = .project/a result = \"{value}+$label\"" "$work/tree/pyproject.toml"
  grep -q "^result = .*$label" "$work/tree/pyproject.toml"
  PATH=$work/build/bin:$PATH "$work/build/bin/pip" wheel -q --no-deps --no-build-isolation -w "$work/wheel" "$work/tree"
  wheel=$(ls "$work"/wheel/*.whl)
  platform=manylinux_$(newest_glibc "$wheel")_$(uname -m)
  "$work/build/bin/python" -m wheel tags --remove --platform-tag "$platform" "$wheel" > "$work/log"
  wheel=$(ls "$work"/wheel/*.whl)
  echo "   built in $((SECONDS - begin)) s: $(basename "$wheel"), $(du -h "$wheel" | cut -f 1)"

  "$python" -m venv "$work/try"
  "$work/try/bin/pip" install -q "${index[@]}" "torch==$torch"
  begin=$SECONDS
  PATH=$work/try/bin:/usr/bin/nowhere "$work/try/bin/pip" install -q --no-deps "$wheel"
  echo "   installed in $((SECONDS - begin)) s"
  (cd "$work" && PATH=$work/try/bin "$work/try/bin/python" -c "
import tesserae as tsm, torch
tsm.init()
print('   works:', tsm.__version__, 'with torch', torch.__version__)" && "$work/try/bin/tesserae" doctor > "$work/log") ||
    { cat "$work/log" >&2; echo "wheels: the wheel for torch $torch does not work" >&2; exit 1; }
  mv "$wheel" "$out/"
  rm -rf "$work/build" "$work/try" "$work/wheel"
done
ls -l "$out"
exit $status
