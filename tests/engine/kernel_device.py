"""Where kernel tests run: on the GPU if there is one, else in Triton's interpreter. Import this before any kernel."""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if not ON_GPU:
    # The interpreter turns one-element arrays into loop bounds with int(), which newer numpy refuses.
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patched(tensor, scope):
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patched

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's bf16 products are wrong, so that precision is tested on GPUs only.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Distance relative to the reference's norm; infinite if anything is not a number."""
    found = found.double().cpu()
    wanted = wanted.double().cpu()
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)
