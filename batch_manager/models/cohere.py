"""Command-R (Cohere): parallel attention and MLP, LayerNorm without bias, interleaved rotary pairs, scaled logits.

Source   "Command R" (Cohere, 2024); checkpoints of transformers' CohereForCausalLM.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.embedding import Head
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import HeadLayerNorm, LayerNorm
from ..layers.rotary import Rotary, half_split_rows
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, refuse_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereSpec(ModelSpec):
    """The spec of Cohere models.

    logit_scale   factor by which the logits are multiplied
    """

    logit_scale: float


class _Layer:
    def __init__(self, spec: CohereSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        size = spec.hidden_size
        self.index, self.head_size = index, spec.head_size
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.input_norm = LayerNorm(weights, context, f"{name}.input_layernorm", size, spec.norm_epsilon, bias=False)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads",
                          row_order=half_split_rows(spec.num_heads + spec.num_kv_heads, spec.num_kv_heads,
                                                    spec.head_size, spec.head_size, context.device))
        self.query_norm = self.key_norm = None
        if spec.qk_norm:
            self.query_norm, self.key_norm = (HeadLayerNorm(
                weights, context, [(f"{name}.self_attn.{part}_norm.weight",
                                    (heads * context.split.size // copies, spec.head_size))], heads,
                spec.head_size, spec.norm_epsilon,
                half_split_rows(heads, 0, spec.head_size, spec.head_size, context.device), copies)
                for part, heads, copies in (("q", spec.num_heads, 1), ("k", spec.num_kv_heads, spec.kv_copies)))
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        normed = self.input_norm(hidden)
        qkv = self.qkv(normed).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, normed)


class Cohere(Decoder):
    """Implements CohereForCausalLM of transformers."""

    layer = _Layer
    last_norm = staticmethod(partial(LayerNorm, bias=False))

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> CohereSpec:
        num_layers, bias = layer_count(config), config.flag("attention_bias", False)
        refuse_windows(config, num_layers)
        if "logit_scale" in config.values and "logit_scale" not in config:
            raise config.fault("logit_scale", "a number, or no such field")
        return read_decoder_spec(
            config, architecture, windows=(None,) * num_layers, qkv_bias=bias, out_bias=bias, max_positions=8192,
            tie_word_embeddings=True, norm_epsilon="layer_norm_eps", default_norm_epsilon=1e-5,
            default_theta=500_000.0, qk_norm=config.flag("use_qk_norm", False), spec_class=CohereSpec,
            logit_scale=config.number("logit_scale", 0.0625))

    def make_head(self, spec: CohereSpec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, scale=spec.logit_scale)
