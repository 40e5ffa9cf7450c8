"""Starts Dynamo's two processes and ends both with itself: `python -m headrace.bench.targets._dynamo MODEL PORT PYTHON …`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile


def lines(model: str, port: str, python: str, extra: list[str]) -> tuple[list[str], list[str]]:
    """The commands of frontend and worker. File discovery (in the folder of DYN_FILE_KV) needs neither etcd nor NATS."""
    shared = ["--discovery-backend", "file"]
    frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port, *shared]
    worker = [python, "-m", "dynamo.vllm", "--model", model, *shared, *extra]
    return frontend, worker


def main() -> int:
    """Run both until one ends; its exit code is ours."""
    model, port, python, *extra = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "DYN_FILE_KV": folder}
        processes = [subprocess.Popen(line, env=env) for line in lines(model, port, python, extra)]
        try:
            while all(process.poll() is None for process in processes):
                processes[0].wait()
        finally:
            for process in processes:
                process.terminate()
        return next((p.returncode for p in processes if p.returncode), 0)


if __name__ == "__main__":
    sys.exit(main())
