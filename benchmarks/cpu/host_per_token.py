"""CPU time of the server and of its engine process per token, without a model's: see `stub_engine.py`.

    python benchmarks/cpu/host_per_token.py --out FILE.json [--trees OTHER/src src]

Each figure is CPU time (not wall time) of a process's threads between two moments at which all streams run, divided by the
tokens that came meanwhile. Several source trees are measured in turns, so that a ratio is of neighbours in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

from noise import Noise, machine

HERE = Path(__file__).parent
STEP_MS = {1: 3, 8: 8, 32: 25, 64: 40, 128: 60, 256: 100}
"""About what steps of so many streams take on two cores."""
KINDS = {
    "completion": ("/v1/completions", {}),
    "chat": ("/v1/chat/completions", {}),
    "stop": ("/v1/completions", {"stop": ["\n\n\n", "never said"]}),
}


def thread_seconds(pid: int) -> Counter[str]:
    """CPU seconds of a process by kind of thread: `loop` is the first one, ZeroMQ names its own."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, used = (task / "comm").read_text().strip(), (task / "schedstat").read_text().split()[0]
        except FileNotFoundError:
            continue
        kind = "loop" if int(task.name) == pid else "zmq" if name.startswith("ZMQ") else "other"
        found[kind] += int(used) / 1e9
    return found


class Reader(asyncio.Protocol):
    """Sends one request and counts the events of its answer."""

    def __init__(self, request: bytes, counts: Counts) -> None:
        self._request, self._counts, self._begun = request, counts, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: {")
        if events and not self._begun:
            self._begun = True
            self._counts.begun += 1
        self._counts.events += events
        if b"data: [DONE]" in data or b"HTTP/1.1 4" in data:
            self._counts.ended += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.ended += 1


class Counts:
    begun = events = ended = 0


def request(kind: str, seed: int, tokens: int) -> bytes:
    path, extra = KINDS[kind]
    draw = random.Random(seed)
    ids = [draw.randrange(1000, 40_000) for _ in range(32)]
    asked = {"prompt": ids} if path == "/v1/completions" else {"messages": [{"role": "user", "content": str(ids)}]}
    asked |= {"model": "smollm2-135m", "stream": True, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    asked |= {"stream_options": {"include_usage": True}}
    body = json.dumps(asked | extra).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


async def measure(port: int, pids: dict[str, int], kind: str, streams: int, seconds: float) -> dict[str, object]:
    """Microseconds per token and events per second, in a window of `seconds` in which all streams run."""
    tokens = int(seconds * 1e3 / STEP_MS[streams]) + 150
    counts, loop = Counts(), asyncio.get_running_loop()
    opened = [
        await loop.create_connection(lambda i=i: Reader(request(kind, i, tokens), counts), "127.0.0.1", port)
        for i in range(streams)
    ]
    while counts.begun < streams and not counts.ended:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    with Noise(list(pids.values())) as noise:
        before, events, began = {n: thread_seconds(p) for n, p in pids.items()}, counts.events, time.perf_counter()
        await asyncio.sleep(seconds)
        after, seen = {n: thread_seconds(p) for n, p in pids.items()}, counts.events - events
        wall = time.perf_counter() - began
    if counts.ended:
        raise SystemExit("a stream ended inside the window")
    for transport, _ in opened:
        transport.abort()
    await asyncio.sleep(0.5)
    per = {
        f"{name}_{part}_us": (after[name][part] - before[name][part]) / seen * 1e6
        for name in pids
        for part in ("loop", "other", "zmq")
        if after[name][part] - before[name][part] > 0
    }
    per["us_per_token"] = sum(per.values())
    return {"per_token": per, "events_per_s": seen / wall, "foreign_cores": noise.foreign}


class Server:
    """One stub server from one source tree."""

    def __init__(self, tree: Path, step_ms: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        path = os.pathsep.join([str(tree.resolve()), str(HERE)])
        command = [sys.executable, str(HERE / "stub_server.py"), str(self.port), str(step_ms)]
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                break
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.2)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.pids = {"server": self.process.pid, "engine": int(children[0])}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path)
    p.add_argument("--trees", type=Path, nargs="+", default=[HERE.parents[1] / "src"], help="source folders to compare")
    p.add_argument("--streams", default="8,32,128,256")
    p.add_argument("--kinds", default="completion", help="of " + ", ".join(KINDS))
    p.add_argument("--seconds", type=float, default=2.0)
    p.add_argument("--repeats", type=int, default=3)
    a = p.parse_args()
    rows: list[dict[str, object]] = []
    for streams in map(int, a.streams.split(",")):
        servers: list[Server] = []
        try:
            for tree in a.trees:
                servers.append(Server(tree, STEP_MS[streams]))
            for kind in a.kinds.split(","):
                for repeat in range(a.repeats):
                    for index in range(len(servers)) if repeat % 2 == 0 else reversed(range(len(servers))):
                        server = servers[index]
                        row = asyncio.run(measure(server.port, server.pids, kind, streams, a.seconds))
                        rows.append({"tree": index, "kind": kind, "streams": streams, "repeat": repeat} | row)
                for index in range(len(servers)):
                    mine = [r for r in rows if (r["tree"], r["kind"], r["streams"]) == (index, kind, streams)]
                    parts = {
                        key: round(statistics.median(r["per_token"].get(key, 0.0) for r in mine), 1)  # type: ignore[attr-defined]
                        for key in mine[0]["per_token"]  # type: ignore[attr-defined]
                    }
                    print(json.dumps({"tree": index, "kind": kind, "streams": streams} | parts), flush=True)
        finally:
            for server in servers:
                server.stop()
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine(), "trees": len(a.trees), "seconds": a.seconds, "rows": rows}
        a.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
