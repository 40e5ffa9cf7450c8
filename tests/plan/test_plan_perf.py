"""Latency, throughput and dollars: limits, monotony, conservation of time, speculation, and the search."""

import math
import re
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidInput
from headrace.plan.closed_loop import closed_loop, gathering
from headrace.plan.costs.roofline import efficiency, step_seconds
from headrace.plan.costs.work import rank_model, step_work
from headrace.plan.deployment import Inputs, resolve
from headrace.plan.economics import fleet, query_cost
from headrace.plan.fit import fit
from headrace.plan.perf import perf, prediction, ridge_flops_per_byte
from headrace.plan.search import Need, rank, tornado
from headrace.plan.workload import traffic
from headrace.spec import hardware
from headrace.spec.accounting import Span
from headrace.spec.workload import Slo, preset

MODELS = ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-27b", "deepseek-v2-lite"]
GPUS = ["a100-sxm-80", "h100-sxm-80", "h200-sxm-141", "b200-sxm-180", "mi300x-192", "l40s-48"]
ENGINES = ["vllm", "sglang", "headrace"]


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    gpu=st.sampled_from(GPUS),
    engine=st.sampled_from(ENGINES),
    concurrency=st.integers(1, 64),
    isl=st.integers(16, 8000),
    osl=st.integers(2, 2000),
)
def test_times_grow_with_load_and_length_and_never_beat_the_roof(model, gpu, engine, concurrency, isl, osl):
    base = Inputs(model=model, gpu=gpu, engine=engine, isl=isl, osl=osl, concurrency=concurrency, weights="bf16")
    if gpu == "l40s-48":
        base = msgspec.structs.replace(base, n_gpus=2, tp=2)
    one = perf(base)
    assert math.isfinite(one.ttft_ms.value)
    for figure in (one.ttft_ms, one.tpot_ms, one.output_tokens_per_s_per_gpu):
        assert 0 < figure.low <= figure.value <= figure.high
    busier = perf(msgspec.structs.replace(base, concurrency=concurrency * 2))
    assert busier.tpot_ms.value >= one.tpot_ms.value * 0.999
    longer = perf(msgspec.structs.replace(base, isl=isl * 2))
    assert longer.ttft_ms.value >= one.ttft_ms.value * 0.999
    t = traffic(resolve(base))
    moved = t.loop.decode.gemm_bytes + t.loop.decode.expert_bytes + t.loop.decode.decode_attention_bytes
    assert sum(one.decode_ms.values()) / 1e3 > moved / t.peaks.bandwidth


def test_time_is_conserved_in_a_closed_loop():
    d = resolve(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=2048, osl=512, concurrency=32))
    t = traffic(d)
    e = efficiency({}, "vllm", "hopper", "bf16")
    times = closed_loop(t.loop, t.peaks, e)
    gaps = 511
    waited = times.ttft_s - e.prompt_s - 0.5 * times.decode_s - times.alone_s
    held = times.tpot_s * gaps - times.decode_s * gaps
    # All prefills of the others are paid either before the first token or between tokens.
    assert waited + held == pytest.approx(31 * times.prompt_s, rel=0.02)


def test_a_request_waits_for_the_start_and_for_prompts_it_meets():
    """Long answers: only the first of ten rounds waits, for half of the others. Short ones: the engine is mostly prefilling."""
    t = traffic(resolve(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=1024, osl=512, concurrency=64)))
    e = efficiency({}, "vllm", "hopper", "bf16")

    def ahead(osl):
        times = closed_loop(replace(t.loop, osl=float(osl)), t.peaks, e)
        return (times.ttft_s - e.prompt_s - 0.5 * times.decode_s - times.alone_s) / times.prompt_s

    assert ahead(10**7) == pytest.approx(63 / 20, rel=1e-3)
    assert ahead(10**7) < ahead(512) < ahead(16) <= 63
    one = closed_loop(replace(t.loop, running=1.0), t.peaks, e)
    assert one.ttft_s == pytest.approx(e.prompt_s + 0.5 * one.decode_s + one.alone_s, rel=1e-6)


def test_requests_beyond_memory_wait():
    inputs = Inputs(model="llama-3.1-70b", gpu="h200-sxm-141", weights="fp8", isl=8192, osl=1024, engine="vllm")
    d = resolve(inputs)
    room = fit(inputs, 8192 + 512).max_users
    light, heavy = (perf(msgspec.structs.replace(inputs, concurrency=c)) for c in (room // 2, room * 2))
    assert light.waiting == 0
    assert heavy.running + heavy.waiting == room * 2
    assert heavy.running == pytest.approx(room, abs=2)
    assert heavy.ttft_ms.value > 20 * light.ttft_ms.value
    assert d.replicas == 1


def test_speculation_pays_where_it_is_accepted():
    base = Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=512, osl=256, concurrency=1)
    plain = perf(base)
    good = perf(msgspec.structs.replace(base, draft_tokens=4, acceptance=0.8))
    bad = perf(msgspec.structs.replace(base, draft_tokens=4, acceptance=0.0))
    assert good.tokens_per_step == pytest.approx(3.3616)
    assert good.tpot_ms.value < plain.tpot_ms.value / 2
    assert bad.tpot_ms.value >= plain.tpot_ms.value


def test_prefix_hits_shorten_the_prompt():
    base = Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=8000, osl=64, concurrency=8)
    assert perf(msgspec.structs.replace(base, prefix_hit_rate=0.9)).ttft_ms.value < perf(base).ttft_ms.value / 2


def test_tensor_parallel_is_faster_but_not_free():
    base = Inputs(model="llama-3.1-70b", gpu="h100-sxm-80", weights="fp8", isl=1024, osl=256, concurrency=8)
    two, eight = (perf(msgspec.structs.replace(base, n_gpus=n, tp=n)) for n in (2, 8))
    assert eight.tpot_ms.value < two.tpot_ms.value
    assert eight.output_tokens_per_s_per_gpu.value < two.output_tokens_per_s_per_gpu.value


def test_replicas_share_the_load():
    base = Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=512, osl=128)
    one = perf(msgspec.structs.replace(base, concurrency=8))
    four = perf(msgspec.structs.replace(base, n_gpus=4, tp=1, concurrency=32))
    assert four.tpot_ms.value == pytest.approx(one.tpot_ms.value)
    assert four.output_tokens_per_s.value == pytest.approx(4 * one.output_tokens_per_s.value)


def test_a_long_prompt_costs_more_than_in_proportion():
    m = rank_model(resolve(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80")))
    short, long = (step_work(m, prefill=[Span(0, n)]) for n in (2048, 32768))
    assert long.prefill_attention_flops > 200 * short.prefill_attention_flops
    assert long.gemm16_flops == pytest.approx(16 * short.gemm16_flops, rel=0.01)


def test_a_step_without_work_takes_only_fixed_time():
    d = resolve(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=8, osl=8, concurrency=1))
    m, t, e = rank_model(d), traffic(d), efficiency({}, "vllm", "hopper", "bf16")
    assert step_seconds(step_work(m), t.peaks, e) == pytest.approx(e.step_s + 32 * e.layer_s)


def test_the_ridge_of_an_h100():
    assert ridge_flops_per_byte(hardware.find("h100-sxm-80"), "bf16") == pytest.approx(295, rel=0.01)


def test_far_from_any_measurement_the_grade_says_so():
    near = perf(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=512, osl=64, concurrency=4))
    far = perf(Inputs(model="llama-3.1-8b", gpu="t4-16", weights="int4", isl=512, osl=64, concurrency=4))
    assert near.tpot_ms.grade == "fitted"
    assert far.tpot_ms.grade == "guess"
    assert far.tpot_ms.high / far.tpot_ms.low > near.tpot_ms.high / near.tpot_ms.low


def test_dollars_follow_price_and_rate():
    base = Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=512, osl=128, concurrency=16, gpu_price_usd_h=3.6)
    p = perf(base)
    usd = p.usd_per_million_output_tokens
    assert usd.value == pytest.approx(1000 / p.output_tokens_per_s_per_gpu.value)
    assert usd.low < usd.value < usd.high
    assert (
        perf(msgspec.structs.replace(base, gpu="mi355x-288", gpu_price_usd_h=None)).usd_per_million_output_tokens
        is None
    )


def test_the_shared_prediction_type_carries_both_halves():
    found = prediction(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=512, osl=128, concurrency=4))
    assert found.tpot_ms.value > 0
    assert found.weights_bytes.grade == "exact"


def test_costs_of_a_conversation():
    cost = query_cost(1.0, 4.0, 1000, 500, turns=3)
    assert cost.usd_per_query == pytest.approx((1000 + 2000) / 1e6)
    assert cost.usd_per_conversation == pytest.approx(3 * 0.003 + (1500 + 3000) / 1e6)
    assert cost.usd_per_conversation_with_prefix_cache == pytest.approx(0.009)


def test_a_fleet_has_one_to_spare():
    found = fleet(10.0, 100, 500.0, 2, 3.0)
    assert found.instances == 3 + 1  # 1,000 tok/s at 80 % of 500 each, and a spare
    assert found.gpus == 8
    assert found.usd_per_hour == 24
    assert found.utilisation == pytest.approx(10 / 15)
    with pytest.raises(InvalidInput, match="rate"):
        fleet(0, 100, 500.0, 2, 3.0)


@pytest.fixture(scope="module")
def ranking():
    need = Need.from_preset(
        "llama-3.1-70b",
        preset("premium-chat"),
        gpus=("h100-sxm-80", "l4-24", "mi355x-288", "a100-sxm-40"),
        counts=(1, 2, 4),
        weights=("auto", "fp8"),
        rate_rps=2.0,
    )
    return rank(need)


def test_candidates_meet_the_service_levels_cheapest_first(ranking):
    assert ranking.candidates
    slo = ranking.need.slo
    priced = [c for c in ranking.candidates if c.usd_per_million_output_tokens]
    assert [c.usd_per_million_output_tokens.value for c in priced] == sorted(
        c.usd_per_million_output_tokens.value for c in priced
    )
    for c in ranking.candidates:
        assert slo.met(c.ttft_ms.value, c.tpot_ms.value)
        assert c.fleet.instances >= 2
        inputs = Inputs(
            model="llama-3.1-70b", gpu=c.gpu, n_gpus=c.gpus, tp=c.tp, weights=c.weights, kv=c.kv, max_model_len=1536
        )
        assert fit(inputs, 1536).max_users >= c.concurrency


def test_cost_of_a_query_adds_up_to_the_bill(ranking):
    c = next(c for c in ranking.candidates if c.cost)
    assert c.cost.usd_per_query == pytest.approx(512 * c.usd_per_million_output_tokens.value / 1e6, rel=0.01)


def test_a_card_without_a_price_is_ranked_last_and_said(ranking):
    unpriced = [c for c in ranking.candidates if c.usd_per_million_output_tokens is None]
    assert unpriced
    assert list(ranking.candidates[-len(unpriced) :]) == unpriced
    assert any("mi355x-288" in note for note in ranking.notes)


def test_stale_prices_of_the_cards_that_are_ranked_are_said_in_one_note():
    need = Need(model="llama-3.1-8b", isl=512, osl=128, slo=Slo(), gpus=("h100-sxm-80", "l4-24"), counts=(1,))
    [stale] = [n for n in rank(need).notes if "date from" in n]
    assert all(text in stale for text in ("prices of 2 cards", "H100", "L4"))
    mine = rank(msgspec.structs.replace(need, prices={"h100-sxm-80": 2.0}))
    [left] = [n for n in mine.notes if "dates from" in n]
    assert "L4" in left
    assert "H100" not in left


def test_every_rejection_has_a_reason_and_a_way_out(ranking):
    assert ranking.rejected
    for r in ranking.rejected:
        assert r.reason
        assert r.change
    small = next(r for r in ranking.rejected if r.gpu == "a100-sxm-40" and r.gpus == 1 and r.weights == "auto")
    assert "weights take 141 GB" in small.reason
    assert small.change == "take 8 GPUs and fp8 weights (--gpus 8 --tp 8 --weights fp8)"


def after(need, rejected):
    """The deployment that a rejected candidate is told to become, and the service levels that it then has to meet."""
    said = re.search(r"\((--[^()]*)\)", rejected.change)
    options = dict(re.findall(r"(--\w+) (\S+)", said[1] if said else ""))
    more = int(options.get("--gpus", 0))
    inputs = Inputs(
        model=need.model,
        gpu=rejected.gpu,
        n_gpus=more or rejected.gpus,
        tp=int(options.get("--tp", rejected.tp)),
        pp=1 if more else rejected.pp,
        dp=1 if more else rejected.dp,
        ep=1 if more else rejected.ep,
        weights=options.get("--weights", rejected.weights),
        kv=options.get("--kv", rejected.kv),
        isl=need.isl,
        osl=need.osl,
        max_model_len=need.isl + need.osl,
        prefix_hit_rate=need.prefix_hit_rate,
        concurrency=need.min_users,
    )
    given = {
        name: re.search(rf"relax.*{text} to ([\d.]+) ms", rejected.change)
        for name, text in (("ttft_ms", "TTFT"), ("tpot_ms", "time per token"))
    }
    return inputs, msgspec.structs.replace(need.slo, **{name: float(to[1]) for name, to in given.items() if to})


@pytest.mark.parametrize(
    ("model", "use", "gpus"),
    [
        ("llama-3.1-70b", "premium-chat", ("a100-sxm-40", "l4-24", "h100-sxm-80")),
        ("gpt-oss-120b", "voice", ("a40-48", "rtx-5090-32", "l40s-48")),
        ("mistral-7b", "code", ("t4-16", "l4-24", "a10g-24")),
    ],
)
def test_the_change_that_is_named_makes_it_pass(model, use, gpus):
    need = Need.from_preset(model, preset(use), gpus=gpus, pp=(1,), dp=(1,), min_users=2)
    rejected = rank(need).rejected
    changes = [r for r in rejected if not r.change.startswith("needs")]
    assert changes
    for r in changes:
        inputs, slo = after(need, r)
        assert inputs.n_gpus <= hardware.find(r.gpu).max_linked_gpus
        memory, p = fit(inputs, need.isl + need.osl), perf(inputs)
        assert memory.fits, r
        assert memory.max_users >= need.min_users, r
        assert slo.met(p.ttft_ms.value, p.tpot_ms.value), r


@pytest.mark.parametrize(
    ("model", "isl", "osl", "slo", "users", "asked"),
    [
        ("qwen3-30b-a3b", 4000, 96, Slo(), 400, {"gpus": ("a100-sxm-40",), "weights": ("int4",), "kv": ("fp8",)}),
        ("deepseek-v2-lite", 256, 64, Slo(4000, 100), 600, {"gpus": ("a40-48", "rtx-4090-24")}),
    ],
)
def test_a_named_change_passes_where_it_is_asked_for(model, isl, osl, slo, users, asked):
    """With attention replicas, whose sequence limits add up: what a change makes of them is raised like that of a candidate."""
    need = Need(
        model=model, isl=isl, osl=osl, slo=slo, min_users=users, counts=(2,), pp=(1,), dp=(2,), engine="vllm", **asked
    )
    rejected = rank(need).rejected
    assert rejected
    for r in rejected:
        assert not r.change.startswith("needs"), r
        inputs, relaxed = after(need, r)
        there = {"counts": (inputs.n_gpus,), "dp": (inputs.dp,), "weights": (inputs.weights,), "kv": (inputs.kv,)}
        again = rank(msgspec.structs.replace(need, slo=relaxed, gpus=(r.gpu,), **there))
        assert (inputs.tp, inputs.ep) in {(c.tp, c.ep) for c in again.candidates}, r


def test_nothing_can_meet_the_impossible():
    need = Need(model="llama-3.1-70b", isl=1024, osl=128, slo=Slo(1, 0.1), gpus=("h100-sxm-80",), counts=(4,))
    found = rank(need)
    assert not found.candidates
    assert "relax" in found.rejected[0].change or "GPUs" in found.rejected[0].change


def test_what_is_missing_is_all_that_is_missing():
    """The weights of DeepSeek-V3 on two 16 GB cards lack hundreds of GiB, and a shorter context would not help."""
    need = Need(model="deepseek-v3", isl=1024, osl=128, slo=Slo(), gpus=("t4-16",), counts=(2,), pp=(1,), dp=(1,))
    for r in rank(need).rejected:
        memory = fit(Inputs(model="deepseek-v3", gpu="t4-16", n_gpus=2, tp=2, ep=r.ep, max_model_len=1152), 1152)
        short_gib = (memory.weights_bytes - memory.budget_bytes) / 2**30
        said = float(re.search(r"needs ([\d.]+) GiB more", r.change)[1])
        assert short_gib < said < short_gib + 5
        assert "shorter context" not in r.change


def test_more_users_than_the_engine_takes_by_default_raise_its_limit():
    need = Need(
        model="llama-3.2-1b", isl=32, osl=8, slo=Slo(), gpus=("rtx-4090-24",), counts=(1,), pp=(1,), min_users=700
    )
    found = rank(need)
    assert [c.concurrency for c in found.candidates] == [700]
    assert any("limit of sequences" in note and "700" in note for note in found.notes)
    few = rank(msgspec.structs.replace(need, min_users=2))
    assert few.candidates
    assert not any("limit of sequences" in note for note in few.notes)


def test_requests_longer_than_the_training_are_told():
    need = Need(model="qwen3-32b", isl=50_000, osl=100, slo=Slo(), gpus=("b300-sxm-288",), counts=(1,), pp=(1,))
    said = "50,100 tokens are longer than the 40,960"
    assert any(said in note for note in rank(need).notes)
    assert any(said in note for note in perf(Inputs(model="qwen3-32b", gpu="b300-sxm-288", isl=50_000, osl=100)).notes)
    assert not any(
        "longer than" in note for note in perf(Inputs(model="qwen3-32b", gpu="b300-sxm-288", isl=500, osl=100)).notes
    )


def test_a_wrong_model_is_an_error_not_a_rejection():
    with pytest.raises(InvalidInput):
        rank(Need(model="llama-9", isl=1, osl=1, slo=Slo()))


def test_the_price_of_the_gpu_is_in_the_tornado():
    swings = tornado(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=1024, osl=256, concurrency=16))
    sizes = [abs(s.high - s.low) for s in swings]
    assert sizes == sorted(sizes, reverse=True)
    price = next(s for s in swings if s.what == "GPU price")
    assert price.high / price.low == pytest.approx(12.29 / 1.99)


def test_the_search_cuts_into_stages_and_replicas():
    def layouts(model, **limits):
        need = Need(model=model, isl=256, osl=64, slo=Slo(), gpus=("b200-sxm-180",), weights=("fp8",), **limits)
        found = rank(need)
        return {(c.gpus, c.tp, c.pp, c.dp, c.ep) for c in (*found.candidates, *found.rejected)}

    assert layouts("llama-3.1-8b", counts=(1, 4)) == {(1, 1, 1, 1, 1), (4, 4, 1, 1, 1), (4, 2, 2, 1, 1)}
    mixed = layouts("qwen3-30b-a3b", counts=(4,))
    assert {(4, 4, 1, 1, 4), (4, 2, 1, 2, 4), (4, 1, 1, 4, 4), (4, 1, 2, 2, 2), (4, 2, 2, 1, 1)} <= mixed
    assert all(tp * pp * dp == 4 for _, tp, pp, dp, _ in mixed)
    assert {pp for _, _, pp, _, _ in layouts("llama-3.1-8b", counts=(4,), pp=(4,))} == {4}


def test_pipeline_stages_work_at_once():
    one = Inputs(model="llama-3.1-70b", gpu="h100-sxm-80", n_gpus=4, tp=4, isl=1024, osl=256, concurrency=64)
    cut = msgspec.structs.replace(one, n_gpus=8, pp=2)
    whole, halves = traffic(resolve(one)).loop, traffic(resolve(cut)).loop
    # A group's step passes both stages and reads all weights once; each stage has half the layers for half the requests.
    assert halves.decode.rows == whole.decode.rows
    assert halves.decode.gemm_flops == pytest.approx(whole.decode.gemm_flops / 2, rel=0.05)
    assert halves.prefill.gemm_flops == pytest.approx(whole.prefill.gemm_flops / 2, rel=0.05)
    assert halves.alone.gemm_flops == pytest.approx(whole.alone.gemm_flops, rel=0.05)
    alone = msgspec.structs.replace(cut, concurrency=1)
    pair, single = traffic(resolve(alone)).loop, traffic(resolve(msgspec.structs.replace(one, concurrency=1))).loop
    assert pair.prefill.gemm_flops == pytest.approx(single.prefill.gemm_flops, rel=0.05)


def test_eager_steps_are_launched_one_by_one():
    plain = Inputs(model="qwen3-30b-a3b", gpu="h100-sxm-80", isl=1024, osl=256, concurrency=4)
    eager = msgspec.structs.replace(plain, eager=True)
    assert perf(eager).tpot_ms.value > perf(plain).tpot_ms.value
    assert perf(eager).decode_ms["gemm"] == perf(plain).decode_ms["gemm"]


def test_balancing_attention_replicas_delays_the_first_token_only():
    run = Inputs(
        model="deepseek-r1", gpu="b200-sxm-180", n_gpus=8, tp=1, dp=8, ep=8, engine="tensorrt-llm", isl=1024, osl=512,
        concurrency=64,
    )  # fmt: skip
    d = resolve(run)
    t = traffic(d)
    e = efficiency({}, d.engine, d.gpu.generation, d.weights)
    held = closed_loop(t.loop, t.peaks, e)
    free = closed_loop(replace(t.loop, held_steps=0.0), t.peaks, e)
    assert held.ttft_s - free.ttft_s == pytest.approx(50 * held.decode_s)
    assert held.tpot_s == free.tpot_s
    assert any("held back" in note for note in perf(run).notes)
    assert traffic(resolve(msgspec.structs.replace(run, engine="sglang"))).loop.held_steps == 0.0


def test_drawn_lengths_take_what_their_mean_takes():
    change = msgspec.structs.replace
    asked = Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=1000, osl=500, concurrency=32)
    drawn, mean = (traffic(resolve(change(asked, **c))) for c in ({"shortest": 0.8}, {"isl": 900, "osl": 450}))
    assert drawn.loop == mean.loop
    for wrong in ({"shortest": 0.0}, {"shortest": 1.5}, {"shortest": 0.8, "equal_lengths": True}):
        with pytest.raises(InvalidInput, match=r"shortest|drawn"):
            resolve(change(asked, **wrong))


def test_prompts_that_gather_wait_for_their_batch():
    """Counted one by one: prompts kept back until there are enough or the first has waited long enough."""

    def waited(per_step, steps, prompts):
        every = 1 / per_step
        gathered = [0.0]
        while len(gathered) < prompts and gathered[-1] + every <= steps:
            gathered.append(gathered[-1] + every)
        ends = gathered[-1] if len(gathered) == prompts else steps
        return sum(ends - at for at in gathered) / len(gathered), len(gathered) - 1

    loop = traffic(resolve(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=512, osl=512, concurrency=64))).loop
    assert gathering(loop, 0.1) == (0.0, 0.0)
    for per_step, steps, prompts in ((0.1, 20.0, 2.0), (0.01, 20.0, 2.0), (0.5, 20.0, 40.0), (1.0, 8.0, 3.0)):
        kept, others = gathering(replace(loop, batch_wait_steps=steps, batch_wait_prompts=prompts), per_step)
        exact, more = waited(per_step, steps, prompts)
        assert kept == pytest.approx(exact, rel=0.1, abs=0.6)
        assert others == pytest.approx(more, abs=1.0)
    assert gathering(replace(loop, poll_steps=31.0), 0.1) == pytest.approx((15.0, 3.0))


@pytest.mark.parametrize(
    ("engine", "setting"),
    [("tensorrt-llm", {"batch_wait_steps": 20, "batch_wait_share": 0.9}), ("sglang", {"poll_steps": 30})],
)
def test_gathering_delays_first_tokens_and_conserves_time(engine, setting):
    asked = Inputs(
        model="llama-3.1-70b", gpu="h200-sxm-141", n_gpus=4, engine=engine, isl=1024, osl=1024, concurrency=32
    )
    e = efficiency({}, engine, "hopper", "bf16")
    plain, kept = (
        closed_loop(traffic(resolve(msgspec.structs.replace(asked, **s))).loop, t.peaks, e)
        for s, t in (({}, traffic(resolve(asked))), (setting, traffic(resolve(asked))))
    )
    assert kept.ttft_s > plain.ttft_s + 5 * plain.decode_s
    assert kept.tpot_s <= plain.tpot_s
    # The cycle grows by no more than the steps that a prompt is kept back.
    loop = traffic(resolve(msgspec.structs.replace(asked, **setting))).loop
    steps, _ = gathering(loop, 32 / 1024)
    assert kept.cycle_s - plain.cycle_s == pytest.approx(steps * plain.decode_s, rel=1e-2)
    alone, waiting = (
        traffic(resolve(msgspec.structs.replace(asked, concurrency=1, **given))) for given in ({}, setting)
    )
    assert closed_loop(waiting.loop, waiting.peaks, e) == closed_loop(alone.loop, alone.peaks, e), "beside nothing"
    for other in {"vllm", "sglang", "tensorrt-llm"} - {engine}:
        with pytest.raises(InvalidInput, match=r"^[a-z_]*: only (sglang|tensorrt-llm) can "):
            perf(msgspec.structs.replace(asked, engine=other, **setting))


def test_drafts_of_running_requests_fill_a_batch_too():
    asked = Inputs(
        model="llama-3.1-70b", gpu="h200-sxm-141", n_gpus=4, engine="tensorrt-llm", isl=512, osl=1024, concurrency=128,
        batch_wait_steps=20, batch_wait_share=0.9, max_batched_tokens=8192,
    )  # fmt: skip
    prompts = [traffic(resolve(msgspec.structs.replace(asked, draft_tokens=n))).loop.batch_wait_prompts for n in (0, 3)]
    assert prompts == pytest.approx([(0.9 * 8192 - 128) / 512, (0.9 * 8192 - 4 * 128) / 512])


@pytest.mark.parametrize(
    "setting",
    [
        {"batch_wait_steps": 20},
        {"batch_wait_share": 0.5},
        {"batch_wait_steps": -1},
        {"poll_steps": 0, "engine": "sglang"},
    ],
)
def test_half_told_waits_are_refused(setting):
    with pytest.raises(InvalidInput):
        perf(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", **({"engine": "tensorrt-llm"} | setting)))


def test_equal_requests_march_in_step_where_prompts_go_first():
    asked = Inputs(model="qwen3-32b", gpu="h100-sxm-80", n_gpus=4, engine="sglang", isl=2048, osl=256, concurrency=64)
    change = msgspec.structs.replace
    drawn, equal = perf(asked), perf(change(asked, equal_lengths=True))
    assert any("march in step" in note for note in equal.notes)
    assert equal.tpot_ms == drawn.tpot_ms
    assert equal.output_tokens_per_s.value == pytest.approx(drawn.output_tokens_per_s.value)
    t = traffic(resolve(asked))
    e = efficiency({}, "sglang", "hopper", "bf16")
    before, after = (closed_loop(replace(t.loop, marching=m), t.peaks, e) for m in (0.0, 1.0))
    waited = after.ttft_s - before.ttft_s
    # Half of the others' prompts, with the own step's, in place of those that were ahead.
    assert (63 + t.loop.prompts - 1) / 2 * before.prompt_s == pytest.approx(
        waited + before.ttft_s - before.alone_s - e.prompt_s - before.decode_s / 2
    )
    assert waited > 0
    assert (after.tpot_s, after.cycle_s) == (before.tpot_s, before.cycle_s)
    assert equal.ttft_ms.value > 2 * drawn.ttft_ms.value
    for other in ({"mixed_chunk": True}, {"concurrency": 1}, {"engine": "vllm"}):
        assert perf(change(asked, equal_lengths=True, **other)).ttft_ms == perf(change(asked, **other)).ttft_ms
    assert any("change nothing" in n for n in perf(change(asked, equal_lengths=True, engine="vllm")).notes)
    with pytest.raises(InvalidInput, match="mixed chunks"):
        perf(change(asked, engine="vllm", mixed_chunk=True))


@pytest.mark.parametrize(
    "asked", [{}, {"concurrency": 500}, {"draft_tokens": 3}, {"engine": "sglang", "equal_lengths": True}]
)
def test_times_and_rate_of_a_loop_are_those_of_one_loop(asked):
    """Little's law: requests in flight are those that end per second times the seconds that each takes."""
    given = {"model": "llama-3.1-8b", "gpu": "h100-sxm-80", "n_gpus": 2, "isl": 2048, "osl": 256, "concurrency": 64}
    inputs = Inputs(**(given | asked))
    p = perf(inputs)
    request_s = (p.ttft_ms.value + p.tpot_ms.value * 255) / 1e3
    in_flight = p.output_tokens_per_s.value / 256 * request_s
    if inputs.equal_lengths:  # the time per token then holds prompts that already were before the first one
        assert in_flight > inputs.concurrency
    else:
        assert in_flight == pytest.approx(inputs.concurrency)
    assert p.output_tokens_per_s.value == pytest.approx(2 * p.output_tokens_per_s_per_gpu.value)
    assert p.output_tokens_per_s.low < p.output_tokens_per_s.value < p.output_tokens_per_s.high


def test_nothing_is_faster_than_the_datasheet_allows():
    from headrace.plan.calibration import shipped
    from headrace.plan.perf import predict

    d = resolve(Inputs(model="gpt-oss-120b", gpu="h100-sxm-80", isl=1024, osl=1024, concurrency=16))
    c = shipped()
    effects = {
        **c.main.effects,
        "any|h100-sxm-80": msgspec.structs.replace(c.main.effects["any|h100-sxm-80"], tpot=-2.0),
    }
    p = predict(d, msgspec.structs.replace(c.main, effects=effects), c.near, "fitted")
    w = traffic(d).loop.decode
    reads_ms = (w.gemm_bytes + w.expert_bytes + w.decode_attention_bytes) / 3.35e12 * 1e3
    assert reads_ms > 7
    assert p.tpot_ms.value == p.tpot_ms.low == pytest.approx(reads_ms)
    assert p.tpot_ms.high > 1.2 * reads_ms
    assert any("datasheet allows" in n for n in p.notes)
    assert not any(
        "datasheet allows" in n for n in predict(d, c.unseen and c.folds["gpt-oss"].calibration, c.near, "fitted").notes
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("model", ["mistral-7b", "qwen2.5-32b", "qwen3-30b-a3b", "gpt-oss-120b"])
def test_a_card_is_not_faster_than_a_better_one(model, engine):
    for concurrency in (1, 16, 64):
        asked = Inputs(
            model=model, gpu="h100-sxm-80", n_gpus=2, engine=engine, isl=512, osl=256, concurrency=concurrency
        )
        h100, h200 = perf(asked), perf(msgspec.structs.replace(asked, gpu="h200-sxm-141"))
        if h100.running == h200.running:
            # Each figure is also shifted by what is known of errors on its own card, a few percent.
            assert h100.tpot_ms.value > 0.95 * h200.tpot_ms.value


def test_a_run_that_cannot_be_speaks_for_no_other():
    from headrace.plan.calibration import shipped

    assert not shipped().main.runs.get("gpt-oss|vllm|h100-sxm-80||mxfp4")
    assert shipped().main.runs["gpt-oss|vllm|h100-sxm-80|0.18.0|mxfp4"]
