"""The tables of a stay beside vLLM, from its raw lines: `tables.py RECORD.json STAY` prints Markdown; `tables.py RECORD.json STAY --add
OURS.log VLLM.log COMMIT DATE [CLOCKS.csv]` puts a new stay's lines into the record first.

A ratio is mean over mean (first tokens: median over median of a part), in brackets the least and greatest ratio of any two runs
(first tokens: of the middle three of five). Rates are those of the bytes and operations that `headrace.spec.accounting` counts:
weights and cached tokens read once a step. What was planned before is for a steady load of as many requests, not for a burst that
drains. `CLOCKS.csv` has the columns clocks.sm, power.draw, clocks_event_reasons.sw_power_cap and timestamp of nvidia-smi.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from importlib import resources
from pathlib import Path

from headrace.engine.roofline import Ceilings, floors
from headrace.spec.accounting import Span, flops, kv_bytes_per_token, weights_read_bytes
from headrace.spec.hf import spec_from_hf
from headrace.spec.model import ModelSpec

READ_TBS, SUSTAINED_TFLOPS = 4.574, 673.0
NEW_TOKENS = 257
OURS, THEIRS = "headrace_after_vllm", "vllm"


def lines_of(path: str) -> list[dict]:
    return [json.loads(line.split("RES ", 1)[1]) for line in Path(path).read_text().splitlines() if "RES {" in line]


def clocks(path: str) -> dict[str, object]:
    """Of samples under load (over 250 W)."""
    rows = [r for r in csv.reader(Path(path).read_text().splitlines()) if len(r) == 4 and r[0][0].isdigit()]
    found = [(int(c.split()[0]), float(w.split()[0]), "Not" not in cap) for c, w, cap, _ in rows]
    busy = [f for f in found if f[1] > 250]
    return {
        "samples": len(busy), "sm_clock_median_mhz": statistics.median(f[0] for f in busy),
        "power_median_w": statistics.median(f[1] for f in busy),
        "power_cap_active_share": round(sum(f[2] for f in busy) / len(busy), 2),
    }  # fmt: skip


def add(record: dict, stay: str, ours: str, theirs: str, commit: str, date: str, clock: str | None) -> None:
    record["commits"][stay] = commit
    record["stays"][stay] = {"date": date, "commit": commit, THEIRS: lines_of(theirs), OURS: lines_of(ours)}
    if clock:
        record["stays"][stay]["clocks"] = clocks(clock)


class Stay:
    def __init__(self, stay: dict) -> None:
        self.lines = {side: stay.get(side, []) for side in (OURS, THEIRS)}

    def found(self, side: str, **given) -> list[dict]:
        return [r for r in self.lines[side] if all(r.get(k) == v for k, v in given.items())]

    def runs(self, side: str, field: str, **given) -> list[float]:
        rows = [r[field] for r in self.found(side, **given) if field in r]
        return [v for row in rows for v in (row if isinstance(row, list) else [row])]

    def parts(self, side: str, **given) -> list[list[float]]:
        return [sorted(r["all"]) for r in self.found(side, **given)]

    def planned(self, figure: str, **given) -> list[float] | None:
        rows = [r["planned"][figure] for r in self.found(OURS, **given) if "planned" in r]
        return rows[-1] if rows else None


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    return statistics.mean(ours) / statistics.mean(theirs), min(ours) / max(theirs), max(ours) / min(theirs)


def ratio_by_draws(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Runs of the same requests in the same order, where both have all of them."""
    if len(ours) != len(theirs):
        return ratio(ours, theirs)
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.mean(ours) / statistics.mean(theirs), min(each), max(each)


def ratio_of_medians(ours: list[list[float]], theirs: list[list[float]]) -> tuple[float, float, float]:
    middle = [[v for part in side for v in part[1:-1]] for side in (ours, theirs)]
    medians = [statistics.mean(map(statistics.median, side)) for side in (ours, theirs)]
    return medians[0] / medians[1], min(middle[0]) / max(middle[1]), max(middle[0]) / min(middle[1])


def told(values: list[float], digits: int) -> str:
    return ", ".join(f"{v:.{digits}f}" for v in values) or "–"


def compared(stay: Stay) -> list[str]:
    out = ["| what | Headrace | vLLM | ratio | wanted | | planned before |", "|---|---|---|---|---|---|---|"]

    def row(name, ours, theirs, found, wanted, digits, planned=None) -> None:
        held = ""
        if wanted is not None:
            good = found[0] >= wanted if wanted > 1 else found[0] <= wanted
            held = "holds" if good else f"missed by {abs(found[0] - wanted):.3f}"
        bound = "" if wanted is None else f"{'≥' if wanted > 1 else '≤'} {wanted:.2f}"
        beside = "" if planned is None else f"{planned[0]:.{digits}f} ({planned[1]:.{digits}f}–{planned[2]:.{digits}f})"
        out.append(
            f"| {name} | {told(ours, digits)} | {told(theirs, digits)} | {found[0]:.3f} ({found[1]:.3f}–{found[2]:.3f}) "
            f"| {bound} | {held} | {beside} |"
        )

    def plain(name, field, wanted, digits, figure=None, compare=ratio, **given) -> None:
        ours, theirs = stay.runs(OURS, field, **given), stay.runs(THEIRS, field, **given)
        if ours and theirs:
            row(name, ours, theirs, compare(ours, theirs), wanted, digits, figure and stay.planned(figure, **given))

    plain("mixed256 output tok/s, draw by draw", "out_tok_s", 1.10, 1, "out_tok_s", ratio_by_draws, step="mixed256")
    for context in (128, 2048, 16384):
        wanted = None if context == 2048 else 0.90
        plain(f"ITL at context {context:,}, ms", "all", wanted, 3, "tpot_ms", step="single", ctx=context)
    for batch in (8, 32, 64, 128, 256):
        wanted = 0.90 if batch in (64, 256) else None
        plain(f"decode step at batch {batch}, ms", "step_ms", wanted, 3, "tpot_ms", step="uniform", B=batch)
    for length in (1024, 4096, 16384):
        ours, theirs = (stay.parts(side, step="ttft", prompt=length) for side in (OURS, THEIRS))
        if ours and theirs:
            medians = [[statistics.median(p) for p in side] for side in (ours, theirs)]
            planned = stay.planned("ttft_ms", step="ttft", prompt=length)
            row(f"TTFT of {length:,} tokens, ms", *medians, ratio_of_medians(ours, theirs), 0.93, 2, planned)
    plain("64 × shared 2k prefix, first, s", "s", 0.70, 3, step="prefix64", cache="first")
    plain("the same again, s", "s", None, 3, step="prefix64", cache="again")
    ready = [stay.runs(side, "s", step="ready") for side in (OURS, THEIRS)]
    if ready[0]:
        held = "holds" if max(ready[0]) <= 20 else "missed"
        out.append(f"| ready without caches, s | {told(ready[0], 1)} | {told(ready[1], 1)} | | ≤ 20 | {held} | |")
    for r in stay.found(OURS, step="stall"):
        held = "holds" if r["ratio"] <= 3 else "missed"
        out.append(
            f"| ITL p99 of 64 streams beside a 16k prompt, ms | {r['loud_p99_ms']} after {r['quiet_p99_ms']} | – | {r['ratio']}× "
            f"| ≤ 3× | {held} | |"
        )
    return out


def computed(spec: ModelSpec, prompts: list[Span]) -> float:
    """Operations of prompts as the engine computes them: past attention of the last layer only sampled rows go on."""
    last = spec.layers[-1]
    attention, mlp = last.mixer, last.mlp
    width = attention.num_heads * attention.head_dim + (2 + mlp.gated) * mlp.intermediate
    passed = sum(p.length - 1 for p in prompts)
    return flops(spec, prompts).total - 2.0 * passed * spec.hidden_size * width


def rates(stay: Stay) -> list[str]:
    """Decode steps and prompts beside the card's ceilings."""
    config = resources.files("headrace.spec").joinpath("models", "mistral-7b.json").read_text()
    spec = spec_from_hf(json.loads(config)["config"], "mistral-7b")
    weights, token = weights_read_bytes(spec, "bf16"), kv_bytes_per_token(spec, "bf16")
    card = Ceilings(1e12 * READ_TBS, 1e12 * SUSTAINED_TFLOPS, "")
    head = f"| decode | bytes a step, GB | ms | TB/s | of {READ_TBS} TB/s | floor of products and attention, ms | its share |"
    out = [head, "|---|---|---|---|---|---|---|"]
    steps = [(1, 128, stay.runs(OURS, "itl_ms", step="single", ctx=128))]
    steps += [(1, 16384, stay.runs(OURS, "itl_ms", step="single", ctx=16384))]
    steps += [(batch, 512, stay.runs(OURS, "step_ms", step="uniform", B=batch)) for batch in (8, 64, 256)]
    for batch, prompt, ms in steps:
        if ms:
            held = weights + batch * (prompt + NEW_TOKENS / 2) * token
            rate = held / statistics.mean(ms) / 1e9
            least = floors(spec, "bf16", "bf16", [Span(prompt + NEW_TOKENS // 2, 1)] * batch, card)
            floor = (least["gemm"] + least["attention"]) / 1e3
            name = f"batch {batch}, {prompt} tokens and up to {NEW_TOKENS} more"
            out.append(
                f"| {name} | {held / 1e9:.2f} | {statistics.mean(ms):.3f} | {rate:.2f} | {rate / READ_TBS:.0%} | {floor:.2f} "
                f"| {floor / statistics.mean(ms):.0%} |"
            )
    out += ["", f"| prompts | tok/s | TFLOP/s | of {SUSTAINED_TFLOPS:.0f} TFLOP/s |", "|---|---|---|---|"]
    for batch in (8, 64, 256):
        if seconds := stay.runs(OURS, "prefill_s", step="uniform", B=batch):
            s = statistics.mean(seconds)
            done = computed(spec, [Span(0, 512)] * batch) / s / 1e12
            out.append(
                f"| {batch} of 512, a step and its token | {512 * batch / s:,.0f} | {done:.0f} | {done / SUSTAINED_TFLOPS:.0%} |"
            )
    for length in (1024, 4096, 16384):
        if parts := stay.parts(OURS, step="ttft", prompt=length):
            ms = statistics.mean(map(statistics.median, parts))
            done = computed(spec, [Span(0, length)]) / ms / 1e9
            out.append(f"| one of {length:,} | {1e3 * length / ms:,.0f} | {done:.0f} | {done / SUSTAINED_TFLOPS:.0%} |")
    return out


def profiles(stay: Stay) -> list[str]:
    """Device time by kind of kernel beside its floor, where the stay has profiles."""
    out = []
    for r in stay.found(OURS, step="profile"):
        floors = r.get("floors_us", {})
        kinds = "; ".join(
            f"{k} {us:,.0f}" + (f" (floor {floors[k]:,.0f})" if k in floors else "")
            for k, (us, _) in r["kinds"].items()
        )
        out.append(f"| {r['B']} × {r['prompt']} | {r['steps']} | {r['span_us']:,.0f} | {kinds} |")
    head = ["| sequences × tokens | steps | us a step | by kind, us |", "|---|---|---|---|"]
    return [*head, *out] if out else []


def memory(stay: Stay) -> list[str]:
    items = [i for r in stay.found(OURS, step="memory") for i in r["items"]]
    rows = [f"| {name} | {a:,} | {b:,} | {'equal' if a == b else f'{b / a - 1:+.1%}'} |" for name, a, b in items]
    return ["| bytes | predicted | held | |", "|---|---|---|---|", *rows]


def main(record_path: str, name: str, words: list[str]) -> None:
    record = json.loads(Path(record_path).read_text())
    if words and words[0] == "--add":
        ours, theirs, commit, date, *clock = words[1:]
        add(record, name, ours, theirs, commit, date, clock[0] if clock else None)
        Path(record_path).write_text(json.dumps(record, indent=1) + "\n")
    stay = Stay(record["stays"][name])
    for table in (compared, rates, memory, profiles):
        print("\n".join(table(stay)), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
