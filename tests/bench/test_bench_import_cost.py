"""Help stays quick: making the command's options loads nothing that only a run needs."""

from __future__ import annotations

import subprocess
import sys


def test_the_options_alone_load_no_library_of_a_run() -> None:
    code = (
        "import sys, typer, headrace.cli.bench\napp = typer.Typer()\nheadrace.cli.bench.register(app)\n"
        "print([m for m in ('aiohttp', 'scipy', 'numpy', 'altair', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
