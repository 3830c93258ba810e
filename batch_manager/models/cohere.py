"""Command-R (Cohere): parallel attention and MLP, LayerNorm without bias, interleaved rotary pairs, scaled logits.

Source   "Command R" (Cohere, 2024); checkpoints of transformers' CohereForCausalLM.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..layers.context import LayerContext
from ..layers.embedding import Head
from ..layers.norm import HeadLayerNorm, LayerNorm, QueryKeyNorms
from ..layers.rotary import half_split_rows
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import read_decoder_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereSpec(ModelSpec):
    """The spec of Cohere models.

    logit_scale   factor by which the logits are multiplied
    """

    logit_scale: float


class CohereLayer(Layer):
    """Attention and the MLP read the same normed rows. The file has rotary pairs side by side."""

    names = LayerNames(mlp_norm="")
    norm = staticmethod(partial(LayerNorm, bias=False))

    def order_of_heads(self, spec: ModelSpec, context: LayerContext) -> dict[str, Any]:
        return {"row_order": half_split_rows(spec.num_heads + spec.num_kv_heads, spec.num_kv_heads, spec.head_size,
                                             spec.head_size)}

    def make_head_norms(self, spec: ModelSpec, weights: Weights, context: LayerContext,
                        name: str) -> QueryKeyNorms | None:
        if not spec.qk_norm:
            return None
        return QueryKeyNorms(*(HeadLayerNorm(
            weights, context, [(f"{name}.{part}_norm.weight", (heads * context.split.size // copies, spec.head_size))],
            heads, spec.head_size, spec.norm_epsilon,
            half_split_rows(heads, 0, spec.head_size, spec.head_size), copies)
            for part, heads, copies in (("q", spec.num_heads, 1), ("k", spec.num_kv_heads, spec.kv_copies))))


class Cohere(Decoder):
    """Implements CohereForCausalLM of transformers."""

    layer = CohereLayer
    last_norm = CohereLayer.norm

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> CohereSpec:
        bias = config.flag("attention_bias", False)
        if "logit_scale" in config.values and "logit_scale" not in config:
            raise config.fault("logit_scale", "a number, or no such field")
        return read_decoder_spec(
            config, architecture, qkv_bias=bias, out_bias=bias, max_positions=8192,
            tie_word_embeddings=True, norm_epsilon="layer_norm_eps", default_norm_epsilon=1e-5,
            default_theta=500_000.0, qk_norm=config.flag("use_qk_norm", False), spec_class=CohereSpec,
            logit_scale=config.number("logit_scale", 0.0625))

    def make_head(self, spec: CohereSpec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, scale=spec.logit_scale)
