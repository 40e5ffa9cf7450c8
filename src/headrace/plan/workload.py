"""From a deployment and its traffic to a closed loop: what runs, what waits, and the work of its steps."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.base.errors import InvalidInput
from headrace.plan.closed_loop import Loop
from headrace.plan.costs.roofline import Peaks, peaks
from headrace.plan.costs.work import RankModel, Work, compute_precision, prompt_chunks, rank_model, step_work
from headrace.plan.deployment import Deployment
from headrace.plan.fit import make_pool, rank_memory
from headrace.spec.hardware import Gpu

RESERVED_OUTPUT = {"tensorrt-llm": 0.85}
"""Share of a request's output that the engine reserves on admission; elsewhere half of it is held on average."""

BALANCE_STEPS = {"tensorrt-llm": 50.0}
"""With attention replicas: steps for which the scheduler holds a prompt back until every replica has one to prefill
(the default of TensorRT-LLM's `attention_dp_config.timeout_iters`; the balance itself is assumed on, its default is off)."""

PREFILL_FIRST = ("sglang",)
"""Engines that prefill all waiting prompts before they decode on, unless told otherwise (SGLang's `--enable-mixed-chunk`)."""

MOST_STEPS = 10_000
"""Into so many steps a prompt may be cut; each is worked out by itself."""

COMPUTE = ("bf16", "fp16", "fp8", "fp4", "int8")


@dataclass(frozen=True, slots=True)
class Traffic:
    """A loop with what it was derived from."""

    loop: Loop
    peaks: Peaks
    model: RankModel
    running: int
    waiting: int
    fits: bool
    notes: tuple[str, ...]


def units(gpu: Gpu) -> tuple[str, ...]:
    """Compute precisions that the card has."""
    return tuple(name for name in COMPUTE if gpu.peak_flops(name))


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens per step of speculation with `drafts` proposals, each accepted with this chance: (1 - a^(g+1)) / (1 - a)."""
    return (1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance) if drafts else 1.0


def traffic(d: Deployment) -> Traffic:
    """The closed loop of a deployment, of requests of mean length. `isl` and `osl` must be given; without a concurrency it is as
    many as fit.

    Pipeline stages work on as many groups of requests at once: a group's step passes all of them, prompts of others flow
    behind it at the pace of one stage.
    """
    isl, osl = d.inputs.isl, d.inputs.osl
    if isl is None or osl is None:
        raise InvalidInput("isl and osl are needed to predict times", field="isl")
    mean = (1.0 + d.inputs.shortest) / 2.0
    isl, osl = max(1, round(isl * mean)), max(1, round(osl * mean))
    memory = rank_memory(d)
    pool = make_pool(d, memory.pool, memory.caches)
    held = isl + round(RESERVED_OUTPUT.get(d.engine, 0.5) * osl)
    admitted = min(pool.users(held), d.max_num_seqs) * d.layout.dp if memory.pool > 0 else 0
    notes: list[str] = []
    fits = admitted >= 1
    if not fits:
        notes.append("does not fit as described; times assume that it did")
        admitted = d.inputs.concurrency or 1
    wanted = admitted if d.inputs.concurrency is None else max(1, round(d.inputs.concurrency / d.replicas))
    if d.inputs.concurrency_scope == "unstated" and wanted > 2 * admitted:
        spread = -(-wanted // admitted)
        notes.append(f"{wanted} requests are taken to be spread over {spread} instances, as one holds {admitted}")
        wanted = -(-wanted // spread)
    running = max(1, min(wanted, admitted))
    waiting = wanted - running
    if waiting:
        notes.append(f"{waiting} of {wanted} requests wait for memory or a slot")
    m = rank_model(d)
    per_replica = max(1, round(running / d.layout.dp))
    held_steps = BALANCE_STEPS.get(d.engine, 0.0) if d.layout.dp > 1 else 0.0
    if held_steps:
        notes.append(f"prompts are taken to be held back for {held_steps:g} steps to balance the attention replicas")
    batch_wait = d.inputs.batch_wait_steps
    if batch_wait and d.layout.dp > 1:
        batch_wait = 0  # TensorRT-LLM's scheduler asks for one or the other
        notes.append("with attention replicas prompts wait for the other replicas, not for a batch")
    marching = d.engine in PREFILL_FIRST and d.inputs.equal_lengths and not d.inputs.mixed_chunk and per_replica > 1
    if d.inputs.equal_lengths and d.engine not in PREFILL_FIRST and d.inputs.concurrency_scope == "instance":
        notes.append(f"equal lengths change nothing here: {d.engine} decodes in steps that prefill")
    if marching:
        notes.append("requests of equal length march in step, as prompts go first: each waits for half of the others")
    drafts = d.inputs.draft_tokens
    stages = d.layout.pp
    in_flight = min(stages, per_replica)
    rows = -(-per_replica // in_flight) * (1 + drafts)
    decode = step_work(m, decode=[(rows, isl + osl // 2)], graphs=not d.inputs.eager)
    cached = min(int(isl * d.inputs.prefix_hit_rate), isl - 1)
    if isl - cached > MOST_STEPS * d.max_batched_tokens:
        raise InvalidInput(
            f"prompts of {isl:,} tokens in steps of {d.max_batched_tokens} (max_batched_tokens) take over {MOST_STEPS:,} steps",
            field="max_batched_tokens",
            remedy="allow larger steps",
        )
    steps = prompt_chunks(isl, d.max_batched_tokens, per_replica, cached)
    prompts = len(steps[0])
    prefill = add([step_work(m, prefill=step) for step in steps])
    alone = step_work(m, prefill=steps[0][:1]) if prompts > 1 else prefill
    filled = d.inputs.batch_wait_share * d.max_batched_tokens
    loop = Loop(
        decode=repeat(decode, stages),
        alone=repeat(alone, stages),
        prefill=repeat(prefill, stages / in_flight),
        prompts=float(prompts),
        running=float(running),
        waiting=float(waiting),
        osl=float(osl),
        replicas_in_step=float(d.layout.dp),
        tokens_per_step=expected_tokens(d.inputs.acceptance, drafts),
        held_steps=held_steps,
        marching=float(marching),
        batch_wait_steps=float(batch_wait),
        # Nobody waits where nothing decodes: TensorRT-LLM and SGLang keep prompts back only beside others that run.
        batch_wait_prompts=min(float(per_replica), max(1.0, (filled - per_replica * (1 + drafts)) / isl)),
        poll_steps=float(d.inputs.poll_steps) if per_replica > 1 else 1.0,
    )
    compute = compute_precision(d.weights, units(d.gpu))
    return Traffic(loop, peaks(d.gpu, compute), m, running, waiting, fits, tuple(notes))


def add(parts: list[Work]) -> Work:
    """The work of several steps together."""
    return Work(**{f.name: sum(getattr(w, f.name) for w in parts) for f in fields(Work)})


def repeat(w: Work, times: float) -> Work:
    """The work of passing through stages of equal work one after another."""
    return Work(**{f.name: times * getattr(w, f.name) for f in fields(Work)})
