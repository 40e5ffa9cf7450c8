"""`headrace calibrate`: measure this machine's ceilings, CPU or GPU, and add it to the hardware catalog."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb `calibrate`."""
    app.command("calibrate")(calibrate)


def calibrate(
    name: Annotated[str | None, typer.Option(help="id of the catalog entry; default: cpu, or the GPU's own")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto for the GPU if there is one")] = "auto",
    seconds: Annotated[float, typer.Option(help="time to spend on each measurement")] = 2.0,
    price: Annotated[float | None, typer.Option(help="dollars per hour of this machine", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON on stdout")] = False,
) -> None:
    """Measure memory bandwidth and matrix products (on a GPU launches too), and write a catalog entry."""
    from headrace.base.errors import InvalidInput

    if device not in ("auto", "cpu", "cuda"):
        raise InvalidInput(f"device must be auto, cpu or cuda, not {device!r}", field="device")
    if device != "cpu" and _gpu(required=device == "cuda"):
        _calibrate_gpu(name, seconds, price, as_json)
        return
    from headrace.plan.ceilings import measure, write_entry

    found = measure(seconds)
    path = write_entry(name or "cpu", found, price)
    print(f"wrote {path}", file=sys.stderr)
    if as_json:
        print(
            json.dumps(
                {"path": str(path), "bandwidth_gbs": found.bandwidth_gbs, "tflops": found.tflops, "how": found.how}
            )
        )
        return
    print(
        f"memory bandwidth {found.bandwidth_gbs:.1f} GB/s, matrix multiplication {found.tflops:.3f} TFLOP/s ({found.how})"
    )


def _gpu(*, required: bool) -> bool:
    """Whether there is a GPU; where one was asked for, its absence is an error."""
    from headrace.base.errors import InvalidInput

    if importlib.util.find_spec("torch") is None:
        if required:
            raise InvalidInput("a GPU is measured with torch", field="device", remedy="pip install 'headrace[engine]'")
        return False
    if not required and not any(Path("/dev").glob("nvidia[0-9]*")):
        return False  # without loading torch, which takes seconds
    import torch

    if required and not torch.cuda.is_available():
        raise InvalidInput("torch sees no CUDA GPU", field="device", remedy="choose cpu")
    return bool(torch.cuda.is_available())


def _calibrate_gpu(name: str | None, seconds: float, price: float | None, as_json: bool) -> None:
    import dataclasses

    import torch

    from headrace.engine.calibrate import measure_gpu, write_gpu_entry

    found = measure_gpu(torch.device("cuda:0"), seconds)
    path = write_gpu_entry(found, name, price)
    print(f"wrote {path}", file=sys.stderr)
    if as_json:
        print(json.dumps({"path": str(path)} | dataclasses.asdict(found)))
        return
    print(
        f"{found.card}: read {found.read_gbs:.0f} GB/s, copy {found.copy_gbs:.0f} GB/s, bf16 products "
        f"{found.best_tflops:.0f} TFLOP/s at best, {found.sustained_tflops:.0f} sustained, launch {found.launch_us:.1f} us, "
        f"{found.graph_us:.2f} us inside a graph"
    )
