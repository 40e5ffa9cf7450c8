# Two commands do everything on a fresh machine: `make demo` and `make test`. Both go through `make setup`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.headrace-setup

.PHONY: setup demo serve test test-gpu check check-native format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh native/CMakeLists.txt native/pyproject.toml $(wildcard native/src/*)
	PYTHON=$(PYTHON) VENV=$(VENV) bash scripts/setup.sh
	touch $(STAMP)

demo: setup
	$(BIN)/python scripts/demo.py

serve: setup
	$(BIN)/headrace serve smollm2-135m --host 127.0.0.1 --port 8000

test: setup
	$(BIN)/pytest

# The kernels and the CUDA backend in bf16 on a GPU; without one they are left out (the interpreter's tier is in `make test`).
test-gpu: setup
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  $(BIN)/pytest tests/engine/test_kernels_rows.py tests/engine/test_kernels_attention.py tests/engine/test_kernels_random_shapes.py \
	    tests/engine/test_cuda_sampling.py tests/engine/test_cuda_rows.py tests/engine/test_cuda_broken_rows.py tests/engine/test_kernels_hopper.py \
	    tests/engine/test_kernels_decode_hopper.py tests/engine/test_cuda_library.py \
	    tests/engine/test_kernels_gemm_hopper.py tests/engine/test_kernels_quantized_hopper.py tests/engine/test_kernels_codes.py tests/engine/test_kernels_groups.py \
	    tests/engine/test_cuda_kv_formats.py tests/engine/test_kernels_quantized.py tests/engine/test_cuda_quantized.py \
	    tests/engine/test_cuda_timeline.py tests/engine/test_cuda_steps.py tests/engine/test_cuda_bf16.py tests/engine/test_cuda_deep.py \
	    tests/engine/test_cuda_flashinfer.py tests/engine/test_cuda_smollm2.py; \
	else echo "no CUDA GPU: skipped"; fi

# The native kernels without Python: plain, under sanitizers, for aarch64 under qemu (minutes of compiling).
check-native:
	bash native/tests/check.sh

check: setup
	$(BIN)/ruff format --check src tests benchmarks scripts
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest

format: setup
	$(BIN)/ruff format src tests benchmarks scripts
	$(BIN)/ruff check --fix src tests benchmarks scripts

clean:
	rm -rf $(VENV) build dist
