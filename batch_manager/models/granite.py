"""Granite: Llama with factors for embeddings, residual branches, attention scores and logits.

Source   "Granite 3.0 Language Models" (IBM, 2024); checkpoints of transformers' GraniteForCausalLM.
"""

from dataclasses import dataclass

from ..layers.context import LayerContext
from ..layers.embedding import Embedding, Head
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .layer import Layer
from .spec import ModelSpec
from .spec_reading import read_decoder_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteSpec(ModelSpec):
    """The spec of Granite models.

    embedding_scale   factor by which the embeddings are multiplied
    residual_scale    factor by which the outputs of attention and MLP are multiplied in each layer
    logits_divisor    number by which the logits are divided
    """

    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0


def unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor


def read_factors(config: Fields) -> dict[str, float]:
    """Return the factors of a config.json as arguments of `read_decoder_spec`."""
    return {"scale": config.number("attention_multiplier", 1.0),
            "embedding_scale": config.number("embedding_multiplier", 1.0),
            "residual_scale": config.number("residual_multiplier", 1.0),
            "logits_divisor": config.number("logits_scaling", 1.0)}


class GraniteLayer(Layer):
    """Llama's layer with a factor on both residual branches."""

    def residual_scale(self, spec: GraniteSpec) -> float | None:
        return unless_one(spec.residual_scale)


class Granite(Decoder):
    """Implements GraniteForCausalLM of transformers."""

    layer = GraniteLayer

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> GraniteSpec:
        bias = config.flag("attention_bias", False)
        return read_decoder_spec(config, architecture, qkv_bias=bias, out_bias=bias,
                                 mlp_bias=config.flag("mlp_bias", False), max_positions=2048, default_norm_epsilon=1e-6,
                                 default_theta=10000.0, spec_class=GraniteSpec, **read_factors(config))

    def make_embedding(self, spec: GraniteSpec, weights: Weights, context: LayerContext) -> Embedding:
        self.prompt_tuning_scale = spec.embedding_scale    # as in transformers
        return super().make_embedding(spec, weights, context, scale=unless_one(spec.embedding_scale))

    def make_head(self, spec: GraniteSpec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, scale=unless_one(1 / spec.logits_divisor))
