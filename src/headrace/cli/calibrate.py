"""`headrace calibrate`: measure this machine's ceilings and add it to the hardware catalog."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb `calibrate`."""
    app.command("calibrate")(calibrate)


def calibrate(
    name: Annotated[str, typer.Option(help="id of the catalog entry")] = "cpu",
    seconds: Annotated[float, typer.Option(help="time to spend on each measurement")] = 2.0,
    price: Annotated[float | None, typer.Option(help="dollars per hour of this machine", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON on stdout")] = False,
) -> None:
    """Measure memory bandwidth and matrix multiplication of this CPU, and write a catalog entry."""
    from headrace.plan.ceilings import measure, write_entry

    found = measure(seconds)
    path = write_entry(name, found, price)
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
