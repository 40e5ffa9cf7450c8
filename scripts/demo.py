"""What Headrace does, in one minute: serve a real model on this machine's CPU and show what came of real requests.

Starts `headrace serve smollm2-135m` on a free port of 127.0.0.1, sends it chat requests through the public HTTP API,
prints answers, latencies and cache use, and sets the memory that was predicted beside what is really allocated. The
server is always stopped. Exit code 1 if a request failed or a prediction was wrong.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from headrace.spec import accounting
from headrace.spec.locate import locate

MODEL = "smollm2-135m"
START_LIMIT_S = 180
SYSTEM = (
    "You are the guide of a small science museum. Visitors of all ages ask you about nature, machines and the sky. "
    "Answer in one or two plain sentences that a child of ten understands, without lists and without headings. Be "
    "friendly and exact: say what happens and why it happens. When you are not sure of something, say so. Do not talk "
    "about yourself, do not repeat the question, and never invent numbers, names or dates. If a visitor asks about "
    "something that has nothing to do with science, lead them kindly back to the exhibits. The museum has four rooms: "
    "light and colour, heat and weather, plants and animals, and the night sky."
)
FIRST = (
    "Why is the sky blue?",
    "How does a magnet work?",
    "Why do leaves turn red in autumn?",
    "What is a shooting star?",
    "Why does ice float on water?",
    "How do bees find flowers?",
)
LATER = ("What makes a rainbow?", "Why is the moon not always round?")

console = Console()
if not console.is_terminal:
    console = Console(width=110)


@dataclass
class Answer:
    """One streamed answer; times in seconds on this client's clock."""

    question: str
    text: str = ""
    started_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    account: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.started_s

    @property
    def itl_s(self) -> float:
        """Mean time between tokens after the first."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, self.usage["completion_tokens"] - 1)


async def ask(http: aiohttp.ClientSession, question: str) -> Answer:
    answer = Answer(question, started_s=time.monotonic())
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "max_tokens": 64,
        "temperature": 0,
        "repetition_penalty": 1.1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "explain": True,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    answer.text += text
                    answer.arrivals_s.append(time.monotonic())
            answer.usage = event.get("usage") or answer.usage
            answer.account = event.get("explain") or answer.account
    console.print(f"[bold]{question}[/bold]\n  {answer.text.strip()}")
    return answer


async def blocks_in_use(http: aiohttp.ClientSession, seen: list[int]) -> None:
    """Sample how many KV blocks requests hold, until cancelled."""
    while True:
        stats = (await get(http, "/engine"))["stats"]
        seen.append(stats["total_blocks"] - stats["free_blocks"])
        await asyncio.sleep(0.1)


async def get(http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    async with http.get(path) as response:
        body: dict[str, Any] = await response.json()
        return body


async def metric(http: aiohttp.ClientSession, name: str) -> float:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"headrace:{name}{{"))


async def until_ready(http: aiohttp.ClientSession, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.returncode}:\n{log.read_text()}")
        try:
            if (await get(http, "/health"))["status"] == "ok":
                return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)
    raise RuntimeError(f"the server was not ready after {START_LIMIT_S} s:\n{log.read_text()}")


async def visit(url: str, server: subprocess.Popen[bytes], log: Path) -> bool:
    """Ask, measure, compare; False if a prediction was wrong."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as http:
        await until_ready(http, server, log)
        console.print(f"Ready. {len(FIRST)} visitors ask at once, {len(LATER)} come later.\n")
        held: list[int] = []
        sampling = asyncio.create_task(blocks_in_use(http, held))
        begin_s = time.monotonic()
        answers = await asyncio.gather(*[ask(http, question) for question in FIRST])
        answers += await asyncio.gather(*[ask(http, question) for question in LATER])
        wall_s = time.monotonic() - begin_s
        sampling.cancel()
        engine = await get(http, "/engine")
        queries, hits = await metric(http, "prefix_cache_queries_total"), await metric(http, "prefix_cache_hits_total")
    show_answers(answers)
    show_engine(engine, answers, wall_s, max(held, default=0), queries, hits)
    return show_memory(engine["info"])


def show_answers(answers: list[Answer]) -> None:
    table = Table(title="Each answer (queue, prefill and decode: as the server explains it)")
    table.add_column("question", no_wrap=True)
    for name in ("prompt", "cached", "new", "TTFT", "ITL", "queue", "prefill", "decode"):
        table.add_column(name, justify="right", no_wrap=True)
    for a in answers:
        parts = a.account["parts_us"]
        table.add_row(
            a.question,
            str(a.usage["prompt_tokens"]),
            str(a.usage["prompt_tokens_details"]["cached_tokens"]),
            str(a.usage["completion_tokens"]),
            f"{a.ttft_s * 1e3:.0f} ms",
            f"{a.itl_s * 1e3:.1f} ms",
            *[f"{parts[part] / 1e3:.0f} ms" for part in ("queue", "prefill", "decode")],
        )
    console.print(table)


def show_engine(
    engine: dict[str, Any], answers: list[Answer], wall_s: float, held: int, queries: float, hits: float
) -> None:
    info = engine["info"]
    made = sum(a.usage["completion_tokens"] for a in answers)
    table = Table(
        title=f"All together: {info['backend']} backend, weights {info['weights_precision']}", show_header=False
    )
    table.add_row("time to first token (TTFT), median", f"{median(a.ttft_s for a in answers) * 1e3:.0f} ms")
    table.add_row("time between tokens (ITL), median", f"{median(a.itl_s for a in answers) * 1e3:.1f} ms")
    table.add_row("throughput", f"{made / wall_s:.1f} tokens/s ({made} tokens in {wall_s:.1f} s)")
    table.add_row("KV blocks used at once", f"{held} of {info['num_blocks']:,} ({info['block_tokens']} tokens each)")
    table.add_row(
        "prefix cache", f"{hits:.0f} of {queries:.0f} prompt tokens were not computed again ({hits / queries:.0%})"
    )
    console.print(table)


def show_memory(info: dict[str, Any]) -> bool:
    """`spec.accounting`, worked out here from the model's header, beside what the engine says it has allocated."""
    spec = locate(MODEL).spec()
    real = {item["name"]: item["actual_bytes"] for item in info["memory"]}
    predicted = {item["name"]: item["predicted_bytes"] for item in info["memory"]}
    per_token = accounting.kv_bytes_per_token(spec, info["kv_precision"])
    layout = accounting.cache_layout(spec, info["kv_precision"], info["block_tokens"])
    pool_tokens = real["kv_pool"] // per_token
    rows = (
        ("weights", predicted["weights"], real["weights"], "B"),
        ("KV cache per token", per_token, real["kv_pool"] // info["pool_tokens"], "B"),
        ("KV pool", layout.bytes_per_block * info["num_blocks"], real["kv_pool"], "B"),
        ("KV pool", info["num_blocks"] * info["block_tokens"], pool_tokens, "tokens"),
    )
    table = Table(title="Memory: what spec.accounting predicts and what is allocated")
    for name in ("", "predicted", "real", ""):
        table.add_column(name, justify="right" if name else "left")
    for name, expected, found, unit in rows:
        table.add_row(name, f"{expected:,} {unit}", f"{found:,} {unit}", "equal" if expected == found else "DIFFERENT")
    console.print(table)
    return all(expected == found for _, expected, found, _ in rows)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    port = free_port()
    console.print(f"Starting the server: headrace serve {MODEL} --port {port}")
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "headrace.cli.main", "serve", MODEL, "--port", str(port)]
        with log.open("wb") as out:
            server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            exact = asyncio.run(visit(f"http://127.0.0.1:{port}", server, log))
        except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
            console.print(f"[red]The demo failed:[/red] {error}")
            return 1
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    if not exact:
        console.print("[red]A prediction differs from what was allocated.[/red]")
        return 1
    console.print(
        "\nNext steps:\n"
        "  make serve                      the same server on http://127.0.0.1:8000/v1, for any OpenAI client\n"
        f"  .venv/bin/headrace chat {MODEL}\n"
        f"  .venv/bin/headrace generate {MODEL} --prompt 'Once upon a time' --max-tokens 40 --timings\n"
        "  make test                       every test"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
