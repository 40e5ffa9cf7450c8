#!/usr/bin/env bash
# Engine against engine and the ladder, on SmolLM2-135M. Run it in a work folder that holds
#   llama/llama-server           llama.cpp's server (or set LLAMA to it)
#   models/smollm2-Q4_0.gguf     its best format here (or set GGUF to another)
# and with `headrace` on the PATH. Results land in ./records; each folder has a report.html. Before each run it waits (at
# most IDLE_WAIT seconds) until other programs are idle, and what they used meanwhile is in the results. Interrupted, or a
# step failed: start it again, and it goes on where it stopped.
set -euo pipefail
LLAMA=${LLAMA:-llama/llama-server} GGUF=${GGUF:-models/smollm2-Q4_0.gguf} PAIRS=${PAIRS:-4} OUT=${OUT:-records}
REQUESTS=${REQUESTS:-96} IDLE_WAIT=${IDLE_WAIT:-600}
OURS="headrace:context=2048,threads=2" NAIVE="naive:context=2048,threads=2"
THEIRS="llama-cpp:bin=$LLAMA,slots=8,context=2048,threads=2,flash_attention=on"
AZURE="--workload azure-conv --scale ${AZURE_SCALE:-0.25} --requests $REQUESTS --concurrency 8"
AGENTS="--workload agentic-branching --scale 0.25 --set tool=0.05 --requests $REQUESTS --concurrency 2"

go() { # folder, command of a first start
  local folder="$OUT/$1"
  shift
  if [ -e "$folder/report.html" ]; then
    echo "$folder is done"
  elif [ -e "$folder/job.json" ]; then
    headrace bench resume "$folder"
  else
    headrace bench "$@" --idle-wait "$IDLE_WAIT" --out "$folder"
  fi
}

ab() { # name, A, model of A, load
  go "$1" ab --a "$2" --model "$3" --b "$OURS" --model-b smollm2-135m $4 --pairs "$PAIRS"
}

mkdir -p "$OUT"
failed=""
for step in ${STEPS:-azure-llama azure-naive agents-llama agents-naive ladder}; do
  echo "$(date +%T) $step"
  case $step in
    azure-llama) ab azure-conv-llama-cpp "$THEIRS" "$GGUF" "$AZURE" ;;
    azure-naive) ab azure-conv-naive "$NAIVE" smollm2-135m "$AZURE" ;;
    agents-llama) ab agentic-branching-llama-cpp "$THEIRS" "$GGUF" "$AGENTS" ;;
    agents-naive) ab agentic-branching-naive "$NAIVE" smollm2-135m "$AGENTS" ;;
    ladder) go ladder ladder smollm2-135m --users 1,4,8 --contexts 256,768 --requests 12 --output 24 --repeats 3 \
      --engine context=1024 --engine threads=2 ${LADDER:-} ;;
    *) echo "no step $step" >&2; false ;;
  esac || failed="$failed $step"
done
echo "$(date +%T) done"
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
