"""Command-R7B, Command A (Cohere 2): Cohere with sliding windows and rotary positions. Every fourth layer has neither.

Source   "Command A" (arXiv 2504.00698); checkpoints of transformers' Cohere2ForCausalLM.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.embedding import Head
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotary, half_split_rows
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import read_alternating_windows, read_decoder_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohere2Spec(ModelSpec):
    """The spec of Cohere 2 models.

    slides        for each layer: whether it has a window and rotary positions; otherwise it has neither
    logit_scale   factor by which the logits are multiplied
    """

    slides: tuple[bool, ...]
    logit_scale: float


class _Layer:
    def __init__(self, spec: Cohere2Spec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        size = spec.hidden_size
        self.index, self.slides, self.head_size = index, spec.slides[index], spec.head_size
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.input_norm = LayerNorm(weights, context, f"{name}.input_layernorm", size, spec.norm_epsilon, bias=False)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads",
                          row_order=half_split_rows(spec.num_heads + spec.num_kv_heads, spec.num_kv_heads,
                                                    spec.head_size, spec.head_size, context.device))
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary | None, attention: Attention) -> torch.Tensor:
        normed = self.input_norm(hidden)
        qkv = self.qkv(normed).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, normed)


class Cohere2(Decoder):
    """Implements Cohere2ForCausalLM of transformers."""

    layer = _Layer
    per_layer = (*Decoder.per_layer, "slides")
    last_norm = staticmethod(partial(LayerNorm, bias=False))

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> Cohere2Spec:
        windows = read_alternating_windows(config, config.count("sliding_window_pattern", 4))
        bias = config.flag("attention_bias", False)
        spec = read_decoder_spec(
            config, architecture, windows=windows, qkv_bias=bias, out_bias=bias,
            max_positions=8192, tie_word_embeddings=True, norm_epsilon="layer_norm_eps", default_norm_epsilon=1e-5,
            default_theta=10000.0, spec_class=Cohere2Spec, logit_scale=config.number("logit_scale", 0.0625),
            slides=tuple(window is not None for window in windows))
        if spec.head_size * spec.num_heads != spec.hidden_size:
            raise config.fault("head_dim", "hidden_size / num_attention_heads, or no value")
        return spec

    def make_head(self, spec: Cohere2Spec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, scale=spec.logit_scale)

    def rotary_of(self, layer: _Layer) -> Rotary | None:
        return self.rotary if layer.slides else None
