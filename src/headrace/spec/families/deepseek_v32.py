"""DeepSeek-V3.2: V3 whose layers attend only to the tokens that a small indexer selects."""

from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import latent_model, routed_experts
from headrace.spec.model import ModelSpec, SparseIndexer


def build(c: Config) -> ModelSpec:
    indexer = SparseIndexer(c.integer("index_n_heads"), c.integer("index_head_dim"), c.integer("index_topk"))
    # The published config calls this 61 layers and one more for MTP, as V3 does.
    mtp = c.integer("num_nextn_predict_layers", default=0, minimum=0)
    c = c.with_defaults({"first_k_dense_replace": 3})
    return latent_model(c, routed_experts(c), indexer=indexer, mtp=mtp)
