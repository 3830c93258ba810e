"""Gemma 3, text model: Gemma 2 with queries and keys normed per head and without attention softcaps. Five of six
layers have a window and a separate rotary table.

Source   "Gemma 3" (arXiv 2503.19786); checkpoints of transformers' Gemma3ForCausalLM.
"""

from dataclasses import dataclass

from ..layers.context import LayerContext
from ..layers.embedding import Embedding, Head
from ..layers.norm import HeadNorms
from ..layers.rotary import Rotary, RotaryParameters
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .gemma2 import Gemma2Layer
from .spec import ModelSpec
from .spec_reading import read_alternating_windows, read_decoder_spec, read_rotary, read_softcap, rope_fields_by_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Spec(ModelSpec):
    """The spec of Gemma 3 models.

    slides           for each layer: whether it has a window and uses `sliding_rotary`; otherwise it uses `rotary`
    logits_softcap   logits become softcap * tanh(logits / softcap); None: they are unchanged
    """

    slides: tuple[bool, ...]
    sliding_rotary: RotaryParameters
    logits_softcap: float | None = None


class _Layer(Gemma2Layer):
    def make_head_norms(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str) -> HeadNorms:
        return HeadNorms(weights, context, name, spec.head_size, spec.norm_epsilon, weight_offset=1.0)


class Gemma3(Decoder):
    """Implements Gemma3ForCausalLM of transformers."""

    layer = _Layer
    per_layer = (*Decoder.per_layer, "slides")
    last_norm = Gemma2Layer.norm
    understands = ("rope_local_base_freq",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> Gemma3Spec:
        windows = read_alternating_windows(config, config.count("sliding_window_pattern", 6))
        bias, (full, sliding) = config.flag("attention_bias", False), rope_fields_by_kind(config)
        max_positions = config.count("max_position_embeddings", 131072)
        return read_decoder_spec(
            config, architecture, windows=windows, qkv_bias=bias, out_bias=bias,
            qk_norm=True, scale=config.count("query_pre_attn_scalar", 256)**-0.5, head_size=256, num_kv_heads=4,
            max_positions=131072, tie_word_embeddings=True, activation="hidden_activation",
            default_activation="gelu_pytorch_tanh", default_norm_epsilon=1e-6, default_theta=1_000_000.0, rope=full,
            spec_class=Gemma3Spec, slides=tuple(window is not None for window in windows),
            sliding_rotary=read_rotary(_for_sliding_layers(config), max_positions, 10000.0, rope=sliding),
            logits_softcap=read_softcap(config, "final_logit_softcapping", None))

    def make_embedding(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> Embedding:
        return super().make_embedding(spec, weights, context, scale=spec.hidden_size**0.5)

    def make_head(self, spec: Gemma3Spec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, softcap=spec.logits_softcap)

    def make_rotary(self, spec: Gemma3Spec, context: LayerContext) -> None:
        self.rotary, self.sliding_rotary = (Rotary(context, rotary, spec.head_size, spec.max_position_embeddings)
                                            for rotary in (spec.rotary, spec.sliding_rotary))

    def rotary_of(self, spec: Gemma3Spec, index: int) -> Rotary:
        return self.sliding_rotary if spec.slides[index] else self.rotary


def _for_sliding_layers(config: Fields) -> Fields:
    """Return the configuration of sliding layers, in which `rope_theta` has the value of `rope_local_base_freq`."""
    return config.replaced({**config.values, "rope_theta": config.values.get("rope_local_base_freq")})
