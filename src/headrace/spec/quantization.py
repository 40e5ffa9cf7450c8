"""What a checkpoint's `quantization_config` says: the stored precision and the parts that stay unquantized.

A part is named as in `headrace.spec.tensors` (`attention`, `mlp`, `experts`, …), with `@layer` appended where only one
layer's part is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.spec.families._config import Config
from headrace.spec.model import ModelSpec
from headrace.spec.precision import precision

_MODULE_PARTS = (
    (r"lm_head|output_layer", "lm_head"),
    (r"embed", "embedding"),
    (r"norm", "norms"),
    (r"shared_expert_gate|mlp\.gate$|router|block_sparse_moe\.gate$|feed_forward\.router", "router"),
    (r"shared_expert", "shared_experts"),
    (r"experts", "experts"),
    (r"self_attn|attention|attn\b", "attention"),
    (r"linear_attn|mamba|mixer|conv1d|ssm", "mixer"),
    (r"mlp|feed_forward|ffn", "mlp"),
)
MATRIX_PARTS = ("attention", "mixer", "mlp", "experts", "shared_experts")
"""Parts of a layer whose matrices are quantized where nothing is said of them."""

_NOT_TEXT = re.compile(r"visual|vision|audio|multi_modal|multimodal|image")


def checkpoint_format(config: Mapping[str, Any], spec: ModelSpec) -> tuple[str, tuple[str, ...]]:
    """(precision name, unquantized parts) of a checkpoint with this config.

    Without `quantization_config` it is the dtype. Raises UnsupportedModel for a method we do not know.
    """
    outer = Config(config)
    quantization = outer.table("quantization_config")
    if quantization is None:
        return dtype_precision(config), ()
    q = Config(quantization)
    stored, ignored = _method(q)
    return stored, unquantized_parts(ignored, spec)


def dtype_precision(config: Mapping[str, Any]) -> str:
    """The precision named by `dtype` or `torch_dtype`; bf16 where neither is given."""
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None or value == "auto":
        return "bf16"
    if not isinstance(value, str):
        raise InvalidInput(f"torch_dtype must be a string, got {value!r}", field="torch_dtype")
    found = precision(value)
    return found.name


def _method(q: Config) -> tuple[str, list[str]]:
    method = q.text("quant_method", default="modelopt" if q.get("quant_algo") else "").lower().replace("_", "-")
    ignored = [*(q.texts("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules") or ())]
    match method:
        case "fp8":
            if (block := q.integers("weight_block_size")) is not None:
                if block != [128, 128]:
                    raise UnsupportedModel(f"weight_block_size {block} is not supported", field="weight_block_size")
                return "fp8_block128", ignored
            return "fp8_e4m3", ignored
        case "fbgemm-fp8":
            return "fp8_channel", ignored
        case "mxfp4":
            return "mxfp4", ignored
        case "gptq":
            size = q.integer("group_size", minimum=-1)
            stored = _integer(q.integer("bits"), size, q.flag("sym", default=True))
            return stored + ("_act" if size > 0 and q.flag("desc_act", default=False) else ""), ignored
        case "awq":
            bits = q.integer("bits", "w_bit", default=4)
            size = q.integer("group_size", "q_group_size", default=128, minimum=-1)
            return _integer(bits, size, not q.flag("zero_point", default=True)), ignored
        case "bitsandbytes":
            skipped = [*ignored, *(q.texts("llm_int8_skip_modules") or ())]
            if q.flag("load_in_8bit", "_load_in_8bit", default=False):
                return "int8", skipped
            if q.text("bnb_4bit_quant_type", default="fp4") != "nf4":
                raise UnsupportedModel("bitsandbytes fp4 is not supported", field="bnb_4bit_quant_type")
            return ("nf4" if q.flag("bnb_4bit_use_double_quant", default=False) else "nf4_single"), skipped
        case "compressed-tensors":
            return _compressed_tensors(q), ignored
        case "modelopt" | "modelopt-fp4":
            algorithm = q.text("quant_algo", default="NVFP4" if method == "modelopt-fp4" else "FP8").upper()
            known = {"FP8": "fp8_e4m3", "NVFP4": "nvfp4", "FP4": "nvfp4", "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel"}
            if algorithm not in known:
                raise UnsupportedModel(f"modelopt quant_algo {algorithm!r} is not supported", field="quant_algo")
            return known[algorithm], ignored
        case _:
            raise UnsupportedModel(
                f"quant_method {method!r} is not supported", field="quantization_config.quant_method"
            )


def _integer(bits: int, group_size: int, symmetric: bool) -> str:
    if group_size == -1:
        name = f"int{bits}"
    else:
        name = f"int{bits}_g{group_size}" + ("" if symmetric else "_asym")
    try:
        return precision(name).name
    except InvalidInput:
        raise UnsupportedModel(
            f"{bits}-bit integers in groups of {group_size} are not supported", field="quantization_config"
        ) from None


def _compressed_tensors(q: Config) -> str:
    for key in ("sparsity_config", "transform_config"):
        _refuse_what_changes_weights(q, key)
    groups = Config(q.table("config_groups") or {})
    if not groups.raw:
        raise InvalidInput("compressed-tensors without config_groups", field="quantization_config.config_groups")
    found = {_compressed_group(groups.nested(name)) for name in groups.raw}
    if len(found) != 1:
        raise UnsupportedModel(
            f"mixed compressed-tensors groups ({', '.join(sorted(found))}) are not supported",
            field="quantization_config.config_groups",
        )
    return found.pop()


def _refuse_what_changes_weights(q: Config, key: str) -> None:
    """UnsupportedModel if `sparsity_config` packs zeros away or `transform_config` rotates what the weights multiply."""
    said = q.table(key)
    if not said:
        return
    if key == "sparsity_config":
        if said.get("format", "dense") == "dense":  # zeros are stored as any other value
            return
        what = f"sparse weights stored as {said['format']!r} are not read"
    elif said.get("config_groups"):
        what = "weights that need transforms of their inputs are not supported"
    else:
        return
    raise UnsupportedModel(
        what, field=f"quantization_config.{key}", remedy="take a checkpoint that was written without it"
    )


def _compressed_group(group: Config) -> str:
    weights = group.nested("weights")
    bits = weights.integer("num_bits")
    kind = weights.text("type", default="int")
    strategy = weights.text("strategy", default="tensor")
    size = weights.integer("group_size", default=-1, minimum=-1)
    if kind == "float":
        if bits == 4:
            return "nvfp4" if size == 16 else "mxfp4"
        names = {"tensor": "fp8_e4m3", "channel": "fp8_channel", "block": "fp8_block128"}
        structure = weights.integers("block_structure")
        if strategy == "block" and structure not in (None, [128, 128]):
            raise UnsupportedModel(f"tiles of {structure} are not supported", field="block_structure")
        if bits == 8 and strategy in names:
            return names[strategy]
        raise UnsupportedModel(f"{bits}-bit floats by {strategy} are not supported", field="quantization_config")
    if kind != "int":
        raise UnsupportedModel(
            f"weights of type {kind!r} are not supported",
            field="quantization_config.config_groups",
            remedy="known types: int, float",
        )
    if strategy not in ("tensor", "channel", "group"):
        raise UnsupportedModel(
            f"integers scaled by {strategy!r} are not supported",
            field="quantization_config.config_groups",
            remedy="known strategies: tensor, channel, group",
        )
    stored = _integer(bits, size if strategy == "group" else -1, weights.flag("symmetric", default=True))
    reordered = weights.get("actorder") in ("group", "dynamic", True)  # the last two: older spellings of the first
    return stored + ("_act" if strategy == "group" and reordered else "")


def module_part(module: str) -> str | None:
    """The part that a module of a Hugging Face checkpoint belongs to, by its name."""
    return next((name for pattern, name in _MODULE_PARTS if re.search(pattern, module)), None)


def ignored_modules(quantization: Mapping[str, Any]) -> list[str]:
    """Patterns of the modules that a `quantization_config` leaves unquantized."""
    return _method(Config(quantization))[1]


def unquantized_parts(modules: list[str], spec: ModelSpec) -> tuple[str, ...]:
    """Parts named by module patterns such as `lm_head`, `model.layers.3.mlp.gate` or `re:.*self_attn.*`.

    A part is listed without `@layer` once every layer is named or the pattern names none.
    """
    parts: set[str] = set()
    by_part: dict[str, set[int]] = {}
    for module in modules:
        if _NOT_TEXT.search(module):
            continue
        plain = module.removeprefix("re:").replace("\\.", ".")
        part = module_part(plain)
        layer = re.search(r"layers\.(\d+)(?:\.|$)", plain)
        if part is None and layer is not None:
            for name in MATRIX_PARTS:
                by_part.setdefault(name, set()).add(int(layer[1]))
        elif part is not None and layer is not None:
            by_part.setdefault(part, set()).add(int(layer[1]))
        elif part is not None:
            parts.add(part)
    for name, layers in by_part.items():
        if layers >= set(range(spec.num_layers)):
            parts.add(name)
        elif name not in parts:
            parts.update(f"{name}@{i}" for i in layers if i < spec.num_layers)
    return tuple(sorted(parts))
