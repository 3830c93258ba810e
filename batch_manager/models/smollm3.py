"""SmolLM 3: Llama in which every fourth layer has no positions; these layers can have a window.

Source   "SmolLM3" (Hugging Face, 2025), "RoPE to NoPE and Back Again" (arXiv 2501.18795); checkpoints of transformers'
         SmolLM3ForCausalLM.
"""

from dataclasses import dataclass

from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, read_layer_types, windows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLm3Spec(ModelSpec):
    """The spec of SmolLM 3 models.

    rotates   for each layer: whether its queries and keys are rotated
    """

    rotates: tuple[bool, ...]


class SmolLm3(Decoder):
    """Implements SmolLM3ForCausalLM of transformers."""

    per_layer = (*Decoder.per_layer, "rotates")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> SmolLm3Spec:
        num_layers, bias = layer_count(config), config.flag("attention_bias", False)
        interval = config.count("no_rope_layer_interval", 4)
        rotates = tuple(bool((index + 1) % interval) for index in range(num_layers))
        if "no_rope_layers" in config:                 # despite the name, 1 means that the layer rotates
            rotates = tuple(map(bool, config.counts("no_rope_layers", range(num_layers, num_layers + 1))))
        has_windows = config.flag("use_sliding_window", False)
        window = config.count("sliding_window", None) if has_windows else None
        kinds = read_layer_types(config, ["full_attention" if rotated or window is None else "sliding_attention"
                                          for rotated in rotates])
        if "sliding_attention" in kinds and not has_windows:
            raise config.fault("layer_types", "no sliding_attention, because use_sliding_window is false")
        return read_decoder_spec(config, architecture, windows=windows_of(config, kinds, window), qkv_bias=bias,
                                 out_bias=bias, mlp_bias=config.flag("mlp_bias", False), num_kv_heads=4,
                                 max_positions=32768, tie_word_embeddings=True, default_norm_epsilon=1e-6,
                                 default_theta=2_000_000.0, spec_class=SmolLm3Spec, rotates=rotates)

    def rotary_of(self, spec: SmolLm3Spec, index: int) -> Rotary | None:
        return self.rotary if spec.rotates[index] else None
