"""Phi-1, Phi-1.5, Phi-2: parallel attention and MLP, an ungated MLP, partial rotary positions, biases.

Source   "Textbooks Are All You Need" (arXiv 2306.11644, 2309.05463); checkpoints of transformers' PhiForCausalLM.
"""

from ..layers.context import LayerContext
from ..layers.embedding import Head
from ..layers.norm import LayerNorm, QueryKeyNorms
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder, Names
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import read_decoder_spec


class _Layer(Layer):
    names = LayerNames(out="self_attn.dense", mlp_norm="", expand=("mlp.fc1",), down="mlp.fc2")
    norm = LayerNorm

    def make_head_norms(self, spec: ModelSpec, weights: Weights, context: LayerContext,
                        name: str) -> QueryKeyNorms | None:
        if not spec.qk_norm:
            return None
        return QueryKeyNorms(*(
            LayerNorm(weights, context, f"{name}.{part}_layernorm", spec.head_size, spec.norm_epsilon)
            for part in "qk"))


class Phi(Decoder):
    """Implements PhiForCausalLM of transformers."""

    layer = _Layer
    names = Names(norm="model.final_layernorm")
    last_norm = LayerNorm

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        return read_decoder_spec(
            config, architecture, qkv_bias=True, out_bias=True, mlp_bias=True,
            gated_mlp=False, qk_norm=config.flag("qk_layernorm", False), max_positions=2048,
            default_activation="gelu_new", norm_epsilon="layer_norm_eps", default_norm_epsilon=1e-5,
            default_theta=10000.0, partial_rotary_factor=0.5)

    def make_head(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, bias=True)
