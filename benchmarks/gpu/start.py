"""Starts with and without compiled kernels, each in a process of its own: `start.py MODEL [turn …] [FIELD=VALUE …]`.

Turns: `threads` and `processes` begin with empty caches and compile kernels that way, `warm` takes the caches of the turn before
(default: threads processes processes threads warm). One JSON line a start: `ready_s` from the process's begin, the parts of it, the
processor's time of the process itself and of those that it started, and how many kernels the cache holds when it is ready and after
some prompts. `tokens` is a hash of the greedy answers, each computed alone: it must be the same in all starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TURNS = ("threads", "processes", "warm")
PROMPTS = ((5, 16), (100, 16), (900, 16), (5000, 16))  # tokens, and tokens of the answer


def asked(words: list[str]) -> tuple[list[str], list[str]]:
    """The turns and the options among command-line words."""
    turns = [w for w in words if "=" not in w] or ["threads", "processes", "processes", "threads", "warm"]
    if (unknown := next((t for t in turns if t not in TURNS), None)) is not None:
        raise SystemExit(f"no turn {unknown!r}; there are {', '.join(TURNS)}")
    if turns[0] == "warm":
        raise SystemExit("warm needs a turn before it")
    return turns, [w for w in words if "=" in w]


def one(model: str, turn: str, options: dict[str, str]) -> None:
    from requests_gpu import single

    from headrace.base.process import process_start_s
    from headrace.control.request import Request, Sampling
    from headrace.engine.inprocess import InProcessEngine
    from headrace.engine.kernels import compilers
    from headrace.engine.launch import launch
    from headrace.spec.config import EngineConfig

    if turn == "threads":
        compilers.LEAST_CORES = sys.maxsize
    core = launch(
        EngineConfig(model=model, **{"backend": "cuda", "max_model_len": 20480, "max_num_seqs": 256} | options)
    )
    ready_s = time.monotonic() - process_start_s()
    cpu, children = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    held = lambda: len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))  # noqa: E731
    kernels = [held()]
    engine = InProcessEngine(core)
    tokens: list[int] = []
    for length, count in PROMPTS:
        arrived: queue.SimpleQueue = queue.SimpleQueue()
        rules = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
        engine.submit(
            Request(request_id=f"{length}", prompt_token_ids=tuple(single(length, 9000 + length)), sampling=rules),
            arrived.put,
        )
        finish = None
        while finish is None:
            output = arrived.get()
            tokens += output.token_ids
            finish = output.finish
        assert finish.error is None, finish.error
    engine.stop()
    kernels.append(held())
    print("RES", json.dumps({
        "step": "start", "turn": turn, "ready_s": round(ready_s, 2), "parts_s": core.info.startup_s, "cpu_s": round(cpu, 2),
        "children_cpu_s": round(children.ru_utime + children.ru_stime, 2), "kernels": kernels,
        "tokens": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12],
        "notes": [n for n in core.info.notes if "kernels" in n or "warm-up" in n],
    }), flush=True)  # fmt: skip


def main(model: str, words: list[str]) -> None:
    turns, options = asked(words)
    with contextlib.ExitStack() as folders:
        for turn in turns:
            if turn != "warm":
                caches = folders.enter_context(tempfile.TemporaryDirectory())
            subprocess.run(
                [sys.executable, __file__, "--one", model, turn, *options], check=True,
                env=os.environ | {"TRITON_CACHE_DIR": f"{caches}/triton", "CUDA_CACHE_PATH": f"{caches}/cuda"},
            )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        from run import value

        pairs = (w.split("=", 1) for w in sys.argv[4:])
        one(sys.argv[2], sys.argv[3], {k: value(v) for k, v in pairs})
    else:
        main(sys.argv[1], sys.argv[2:])
