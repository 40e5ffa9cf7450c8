"""A real server process: `headrace serve` as a user starts it, and what its metrics say."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

MODEL = "smollm2-135m"
BACKEND = os.environ.get("HEADRACE_TEST_BACKEND", "auto")


class ServerProcess:
    """Starts at once and waits until /health is well; `stop` returns the exit code."""

    def __init__(self, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        # one thread: these tests share their cores with others, and threads that wait for each other make that worse
        common = ("--port", str(self.port), "--threads", "1", "--backend", BACKEND)
        command = [sys.executable, "-m", "headrace.cli.main", "serve", MODEL, *common, *options]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while not self.healthy():
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.1)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=600, limits=httpx.Limits(max_connections=None))

    def metrics(self) -> dict[str, float]:
        """Samples by name, with the reason for finished requests."""
        samples = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                reason = sample.labels.get("finished_reason")
                name = sample.name.removeprefix("headrace:")
                samples[f"{name}.{reason}" if reason else name] = sample.value
        return samples

    def engine_process(self) -> psutil.Process:
        return next(
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "headrace.engine.child" in child.cmdline()
        )

    def resident_bytes(self) -> int:
        """Memory of the server and of its engine."""
        own = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in (own, *own.children(recursive=True)))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
