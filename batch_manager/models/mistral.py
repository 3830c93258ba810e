"""Mistral: Llama with a sliding window.

Source   "Mistral 7B" (arXiv 2310.06825); checkpoints of transformers' MistralForCausalLM.
"""

from ..weights.json_file import Fields
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import read_decoder_spec, read_uniform_windows, read_window


class Mistral(Decoder):
    """Implements MistralForCausalLM of transformers."""

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        return read_decoder_spec(config, architecture, windows=read_uniform_windows(config, read_window(config)),
                                 num_kv_heads=8, max_positions=131072, default_norm_epsilon=1e-6,
                                 default_theta=10000.0)
