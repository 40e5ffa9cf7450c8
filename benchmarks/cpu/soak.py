"""Whether a long-running server grows: short requests for minutes, and the memory of its processes every ten seconds.

    python benchmarks/cpu/soak.py --out FILE.json [--seconds 300] [--repeat-prompts] [-- more options of `headrace serve`]

Eight clients at a time send completions, streams, chats and streams that they leave. The KV pool is small, so that it is all in
use before the first sample; the rest is what a server keeps for requests that have ended. `--repeat-prompts`: greedy answers to
320 prompts again and again, so that what is kept for each token or word that was ever seen stops growing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp
import psutil

WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as")
CLIENTS, PROMPTS_EACH, SAMPLE_S = 8, 40, 10.0


def memory(root: int) -> dict[str, int]:
    """KiB of anonymous memory of the server (`server`) and of its engine (`engine`), heaps and the KV pool included."""
    found = {}
    for name, process in zip(
        ("server", "engine"), [psutil.Process(root), *psutil.Process(root).children()], strict=False
    ):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        found[name] = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return found


class Load:
    """Clients of one server; `requests` have ended so far."""

    def __init__(self, port: int, repeat_prompts: bool) -> None:
        self.base = f"http://127.0.0.1:{port}/v1"
        self.repeat_prompts = repeat_prompts
        self.requests = 0

    async def client(self, session: aiohttp.ClientSession, number: int, until: float) -> None:
        chosen = random.Random(number)
        while time.monotonic() < until:
            rng = (
                random.Random(number * PROMPTS_EACH + chosen.randrange(PROMPTS_EACH)) if self.repeat_prompts else chosen
            )
            text = " ".join(rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(rng.randint(2, 8)))
            temperature = 0 if self.repeat_prompts else chosen.choice((0, 1))
            await self.send(session, chosen.choice(("whole", "stream", "chat", "left")), text, temperature)
            self.requests += 1

    async def send(self, session: aiohttp.ClientSession, kind: str, text: str, temperature: float) -> None:
        body = {"model": "m", "max_tokens": 64 if kind == "left" else 4, "temperature": temperature}
        path = "/chat/completions" if kind == "chat" else "/completions"
        body |= {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
        body |= {"stream": True} if kind in ("stream", "left") else {}
        async with session.post(self.base + path, json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"{answer.status}: {await answer.text()}")
            if kind == "left":
                await answer.content.readline()
                answer.close()
            else:
                await answer.read()


async def soak(load: Load, pid: int, seconds: float, warm_s: float) -> list[dict[str, object]]:
    """Samples from the end of the warm-up on."""
    begin = time.monotonic()
    until = begin + warm_s + seconds
    samples: list[dict[str, object]] = []

    async def watch() -> None:
        await asyncio.sleep(warm_s)
        while True:
            samples.append({"s": round(time.monotonic() - begin, 1), "requests": load.requests} | memory(pid))
            print(samples[-1], file=sys.stderr)
            if time.monotonic() > until - SAMPLE_S / 2:
                return
            await asyncio.sleep(SAMPLE_S)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(watch(), *(load.client(session, i, until) for i in range(CLIENTS)))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--warm", type=float, default=40.0, help="seconds before the first sample")
    parser.add_argument("--repeat-prompts", action="store_true")
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("serve", nargs="*", help="more options of `headrace serve`, after --")
    a = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("headrace")), "serve", "smollm2-135m", "--port", str(port)]
    command += ["--served-model-name", "m", "--num-blocks", str(a.num_blocks), *a.serve]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                if server.poll() is not None:
                    raise SystemExit("the server ended") from None
                time.sleep(0.2)
        samples = asyncio.run(soak(Load(port, a.repeat_prompts), server.pid, a.seconds, a.warm))
    finally:
        server.terminate()
        server.wait()
    first, last = samples[0], samples[-1]
    requests = max(1, int(last["requests"]) - int(first["requests"]))  # type: ignore[call-overload]
    grew = {name: round((last[name] - first[name]) * 1024 / requests) for name in ("server", "engine")}  # type: ignore[operator]
    record = {"command": " ".join(sys.argv), "bytes_a_request": grew, "samples": samples}
    a.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(grew))


if __name__ == "__main__":
    main()
