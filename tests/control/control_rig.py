"""What the control tests share: layouts, a scheduler driven on a fake executor, and the answers it must give."""

from __future__ import annotations

from collections import deque

from headrace.base.clock import VirtualClock
from headrace.control.api import Finish, FinishReason, Output
from headrace.control.config import SchedulerConfig
from headrace.control.fake import FakeExecutor, mix, next_token
from headrace.control.request import Request, Sampling
from headrace.control.scheduler import Scheduler
from headrace.spec.cache import CacheGroup, CacheLayout

VOCAB = 24


def layout(windows=(None,), block_tokens=4):
    groups = tuple(CacheGroup((g,), window) for g, window in enumerate(windows))
    return CacheLayout(groups, 1, block_tokens, 1, 1, 1, "float32", 8 * block_tokens)


def salt(request_id):
    """Ids look like `namespace/number` or `namespace/number/nan<k>`; each namespace is a world of its own."""
    return mix(0, sum(map(ord, request_id.split("/")[0])))


def fails_at(request):
    """The generated token at which a request's logits are NaN, or None."""
    tail = request.request_id.split("/")[-1]
    return int(tail[3:]) if tail.startswith("nan") else None


def answer(request, limit):
    """What a request must produce: tokens, reason, whether it fails; straight from the definition, no cache, no batch."""
    sampling, tokens = request.sampling, list(request.prompt_token_ids)
    lineage = salt(request.request_id)
    for token in tokens:
        lineage = mix(lineage, token)
    while len(tokens) < limit:
        index = len(tokens) - len(request.prompt_token_ids)
        if fails_at(request) == index:
            return tokens[-index:] if index else [], FinishReason.ERROR
        token = next_token(lineage, index, sampling, VOCAB)
        tokens.append(token)
        lineage = mix(lineage, token)
        if token in sampling.stopping_ids:
            return tokens[len(request.prompt_token_ids) :], FinishReason.STOP
    return tokens[len(request.prompt_token_ids) :], FinishReason.LENGTH


class HalfRight:
    """Drafts that are right for a while and then wrong, by turns."""

    def __init__(self, depth):
        self.depth = depth

    def propose(self, request_id, token_ids, at_most):
        lineage = salt(request_id)
        for token in token_ids:
            lineage = mix(lineage, token)
        drafts = []
        right = lineage % (self.depth + 2)
        for count in range(min(at_most, lineage // 7 % (self.depth + 1))):
            token = mix(mix(lineage, 0), 0) % VOCAB  # the executor's rule for seed 0 without min_tokens
            drafts.append(token if count < right else (token + 1) % VOCAB)
            lineage = mix(lineage, drafts[-1])
        return tuple(drafts)


class Rig:
    """A scheduler and a fake executor with up to `depth` steps in flight; `check()` after every operation."""

    def __init__(
        self,
        *,
        windows=(None,),
        block_tokens=4,
        blocks=64,
        depth=1,
        drafter=None,
        check=True,
        compute_s=lambda plan: 0.0,
        **config,
    ):
        settings = {"max_num_seqs": 6, "max_batched_tokens": 16, "max_model_len": 64, **config}
        self.clock = VirtualClock(100.0)
        self.blocks = blocks
        shape = layout(windows, block_tokens)
        self.scheduler = Scheduler(SchedulerConfig(**settings), shape, blocks, self.clock, drafter)
        self.executor = FakeExecutor(
            shape,
            blocks,
            settings["max_num_seqs"],
            vocab_size=VOCAB,
            salt=salt,
            fails=self._fails,
            compute_s=compute_s,
        )
        self.depth = depth
        self.flight = deque()
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, int] = {}
        self.finish: dict[str, Finish] = {}
        self.order: list[str] = []  # ids in the order of their first step
        self._slots: dict[int, str] = {}
        self._number = 0
        self._checks = check

    def _fails(self, request_id, position):
        request = self.requests[request_id]
        index = fails_at(request)
        return index is not None and position == len(request.prompt_token_ids) + index - 1

    def limit(self, request):
        config = self.scheduler.config
        asked = len(request.prompt_token_ids) + request.sampling.max_tokens
        return min(asked, config.max_model_len, self.scheduler.capacity_tokens + 1)

    def submit(self, prompt, *, namespace="", nan=None, priority=0, arrival_s=0.0, **sampling):
        name = f"{namespace}/{self._number}" + ("" if nan is None else f"/nan{nan}")
        self._number += 1
        sampling = {"max_tokens": 4, "eos_token_ids": (0,), **sampling}
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            sampling=Sampling(**sampling),
            priority=priority,
            namespace=namespace,
            arrival_s=arrival_s,
        )
        self.requests[name] = request
        self.tokens[name] = []
        output = self.scheduler.submit(request)
        self.take([] if output is None else [output])
        return name

    def take(self, outputs: list[Output]):
        for output in outputs:
            name = output.request_id
            assert name not in self.finish, f"{name} has ended before"
            if output.prompt_logprobs:
                assert name not in self.prompt_logprobs
                assert not self.tokens[name], "prompt logprobs after the first token"
                self.prompt_logprobs[name] = len(output.prompt_logprobs)
            if self.requests[name].sampling.logprobs is not None:
                assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
            self.tokens[name] += output.token_ids
            if output.finish is not None:
                self.finish[name] = output.finish
                self._check_finish(name, output.finish)
        self.check()

    def _check_finish(self, name, finish):
        request = self.requests[name]
        assert finish.prompt_tokens == len(request.prompt_token_ids)
        assert finish.completion_tokens == len(self.tokens[name])
        if finish.stop_token_id is not None:
            assert finish.stop_token_id == self.tokens[name][-1]
        if (timeline := finish.timeline) is not None:
            parts = timeline.queue_s + timeline.prefill_s + timeline.decode_s + timeline.preempted_s
            assert parts == timeline.total_s
            assert timeline.prefix_hit_tokens + timeline.prefix_miss_tokens == finish.prompt_tokens
        tokens, reason = answer(request, self.limit(request))
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (self.tokens[name], finish.reason) == (tokens, reason), name
        else:
            assert self.tokens[name] == tokens[: len(self.tokens[name])], name

    def check(self):
        if self._checks:
            self.scheduler.check()

    def plan(self):
        plan = self.scheduler.plan()
        self.check()
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.config.max_batched_tokens
            for init in plan.inits:
                if init.request_id not in self.order:
                    self.order.append(init.request_id)
            self.flight.append((plan, self.executor.submit(plan)))
        return plan

    def commit(self):
        plan, handle = self.flight.popleft()
        self.clock.advance(0.125 + 0.001 * plan.num_tokens)
        self.take(self.scheduler.commit(plan, handle.result()))

    def abort(self, name):
        output = self.scheduler.abort(name)
        self.take([] if output is None else [output])

    def lose_steps(self):
        """A step raised: everything in flight is lost and the executor is reset."""
        self.flight.clear()
        self.executor.reset()

    def step(self):
        """Fill the pipeline, then commit its oldest step; False if there was nothing to do."""
        while len(self.flight) < self.depth and self.plan() is not None:
            pass
        if not self.flight:
            return False
        self.commit()
        return True

    def run(self, most_steps=2000):
        """Until every request has ended; then everything must have been given back."""
        for _ in range(most_steps):
            if not self.step():
                break
        assert not self.scheduler.has_work(), f"still at work after {most_steps} steps: {self.scheduler.stats()}"
        assert set(self.finish) == set(self.requests)
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_blocks == stats.total_blocks == self.blocks
        return self
