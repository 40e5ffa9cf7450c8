"""How each engine is started for the comparison, at its best known settings for two cores."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import instructions


@dataclass
class Engine:
    """One server under test. `works` limits it to some works (engines that need other flags at other concurrency)."""

    name: str
    command: list[str]
    api: str = "openai"
    model: str = "smollm2"
    works: tuple[str, ...] | None = None
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the running server."""
        if self.process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self.process.pid

    def start(self, logs: Path, patience_s: float = 600.0) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        command = [part.replace("{port}", str(self.port)) for part in self.command]
        log = (logs / f"{self.name}.log").open("wb")
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | self.env)
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended at once; see {log.name}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(f"{self.name} was not ready after {patience_s:.0f} s; see {log.name}")

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def limited(engine: Engine, **limits: str) -> Engine:
    """The same engine held to AVX2 by its environment. A llama-server must be built for it."""
    engine.env = engine.env | instructions.COMMON | limits
    return engine


def headrace(backend: str, avx2: bool = False) -> Engine:
    command = [str(Path(sys.executable).with_name("headrace")), "serve", "smollm2-135m", "--port", "{port}"]
    command += ["--backend", backend, "--served-model-name", "smollm2"]
    if not avx2:
        return Engine(f"headrace-{backend}", command)
    if backend == "native":
        command += ["--option", "kernels=avx2"]
    return limited(Engine(f"headrace-{backend}", command), **instructions.TORCH)


def llama(server: Path, gguf: Path, *, flash: bool, parallel: int, works: tuple[str, ...]) -> Engine:
    name = f"llama-{gguf.stem.rsplit('-', 1)[-1]}-{'fa' if flash else 'nofa'}-np{parallel}"
    command = [str(server), "-m", str(gguf), "-np", str(parallel), "-c", str(parallel * 1280), "-t", "2", "-tb", "2"]
    command += ["-fa", "on" if flash else "off", "--host", "127.0.0.1", "--port", "{port}"]
    return Engine(name, command, api="llama", works=works)


def vllm(executable: Path, folder: Path) -> Engine:
    """vLLM's CPU build, fp32 (bf16 gave wrong answers), with the allocator its manual asks for."""
    command = [str(executable), "serve", str(folder), "--served-model-name", "smollm2", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--max-model-len", "2048", "--max-num-seqs", "32"]
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    preload = [Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"), executable.parent.parent / "lib/libiomp5.so"]
    env["LD_PRELOAD"] = ":".join(str(p) for p in preload if p.exists())
    return Engine("vllm-cpu-fp32", command, env=env)


def transformers_static(python: Path, folder: Path) -> Engine:
    """transformers' own `generate` behind a one-file server: requests in flight are batched statically."""
    script = Path(__file__).with_name("transformers_server.py")
    return Engine("transformers-fp32", [str(python), str(script), str(folder), "{port}"])


def openvino(python: Path, gguf: Path) -> Engine:
    """OpenVINO GenAI's continuous batching pipeline behind a one-file server; int8 from a Q8_0 file."""
    script = Path(__file__).with_name("openvino_server.py")
    return Engine(f"openvino-{gguf.stem.rsplit('-', 1)[-1]}", [str(python), str(script), str(gguf), "{port}"])
