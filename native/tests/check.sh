#!/usr/bin/env bash
# Build and run the C++ check: plain, under the sanitizers, and for aarch64 under qemu where its compiler is installed.
#   native/tests/check.sh [plain|address|thread|aarch64 ...]     default: all that this machine can run
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
work=${HEADRACE_CHECK_BUILD:-$here/build/check}
kinds=("$@")
if [ ${#kinds[@]} -eq 0 ]; then
  kinds=(plain address thread)
  command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null && kinds+=(aarch64)
fi
build() {  # name, then cmake options
  local name=$1
  shift
  cmake -S "$here" -B "$work/$name" -DHEADRACE_PYTHON=OFF -DHEADRACE_CHECK=ON "$@" >/dev/null
  cmake --build "$work/$name" -j "${JOBS:-2}" >/dev/null
}
for kind in "${kinds[@]}"; do
  echo "== $kind"
  case $kind in
    plain) build plain && "$work/plain/headrace_check" ;;
    address) build address -DHEADRACE_SANITIZE=address,undefined && "$work/address/headrace_check" --brief ;;
    thread) build thread -DHEADRACE_SANITIZE=thread && "$work/thread/headrace_check" --brief ;;
    aarch64)
      build aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
        -DCMAKE_EXE_LINKER_FLAGS=-static
      qemu-aarch64 "$work/aarch64/headrace_check" --brief
      ;;
    *) echo "unknown kind $kind" >&2; exit 2 ;;
  esac
done
