"""StarCoder 1 and SantaCoder: GPT-2 with one key/value head."""

from headrace.spec.families import gpt2
from headrace.spec.families._config import Config
from headrace.spec.model import ModelSpec


def build(c: Config) -> ModelSpec:
    shared = {"num_key_value_heads": 1} if c.flag("multi_query", default=True) else {}
    return gpt2.build(c.with_defaults({"activation_function": "gelu_pytorch_tanh"} | shared))
