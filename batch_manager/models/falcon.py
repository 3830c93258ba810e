"""Falcon, Falcon-RW, Falcon 2: rotary positions or ALiBi, parallel or sequential attention and MLP, an ungated MLP, and
one key head, several, or one for each query head.

Source   "The Falcon Series of Open Language Models" (arXiv 2311.16867); checkpoints of transformers'
         FalconForCausalLM.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.interface import Attention, LayerAttention
from ..layers.context import LayerContext
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from .alibi_slopes import alibi_slopes
from .decoder import Decoder, Names
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import MAX_HEADS, MAX_WIDTH, even_share, name_or_alias, read_decoder_spec, refuse_rope_scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconSpec(ModelSpec):
    """The spec of Falcon models.

    is_parallel     whether attention and the MLP read the same hidden states; otherwise the MLP follows attention
    has_own_norms   whether parallel attention and MLP have separate norms; False if `is_parallel` is False
    """

    is_parallel: bool
    has_own_norms: bool


class _Layer(Layer):
    names = LayerNames(qkv=("self_attention.query_key_value",), out="self_attention.dense",
                       expand=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h")
    norm = LayerNorm

    def names_of(self, spec: FalconSpec) -> LayerNames:
        if spec.has_own_norms:
            return dataclasses.replace(self.names, input_norm="ln_attn", mlp_norm="ln_mlp")
        return dataclasses.replace(self.names, mlp_norm="") if spec.is_parallel else self.names

    def order_of_heads(self, spec: FalconSpec, context: LayerContext) -> dict[str, Any]:
        """The file orders the rows by key head: first its query heads, then the key head, then its value head."""
        return {"by_head": spec.num_kv_heads}

    def __call__(self, hidden: torch.Tensor, rotary: Rotary | None, attention: Attention) -> torch.Tensor:
        if not self.spec.has_own_norms:
            return super().__call__(hidden, rotary, attention)
        attended = self.attended(self.input_norm(hidden), rotary, attention)
        normed = self.mlp_norm(hidden)                 # before add_to, which can overwrite `hidden`
        return self.mlp.add_to(self.out.add_to(hidden, attended), normed)


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
            config.replaced(renamed), architecture, qkv_bias=bias, out_bias=bias,
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
        return dataclasses.replace(spec, rotary=None, attention=(attention,) * spec.num_layers)


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
