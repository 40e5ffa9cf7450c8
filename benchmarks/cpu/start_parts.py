"""Where the CPU time of a start goes: from the process to the first token of one prompt on the native backend.

    python benchmarks/cpu/start_parts.py --out FILE.json [--model NAME] [--repeats 9]

Each run is a process of its own that goes the way of `headrace generate`, but one part after the other, on two threads. Of
every part the least CPU time of all runs is kept: what the main thread used (`parts_s`; the step also counts the worker),
and the whole process (`process_s`). What this script itself imports counts as the interpreter. A busy machine makes CPU
time longer, never shorter. Reads caches that an earlier start made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

MODEL = "smollm2-135m"
PROMPT = "Water boils at a lower temperature on a mountain because"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def child(model: str) -> dict[str, float]:
    """CPU seconds by part of this process, whose imports must all happen here."""
    parts = {"interpreter": time.thread_time()}
    last = time.thread_time()

    def part(name: str) -> None:
        nonlocal last
        now = time.thread_time()
        parts[name] = now - last
        last = now

    from headrace.base.process import collector_paused, import_numpy

    with collector_paused():
        import_numpy()
        part("numpy")
        import headrace_native
        import msgspec
        import tokenizers

        part("other libraries")
        import headrace.cli._plain
        import headrace.cli.generate
        import headrace.cli.main
        import headrace.engine.executors.native
        import headrace.engine.native.model
        import headrace.engine.weights.gguf
        import headrace.llm
        import headrace.text.tokenizer_first  # noqa: F401
        from headrace.engine.launch import launch
        from headrace.spec.config import EngineConfig
        from headrace.spec.locate import locate
        from headrace.text.load import load_tokenizer

        part("our modules")
        del headrace_native, msgspec, tokenizers
        files = locate(model, cached=True)
        files.gguf()
        part("header")
        tokenizer = load_tokenizer(files, first_text_soon=True)
        ids = tokenizer.encode(PROMPT)
        part("tokenizer and first text")
        core = launch(EngineConfig(model=model, backend="native", max_model_len=2048, threads=2), files=files)
        part("weights and engine")
    from headrace.control.request import Request, Sampling
    from headrace.engine.inprocess import InProcessEngine

    engine = InProcessEngine(core)
    before = time.process_time()
    request = Request(request_id="one", prompt_token_ids=tuple(ids), sampling=Sampling(max_tokens=1, temperature=0.0))
    list(engine.stream(request))
    parts["first step"] = time.process_time() - before
    return parts | {"process": time.process_time()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path)
    p.add_argument("--model", default=MODEL)
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child:
        print(json.dumps(child(a.model)), flush=True)
        os._exit(0)  # the engine's threads need not be taken apart
    command = [sys.executable, __file__, "--child", "--model", a.model]
    runs = []
    for _ in range(a.repeats + 1):  # the first fills caches
        out = subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout
        runs.append(json.loads(out.splitlines()[-1]))
    least = {name: min(run[name] for run in runs[1:]) for name in runs[0]}
    record = {"command": " ".join(sys.argv), "repeats": a.repeats, "process_s": least.pop("process"), "parts_s": least}
    text = json.dumps(record, indent=1)
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
