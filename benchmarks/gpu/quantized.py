"""Weight formats beside bf16 on one GPU: `quantized.py MODEL [--rounds N] [--batches N …] [FORMAT …]`; one JSON line a measurement,
then a table.

One process per format holds its engine; they are all started first and then take turns, a round each, so that the card's
moods meet them alike. Weights are drawn (`load_format` dummy), ids are greedy, prompts are never repeated. A decode step is
the time of 48 tokens after the first, a step of each of B streams; a prompt's time is that of its first token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

from requests_gpu import single

FORMATS = ("bf16", "int4_g128", "int4_g128_asym", "nf4", "mxfp4", "int8", "w8a8", "fp8_channel")
BATCHES = (1, 8, 32, 64, 128, 256)
PROMPTS = (1024, 4096)
AFTER = 48


def report(**fields) -> None:
    print("RES", json.dumps(fields), flush=True)


def serve(pipe: Connection, model: str, weights: str, kv: str, batches: list[int], seed: int) -> None:
    """Start an engine, then measure a round for every message."""
    from run import Bench

    begin = time.monotonic()
    # Not all of a card: the others need their part of it.
    bench = Bench(
        model, weights=weights, kv=kv, load_format="dummy", max_model_len=4352, max_num_seqs=256, num_blocks=2400
    )  # fmt: skip
    salt = seed

    def asks(count: int, length: int, tokens: int):
        nonlocal salt
        salt += count
        return [(single(length, 7_000_000 + salt * 1000 + k), tokens) for k in range(count)]

    def seconds(count: int, length: int, tokens: int) -> float:
        return bench.generate(asks(count, length, tokens))[0]

    seconds(8, 64, 8)
    seconds(1, 4096, 2)
    (held,) = (m for m in bench.core.info.memory if m.name == "weights")
    pipe.send(
        {"start_s": round(time.monotonic() - begin, 1), "bytes": held.actual_bytes, "predicted": held.predicted_bytes}
    )
    while pipe.recv():
        found = {}
        for batch in batches:
            first = seconds(batch, 64, 1)
            whole = [seconds(batch, 64, 1 + AFTER) for _ in range(3 if batch == 1 else 1)]
            found[f"step_ms_{batch}"] = round(1e3 * (statistics.median(whole) - first) / AFTER, 4)
        for length in PROMPTS:
            found[f"ttft_ms_{length}"] = round(1e3 * statistics.median(seconds(1, length, 1) for _ in range(3)), 3)
        pipe.send(found)
    bench.engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins that would end later than this")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    given = parser.parse_args()
    begin, longest = time.monotonic(), 0.0
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    workers = []
    for i, name in enumerate(given.formats):
        pipes[name], theirs = context.Pipe()
        workers.append(
            context.Process(
                target=serve, args=(theirs, given.model, name, given.kv, given.batches, i * 100_000), daemon=True
            )
        )
        workers[-1].start()
        theirs.close()
    sizes: dict[str, int] = {}
    for name in list(pipes):
        try:
            ready = pipes[name].recv()
        except EOFError:
            report(step="failed", weights=name)
            del pipes[name]
            continue
        sizes[name] = ready["bytes"]
        report(step="ready", weights=name, **ready)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in pipes}
    for turn in range(given.rounds):
        begun = time.monotonic()
        if begun + longest > begin + given.seconds:
            break
        for name in sorted(pipes, key=lambda n: (given.formats.index(n) + turn) % len(given.formats)):
            pipes[name].send(True)
            rounds[name].append(pipes[name].recv())
            report(step="round", turn=turn, weights=name, **rounds[name][-1])
        longest = max(longest, time.monotonic() - begun)
    for pipe in pipes.values():
        pipe.send(False)
    base = rounds.get("bf16")
    for name, found in rounds.items():
        row: dict[str, object] = {"weights": name, "bytes": sizes[name]}
        for key in found[0]:
            values = [r[key] for r in found]
            row[key] = [round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3)]
            if base:
                # Of rounds side by side: the card's clock moves less within one than over all.
                ratios = [b[key] / r[key] for b, r in zip(base, found, strict=True)]
                row[f"{key}_faster"] = [
                    round(statistics.median(ratios), 3),
                    round(min(ratios), 3),
                    round(max(ratios), 3),
                ]
        report(step="summary", **row)


if __name__ == "__main__":
    main()
