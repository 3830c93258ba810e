"""OLMo 3: OLMo 2 in which three of four layers have a window and a separate rotary table.

Source   "OLMo 3" (Ai2, 2025); checkpoints of transformers' Olmo3ForCausalLM.
"""

from dataclasses import dataclass

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import RmsNorm
from ..layers.rotary import Rotary, RotaryParameters
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import read_alternating_windows, read_decoder_spec, read_rotary, rope_fields_by_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo3Spec(ModelSpec):
    """The spec of OLMo 3 models.

    slides   for each layer: whether it has a window and uses `sliding_rotary`; otherwise it uses `rotary`
    """

    slides: tuple[bool, ...]
    sliding_rotary: RotaryParameters


class _Layer:
    def __init__(self, spec: Olmo3Spec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index, self.slides = index, spec.slides[index]
        self.head_size = spec.head_size
        self.sizes = spec.qkv_sizes
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads")
        self.query_norm = RmsNorm(weights, context, f"{name}.self_attn.q_norm", spec.qkv_sizes[0], epsilon, split=True)
        self.key_norm = RmsNorm(weights, context, f"{name}.self_attn.k_norm", spec.qkv_sizes[1], epsilon, split=True,
                                copies=spec.kv_copies)
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.attention_norm = RmsNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)
        self.mlp_norm = RmsNorm(weights, context, f"{name}.post_feedforward_layernorm", size, epsilon)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        query, key, value = self.qkv(hidden).split_with_sizes(self.sizes, 1)
        query, key, value = (rows.view(len(hidden), -1, self.head_size)
                             for rows in (self.query_norm(query), self.key_norm(key), value))
        hidden = hidden + self.attention_norm(self.out(attention.run(self.index, query, key, value, rotary)))
        return hidden + self.mlp_norm(self.mlp(hidden))


class Olmo3(Decoder):
    """Implements Olmo3ForCausalLM of transformers."""

    layer = _Layer
    per_layer = (*Decoder.per_layer, "slides")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> Olmo3Spec:
        windows = read_alternating_windows(config, 4)
        bias, (full, sliding) = config.flag("attention_bias", False), rope_fields_by_kind(config)
        max_positions = config.count("max_position_embeddings", 2048)
        # As in transformers, a top-level `rope_theta` applies to full layers only.
        others = config.replaced({name: value for name, value in config.values.items() if name != "rope_theta"})
        return read_decoder_spec(
            config, architecture, windows=windows, qkv_bias=bias, out_bias=bias,
            qk_norm=True, max_positions=2048, default_norm_epsilon=1e-5, default_theta=500_000.0, rope=full,
            spec_class=Olmo3Spec, slides=tuple(window is not None for window in windows),
            sliding_rotary=read_rotary(others, max_positions, 500_000.0, rope=sliding))

    def make_rotary(self, spec: Olmo3Spec, context: LayerContext) -> None:
        self.rotary, self.sliding_rotary = (Rotary(context, rotary, spec.head_size, spec.max_position_embeddings)
                                            for rotary in (spec.rotary, spec.sliding_rotary))

    def rotary_of(self, layer: _Layer) -> Rotary:
        return self.sliding_rotary if layer.slides else self.rotary
