"""GLM-5: DeepSeek-V3.2's layers (MLA with a sparse indexer, routed experts) in GLM's sizes."""

from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import latent_model, routed_experts
from headrace.spec.model import ModelSpec, SparseIndexer


def build(c: Config) -> ModelSpec:
    indexer = SparseIndexer(c.integer("index_n_heads"), c.integer("index_head_dim"), c.integer("index_topk"))
    mtp = c.integer("num_nextn_predict_layers", default=0, minimum=0)
    return latent_model(c, routed_experts(c), indexer=indexer, mtp=mtp)
