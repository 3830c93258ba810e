"""Falcon, Falcon-RW, Falcon 2: rotary positions or ALiBi, parallel or sequential attention and MLP, an ungated MLP, and
one key head, several, or one for each query head.

Source   "The Falcon Series of Open Language Models" (arXiv 2311.16867); checkpoints of transformers'
         FalconForCausalLM.
"""

import dataclasses
from dataclasses import dataclass

import torch

from ..attention.interface import Attention, LayerAttention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import Mlp
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .alibi_slopes import alibi_slopes
from .decoder import Decoder, Names
from .spec import ModelSpec
from .spec_reading import (
    MAX_HEADS,
    MAX_WIDTH,
    even_share,
    layer_count,
    name_or_alias,
    read_decoder_spec,
    refuse_rope_scaling,
    refuse_windows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconSpec(ModelSpec):
    """The spec of Falcon models.

    is_parallel     whether attention and the MLP read the same hidden states; otherwise the MLP follows attention
    has_own_norms   whether parallel attention and MLP have separate norms; False if `is_parallel` is False
    """

    is_parallel: bool
    has_own_norms: bool


class _Layer:
    def __init__(self, spec: FalconSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index, self.head_size, self.is_parallel = index, spec.head_size, spec.is_parallel
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        size = spec.hidden_size

        def norm(part: str) -> LayerNorm:
            return LayerNorm(weights, context, f"{name}.{part}", size, spec.norm_epsilon)

        self.attention_norm = norm("ln_attn" if spec.has_own_norms else "input_layernorm")
        self.mlp_norm = None                               # None: the MLP reads attention's normed rows
        if spec.has_own_norms or not spec.is_parallel:
            self.mlp_norm = norm("ln_mlp" if spec.has_own_norms else "post_attention_layernorm")
        # The file orders the rows by key head: first its query heads, then the key head, then its value head.
        self.qkv = Linear(weights, context, [f"{name}.self_attention.query_key_value"], size, spec.qkv_sizes,
                          bias=spec.qkv_bias, split="heads", by_head=spec.num_kv_heads)
        self.out = Linear(weights, context, [f"{name}.self_attention.dense"], spec.qkv_sizes[0], [size],
                          bias=spec.out_bias, split="rows")
        self.mlp = Mlp(weights, context, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h", size,
                       spec.intermediate_size, spec.activation, bias=spec.mlp_bias)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary | None, attention: Attention) -> torch.Tensor:
        normed = self.attention_norm(hidden)
        qkv = self.qkv(normed).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        attended = attention.run(self.index, query, key, value, rotary)
        if self.is_parallel:
            mlp_rows = normed if self.mlp_norm is None else self.mlp_norm(hidden)     # before add_to overwrites hidden
            return self.mlp.add_to(self.out.add_to(hidden, attended), mlp_rows)
        hidden = self.out.add_to(hidden, attended)
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class Falcon(Decoder):
    """Implements FalconForCausalLM of transformers."""

    layer = _Layer
    names = Names("transformer.word_embeddings", "transformer.h", "transformer.ln_f")
    last_norm = LayerNorm
    harmless_tensors = (r"(transformer\.)?h\.\d+\.self_attention\.(maybe_rotary|rotary|rotary_emb)\.inv_freq",
                        r"(transformer\.)?rotary_emb\.inv_freq")
    understands = ("multi_query",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> FalconSpec:
        num_layers = layer_count(config)
        refuse_windows(config, num_layers)
        num_heads = config.count("num_attention_heads", maximum=MAX_HEADS)
        width = name_or_alias(config, "hidden_size", "n_embed")
        hidden_size = config.count(width, maximum=MAX_WIDTH)
        even_share(config, width, hidden_size, num_heads)
        if "head_dim" in config:
            raise config.fault("head_dim", "no value, because heads have hidden_size / num_attention_heads entries")
        if config.flag("apply_residual_connection_post_layernorm", False):
            raise config.fault("apply_residual_connection_post_layernorm", "false or no value")
        is_parallel, has_own_norms = _read_norms(config)
        bias, has_slopes = config.flag("bias", False), config.flag("alibi", False)
        renamed = {**config.values, "hidden_size": hidden_size,
                   "num_key_value_heads": _read_kv_heads(config, num_heads),
                   "intermediate_size": config.count("ffn_hidden_size", 4 * hidden_size, maximum=MAX_WIDTH)}
        spec = read_decoder_spec(
            config.replaced(renamed), architecture, windows=(None,) * num_layers, qkv_bias=bias, out_bias=bias,
            mlp_bias=bias, gated_mlp=False, tie_word_embeddings=True, activation="activation",
            default_activation="gelu", norm_epsilon="layer_norm_epsilon", default_norm_epsilon=1e-5,
            default_theta=10000.0, max_positions=2048, spec_class=FalconSpec, is_parallel=is_parallel,
            has_own_norms=has_own_norms)
        if not has_slopes:
            return spec
        refuse_rope_scaling(config)
        # As in training, slope * position is rounded to bfloat16, whatever the dtype of the weights, and added to the
        # scores before they are scaled.
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.bfloat16, device="cpu").tolist()
        scale = spec.attention[0].scale
        attention = LayerAttention(scale=scale, alibi_slopes=tuple(slopes), alibi_bfloat16_factor=scale)
        return dataclasses.replace(spec, rotary=None, attention=(attention,) * num_layers)


def _read_kv_heads(config: Fields, num_heads: int) -> int:
    num_kv_heads = config.count("num_kv_heads", num_heads, maximum=MAX_HEADS)
    if config.flag("new_decoder_architecture", False):
        if num_heads % num_kv_heads:
            raise config.fault("num_kv_heads", f"a divisor of num_attention_heads, {num_heads}")
        return num_kv_heads
    if config.flag("multi_query", True):
        return 1
    if num_kv_heads != num_heads:
        raise config.fault("num_kv_heads", f"num_attention_heads, {num_heads}, because neither "
                                           "new_decoder_architecture nor multi_query is set")
    return num_heads


def _read_norms(config: Fields) -> tuple[bool, bool]:
    """Return (is_parallel, has_own_norms) of a FalconSpec."""
    is_new, is_parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    num_norms = config.count("num_ln_in_parallel_attn", 2 if is_new else 1)
    if is_new and not is_parallel:
        raise config.fault("parallel_attn", "true or no value, because new_decoder_architecture is true")
    if is_parallel and num_norms not in ((1, 2) if is_new else (1,)):
        raise config.fault("num_ln_in_parallel_attn", "1 or 2" if is_new else "1 without new_decoder_architecture")
    return is_parallel, is_parallel and num_norms == 2
