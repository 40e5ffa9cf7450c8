"""What is being planned: a model on some GPUs under an engine, with every name resolved and every default filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.base.units import GIB
from headrace.plan.stored import Parts
from headrace.spec import engine_facts, hardware, models
from headrace.spec.accounting import file_weight_bytes
from headrace.spec.hf import spec_from_hf
from headrace.spec.locate import locate
from headrace.spec.model import Attention, LatentAttention, LinearAttention, ModelSpec, MoE
from headrace.spec.precision import kv_precision, precision
from headrace.spec.sharding import Layout

MOST = 10_000_000
"""Of anything that is counted but the longest context: more is a slip of the pen."""


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a prediction may know about a run, and nothing it is asked to predict.

    Predictions take this and only this, so they cannot read a measured answer. `weights`/`kv`: precisions, "auto" for
    the checkpoint's and the engine's default. `memory_fraction`, `max_*`: None means the engine's own default.
    `concurrency`: requests in flight in a closed loop; None means as many as fit (an offline queue). Published runs often
    do not say whether it is per instance (`concurrency_scope` "unstated"): then more than twice what one instance holds counts as
    spread over several. "server": a published run whose campaign measures one instance.
    `equal_lengths`: all prompts and all answers are equally long, as load generators send them without a spread.
    `shortest`: lengths are drawn uniformly from this share of `isl` and `osl` up to them.
    `mixed_chunk`: the engine decodes in steps that prefill, where that is a choice (SGLang, off by default).
    `batch_wait_steps`/`batch_wait_share`: a prompt waits so many decode steps for others, until together they are this share
    of a step's token budget (TensorRT-LLM's `batch_wait_timeout_iters` and `batch_wait_max_tokens_ratio`, none by default).
    `poll_steps`: decode steps between checks for new requests (SGLang's `--scheduler-recv-interval`, 1 by default).
    """

    model: str
    gpu: str
    n_gpus: int = 1
    tp: int | None = None
    pp: int = 1
    dp: int = 1
    ep: int = 1
    engine: str = "vllm"
    engine_version: str = ""
    weights: str = "auto"
    kv: str = "auto"
    memory_fraction: float | None = None
    max_model_len: int | None = None
    max_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_tokens: int | None = None
    isl: int | None = None
    osl: int | None = None
    concurrency: int | None = None
    draft_tokens: int = 0
    acceptance: float = 0.7
    eager: bool = False
    chunked_prefill: bool = True
    prefix_hit_rate: float = 0.0
    gpu_price_usd_h: float | None = None
    concurrency_scope: Literal["instance", "server", "unstated"] = "instance"
    equal_lengths: bool = False
    mixed_chunk: bool = False
    shortest: float = 1.0
    batch_wait_steps: int = 0
    batch_wait_share: float = 0.0
    poll_steps: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    """A geometry with what the catalog says about it. `family` is "unknown" outside the catalog. `asks_fp8_kv`: the checkpoint
    was made for FP8 keys and values, which vLLM then takes where nothing else is said. `file_parts`: bytes of a GGUF file's tensors
    by part, whose types differ."""

    id: str
    spec: ModelSpec
    family: str = "unknown"
    outside_text: int = 0
    asks_fp8_kv: bool = False
    file_parts: Parts = ()


@dataclass(frozen=True, slots=True)
class Deployment:
    """Resolved inputs: objects in place of names. `replicas` is how many instances `n_gpus` GPUs make. `file_parts` where the
    weights are those of a GGUF file."""

    inputs: Inputs
    model: Model
    gpu: hardware.Gpu
    engine: str
    policy: engine_facts.MemoryPolicy
    layout: Layout
    replicas: int
    weights: str
    part_weights: tuple[tuple[str, str], ...]
    kv: str
    fraction: float
    max_model_len: int
    max_batched_tokens: int
    max_num_seqs: int
    block_tokens: int
    notes: tuple[str, ...] = ()
    file_parts: Parts = ()


@cache
def find_model(name: str) -> Model:
    """A model by catalog name, hub id, folder, .gguf or config.json; the catalog needs neither disk nor network."""
    if not Path(name).expanduser().exists():
        known = models.known(name)
        if known is not None:
            named = re.search(r"[-_]fp8[-_]kv$", name, re.IGNORECASE) is not None
            return Model(known.id, _spec(known.id), known.family, known.outside_text, named)
        if "/" not in name:
            models.find(name)  # raises with suggestions
    files = locate(name)
    try:
        spec = files.spec()
    except UnsupportedModel as error:  # of a planner, whose only input is the question, that is the wrong question
        raise InvalidInput(error.message, field=error.field, remedy=error.remedy) from error
    stored = files.quantization() or {}
    scheme = stored.get("kv_cache_scheme")
    asks = isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    parts = tuple(file_weight_bytes(files.gguf()).by_part.items()) if files.kind == "gguf" else ()
    return Model(
        spec.name or name, spec, asks_fp8_kv=asks or stored.get("kv_cache_quant_algo") == "FP8", file_parts=parts
    )


@cache
def _spec(model_id: str) -> ModelSpec:
    return spec_from_hf(models.catalog()[model_id].config, model_id)


def resolve(inputs: Inputs) -> Deployment:
    """Fill in every default; `InvalidInput` names the field that is wrong and what to give instead."""
    _check(inputs)
    model = find_model(inputs.model)
    gpu = hardware.find(inputs.gpu)
    engine = engine_facts.find(inputs.engine).id
    if engine == "tensorrt-llm" and gpu.link == "xgmi":
        raise InvalidInput(f"TensorRT-LLM does not run on {gpu.name}", field="engine", remedy="use vllm or sglang")
    policy = engine_facts.memory_policy(engine, inputs.engine_version)
    experts = any(isinstance(layer.mlp, MoE) for layer in model.spec.layers)
    layout, replicas, notes = _layout(inputs if experts else msgspec.structs.replace(inputs, ep=1))
    if inputs.ep > 1 and not experts:
        notes.append(f"ep {inputs.ep} is taken as 1: {model.id} has no experts to spread")
    weights, parts = _weights(inputs.weights, model, inputs.model)
    kv = "fp8" if _takes_stored_kv(inputs, engine, model) else _kv(inputs.kv, model, weights, policy, gpu)
    _check_divisible(model.spec, layout)
    large = gpu.memory_bytes >= 70 * GIB and gpu.generation != "ampere"
    max_model_len = inputs.max_model_len or model.spec.max_context
    if inputs.isl is not None and inputs.max_model_len is None:
        max_model_len = max(max_model_len, inputs.isl + (inputs.osl or 0))
    batched = inputs.max_batched_tokens or policy.batched_tokens[large]
    if batched == 0 or not inputs.chunked_prefill:
        batched = max(batched, max_model_len, 2048)
    elif inputs.max_batched_tokens is None and model.outside_text:
        batched = max(batched, policy.batched_tokens_multimodal)
    return Deployment(
        inputs=inputs,
        model=model,
        gpu=gpu,
        engine=engine,
        policy=policy,
        layout=layout,
        replicas=replicas,
        weights=weights,
        part_weights=parts,
        kv=kv,
        fraction=_fraction(inputs, policy, gpu, layout, batched, large),
        max_model_len=max_model_len,
        max_batched_tokens=batched,
        max_num_seqs=inputs.max_num_seqs or policy.sequences[large],
        block_tokens=inputs.block_tokens or max(policy.block_tokens, kv_precision(kv).key_group),
        notes=tuple(notes),
        file_parts=model.file_parts if inputs.weights.strip().lower() in ("", "auto") else (),
    )


def trained_context_note(spec: ModelSpec, tokens: int) -> list[str]:
    """A note if a request is longer than what the model was trained for; the arithmetic holds, the answers may not."""
    if tokens <= spec.max_context:
        return []
    return [f"requests of {tokens:,} tokens are longer than the {spec.max_context:,} that the model was trained for"]


def _check(inputs: Inputs) -> None:
    positive = ("n_gpus", "tp", "pp", "dp", "ep", "max_model_len", "max_batched_tokens", "max_num_seqs", "block_tokens")
    for name in (*positive, "isl", "osl", "concurrency"):
        value = getattr(inputs, name)
        if value is not None and value < 1:
            raise InvalidInput(f"{name} must be at least 1, got {value}", field=name)
        if value is not None and value > MOST and name != "max_model_len":
            raise InvalidInput(f"{name} must be at most {MOST:,}, got {value:,}", field=name)
    if inputs.memory_fraction is not None and not 0 < inputs.memory_fraction <= 1:
        raise InvalidInput(
            f"memory_fraction must be above 0 and at most 1, got {inputs.memory_fraction}", field="memory_fraction"
        )
    if inputs.draft_tokens < 0:
        raise InvalidInput(f"draft_tokens must not be negative, got {inputs.draft_tokens}", field="draft_tokens")
    if inputs.mixed_chunk and engine_facts.find(inputs.engine).id != "sglang":
        raise InvalidInput(
            f"only sglang has mixed chunks as a choice, not {inputs.engine}",
            field="mixed_chunk",
            remedy="leave it out",
        )
    if not 0 < inputs.shortest <= 1:
        raise InvalidInput(f"shortest must be above 0 and at most 1, got {inputs.shortest}", field="shortest")
    if inputs.equal_lengths and inputs.shortest < 1:
        raise InvalidInput("lengths are equal or drawn, not both", field="shortest", remedy="leave one out")
    if inputs.batch_wait_steps < 0 or not 0 <= inputs.batch_wait_share <= 1:
        raise InvalidInput(
            "batch_wait_steps must not be negative and batch_wait_share must be from 0 to 1, got "
            f"{inputs.batch_wait_steps} and {inputs.batch_wait_share}",
            field="batch_wait_steps",
        )
    if inputs.batch_wait_steps and engine_facts.find(inputs.engine).id != "tensorrt-llm":
        raise InvalidInput(
            f"only tensorrt-llm can wait for a batch, not {inputs.engine}",
            field="batch_wait_steps",
            remedy="leave it out",
        )
    if bool(inputs.batch_wait_steps) != bool(inputs.batch_wait_share):
        raise InvalidInput(
            "batch_wait_steps and batch_wait_share belong together: how long, and for how much",
            field="batch_wait_share",
            remedy="give both or neither",
        )
    if inputs.poll_steps < 1:
        raise InvalidInput(f"poll_steps must be at least 1, got {inputs.poll_steps}", field="poll_steps")
    if inputs.poll_steps > 1 and engine_facts.find(inputs.engine).id != "sglang":
        raise InvalidInput(
            f"only sglang can check for requests every so many steps, not {inputs.engine}",
            field="poll_steps",
            remedy="leave it out",
        )
    if not 0 <= inputs.acceptance < 1:
        raise InvalidInput(f"acceptance must be in [0, 1), got {inputs.acceptance}", field="acceptance")
    if not 0 <= inputs.prefix_hit_rate < 1:
        raise InvalidInput(f"prefix_hit_rate must be in [0, 1), got {inputs.prefix_hit_rate}", field="prefix_hit_rate")


def _layout(inputs: Inputs) -> tuple[Layout, int, list[str]]:
    """Ranks of one instance and how many instances there are. Without --tp, one instance over all GPUs."""
    n, pp, dp, ep = inputs.n_gpus, inputs.pp, inputs.dp, inputs.ep
    tp = inputs.tp if inputs.tp is not None else max(1, n // (pp * dp))
    notes: list[str] = []
    if dp > 1 and tp * dp * pp > n >= tp * pp and tp % dp == 0:
        # SGLang and TensorRT-LLM count data-parallel attention inside tp: each replica has tp / dp ranks.
        tp //= dp
        notes.append(f"dp {dp} is taken as attention replicas inside tp, {tp} rank(s) each")
    layout = Layout(tp, pp, dp, ep)
    if layout.ranks > n:
        raise InvalidInput(
            f"tp {tp} x pp {pp} x dp {dp} with ep {ep} needs {layout.ranks} GPUs, but there are {n}",
            field="gpus",
            remedy=f"give --gpus {layout.ranks} or a smaller layout",
        )
    if n % layout.ranks:
        raise InvalidInput(
            f"{n} GPUs are not a multiple of the {layout.ranks} that one instance takes",
            field="gpus",
            remedy="change --tp",
        )
    replicas = n // layout.ranks
    if replicas > 1:
        notes.append(f"{replicas} independent instances of {layout.ranks} GPU(s) each")
    return layout, replicas, notes


def _check_divisible(spec: ModelSpec, layout: Layout) -> None:
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention | LatentAttention) and mixer.num_heads % layout.tp:
            raise InvalidInput(
                f"{mixer.num_heads} attention heads cannot be divided over tp {layout.tp}",
                field="tp",
                remedy="choose a divisor",
            )
    if layout.pp > len(spec.layers):
        raise InvalidInput(f"pp {layout.pp} exceeds the {len(spec.layers)} layers", field="pp")


_NAMED = (
    (r"gptq[-_ ]?int8", "int8_g128"),
    (r"int8|w8a8|w8a16", "int8"),
    (r"awq", "int4_g128_asym"),
    (r"gptq|int4|w4a16", "int4_g128"),
    (r"bnb[-_ ]4bit|nf4", "nf4"),
    (r"mxfp4", "mxfp4"),
    (r"nvfp4|fp4", "nvfp4"),
)
"""Weight formats by how names of published checkpoints say them; FP8 apart, whose scales depend on the publisher."""

_WEIGHTS = {
    "fp8_col": "fp8_channel",
    "fp8_block": "fp8_block128",
    "float8": "fp8_e4m3",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "fp8_w8a8": "fp8_e4m3",
    "w8a8_fp8": "fp8_e4m3",
    "fp8_static": "fp8_e4m3",
    "fp8_per_tensor": "fp8_e4m3",
    "modelopt": "fp8_e4m3",
    "int8_w8a8": "int8",
    "w8a8_int8": "int8",
    "int8_w8a16": "int8",
    "int8_wo": "int8",
    "int4": "int4_g128",
    "int4_wo": "int4_g128",
    "w4a8": "int4_g128",
    "gptq_marlin": "int4_g128",
    "awq4": "int4_g128_asym",
    "awq_4bit": "int4_g128_asym",
    "awq_int4": "int4_g128_asym",
    "int4_awq": "int4_g128_asym",
    "awq_marlin": "int4_g128_asym",
    "fp4": "nvfp4",
    "w4a4": "nvfp4",
    "modelopt_fp4": "nvfp4",
    "bitsandbytes": "nf4",
    "bnb": "nf4",
    "bnb_4bit": "nf4",
    "q3_k_m": "q3_k",
    "q4_k_m": "q4_k",
    "q4_k_s": "q4_k",
    "q5_k_m": "q5_k",
}
"""What people and engines' options call weight formats, with one underscore for any sign between words."""


def named_weights(asked: str, spec: ModelSpec) -> str:
    """The weight format that a checkpoint's own name states (`…-FP8`, `…-AWQ`) where the geometry's own is 16 bit, or nothing."""
    if spec.checkpoint_precision not in ("bf16", "fp16"):
        return ""
    name = asked.lower()
    for pattern, stored in _NAMED:
        if re.search(rf"[-_ .](?:{pattern})\b", name):
            return stored
    if not re.search(r"[-_ .]fp8\b", name):
        return ""
    return "fp8_block128" if name.startswith(("qwen/", "zai-org/", "deepseek-ai/")) else "fp8_channel"


def _weights(name: str, model: Model, asked: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The weight format, and the formats of parts that published checkpoints of that kind store otherwise."""
    spec = model.spec
    bare = re.sub(r"\s*\(.*\)\s*$", "", name.strip().lower())
    if bare in ("", "auto"):
        bare = named_weights(asked, spec)
        if not bare:
            return spec.checkpoint_precision, ()
    words = re.sub(r"[-_ ]+", "_", bare)
    chosen = precision(_WEIGHTS.get(words, words)).name
    if spec.checkpoint_precision == "mxfp4" and bare == "fp4":
        return "mxfp4", ()
    if chosen == "fp8_e4m3" and spec.checkpoint_precision == "fp8_block128":
        chosen = "fp8_block128"
    if chosen == "nvfp4":
        if "attn" in name or any(isinstance(layer.mixer, LatentAttention) for layer in spec.layers):
            # Published FP4 checkpoints of MLA models leave the attention projections in 16 bit …
            return chosen, (("attention", "bf16"),)
        if any(isinstance(layer.mixer, LinearAttention) for layer in spec.layers):
            # … and those of hybrids quantize attention and linear attention to FP8.
            return chosen, (("attention", "fp8_channel"), ("mixer", "fp8_channel"))
    return chosen, ()


def _takes_stored_kv(inputs: Inputs, engine: str, model: Model) -> bool:
    """vLLM reads `kv_cache_scheme` and `kv_cache_quant_algo` where its option says auto."""
    return engine == "vllm" and model.asks_fp8_kv and inputs.kv.strip().lower() in ("", "auto")


def _kv(name: str, model: Model, weights: str, policy: engine_facts.MemoryPolicy, gpu: hardware.Gpu) -> str:
    bare = re.sub(r"\s*\(.*\)\s*$", "", name.strip().lower())
    if bare not in ("", "auto"):
        return kv_precision(bare).name
    if policy.kv_default == "checkpoint" and weights.startswith(("fp8", "nvfp4", "mxfp4")):
        return "fp8"
    latent = any(isinstance(layer.mixer, LatentAttention) for layer in model.spec.layers)
    if latent and gpu.generation in policy.fp8_latent_on:
        return "fp8"
    return "fp16" if model.spec.checkpoint_precision == "fp16" else "bf16"


def _fraction(
    inputs: Inputs,
    policy: engine_facts.MemoryPolicy,
    gpu: hardware.Gpu,
    layout: Layout,
    batched: int,
    large: bool,
) -> float:
    if inputs.memory_fraction is not None:
        return inputs.memory_fraction
    if policy.fraction:
        return policy.fraction
    reserve = policy.reserve_mib + policy.reserve_mib_per_token * max(batched, 2048)
    reserve += policy.reserve_mib_per_graph_batch * policy.graph_batch[layout.tp >= 4]
    reserve += layout.tp * layout.pp / 8 * 1024
    total_mib = gpu.memory_bytes / 2**20
    if total_mib > 60 * 1024:
        reserve = max(reserve, policy.reserve_min_mib_large)
    return max(0.1, round((total_mib - reserve) / total_mib, 3))


def with_gpus(inputs: Inputs, gpu: str, n_gpus: int, tp: int) -> Inputs:
    """The same question on other hardware."""
    return msgspec.structs.replace(inputs, gpu=gpu, n_gpus=n_gpus, tp=tp)


def describe(d: Deployment) -> str:
    """One line that names the subject."""
    parts = [f"{d.model.id} ({d.weights}, KV {d.kv})", f"on {d.inputs.n_gpus} x {d.gpu.name}", f"with {d.engine}"]
    shape = [
        f"{k}{v}"
        for k, v in (("tp", d.layout.tp), ("pp", d.layout.pp), ("dp", d.layout.dp), ("ep", d.layout.ep))
        if v > 1
    ]
    return " ".join(parts) + (f" [{' '.join(shape)}]" if shape else "")


def known_families(names: Sequence[str]) -> set[str]:
    """Families of those models that the catalog knows."""
    return {m.family for m in map(models.known, names) if m is not None}


__all__ = [
    "Deployment",
    "Inputs",
    "Model",
    "describe",
    "find_model",
    "known_families",
    "replace",
    "resolve",
    "with_gpus",
]
