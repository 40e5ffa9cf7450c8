"""DeepSeek-V3, R1 and their kin: MLA, sigmoid router with a correction bias, shared experts, MTP layers."""

import math
from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from headrace.base.errors import InvalidInput
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import LatentAttention, Layer, ModelSpec, MoE, SparseIndexer


def build(c: Config) -> ModelSpec:
    return latent_model(
        c, routed_experts(c), mtp=c.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0)
    )


def latent_model(
    c: Config,
    experts: MoE,
    *,
    indexer: SparseIndexer | None = None,
    shared_indexers: Collection[int] = (),
    mtp: int = 0,
) -> ModelSpec:
    """A model of MLA layers; which ones are dense is said by `mlp_layer_types` or `first_k_dense_replace`.

    Layers in `shared_indexers` reuse an earlier layer's selection.
    """
    count = p.num_layers(c)
    dense_first = c.integer("first_k_dense_replace", default=0, minimum=0)
    step = c.integer("moe_layer_freq", default=1)
    given = c.texts("mlp_layer_types")
    if given is not None and len(given) < count:
        raise InvalidInput(f"mlp_layer_types has {len(given)} entries for {count} layers", field="mlp_layer_types")
    sparse = [given[i] == "sparse" if given is not None else i >= dense_first and i % step == 0 for i in range(count)]
    mixer = latent_attention(c, indexer)
    follower = mixer if indexer is None else replace(mixer, indexer=replace(indexer, shared=True))
    return p.model(
        c,
        [
            Layer(follower if i in shared_indexers else mixer, experts if is_sparse else p.mlp(c))
            for i, is_sparse in enumerate(sparse)
        ],
        tied=False,
        model_type={"kimi_k2": "deepseek_v3"}.get(c.model_type, c.model_type),
        mtp_layers=(Layer(mixer, experts),) * mtp,
    )


def latent_attention(c: Config, indexer: SparseIndexer | None = None, *, rotary: bool = True) -> LatentAttention:
    """MLA from DeepSeek's keys. With YaRN's `mscale_all_dim` the softmax scale grows by mscale squared."""
    nope, rope_dim = c.integer("qk_nope_head_dim"), c.integer("qk_rope_head_dim")
    embedding = p.rope(
        c.without("partial_rotary_factor"), rope_dim, interleaved=c.flag("rope_interleave", default=True)
    )
    scaling = embedding.scaling
    scale = (nope + rope_dim) ** -0.5
    if scaling.kind == "yarn" and scaling.mscale_all_dim and scaling.factor > 1:
        scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
    return LatentAttention(
        c.integer("num_attention_heads"),
        c.integer("q_lora_rank", default=None),
        c.integer("kv_lora_rank"),
        nope,
        rope_dim,
        c.integer("v_head_dim"),
        qkv_bias=c.flag("attention_bias", default=False),
        rope=embedding if rotary else None,
        scale=scale,
        indexer=indexer,
    )


def routed_experts(c: Config, **fields: Any) -> MoE:
    """DeepSeek-V3's experts: sigmoid scores, a correction bias that only chooses, groups, and shared experts."""
    width = c.integer("moe_intermediate_size")
    values: dict[str, Any] = {
        "intermediate": width,
        "shared_intermediate": width * c.integer("n_shared_experts", "num_shared_experts", default=0, minimum=0),
        "router_correction": True,
        "scoring": "sigmoid",
        "normalize_top_k": c.flag("norm_topk_prob", "moe_renormalize", default=True),
        "num_groups": c.integer("n_group", "num_expert_group", default=1),
        "top_k_groups": c.integer("topk_group", default=1),
        "routed_scale": c.number("routed_scaling_factor", default=1.0),
    }
    return p.moe(c, **(values | fields))
