"""A run of post-training quantization that is killed, wherever that happens, goes on to the same folder."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
from test_models_logits import tiny_model
from test_quant_posttraining import WIDTHS, made, text

KILLED = """
import os, signal, sys
import numpy as np
from headrace.engine.quant import posttraining
from headrace.engine.quant.calibration import CalibrationText
from headrace.engine.quant.methods import gptq
from headrace.spec.locate import locate
from pathlib import Path
import safetensors.torch

folder, out, calibration, point = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def after(calls, whole, last):
    left = [calls]
    def call(*arguments, **how):
        left[0] -= 1
        return last(*arguments, **how) if left[0] == 0 else whole(*arguments, **how)
    return call

rounded, save, replace = gptq.rounded, safetensors.torch.save_file, os.replace

def half_a_file(tensors, path, **how):
    save(tensors, path, **how)
    os.truncate(path, os.path.getsize(path) // 2)
    die()

match point:
    case "matrix":  # in the middle of the second layer's matrices
        gptq.rounded = after(10, rounded, lambda *a, **k: die())
    case "file":
        safetensors.torch.save_file = after(2, save, half_a_file)
    case "rename":  # the file is there, the journal does not say so
        os.replace = after(2, replace, lambda *a: (replace(*a), die()))
posttraining.quantize(
    locate(folder), "int4-g32", "gptq", Path(out), calibration=CalibrationText(np.load(calibration))
)
"""


@pytest.mark.parametrize("point", ["matrix", "file", "rename"])
def test_a_run_that_is_killed_is_continued_to_the_same_files(tmp_path, point):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    out, calibration = tmp_path / "out", tmp_path / "tokens.npy"
    np.save(calibration, text().tokens)
    line = [sys.executable, "-c", KILLED, str(folder), str(out), str(calibration), point]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not (out / "config.json").exists()
    seen = []
    made(folder, out, method="gptq", report=seen.append)
    assert [p.resumed for p in seen] == [True, False, False, False]
    made(folder, tmp_path / "whole", method="gptq")
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in out.iterdir()) == names
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
