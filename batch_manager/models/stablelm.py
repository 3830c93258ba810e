"""StableLM: Llama with LayerNorm and partial rotary positions; attention and MLP can be parallel.

Source   "Stable LM 2 1.6B" (arXiv 2402.17834); checkpoints of transformers' StableLmForCausalLM.
"""

from dataclasses import dataclass

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import HeadLayerNorm, LayerNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, refuse_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLmSpec(ModelSpec):
    """The spec of StableLM models.

    is_parallel   whether attention and the MLP read the same normed hidden states; otherwise the MLP follows attention
    """

    is_parallel: bool


class _Layer:
    def __init__(self, spec: StableLmSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index = index
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_size = spec.head_size
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.input_norm = LayerNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads")
        self.query_norm = self.key_norm = None
        if spec.qk_norm:
            self.query_norm, self.key_norm = (HeadLayerNorm(
                weights, context, [(f"{name}.self_attn.{part}_layernorm.norms.{head}.weight", (spec.head_size,))
                                   for head in range(count * context.split.size // copies)], count, spec.head_size,
                epsilon, copies=copies)
                for part, count, copies in (("q", spec.num_heads, 1), ("k", spec.num_kv_heads, spec.kv_copies)))
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.is_parallel = spec.is_parallel
        if not spec.is_parallel:
            self.mlp_norm = LayerNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        normed = self.input_norm(hidden)
        qkv = self.qkv(normed).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, normed if self.is_parallel else self.mlp_norm(hidden))


class StableLm(Decoder):
    """Implements StableLmForCausalLM of transformers."""

    layer = _Layer
    last_norm = LayerNorm

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> StableLmSpec:
        num_layers = layer_count(config)
        refuse_windows(config, num_layers)
        if "head_dim" in config:
            raise config.fault("head_dim", "no value, because heads have hidden_size / num_attention_heads entries")
        return read_decoder_spec(
            config, architecture, windows=(None,) * num_layers, qkv_bias=config.flag("use_qkv_bias", False),
            num_kv_heads=32, max_positions=4096, norm_epsilon="layer_norm_eps", default_norm_epsilon=1e-5,
            default_theta=10000.0, qk_norm=config.flag("qk_layernorm", False),
            partial_rotary_factor=0.25, spec_class=StableLmSpec,
            is_parallel=config.flag("use_parallel_residual", False))
