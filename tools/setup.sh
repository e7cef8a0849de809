#!/usr/bin/env bash
# tools/setup.sh [--dev]: makes this checkout able to build. Every target that needs it calls it; a second call does
# nothing. `make demo` needs less than the targets that build and test everything: those pass --dev.
#   1. Tools and libraries: looks for the commands and CMake packages themselves, wherever they come from; what is
#      missing is installed with apt-get where we may (root, or sudo without a password), else named in one line.
#   2. Python: the active one if it has torch >= 2.11 (TESSERAE_PYTHON names another), else .venv with requirements.txt.
#   3. With --dev: Chromium, Doxygen, Python's headers, and requirements-dev.txt. Nothing is installed into an environment
#      that is not ours: where the active Python lacks something, .venv is laid over it and sees its packages.
# Leaves build/setup/python (the path of the Python to use) and build/setup/stamp (for what that was done).
set -euo pipefail
cd -P "$(dirname "$0")/.."  # as Python will call this folder
mkdir -p build/setup

dev=no
if [ "${1:-}" = --dev ]; then dev=yes; fi

stamp() {
  cksum requirements.txt requirements-dev.txt tools/setup.sh
  echo "${TESSERAE_PYTHON:-} ${VIRTUAL_ENV:-} ${CONDA_PREFIX:-} $(command -v python3 || true)"
}
wanted=$(stamp)
is_done() { [ "$(cat build/setup/stamp 2>/dev/null)" = "$wanted $1" ] && "$(cat build/setup/python)" -c '' 2>/dev/null; }
if is_done dev=yes || is_done "dev=$dev"; then
  exit 0
fi
rm -f build/setup/stamp

die() {
  echo "setup: $*" >&2
  exit 1
}

# ---- what is there ----
version_at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }
has_compiler() { echo '#include <concepts>' | ${CXX:-c++} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; }
has_cmake() { version_at_least 3.22 "$(cmake --version 2>/dev/null | awk 'NR == 1 {print $3}')"; }
has_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
has_torch() {
  has_python "$1" &&
    "$1" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null
}
has_headers() {
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' 2>/dev/null
}
has_requirements() {  # PYTHON FILE: every line NAME==VERSION is installed so
  "$1" - "$2" 2>/dev/null <<'END'
import sys
from importlib.metadata import version
lines = (line.split("#")[0].strip() for line in open(sys.argv[1]))
sys.exit(any(version(name) != wanted for name, _, wanted in (line.partition("==") for line in lines if line)))
END
}
is_ours() { [ "$("$1" -c 'import sys; print(sys.prefix)' 2>/dev/null)" = "$PWD/.venv" ]; }
has_pip() { "$1" -c 'import pip' 2>/dev/null; }
can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }
has_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; } &>/dev/null
has_format() { clang-format-14 --version || clang-format --version | grep -q 'version 14\.'; } &>/dev/null

# The CMake packages that cmake/Dependencies.cmake asks for and find_package does not find; needs CMake and a compiler.
missing_libraries() {
  local probe=build/setup/probe
  rm -rf "$probe" && mkdir -p "$probe"
  {
    echo 'cmake_minimum_required(VERSION 3.22)'
    echo 'project(probe LANGUAGES CXX)'
    echo "list(APPEND CMAKE_MODULE_PATH \"$PWD/cmake\")"
    sed -nE 's/^ *find_package\(([^ )]+) ?([0-9.]*).*/\1 \2/p' cmake/Dependencies.cmake | while read -r name version; do
      echo "find_package($name $version QUIET)"
      echo "if(NOT ${name}_FOUND)"
      echo "  file(APPEND \${CMAKE_BINARY_DIR}/missing \"$name\\n\")"
      echo 'endif()'
    done
  } >"$probe/CMakeLists.txt"
  cmake -G "Unix Makefiles" -S "$probe" -B "$probe/build" >build/setup/probe.log 2>&1 ||
    die "CMake cannot configure an empty project: see build/setup/probe.log"
  cat "$probe/build/missing" 2>/dev/null || true
}

debian_package() {  # of a missing thing, as named below
  case $1 in
    compiler) echo g++ ;;
    ninja) echo ninja-build ;;
    venv) echo python3-venv ;;
    python-headers) echo "$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')" ;;
    nlohmann_json) echo nlohmann-json3-dev ;;
    xxHash) echo libxxhash-dev ;;
    CLI11) echo libcli11-dev ;;
    GTest) echo libgtest-dev libgmock-dev ;;
    benchmark) echo libbenchmark-dev ;;
    clang-format) echo clang-format-14 ;;
    *) echo "$1" ;;
  esac
}

find_python() {  # the Python to use, or to make .venv with
  local candidate
  for candidate in "${TESSERAE_PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
    if has_python "$candidate"; then
      echo "$candidate"
      return
    fi
  done
}

look() {  # sets python, use_venv, required, libraries (of those), useful
  required=() useful=()
  python=$(find_python)
  use_venv=no
  if [ -z "$python" ]; then
    required+=(python3)
  elif ! has_torch "$python"; then
    if [ -n "${TESSERAE_PYTHON:-}" ]; then die "TESSERAE_PYTHON=$TESSERAE_PYTHON has no torch >= 2.11"; fi
    use_venv=yes
    if ! has_pip .venv/bin/python && ! can_make_venv "$python"; then required+=(venv); fi
  fi
  if [ "$dev" = yes ] && [ -n "$python" ] && ! has_headers "$python"; then required+=(python-headers); fi
  if [ "$dev" = yes ] && [ "$use_venv" = no ] && ! is_ours "$python" &&
    ! has_requirements "$python" requirements-dev.txt && ! can_make_venv "$python"; then
    required+=(venv)
  fi
  has_compiler || required+=(compiler)
  has_cmake || required+=(cmake)
  command -v ninja >/dev/null || required+=(ninja)
  libraries=unknown
  if has_compiler && has_cmake; then
    libraries=$(missing_libraries)
    required+=($libraries)
  fi
  command -v ccache >/dev/null || useful+=(ccache)
  command -v mold >/dev/null || useful+=(mold)
  has_format || useful+=(clang-format)
  if [ "$dev" = yes ] && ! has_browser; then useful+=(chromium); fi
  if [ "$dev" = yes ] && ! command -v doxygen >/dev/null; then useful+=(doxygen); fi
}

# ---- 1. tools and libraries ----
as_root=()
may_install() {
  command -v apt-get >/dev/null || return 1
  [ "$(id -u)" -eq 0 ] && return 0
  as_root=(sudo -n)
  sudo -n true 2>/dev/null
}
# The package lists of a fresh machine are empty or old: only when an installation fails is it worth fetching them.
install_packages() {
  tools/phase.sh packages build/setup/packages.log "${as_root[@]}" bash -c '
    export DEBIAN_FRONTEND=noninteractive
    install() { apt-get install -y --no-install-recommends "$@"; }
    install "$@" || { apt-get update && install "$@"; }' apt "$@"
}
packages_of() {
  local thing
  for thing in "$@"; do debian_package "$thing"; done | tr ' ' '\n' | sort -u
}

look
if [ ${#required[@]} -gt 0 ] || [ ${#useful[@]} -gt 0 ]; then
  if may_install; then
    if [ ${#required[@]} -gt 0 ]; then
      if [ "$libraries" = unknown ]; then required+=(nlohmann_json xxHash CLI11 GTest benchmark); fi
      mapfile -t packages < <(packages_of "${required[@]}")
      echo "setup: installing ${packages[*]}"
      install_packages "${packages[@]}"
    fi
    for thing in "${useful[@]}"; do
      install_packages "$(debian_package "$thing")" >/dev/null || echo "setup: no package for $thing; going on without it"
    done
    look
  fi
  if [ ${#required[@]} -gt 0 ]; then
    die "missing: ${required[*]}. Install them (Debian: $(packages_of "${required[@]}" | paste -sd ' '))," \
      "or name their prefix in CMAKE_PREFIX_PATH, and run again."
  fi
fi

# ---- 2. Python ----
if [ "$use_venv" = yes ]; then
  if ! has_python .venv/bin/python; then
    tools/phase.sh venv build/setup/venv.log "$python" -m venv --clear .venv
  elif ! has_pip .venv/bin/python; then  # as `uv venv` makes them
    tools/phase.sh pip build/setup/venv.log .venv/bin/python -m ensurepip
  fi
  # Most of torch's 2,000 modules are never imported: compiling them all would take half a minute.
  tools/phase.sh python build/setup/pip.log .venv/bin/python -m pip install --no-compile -r requirements.txt
  # g++ takes headers of equal content and time for one, and torch has many that are empty: with times as they were
  # installed, what it makes of torch's headers differs from clone to clone, and the compiler's cache finds nothing.
  find .venv/lib/python*/site-packages/torch/include -type f -exec touch -d 2000-01-01 {} +
  python=.venv/bin/python
fi
if [ "$dev" = yes ] && ! has_requirements "$python" requirements-dev.txt; then
  if ! is_ours "$python"; then
    over=$("$python" -c 'import sys; print("\n".join(path for path in sys.path if path.endswith("-packages")))')
    tools/phase.sh venv build/setup/venv.log "$python" -m venv --clear .venv
    echo "$over" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/over.pth"
    python=.venv/bin/python
  fi
  tools/phase.sh packages build/setup/pip-dev.log "$python" -m pip install --no-compile -r requirements-dev.txt
fi
"$python" -c 'import sys; print(sys.executable)' >build/setup/python

# The format check wants one exact major version: releases that do not package it get it from PyPI.
if ! has_format && [ ! -x build/setup/clang-format/bin/clang-format ]; then
  "$(cat build/setup/python)" -m pip install -q --target build/setup/clang-format 'clang-format==14.0.6' \
    &>build/setup/format.log || echo "setup: no clang-format 14; only the format check needs it"
fi
echo "$wanted dev=$dev" >build/setup/stamp
