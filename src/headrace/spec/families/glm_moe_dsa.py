"""GLM-5: DeepSeek-V3.2's layers (MLA with a sparse indexer, routed experts) in GLM's sizes; some layers share a selection."""

from headrace.base.errors import InvalidInput
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import latent_model, routed_experts
from headrace.spec.model import ModelSpec, SparseIndexer


def build(c: Config) -> ModelSpec:
    indexer = SparseIndexer(c.integer("index_n_heads"), c.integer("index_head_dim"), c.integer("index_topk"))
    mtp = c.integer("num_nextn_predict_layers", default=0, minimum=0)
    c = c.with_defaults({"first_k_dense_replace": 3})
    return latent_model(c, routed_experts(c), indexer=indexer, shared_indexers=_shared(c, p.num_layers(c)), mtp=mtp)


def _shared(c: Config, count: int) -> set[int]:
    """Layers without an indexer: by `indexer_types`, by `index_topk_pattern` (F, S), or all but every n-th after an offset."""
    kinds = c.texts("indexer_types")
    if kinds is None and isinstance(c.get("index_topk_pattern"), str):
        kinds = ["shared" if letter == "S" else "full" for letter in c.text("index_topk_pattern")]
    if kinds is not None:
        if len(kinds) < count:
            raise InvalidInput(f"indexer_types has {len(kinds)} entries for {count} layers", field="indexer_types")
        return {i for i in range(count) if kinds[i] == "shared"}
    every = c.integer("index_topk_freq", default=1)
    offset = c.integer("index_skip_topk_offset", default=2, minimum=0)
    return {i for i in range(count) if max(i - offset + 1, 0) % every}
