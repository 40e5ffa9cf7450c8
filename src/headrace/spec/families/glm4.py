"""GLM-4-0414: GLM with a norm after each part too."""

from headrace.spec.families._config import Config
from headrace.spec.families.glm import glm
from headrace.spec.model import ModelSpec


def build(c: Config) -> ModelSpec:
    return glm(c, num_norms=4)
