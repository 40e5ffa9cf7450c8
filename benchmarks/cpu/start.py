"""From a command to its first token: `headrace generate` beside llama.cpp, files in the page cache.

    python benchmarks/cpu/start.py --out FILE.json --llama-completion PATH --gguf Q4_0.gguf [Q8_0.gguf ...]

Each run starts a process that answers one prompt with one token. Stamped: the first byte of the answer on its standard
output, and the exit; with the process's CPU time and largest resident set. Engines take turns, in alternating order, after
one run each that fills caches; ratios are paired by repeat, geometric mean with Student's t interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from noise import Noise, machine, wait_idle

from serve import ratio

PROMPT = "Water boils at a lower temperature on a mountain because"
MODEL = "smollm2-135m"
# An installed package has its bytecode; where the shell says to write none, a checkout's would be compiled by every start.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def commands(a: argparse.Namespace) -> dict[str, list[str]]:
    """By name: ours with its cache and without, each peer file with and without llama.cpp's warm-up run."""
    ours = [str(Path(sys.executable).with_name("headrace")), "generate", MODEL, "--backend", "native"]
    ours += ["--prompt", PROMPT, "--max-tokens", "1", "--temperature", "0", "--max-model-len", "2048"]
    if a.threads:
        ours += ["--threads", str(a.threads)]
    found = {"headrace": ours, "headrace --no-cache": [*ours, "--no-cache"]}
    for gguf in a.gguf:
        peer = [str(a.llama_completion), "-m", str(gguf), "-p", PROMPT, "-n", "1", "-c", "2048", "--temp", "0"]
        peer += ["-no-cnv", "--no-display-prompt", "-t", str(a.threads or os.cpu_count())]
        found[f"llama.cpp {gguf.stem}"] = peer
        found[f"llama.cpp {gguf.stem} --no-warmup"] = [*peer, "--no-warmup"]
    return found


def run(command: list[str]) -> dict[str, float]:
    """One process: seconds to the first visible byte of the answer and to the exit, CPU seconds, peak MB resident."""
    begin = time.perf_counter()
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
    assert process.stdout is not None
    first: float | None = None
    answer = b""
    while block := os.read(process.stdout.fileno(), 4096):
        answer += block
        if first is None and answer.strip():
            first = time.perf_counter() - begin
    _, status, used = os.wait4(process.pid, 0)
    end = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    said = process.stderr.read().decode(errors="replace") if process.stderr else ""
    if process.returncode != 0 or first is None:
        raise SystemExit(f"{command[0]} gave {process.returncode} and {answer!r}: {said[-800:]}")
    return {
        "first_token_s": first,
        "exit_s": end,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mb": used.ru_maxrss / 1024,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path)
    p.add_argument("--llama-completion", type=Path)
    p.add_argument("--gguf", type=Path, nargs="*", default=[])
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--threads", type=int)
    p.add_argument("--quiet-cores", type=float, default=0.15, help="foreign load above which a run is left out")
    p.add_argument("--patience", type=float, default=20.0, help="seconds to wait for quiet before each run")
    a = p.parse_args()
    if a.gguf and a.llama_completion is None:
        p.error("--gguf needs --llama-completion")
    engines = commands(a)
    for command in engines.values():
        run(command)
    raw: list[dict[str, object]] = []
    for repeat in range(a.repeats):
        for name in engines if repeat % 2 == 0 else reversed(engines):
            wait_idle([], a.quiet_cores, a.patience)
            with Noise([]) as noise:
                row: dict[str, object] = {"engine": name, "repeat": repeat} | run(engines[name])
            # what a process used after its parent last looked is in no children's time: take it off here
            row["foreign_cores"] = max(0.0, noise.foreign - float(row["cpu_s"]) / float(row["exit_s"]))  # type: ignore[arg-type]
            raw.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    kept = {
        name: {r["repeat"]: r for r in raw if r["engine"] == name and r["foreign_cores"] <= a.quiet_cores}
        for name in engines
    }  # type: ignore[operator]
    figures = ("first_token_s", "exit_s", "cpu_s", "peak_mb")
    medians = {n: {f: statistics.median(r[f] for r in of.values()) for f in figures} for n, of in kept.items() if of}  # type: ignore[type-var]
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for ours in (n for n in engines if n.startswith("headrace")):
        for peer in (n for n in engines if not n.startswith("headrace")):
            both = sorted(kept[ours].keys() & kept[peer].keys())  # type: ignore[type-var]
            if both:
                pair = [[float(kept[n][r]["first_token_s"]) for r in both] for n in (ours, peer)]  # type: ignore[arg-type]
                ratios.setdefault(ours, {})[peer] = ratio(*pair, more_is_better=False)
    record = {
        "command": " ".join(sys.argv),
        "commands": {n: " ".join(c) for n, c in engines.items()},
        "machine": machine(),
        "quiet_cores": a.quiet_cores,
        "repeats": {n: len(of) for n, of in kept.items()},
        "medians": medians,
        "times_faster_to_the_first_token": ratios,
        "raw": raw,
    }
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: record[k] for k in ("medians", "times_faster_to_the_first_token", "repeats")}, indent=1))


if __name__ == "__main__":
    main()
