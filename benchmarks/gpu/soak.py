"""Random steps at a full pool: `soak.py MODEL [STEPS]` mixes prompts, answers, sampling rules and aborts, and counts errors.

The pool takes its usual share of the card; prompts are long and unrelated, so that it is full after the first seconds and
every block handed out later is taken from the prefix cache or from a preempted sequence.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import time

import torch

from headrace.control.request import Request, Sampling
from headrace.engine.inprocess import InProcessEngine
from headrace.engine.launch import launch
from headrace.spec.config import EngineConfig


def sampling(rng: random.Random, count: int) -> Sampling:
    """Any mix of rules that a request may ask for."""
    rules: dict[str, object] = {
        "max_tokens": count,
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]),
        "ignore_eos": True,
    }
    if rng.random() < 0.3:
        rules |= {
            "top_k": rng.choice([1, 20, 1000]),
            "top_p": rng.choice([0.5, 0.95, 1.0]),
            "min_p": rng.choice([0.0, 0.1]),
        }
    if rng.random() < 0.03:
        rules |= {"logprobs": rng.randint(0, 20)}
    if rng.random() < 0.005:  # rare, since each makes its steps wait for the ones before
        rules |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
    if rng.random() < 0.005:
        rules |= {"prompt_logprobs": 1}
    return Sampling(**rules)  # type: ignore[arg-type]


def main(model: str, steps: int) -> None:
    core = launch(EngineConfig(model=model, backend="cuda", max_model_len=20480, max_num_seqs=64, memory_fraction=0.88))
    engine = InProcessEngine(core)
    rng = random.Random(5)
    arrived: queue.SimpleQueue = queue.SimpleQueue()
    live: set[str] = set()
    made = ended = aborted = 0
    errors: list[str] = []
    least_free = torch.cuda.mem_get_info()[0]
    begin, base = time.perf_counter(), engine.stats.steps
    vocab = core.info.vocab_size
    filling = core.info.num_blocks * core.info.block_tokens

    def report() -> None:
        stats = engine.stats
        print("RES", json.dumps({
            "step": "soak", "steps": stats.steps - base, "s": round(time.perf_counter() - begin, 1), "requests": made,
            "ended": ended, "aborted": aborted, "errors": errors[:3], "preemptions": stats.preemptions,
            "cached_blocks": stats.cached_blocks, "free_blocks": stats.free_blocks, "blocks": stats.total_blocks,
            "least_free_bytes": least_free, "torch_peak_bytes": torch.cuda.max_memory_allocated(),
        }), flush=True)  # fmt: skip

    told = 0
    while (done := engine.stats.steps - base) < steps:
        if done >= told + 2000:
            told = done
            report()
        while len(live) < 80:
            # At first what fills the pool, then mostly short requests, so that most steps decode.
            length, count = 16000, 4
            if filling < 0:
                length = rng.randint(1, 8000) if rng.random() < 0.03 else rng.randint(1, 200)
                count = rng.randint(1, 250)
            filling -= length
            name = f"r{made}"
            prompt = tuple(rng.choices(range(3, vocab - 10), k=length))
            request = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling(rng, count))
            engine.submit(request, arrived.put)
            live.add(name)
            made += 1
        output = arrived.get()
        if output.finish is not None:
            live.discard(output.request_id)
            ended += 1
            if output.finish.error is not None:
                errors.append(output.finish.error)
        elif output.request_id in live and rng.random() < 0.0003:
            engine.abort(output.request_id)
            aborted += 1
        if rng.random() < 0.001:
            least_free = min(least_free, torch.cuda.mem_get_info()[0])
    report()
    engine.stop()
    assert not errors, errors[0]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
