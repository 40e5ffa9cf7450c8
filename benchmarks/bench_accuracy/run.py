"""How far each load generator is from the truth: ours, guidellm and aiperf against the same golden server.

The golden server knows when each event left it. For each scenario and tool this prints the tool's figure less the
server's own, and how many failures and repeated prompts each tool noticed or caused.

    python benchmarks/bench_accuracy/run.py --guidellm PATH/guidellm --aiperf PATH/aiperf --tokenizer FOLDER --out DIR

`--tokenizer` is a Hugging Face tokenizer folder: both other tools need one to write prompts. A tool whose program is
not given is left out, and the result says so. With `--idle-wait 300` each measurement waits until other programs are
idle; what they used meanwhile (`foreign_cores`) stands with each result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.host import host
from headrace.bench.golden import GoldenScript, golden_process
from headrace.bench.importers import import_results
from headrace.bench.neighbours import NOTICEABLE_CORES, Neighbours, wait_until_idle


@dataclass(frozen=True)
class Scenario:
    """One golden script and one load."""

    name: str
    what: str
    script: GoldenScript
    concurrency: int
    requests: int
    prompt: int = 100
    output: int = 32


SCENARIOS = (
    Scenario("plain", "one token per chunk", GoldenScript(ttft_ms=50, itl_ms=5), 4, 60),
    Scenario("chunks", "four tokens per chunk", GoldenScript(ttft_ms=50, itl_ms=5, tokens_per_chunk=4), 4, 60),
    Scenario("errors", "an error inside every fifth stream", GoldenScript(ttft_ms=50, itl_ms=5, error_every=5), 4, 60),
    Scenario(
        "short", "half of the tokens in every fourth answer", GoldenScript(ttft_ms=50, itl_ms=5, short_every=4), 4, 60
    ),
    Scenario(
        "cache", "a prefix cache that must find nothing", GoldenScript(ttft_ms=20, itl_ms=2, prefix_cache=True), 4, 120
    ),
    Scenario("busy", "2,000 events per second", GoldenScript(ttft_ms=50, itl_ms=8), 16, 160, output=64),
)


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.loads(response.read())


def truth_of(url: str, tokens: int) -> dict[str, float]:
    """The server's own account of the requests that asked for `tokens` tokens (probes and warm-ups ask for fewer)."""
    entries = [t for t in fetch(url + "/golden/truth") if len(t["event_s"]) > 2 or t["fault"] in ("error", "short")]
    good = [t for t in entries if sum(t["event_tokens"]) == tokens]
    gaps, weights = [], []
    for t in good:
        gaps.append(np.diff(t["event_s"]) / np.array(t["event_tokens"][1:]))
        weights.append(np.array(t["event_tokens"][1:]))
    prompt = sum(t["prompt_tokens"] for t in entries)
    return {
        "ttft_ms": 1e3 * float(np.mean([t["event_s"][0] - t["received_s"] for t in good])),
        "itl_ms": 1e3 * float(np.average(np.concatenate(gaps), weights=np.concatenate(weights))),
        "good": len(good),
        "bad": sum(t["fault"] in ("error", "short") for t in entries),
        "cache_share": sum(t["cached_tokens"] for t in entries) / prompt,
    }


def ours(s: Scenario, url: str, _a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    line = [
        sys.executable, "-m", "headrace.cli.main", "bench", "run", "--url", url, "--model", "golden", "--json",
        "--set", f"isl={s.prompt}", "--set", f"osl={s.output}", "--requests", str(s.requests), "--no-report",
        "--concurrency", str(s.concurrency), "--max-failures", "90%", "--out", str(folder / "ours"), "--warmup", "0",
        "--no-headroom",
    ]  # fmt: skip
    found = json.loads(call(line).stdout)
    return {
        "ttft_ms": 1e3 * found["ttft_raw_s"]["mean"],
        "ttft_p99_ms": 1e3 * found["ttft_raw_s"]["p99"],
        "itl_ms": 1e3 * found["itl_s"]["mean"],
        "good": found["requests"]["ok"],
    }


def guidellm(s: Scenario, url: str, a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result = folder / "guidellm.json"
    call([
        a.guidellm, "run", "--backend", f"kind=openai_http,target={url},model=golden",
        "--profile", f"kind=concurrent,streams={s.concurrency}", "--constraint", f"kind=max_requests,count={s.requests}",
        "--data", f"kind=synthetic_text,prompt_tokens={s.prompt},output_tokens={s.output}",
        "--tokenizer", f"kind=hf_auto,model={a.tokenizer}", "--output", f"kind=json,path={result}", "--disable-progress",
    ])  # fmt: skip
    metrics = json.loads(result.read_text())["benchmarks"][0]["metrics"]
    import_results(result, folder / "guidellm-imported")
    return {
        "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["mean"],
        "ttft_p99_ms": metrics["time_to_first_token_ms"]["successful"]["percentiles"]["p99"],
        "itl_ms": metrics["inter_token_latency_ms"]["successful"]["mean"],
        "good": metrics["request_totals"]["successful"],
    }


def aiperf(s: Scenario, url: str, a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result = folder / "aiperf"
    call([
        a.aiperf, "profile", "-m", "golden", "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(a.tokenizer), "--concurrency", str(s.concurrency), "--request-count", str(s.requests),
        "--synthetic-input-tokens-mean", str(s.prompt), "--output-tokens-mean", str(s.output),
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--artifact-dir", str(result), "--ui", "none",
    ])  # fmt: skip
    found = json.loads((result / "profile_export_aiperf.json").read_text())
    import_results(result, folder / "aiperf-imported")
    return {
        "ttft_ms": found["time_to_first_token"]["avg"],
        "ttft_p99_ms": found["time_to_first_token"]["p99"],
        "itl_ms": found["inter_token_latency"]["avg"],
        "good": int(found["request_count"]["avg"]),
    }


def call(line: list[str]) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True, timeout=300, env=env)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{line[0]} ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    return done


async def measure(s: Scenario, tool: Any, a: argparse.Namespace) -> dict[str, Any]:
    if a.idle_wait:
        await wait_until_idle(a.idle_wait)
    async with golden_process(s.script) as url:
        with tempfile.TemporaryDirectory() as folder:
            neighbours = Neighbours()
            said = await asyncio.to_thread(tool, s, url, a, Path(folder))
            foreign = neighbours.cores()
        truth = await asyncio.to_thread(truth_of, url, s.output)
    return {
        "ttft_error_ms": said["ttft_ms"] - truth["ttft_ms"],
        "itl_error_ms": said["itl_ms"] - truth["itl_ms"],
        "called_good": said["good"],
        "really_good": truth["good"],
        "really_bad": truth["bad"],
        "cache_share": truth["cache_share"],
        "foreign_cores": foreign,
        "said": said,
        "truth": truth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guidellm", default="")
    parser.add_argument("--aiperf", default="")
    parser.add_argument("--tokenizer", type=Path, default=Path())
    parser.add_argument("--scenario", action="append", help="only these")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--idle-wait", type=float, default=0.0, help="seconds to wait at most for the host to be idle")
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    tools = (
        {"headrace": ours} | ({"guidellm": guidellm} if a.guidellm else {}) | ({"aiperf": aiperf} if a.aiperf else {})
    )
    results = []
    for repeat in range(a.repeats):
        for scenario in SCENARIOS:
            if a.scenario and scenario.name not in a.scenario:
                continue
            order = list(tools) if repeat % 2 == 0 else list(reversed(tools))
            for name in order:
                try:
                    found = asyncio.run(measure(scenario, tools[name], a))
                except (RuntimeError, subprocess.TimeoutExpired, KeyError) as error:
                    found = {"failed": str(error)[-800:]}
                results.append({"scenario": scenario.name, "tool": name, "repeat": repeat, **found})
                print(json.dumps({k: v for k, v in results[-1].items() if k not in ("said", "truth")}), flush=True)
    a.out.mkdir(parents=True, exist_ok=True)
    record = {
        "command": " ".join(["python", "benchmarks/bench_accuracy/run.py", f"--repeats {a.repeats}"]),
        "host": host(),
        "disturbed": sum((r.get("foreign_cores") or 0.0) >= NOTICEABLE_CORES for r in results),
        "left_out": [name for name in ("guidellm", "aiperf") if name not in tools],
        "scenarios": {s.name: s.what for s in SCENARIOS},
        "results": results,
    }
    (a.out / "accuracy.json").write_text(json.dumps(record, indent=1))
    text = (
        table(results)
        + f"\n{record['disturbed']} of {len(results)} measurements with other programs above 0.15 cores.\n"
    )
    (a.out / "accuracy.md").write_text(text)
    print(text)


def table(results: list[dict[str, Any]]) -> str:
    """Medians over the repeats, with the range."""
    lines = [
        "| scenario | tool | TTFT error, ms | ITL error, ms | called good / really good | prompt tokens found in the cache |",
        "|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((r["scenario"], r["tool"]) for r in results)
    for scenario, tool in keys:
        mine = [r for r in results if (r["scenario"], r["tool"]) == (scenario, tool)]
        good = [r for r in mine if "failed" not in r]
        if not good:
            lines.append(f"| {scenario} | {tool} | did not run | | | |")
            continue

        def spread(key: str, digits: int = 2, good: list[dict[str, Any]] = good) -> str:
            values = sorted(r[key] for r in good)
            return f"{np.median(values):+.{digits}f} ({values[0]:+.{digits}f} – {values[-1]:+.{digits}f})"

        counts = f"{good[0]['called_good']} / {good[0]['really_good']}"
        share = f"{np.median([r['cache_share'] for r in good]):.1%}"
        lines.append(
            f"| {scenario} | {tool} | {spread('ttft_error_ms')} | {spread('itl_error_ms', 3)} | {counts} | {share} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
