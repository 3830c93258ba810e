"""OLMo 3: OLMo 2 in which three of four layers have a window and a separate rotary table.

Source   "OLMo 3" (Ai2, 2025); checkpoints of transformers' Olmo3ForCausalLM.
"""

from dataclasses import dataclass

from ..layers.context import LayerContext
from ..layers.rotary import Rotary, RotaryParameters
from ..weights.json_file import Fields
from .decoder import Decoder
from .olmo2 import Olmo2Layer
from .spec import ModelSpec
from .spec_reading import read_alternating_windows, read_decoder_spec, read_rotary, rope_fields_by_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo3Spec(ModelSpec):
    """The spec of OLMo 3 models.

    slides   for each layer: whether it has a window and uses `sliding_rotary`; otherwise it uses `rotary`
    """

    slides: tuple[bool, ...]
    sliding_rotary: RotaryParameters


class Olmo3(Decoder):
    """Implements Olmo3ForCausalLM of transformers."""

    layer = Olmo2Layer
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

    def rotary_of(self, spec: Olmo3Spec, index: int) -> Rotary:
        return self.sliding_rotary if spec.slides[index] else self.rotary
