#!/usr/bin/env bash
# Engine against engine and the ladder, on SmolLM2-135M. Run it in a work folder that holds
#   llama/llama-server           llama.cpp's server (or set LLAMA to it)
#   models/smollm2-Q4_0.gguf     its best format here (or set GGUF to another)
# and with `headrace` on the PATH. Results land in ./records; each folder has a report.html.
set -euo pipefail
LLAMA=${LLAMA:-llama/llama-server} GGUF=${GGUF:-models/smollm2-Q4_0.gguf} PAIRS=${PAIRS:-4} OUT=${OUT:-records}
OURS="headrace:context=2048,threads=2" NAIVE="naive:context=2048,threads=2"
THEIRS="llama-cpp:bin=$LLAMA,slots=8,context=2048,threads=2,flash_attention=on"
AZURE="--workload azure-conv --scale 0.1 --requests 32 --concurrency 8"
AGENTS="--workload agentic-branching --scale 0.25 --set tool=0.05 --requests 32 --concurrency 2"

ab() { # name, A, model of A, load
  headrace bench ab --a "$2" --model "$3" --b "$OURS" --model-b smollm2-135m $4 --pairs "$PAIRS" --idle-wait "${IDLE_WAIT:-600}" --out "$OUT/$1" --json > "$OUT/$1.log"
  rm "$OUT/$1.log"
}

mkdir -p "$OUT"
for step in ${STEPS:-azure-llama azure-naive agents-llama agents-naive ladder}; do
  case $step in
    azure-llama) ab azure-conv-llama-cpp "$THEIRS" "$GGUF" "$AZURE" ;;
    azure-naive) ab azure-conv-naive "$NAIVE" smollm2-135m "$AZURE" ;;
    agents-llama) ab agentic-branching-llama-cpp "$THEIRS" "$GGUF" "$AGENTS" ;;
    agents-naive) ab agentic-branching-naive "$NAIVE" smollm2-135m "$AGENTS" ;;
    ladder) headrace bench ladder smollm2-135m --users 1,4,8 --contexts 256,768 --requests 12 --output 24 --repeats 3 \
      --idle-wait "${IDLE_WAIT:-600}" --engine context=1024 --engine threads=2 ${LADDER:-} --out "$OUT/ladder" ;;
  esac
done
