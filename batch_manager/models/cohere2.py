"""Command-R7B, Command A (Cohere 2): Cohere with sliding windows and rotary positions. Every fourth layer has neither.

Source   "Command A" (arXiv 2504.00698); checkpoints of transformers' Cohere2ForCausalLM.
"""

from dataclasses import dataclass

from ..layers.context import LayerContext
from ..layers.embedding import Head
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .cohere import CohereLayer
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


class Cohere2(Decoder):
    """Implements Cohere2ForCausalLM of transformers."""

    layer = CohereLayer
    per_layer = (*Decoder.per_layer, "slides")
    last_norm = CohereLayer.norm

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

    def rotary_of(self, spec: Cohere2Spec, index: int) -> Rotary | None:
        return self.rotary if spec.slides[index] else None
