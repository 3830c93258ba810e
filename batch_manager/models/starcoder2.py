"""StarCoder 2: Mistral with LayerNorm, biases and an ungated MLP.

Source   "StarCoder 2" (arXiv 2402.19173); checkpoints of transformers' Starcoder2ForCausalLM.
"""

from ..layers.norm import LayerNorm
from ..weights.json_file import Fields
from .decoder import Decoder
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import read_decoder_spec, read_uniform_windows


class _Layer(Layer):
    names = LayerNames(expand=("mlp.c_fc",), down="mlp.c_proj")
    norm = LayerNorm


class StarCoder2(Decoder):
    """Implements Starcoder2ForCausalLM of transformers."""

    layer = _Layer
    last_norm = LayerNorm

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        windows = read_uniform_windows(config, config.count("sliding_window", None))
        bias = config.flag("use_bias", True)
        return read_decoder_spec(config, architecture, windows=windows, qkv_bias=bias, out_bias=bias,
                                 mlp_bias=bias, gated_mlp=False, num_kv_heads=2, max_positions=4096,
                                 tie_word_embeddings=True, default_activation="gelu_pytorch_tanh",
                                 norm_epsilon="norm_epsilon", default_norm_epsilon=1e-5, default_theta=10000.0)
