"""Random steps at a full pool: `soak.py MODEL [STEPS] [FIELD=VALUE …]` mixes prompts, answers, sampling rules and aborts.

The pool takes its usual share of the card; the first prompts are unrelated and fill it, and every block handed out later is
taken from the prefix cache or from a preempted sequence. Counts errors, and tells the least free memory seen. Few layers
(`checkpoint.py FOLDER qwen3-8-layers`) make many steps of a minute. `num_blocks=9000` leaves the card to others. However large the
pool is, once the engine is ready torch may hold no more than was predicted and the engine's reserve: what does not fit there
fails as it would on a full card. `seed=N` draws other requests.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import sys
import time

import torch

from headrace.control.request import Request, Sampling
from headrace.engine.cuda.model import RESERVE_BYTES
from headrace.engine.inprocess import InProcessEngine
from headrace.engine.launch import launch
from headrace.spec.config import EngineConfig

SEQS = 32


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
    if rng.random() < 0.002:  # rare, since each makes its steps wait for the ones before
        rules |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
    if rng.random() < 0.003:
        rules |= {"prompt_logprobs": 1}
    return Sampling(**rules)  # type: ignore[arg-type]


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def value(text: str) -> float | int | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def main(model: str, steps: int, options: dict[str, float | int | str]) -> None:
    """`options`: fields of EngineConfig that differ from the defaults here, say attention=flashinfer."""
    sizes: dict[str, object] = {
        "max_model_len": 20480,
        "max_num_seqs": SEQS,
        "memory_fraction": 0.88,
        "backend": "cuda",
    }
    sizes |= options
    seed = int(sizes.pop("seed", 5))  # type: ignore[call-overload]
    core = launch(EngineConfig(model=model, **sizes))  # type: ignore[arg-type]
    if torch.cuda.is_available():
        held = sum(m.predicted_bytes for m in core.info.memory) + RESERVE_BYTES
        torch.cuda.set_per_process_memory_fraction(held / torch.cuda.get_device_properties(0).total_memory)
        print("RES", json.dumps({"step": "limit", "bytes": held, "blocks": core.info.num_blocks}), flush=True)
    engine = InProcessEngine(core)
    rng = random.Random(seed)
    arrived: queue.SimpleQueue = queue.SimpleQueue()
    live: set[str] = set()
    made = ended = aborted = 0
    errors: list[str] = []
    least_free = at_start = free_bytes()
    begin, base = time.perf_counter(), engine.stats.steps
    vocab = core.info.vocab_size
    filling = core.info.num_blocks * core.info.block_tokens
    words = tuple(rng.choices(range(3, vocab - 10), k=1 << 20))

    def prompt(length: int) -> tuple[int, ...]:
        """Unlike all others: a run of the drawn words behind a first word of its own."""
        at = rng.randrange(len(words) - length)
        return (rng.randrange(3, vocab - 10), rng.randrange(3, vocab - 10), *words[at : at + length])

    def report() -> None:
        stats = engine.stats
        print("RES", json.dumps({
            "step": "soak", "steps": stats.steps - base, "s": round(time.perf_counter() - begin, 1), "requests": made,
            "ended": ended, "aborted": aborted, "errors": errors[:3], "preemptions": stats.preemptions,
            "cached_blocks": stats.cached_blocks, "free_blocks": stats.free_blocks, "blocks": stats.total_blocks,
            "free_bytes_at_start": at_start, "least_free_bytes": least_free,
            "torch_peak_bytes": torch.cuda.max_memory_allocated(), "torch_reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        }), flush=True)  # fmt: skip

    told = looked = 0
    while (done := engine.stats.steps - base) < steps:
        if done >= told + 1000:
            told = done
            report()
        if done >= looked + 20:
            looked = done
            least_free = min(least_free, free_bytes())
        while len(live) < SEQS + SEQS // 4:
            # At first what fills the pool, then mostly short requests, so that most steps decode.
            length, count = 4000, 1
            if filling < 0:
                length = rng.randint(1, 8000) if rng.random() < 0.02 else rng.randint(1, 150)
                count = rng.randint(1, 150)
            filling -= length
            name = f"r{made}"
            engine.submit(
                Request(request_id=name, prompt_token_ids=prompt(length), sampling=sampling(rng, count)), arrived.put
            )
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
    report()
    engine.stop()
    assert not errors, errors[0]


if __name__ == "__main__":
    given = {k: value(v) for k, v in (a.split("=", 1) for a in sys.argv[2:] if "=" in a)}
    counts = [int(a) for a in sys.argv[2:] if "=" not in a]
    main(sys.argv[1], counts[0] if counts else 10_000, given)
