#!/usr/bin/env bash
# tools/docs.sh [BUILD]: builds the site of docs/ into build/docs/html. Every warning is an error: a link, an anchor or a
# name that leads nowhere, a page that docs/index.md does not have, a public name that is not described.
#   1. Tools: doxygen (tools/setup.sh --dev installs it where it may), and build/docs/env with requirements-docs.txt, laid over the
#      Python that the build uses, so that the package can be imported.
#   2. Doxygen: the public C++ headers to XML, and whether everything in them is described (tools/check_docs.py).
#   3. Sphinx: docs/site/conf.py. TESSERAE_REPOSITORY=URL makes links to sources lead there instead of to copies.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release} out=build/docs
mkdir -p "$out"

die() {
  echo "docs: $*" >&2
  exit 1
}
[ -f "$build/python/tesserae/__init__.py" ] || die "no package in $build/python: \`make docs\` builds it"

# ---- 1. tools ----
tools/setup.sh --dev
command -v doxygen >/dev/null || die "doxygen is missing. Install it (Debian: doxygen), and run again."
python=$(cat build/setup/python)
wanted=$(cksum requirements-docs.txt; echo "$python")
if [ "$(cat "$out/stamp" 2>/dev/null)" != "$wanted" ] || ! "$out/env/bin/python" -c '' 2>/dev/null; then
  rm -f "$out/stamp"
  tools/phase.sh venv "$out/venv.log" "$python" -m venv --clear "$out/env"
  tools/phase.sh packages "$out/pip.log" "$out/env/bin/python" -m pip install -r requirements-docs.txt
  over=$("$python" -c 'import sys; print("\n".join(path for path in sys.path if path.endswith("-packages")))')
  echo "$over" >"$("$out/env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/over.pth"
  echo "$wanted" >"$out/stamp"
fi
env=$PWD/$out/env/bin/python
export PYTHONPATH="$PWD/$build/python" OMP_NUM_THREADS=1

# ---- 2. the C++ headers ----
headers=$(tools/check_docs.py --headers)
rm -rf "$out/doxygen" && mkdir -p "$out/doxygen"
{
  cat docs/site/Doxyfile
  echo "INPUT = $(echo $headers)"
  echo "OUTPUT_DIRECTORY = $out/doxygen"
} >"$out/Doxyfile"
tools/phase.sh doxygen "$out/doxygen.log" doxygen "$out/Doxyfile"
tools/check_docs.py --cpp "$out/doxygen/xml"
sed -i '/<derivedcompoundref/d' "$out"/doxygen/xml/class*.xml  # Breathe links "Subclassed by" to targets that it lacks
"$env" tools/check_docs.py --python

# ---- 3. the site ----
tools/check_links.py
rm -rf "$out/html"
TESSERAE_DOXYGEN_XML=$PWD/$out/doxygen/xml \
  tools/phase.sh sphinx "$out/sphinx.log" "$env" -m sphinx -b html -W --keep-going -q -j 1 -d "$out/doctrees" \
  -c docs/site docs "$out/html"
tools/check_links.py --site "$out/html"
echo "docs: $out/html/index.html"
