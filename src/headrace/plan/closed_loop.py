"""A closed loop in formulas: N requests always in flight, each replaced as soon as it ends.

Per cycle of one request the engine runs `osl` decode steps and one prefill for each request in flight. A request waits
for part of the other prefills before its first token and is held up by the rest between its tokens: the two shares add up
to all of them, so time is conserved. Requests beyond what memory or the engine admits wait outside (Little's law).

How many prefills lie ahead has two causes. A measured run starts all its requests at once, so those of the first of `ROUNDS` rounds
wait for half of the others. Later ones arrive when a request ends: such a moment falls into prefilling with a chance
equal to the share of time that prefilling takes, and then `wave` x others ** `spread` prompts are before it.

Requests of equal length that an engine prefills before it decodes (`marching`) never part: all end together, and in every round
each waits for half of the others (a step's prompts end together). Their time per token keeps the former share, with which time is
no longer conserved: sharing it out anew made the errors of time per token larger, those of steps being larger still.

An engine may keep prompts back to prefill several at once: until others have come or some steps have passed
(`batch_wait_steps`), or because it looks for new ones only every so many steps (`poll_steps`). A prompt then waits these steps
(`gathering`) and for those that come with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.plan.costs.roofline import Efficiency, Number, Peaks, step_seconds
from headrace.plan.costs.work import Work

ROUNDS = 10.0
"""Requests of a measured run over those in flight: the custom of public benchmarks (InferenceX asks for ten)."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Work and counts of one closed loop, per replica. `running`: admitted requests, `waiting`: those outside.

    `alone` is the work of prefilling one prompt by itself (all its steps, if it is longer than one); `prefill` that of a
    step, or of those steps, shared by `prompts` prompts. `osl` counts the first token too. `replicas_in_step`: attention
    replicas, which prefill side by side. `tokens_per_step`: above 1 with speculation. `held_steps`: decode steps for which
    the scheduler keeps a new prompt back. `marching`: 1 where requests of equal length end together, round after round, because the
    engine prefills all prompts before it decodes; else 0. `batch_wait_steps`: decode steps that a prompt is kept back for others, until
    `batch_wait_prompts` are there; `poll_steps`: decode steps between looks for new prompts.
    """

    decode: Work
    alone: Work
    prefill: Work
    prompts: Number
    running: Number
    waiting: Number
    osl: Number
    replicas_in_step: Number
    tokens_per_step: Number = 1.0
    held_steps: Number = 0.0
    marching: Number = 0.0
    batch_wait_steps: Number = 0.0
    batch_wait_prompts: Number = 1.0
    poll_steps: Number = 1.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: `ttft_s`, `tpot_s`, one decode step, one prompt's prefill among others (`prompt_s`) and
    by itself (`alone_s`); `cycle_s` of a request inside the engine, `marched_s` of `ttft_s` outside it (see above)."""

    ttft_s: Number
    tpot_s: Number
    decode_s: Number
    prompt_s: Number
    alone_s: Number
    cycle_s: Number
    marched_s: Number = 0.0


def _least(a: Number, b: Number) -> Number:
    return (a + b - abs(a - b)) / 2.0


def gathering(loop: Loop, per_step: Number) -> tuple[Number, Number]:
    """Decode steps that a prompt is kept back on average, and how many others gather with it, when `per_step` prompts arrive in a step.

    The first waits until all have come, the last of them for nothing, or until its time is up; those between wait for what is left. Looks
    at fixed steps find a prompt half way between two of them.
    """
    full = (loop.batch_wait_prompts - 1.0) / per_step
    first = _least(full, loop.batch_wait_steps)
    timed_out = full >= loop.batch_wait_steps
    poll = loop.poll_steps - 1.0
    kept = first / 2.0 * (1.0 + timed_out / (1.0 + per_step * first))
    return kept + poll / 2.0, per_step * (first + poll)


def closed_loop(loop: Loop, p: Peaks, e: Efficiency) -> Times:
    """Mean times of the loop."""
    decode = step_seconds(loop.decode, p, e)
    alone = step_seconds(loop.alone, p, e)
    prompt = step_seconds(loop.prefill, p, e) / loop.prompts
    others = loop.running / loop.replicas_in_step - 1.0
    others = others * (others > 0)
    prefilling = (others + 1.0) * prompt
    busy = prefilling / (prefilling + decode * loop.osl / loop.tokens_per_step)
    ahead = others / (2.0 * ROUNDS) + busy * e.wave * (others + 1e-9) ** e.spread
    kept, together = gathering(loop, (others + 1.0) * loop.tokens_per_step / loop.osl)
    # Those that gathered are prefilled in one step as far as it holds them, one after another beyond that.
    ahead = _least(ahead + (together + _least(together, loop.prompts - 1.0)) / 2.0, others)
    gaps = loop.osl - 1.0 + (loop.osl <= 1.0)
    decoding = decode * gaps / loop.tokens_per_step
    held = (others - ahead) * prompt * loop.osl / (loop.osl + 1.0)
    tpot = (decoding + held) / gaps
    first = e.prompt_s + alone + prompt * ahead + (0.5 + loop.held_steps + kept) * decode
    cycle = first + tpot * gaps
    half = (others + loop.prompts - 1.0) / 2.0
    half = half * (half < others) + others * (half >= others)
    marched = loop.marching * prompt * (half - ahead)
    return Times(first + marched + cycle * loop.waiting / loop.running, tpot, decode, prompt, alone, cycle, marched)
