"""What is spared when kernels are launched, with a driver that launches nothing."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

class Compiled:
    function, packed_metadata = 0, ()
    launch_metadata = lambda self, *_: None
    run = lambda self, *_: launched.append(1)

def compiled(self, key, *_):
    self.cache_key  # lists the constants, as compiling does
    self.device_caches[0][0][key] = Compiled()
    return Compiled()

launched = []
driver.set_active(Driver())
JITFunction._do_compile = compiled
from headrace.engine.cuda.repack import repacked
from headrace.engine.kernels import launchers, quantized
from headrace.engine.quant.formats import form

matrix = repacked([form("nf4").quantize(torch.randn(64, 256))])
out = torch.empty(64 * 256, dtype=torch.bfloat16)
assert launchers.spare_checks() == 0
quantized.dequantize(matrix, out)
key = quantized._dequantize.cache_key
assert len(quantized._dequantize.used_global_vals) > 5
assert launchers.spare_checks() == 1
quantized.dequantize(matrix, out)
assert launched == [1, 1]
assert quantized._dequantize.cache_key == key
assert not quantized._dequantize.used_global_vals
assert launchers.spare_checks() == 0
"""


def test_launched_kernels_go_without_the_comparison_of_constants():
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120, env=compiled
    )
    assert done.returncode == 0, done.stderr
