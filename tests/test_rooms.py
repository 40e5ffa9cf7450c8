"""Which rooms may be entered without torch, and that nothing is imported against the arrows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH_FREE = (
    "headrace",
    "headrace.base",
    "headrace.spec",
    "headrace.control",
    "headrace.text",
    "headrace.engine",
    "headrace.engine.launch",
    "headrace.engine.process",
    "headrace.serve",
    "headrace.plan",
    "headrace.bench",
    "headrace.advise",
    "headrace.cli.main",
    "headrace.llm",
)
PROBE = """
import importlib, pkgutil, sys
room = importlib.import_module(sys.argv[1])
if sys.argv[1].count(".") == 1 and sys.argv[1] not in ("headrace.engine", "headrace.llm"):
    for module in pkgutil.walk_packages(room.__path__, sys.argv[1] + "."):
        importlib.import_module(module.name)
heavy = sorted({"torch", "transformers", "triton"} & set(sys.modules))
sys.exit(f"{sys.argv[1]} loads {heavy}" if heavy else 0)
"""


@pytest.mark.parametrize("room", TORCH_FREE)
def test_the_room_loads_no_torch(room: str) -> None:
    """Of the rooms that are torch-free as a whole, every module is imported; of the engine, those that start it."""
    if importlib.util.find_spec(room) is None:
        pytest.skip(f"{room} is not built yet")
    run = subprocess.run([sys.executable, "-c", PROBE, room], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_the_public_names_are_lazy_but_there() -> None:
    code = (
        "import headrace, sys; assert 'headrace.llm' not in sys.modules;"
        "from headrace import LLM, Completion, SamplingParams, __version__;"
        "assert LLM.__module__ == 'headrace.llm' and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_arrows_between_rooms_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
