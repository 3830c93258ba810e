"""Llama: RMSNorm, rotary positions, grouped-query attention, a gated MLP.

Source   "Llama 2" (arXiv 2307.09288) and the Llama 3 releases; checkpoints of transformers' LlamaForCausalLM.
"""

from ..weights.json_file import Fields
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import read_decoder_spec


class Llama(Decoder):
    """Implements LlamaForCausalLM of transformers."""

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        bias = config.flag("attention_bias", False)
        return read_decoder_spec(config, architecture, qkv_bias=bias, out_bias=bias,
                                 mlp_bias=config.flag("mlp_bias", False), max_positions=2048, default_norm_epsilon=1e-6,
                                 default_theta=10000.0)
