"""Gemma: Llama with scaled embeddings, norm weights that are stored minus one, an explicit head size and tanh GELU.

Source   "Gemma" (arXiv 2403.08295); checkpoints of transformers' GemmaForCausalLM.
"""

from dataclasses import replace
from functools import partial

from ..layers.context import LayerContext
from ..layers.embedding import Embedding
from ..layers.norm import RmsNorm
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .layer import Layer
from .spec import ModelSpec
from .spec_reading import read_decoder_spec


class _Layer(Layer):
    norm = staticmethod(partial(RmsNorm, weight_offset=1.0))


class Gemma(Decoder):
    """Implements GemmaForCausalLM of transformers."""

    layer = _Layer
    last_norm = _Layer.norm

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        bias = config.flag("attention_bias", False)
        spec = read_decoder_spec(config, architecture, qkv_bias=bias, out_bias=bias,
                                 head_size=256, num_kv_heads=16, max_positions=8192, tie_word_embeddings=True,
                                 default_activation="gelu_pytorch_tanh", default_norm_epsilon=1e-6,
                                 default_theta=10000.0)
        # Early checkpoints say "gelu" but use the tanh approximation; transformers treats them the same way.
        return replace(spec, activation="gelu_new") if config.text("hidden_act", "") == "gelu" else spec

    def make_embedding(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> Embedding:
        return super().make_embedding(spec, weights, context, scale=spec.hidden_size**0.5)
