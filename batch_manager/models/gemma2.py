"""Gemma 2: Gemma with norms before and after attention and MLP, softcaps, and a window in every other layer.

Source   "Gemma 2" (arXiv 2408.00118); checkpoints of transformers' Gemma2ForCausalLM.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.embedding import Embedding, Head
from ..layers.norm import RmsNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import read_alternating_windows, read_decoder_spec, read_softcap


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Spec(ModelSpec):
    """The spec of Gemma 2 models.

    logits_softcap   logits become softcap * tanh(logits / softcap); None: they are unchanged
    """

    logits_softcap: float | None = None


class Gemma2Layer(Layer):
    """Llama's layer with a norm of the results of attention and of the MLP, too."""

    names = LayerNames(mlp_norm="pre_feedforward_layernorm")
    norm = staticmethod(partial(RmsNorm, weight_offset=1.0))

    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        super().__init__(spec, weights, context, name, index)
        self.attention_norm, self.last_norm = (
            self.make_norm(spec, weights, context, f"{name}.post_{part}_layernorm")
            for part in ("attention", "feedforward"))

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        attended = self.out(self.attended(self.input_norm(hidden), rotary, attention))
        hidden = hidden + self.attention_norm(attended)
        return hidden + self.last_norm(self.mlp(self.mlp_norm(hidden)))


class Gemma2(Decoder):
    """Implements Gemma2ForCausalLM of transformers."""

    layer = Gemma2Layer
    last_norm = Gemma2Layer.norm

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> Gemma2Spec:
        bias = config.flag("attention_bias", False)
        return read_decoder_spec(config, architecture, windows=read_alternating_windows(config, 2),
                                 qkv_bias=bias, out_bias=bias, scale=config.count("query_pre_attn_scalar", 256)**-0.5,
                                 softcap=read_softcap(config, "attn_logit_softcapping", 50.0), head_size=256,
                                 num_kv_heads=4, max_positions=8192, tie_word_embeddings=True,
                                 activation="hidden_activation", default_activation="gelu_pytorch_tanh",
                                 default_norm_epsilon=1e-6, default_theta=10000.0, spec_class=Gemma2Spec,
                                 logits_softcap=read_softcap(config, "final_logit_softcapping", 30.0))

    def make_embedding(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> Embedding:
        return super().make_embedding(spec, weights, context, scale=spec.hidden_size**0.5)

    def make_head(self, spec: Gemma2Spec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, softcap=spec.logits_softcap)
