"""An engine core whose model is a pause: real scheduler, real steps, tokens of a known text. What is left is the host's work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from works import corpus

from headrace.base.clock import SystemClock
from headrace.control.api import EngineInfo
from headrace.control.config import SchedulerConfig
from headrace.control.scheduler import Scheduler
from headrace.engine.backend import Limits
from headrace.engine.batch import Batch, Ints
from headrace.engine.grammars import Grammars
from headrace.engine.launch import EngineCore
from headrace.engine.sampler.rows import Rows, Sampled
from headrace.engine.sampler.state import SamplingState
from headrace.engine.step_thread import ThreadExecutor
from headrace.engine.steps import Steps
from headrace.spec.accounting import cache_layout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

BLOCKS, STREAMS, LONGEST = 16_384, 256, 2_048


class Pause:
    """See `headrace.engine.compute.Compute`. Every call of the model takes `step_s`, asleep; row i says the text's next word."""

    def __init__(self, vocab_size: int, step_s: float) -> None:
        self.vocab_size = vocab_size
        self._step_s = step_s
        self._text = np.array(corpus(), np.int64)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pass

    def hidden(self, batch: Batch, rows: Ints, begun: Callable[[], None] = lambda: None) -> Ints:
        begun()
        time.sleep(self._step_s)
        return np.empty(0, np.int64)

    def discard(self, blocks: Sequence[int]) -> None:
        pass

    def logits(self, first: int, count: int) -> None:
        return None

    def sample(self, logits: None, rows: Rows, state: SamplingState) -> Sampled:
        at = (rows.slots * 7919 + rows.indices) % len(self._text)
        return Sampled(self._text[at].tolist(), {}, {})


def launch(config: EngineConfig) -> EngineCore:
    """Options: `step_ms`, how long a step takes."""
    spec = locate(config.model).spec()
    layout = cache_layout(spec, "fp16", 16)
    settings = SchedulerConfig(max_num_seqs=STREAMS, max_batched_tokens=4_096, max_model_len=LONGEST)
    steps = Steps(
        Pause(spec.vocab_size, float(dict(config.options)["step_ms"]) / 1e3),
        layout,
        Limits(BLOCKS, STREAMS, LONGEST, 4_096),
        Grammars(spec.vocab_size, lambda: None),
    )
    info = EngineInfo(
        model=config.model, model_type=spec.model_type, backend="stub", vocab_size=spec.vocab_size,
        max_model_len=LONGEST, max_num_seqs=STREAMS, max_batched_tokens=4_096, block_tokens=16, num_blocks=BLOCKS,
        kv_bytes_per_token=0, pool_tokens=BLOCKS * 16, weights_precision="none", kv_precision="fp16",
    )  # fmt: skip
    scheduler = Scheduler(settings, layout, BLOCKS, SystemClock())
    return EngineCore(scheduler, ThreadExecutor(steps.step, STREAMS, name="steps"), info)
