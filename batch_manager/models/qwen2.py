"""Qwen2 and Qwen2.5: Llama with biases on query, key and value; upper layers can have a window.

Source   "Qwen2" (arXiv 2407.10671); checkpoints of transformers' Qwen2ForCausalLM.
"""

from ..weights.json_file import Fields
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, read_layer_windows


class Qwen2(Decoder):
    """Implements Qwen2ForCausalLM of transformers."""

    understands = ("sliding_window", "max_window_layers")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        windows = read_layer_windows(config, layer_count(config))
        return read_decoder_spec(config, architecture, windows=windows, qkv_bias=True, num_kv_heads=32,
                                 max_positions=32768, default_norm_epsilon=1e-6,
                                 default_theta=10000.0)
