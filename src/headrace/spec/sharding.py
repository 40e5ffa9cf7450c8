"""What one rank holds of a model: the same geometry with its share of heads, widths and vocabulary.

A rank's share is again a `ModelSpec`, so every formula of `headrace.spec.accounting` applies to it unchanged.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from msgspec.structs import replace

from headrace.base.errors import InvalidInput
from headrace.base.units import ceil_div
from headrace.spec.model import (
    Attention,
    DenseMLP,
    FeedForward,
    LatentAttention,
    Layer,
    LinearAttention,
    Mixer,
    ModelSpec,
    MoE,
    NoMixer,
    NoMLP,
    StateSpace,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread: `tp` ranks share each layer, `pp` stages share the layers, `dp` attention replicas.

    `ep`: ranks over which the experts are spread (1: they are cut like everything else). With `dp` above 1 the attention
    of each replica is whole on its `tp` ranks while the experts are spread over all of them (data-parallel attention).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)}", field=name)

    @property
    def ranks(self) -> int:
        """GPUs of one instance."""
        return max(self.tp * self.dp, self.ep) * self.pp

    @property
    def expert_shards(self) -> int:
        """Over how many ranks the routed experts of a layer are spread, by cutting or by placing them."""
        return max(self.tp * self.dp, self.ep) if self.dp > 1 or self.ep > 1 else self.tp


def rank_spec(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """The largest share of any rank.

    Query heads, widths and vocabulary are divided by `tp`, rounded up; KV heads too, but every rank keeps at least one
    whole head (replication beyond that). The MLA latent and its down-projections are replicated on all ranks. Routed
    experts are divided over `expert_shards` in width, which equals placing whole experts as far as bytes go. A pipeline
    stage holds its share of the layers; embedding and head are counted on it although only the outer stages have them.
    """
    if layout.tp == 1 and layout.pp == 1 and layout.expert_shards == 1:
        return spec
    tp, shards = layout.tp, layout.expert_shards
    layers = spec.layers[: ceil_div(len(spec.layers), layout.pp)] if layout.pp > 1 else spec.layers
    return dataclasses.replace(
        spec,
        vocab_size=ceil_div(spec.vocab_size, tp),
        layers=tuple(_layer(layer, tp, shards) for layer in layers),
        mtp_layers=tuple(_layer(layer, tp, shards) for layer in spec.mtp_layers),
    )


def _layer(layer: Layer, tp: int, shards: int) -> Layer:
    ssm = layer.parallel_ssm
    return replace(
        layer,
        mixer=_mixer(layer.mixer, tp),
        mlp=_mlp(layer.mlp, tp, shards),
        parallel_ssm=None if ssm is None else _state_space(ssm, tp),
    )


def _mixer(mixer: Mixer, tp: int) -> Mixer:
    match mixer:
        case Attention():
            return replace(
                mixer, num_heads=ceil_div(mixer.num_heads, tp), num_kv_heads=max(1, ceil_div(mixer.num_kv_heads, tp))
            )
        case LatentAttention():
            return replace(mixer, num_heads=ceil_div(mixer.num_heads, tp))
        case LinearAttention():
            return replace(
                mixer,
                num_k_heads=max(1, ceil_div(mixer.num_k_heads, tp)),
                num_v_heads=max(1, ceil_div(mixer.num_v_heads, tp)),
            )
        case StateSpace():
            return _state_space(mixer, tp)
        case NoMixer():
            return mixer


def _state_space(ssm: StateSpace, tp: int) -> StateSpace:
    return replace(
        ssm,
        inner=ceil_div(ssm.inner, tp),
        num_heads=ceil_div(ssm.num_heads, tp) if ssm.num_heads else 0,
        groups=max(1, ceil_div(ssm.groups, tp)),
    )


def _mlp(mlp: FeedForward, tp: int, shards: int) -> FeedForward:
    match mlp:
        case DenseMLP():
            return replace(mlp, intermediate=ceil_div(mlp.intermediate, tp))
        case MoE():
            return replace(
                mlp,
                intermediate=ceil_div(mlp.intermediate, shards),
                shared_intermediate=ceil_div(mlp.shared_intermediate, tp),
            )
        case NoMLP():
            return mlp
