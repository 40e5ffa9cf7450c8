"""What becomes of the options that limit prompts beside running streams."""

import importlib.util

import pytest

from headrace.base.errors import InvalidInput
from headrace.control.prefill import CPU_LIMITS, PrefillLimits
from headrace.engine.launch import launch
from headrace.spec.config import EngineConfig

pytestmark = pytest.mark.model


@pytest.mark.skipif(importlib.util.find_spec("headrace_native") is None, reason="headrace-native is not installed")
@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, CPU_LIMITS),
        ({"step_target_ms": 20.0}, PrefillLimits(step_target_s=0.02)),
        ({"max_prefill_tokens": 100}, PrefillLimits(max_prefill_tokens=100)),
        (
            {"max_prefill_tokens": 100, "step_target_ms": 30.0},
            PrefillLimits(max_prefill_tokens=100, step_target_s=0.03),
        ),
        ({"chunked_prefill": False}, PrefillLimits()),
    ],
)
def test_what_is_asked_for_replaces_the_default_of_a_cpu(options, limits):
    core = launch(
        EngineConfig(
            model="smollm2-135m", backend="native", max_model_len=128, kv_bytes=16 * 2**20, threads=1, **options
        )
    )
    core.executor.close()
    config = core.scheduler.config
    assert config.max_prefill_tokens == limits.max_prefill_tokens
    assert config.prefill_burst == limits.prefill_burst
    assert config.step_target_s == limits.step_target_s


@pytest.mark.parametrize(
    "options", [{"step_target_ms": 0.0}, {"step_target_ms": -5.0}, {"step_target_ms": 50.0, "chunked_prefill": False}]
)
def test_a_wrong_target_is_refused(options):
    with pytest.raises(InvalidInput) as caught:
        EngineConfig(model="smollm2-135m", **options)
    assert caught.value.field == "step_target_ms"
