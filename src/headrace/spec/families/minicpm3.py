"""MiniCPM3: MLA with a dense MLP and scaled embeddings, residuals and logits."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import latent_attention
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    count = p.num_layers(c)
    hidden = p.hidden_size(c)
    c = c.with_defaults({"v_head_dim": hidden // c.integer("num_attention_heads"), "rope_interleave": False})
    layer = Layer(latent_attention(c), p.mlp(c))
    return p.model(
        c,
        [layer] * count,
        tied=True,
        embedding_scale=c.number("scale_emb", default=12.0),
        residual_scale=c.number("scale_depth", default=1.4) / count**0.5,
        logit_scale=c.integer("dim_model_base", default=256) / hidden,
    )
