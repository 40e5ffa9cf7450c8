#!/usr/bin/env bash
# Build and run the C++ check: plain, under the sanitizers, with AVX-VNNI's kernels, and for aarch64 under qemu where its
# compiler is installed; then the Python tests of the extension, fuzzing included, on sanitized builds of it.
#   native/tests/check.sh [plain|address|thread|avxvnni|aarch64|python-address|python-thread ...]
# default: all that this machine can run. PYTHON names the interpreter that has the project's test dependencies.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
work=${HEADRACE_CHECK_BUILD:-$here/build/check}
kinds=("$@")
if [ ${#kinds[@]} -eq 0 ]; then
  kinds=(plain address thread)
  grep -qw avx512_vnni /proc/cpuinfo && kinds+=(avxvnni)
  command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null && kinds+=(aarch64)
  kinds+=(python-address python-thread)
fi
python=${PYTHON:-$here/../.venv/bin/python}
build() {  # name, then cmake options
  local name=$1
  shift
  cmake -S "$here" -B "$work/$name" -DHEADRACE_PYTHON=OFF -DHEADRACE_CHECK=ON "$@" >/dev/null
  cmake --build "$work/$name" -j "${JOBS:-2}" >/dev/null
}
build_python() {  # name, sanitizers: an extension module beside a copy of the package, in $work/$name
  cmake -S "$here" -B "$work/$1" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$python" -DHEADRACE_SANITIZE="$2" >/dev/null
  cmake --build "$work/$1" -j "${JOBS:-2}" >/dev/null
  mkdir -p "$work/$1/headrace_native"
  cp "$here/headrace_native/__init__.py" "$work/$1"/_native*.so "$work/$1/headrace_native/"
}
run_python() {  # name, runtime libraries: the tests that go straight to the extension, none of which loads torch
  local name=$1 preload="" tests=$here/../tests/native
  for library in $2; do preload+=" $(c++ -print-file-name="$library")"; done
  # the interpreter never frees all it has; PYTHONMALLOC=malloc lets the sanitizer see its buffers' ends
  ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
    PYTHONMALLOC=malloc PYTHONPATH="$work/$name:$here/../src" OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
    LD_PRELOAD="${preload# }" setarch -R "$python" -m pytest -q -x -p no:cacheprovider \
    "$tests"/test_native_fuzz.py "$tests"/test_native_attention.py "$tests"/test_native_gemm.py "$tests"/test_native_pack.py \
    "$tests"/test_native_sampler.py "$tests"/test_native_cache.py "$tests"/test_native_rows.py "$tests"/test_native_pool.py "$tests"/test_native_ahead.py -k "${SELECT:-not nothing}"
}
for kind in "${kinds[@]}"; do
  echo "== $kind"
  case $kind in
    # one command a line: in `build && run` a failed build would end nothing
    plain)
      build plain
      "$work/plain/headrace_check"
      ;;
    address)
      build address -DHEADRACE_SANITIZE=address,undefined
      "$work/address/headrace_check" --brief
      ;;
    thread)
      build thread -DHEADRACE_SANITIZE=thread
      "$work/thread/headrace_check" --brief
      ;;
    aarch64)
      build aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
        -DCMAKE_EXE_LINKER_FLAGS=-static
      qemu-aarch64 "$work/aarch64/headrace_check" --brief
      ;;
    python-address)
      build_python python-address address,undefined
      run_python python-address "libasan.so libubsan.so"
      ;;
    python-thread)
      build_python python-thread thread
      # Random tables give a block to two sequences, whose writes race: the caller's affair, but it ends this run.
      SELECT="${SELECT:-not random_tables_and_shapes}" run_python python-thread libtsan.so
      ;;
    avxvnni)
      build avxvnni -DHEADRACE_VNNI_EVEX=ON
      "$work/avxvnni/headrace_check" --brief
      ;;
    *) echo "unknown kind $kind" >&2; exit 2 ;;
  esac
done
