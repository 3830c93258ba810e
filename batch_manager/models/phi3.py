"""Phi-3, Phi-3.5, Phi-4: Mistral with fused projections and optional partial rotary positions.

Source   "Phi-3" (arXiv 2404.14219); checkpoints of transformers' Phi3ForCausalLM.
"""

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import RmsNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import read_decoder_spec, read_uniform_windows


class _Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index = index
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_size = spec.head_size
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.input_norm = RmsNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.qkv_proj"], size, spec.qkv_sizes, split="heads")
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size],
                          split="rows")
        self.mlp_norm = RmsNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation,
                            gate_up=["gate_up_proj"])

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class Phi3(Decoder):
    """Implements Phi3ForCausalLM of transformers."""

    layer = _Layer
    understands = ("original_max_position_embeddings",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        windows = read_uniform_windows(config, config.count("sliding_window", None))
        return read_decoder_spec(_with_longrope(config), architecture, windows=windows,
                                 partial_rotary_factor=1.0, max_positions=4096, default_norm_epsilon=1e-5,
                                 default_theta=10000.0)


def _with_longrope(config: Fields) -> Fields:
    """Return the configuration with the current name of longrope, and with its defaults.

    Early files call longrope "su". The default of `original_max_position_embeddings` is 4096.
    """
    values = dict(config.values)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.fields(name, Fields({}, config.where))
        kind = rope.text("rope_type", rope.text("type", "default"))
        if kind not in ("default", "longrope", *(["su"] if name == "rope_scaling" else [])):
            raise rope.fault("rope_type" if "rope_type" in rope else "type", "longrope or default")
        if rope.values:
            values[name] = {**rope.values, "rope_type": "default" if kind == "default" else "longrope"}
            values[name].pop("type", None)
    if "original_max_position_embeddings" not in config:
        values["original_max_position_embeddings"] = 4096
    return config.replaced(values)
