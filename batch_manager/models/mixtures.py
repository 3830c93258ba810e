"""Mixtures of experts: Llama's frame with experts in place of the MLP, in some layers or in all.

Source   Mixtral (arXiv 2401.04088), Qwen1.5-MoE (Qwen, 2024), Qwen3 (arXiv 2505.09388), OLMoE (arXiv 2409.02060),
         Granite 3.0 (IBM, 2024); checkpoints of transformers' classes of the same names.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.experts import ExpertNames, ExpertParameters, Experts
from ..layers.norm import HeadNorms, QueryKeyNorms, RmsNorm
from ..layers.rotary import Rotary
from ..weights.gguf_names import MAX_EXPERTS
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .granite import Granite, GraniteLayer, GraniteSpec, read_factors
from .spec_reading import (
    MAX_WIDTH,
    layer_count,
    name_or_alias,
    read_decoder_spec,
    read_layer_types,
    read_uniform_windows,
    read_window,
    windows_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec(GraniteSpec):
    """The spec of a mixture of experts, with the factors of Granite.

    norms_rows   with qk_norm: whether a norm is over all heads of a row; otherwise over each head
    clip         largest size of an entry of queries, keys and values; None: any
    """

    norms_rows: bool = False
    clip: float | None = None


class _Layer(GraniteLayer):
    mlp_name, expert_names = "mlp", ExpertNames()

    def make_head_norms(self, spec: MixtureSpec, weights: Weights, context: LayerContext,
                        name: str) -> QueryKeyNorms | None:
        self.row_norms: tuple[RmsNorm, ...] = ()
        if spec.norms_rows:
            self.row_norms = tuple(
                RmsNorm(weights, context, f"{name}.{part}_norm", size, spec.norm_epsilon, split=True, copies=copies)
                for part, size, copies in zip("qk", spec.qkv_sizes, (1, spec.kv_copies)))
        elif spec.qk_norm:
            return HeadNorms(weights, context, name, spec.head_size, spec.norm_epsilon)
        return None

    def make_mlp(self, spec: MixtureSpec, weights: Weights, context: LayerContext, name: str) -> Any:
        experts = spec.experts[self.index]
        if experts is None:
            return super().make_mlp(spec, weights, context, name)
        return Experts(weights, context, f"{name}.{self.mlp_name}", spec.hidden_size, experts, spec.activation,
                       self.expert_names, self.residual_scale(spec))

    def attended(self, rows: torch.Tensor, rotary: Rotary | None, attention: Attention) -> torch.Tensor:
        clip = self.spec.clip
        if not self.row_norms and clip is None:
            return super().attended(rows, rotary, attention)
        parts = list(self.qkv(rows).split_with_sizes(self.spec.qkv_sizes, 1))
        for number, norm in enumerate(self.row_norms):
            parts[number] = norm(parts[number])
        if clip is not None:
            parts = [part.clamp(-clip, clip) for part in parts]
        query, key, value = (part.view(len(rows), -1, self.head_size) for part in parts)
        return attention.run(self.index, query, key, value, rotary)


class _MixtralLayer(_Layer):
    mlp_name, expert_names = "block_sparse_moe", ExpertNames(gate_up=("w1", "w3"), down="w2")


class _GraniteLayer(_Layer):
    mlp_name, expert_names = "block_sparse_moe", ExpertNames("router.layer", "", ("input_linear",), "output_linear")


def _read_experts(config: Fields, num_layers: int, *, count: int, chosen: int, renormalises: bool,
                  name: str = "num_experts", alias: str = "num_local_experts", size: str = "intermediate_size",
                  default_size: Any = None, shared_size: int = 0) -> tuple[ExpertParameters | None, ...]:
    """Return the experts of each layer. A layer has none if `mlp_only_layers` has its number, or if its number is not
    the last one of a group of `decoder_sparse_step` layers.

    count, chosen, default_size   the family's defaults; default_size None: the file must have the field
    name, alias, size             names of the fields with the number of experts and the size of one
    """
    count = config.count(name_or_alias(config, name, alias), count, minimum=1, maximum=MAX_EXPERTS)
    chosen = config.count("num_experts_per_tok", chosen, maximum=MAX_EXPERTS)
    if chosen > count:
        raise config.fault("num_experts_per_tok", f"at most the number of experts, {count}")
    default = () if default_size is None else (default_size,)
    experts = ExpertParameters(count=count, chosen=chosen, size=config.count(size, *default, maximum=MAX_WIDTH),
                               renormalises=renormalises, shared_size=shared_size)
    if size == "intermediate_size":                    # every layer of these families has experts
        return (experts,) * num_layers
    dense = config.counts("mlp_only_layers", range(num_layers + 1)) if "mlp_only_layers" in config else []
    step = config.count("decoder_sparse_step", 1)
    return tuple(None if index in dense or (index + 1) % step else experts for index in range(num_layers))


class Mixtral(Decoder):
    """Implements MixtralForCausalLM of transformers."""

    layer, per_layer = _MixtralLayer, ("attention", "experts")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> MixtureSpec:
        windows = read_uniform_windows(config, config.count("sliding_window", None))
        experts = _read_experts(config, len(windows), count=8, chosen=2, renormalises=True, name="num_local_experts",
                                alias="num_experts")
        return read_decoder_spec(config, architecture, windows=windows, num_kv_heads=8, max_positions=131072,
                                 default_norm_epsilon=1e-5, default_theta=1e6, spec_class=MixtureSpec, experts=experts)


class Qwen2Moe(Decoder):
    """Implements Qwen2MoeForCausalLM of transformers."""

    layer, per_layer = _Layer, ("attention", "experts")
    understands = ("sliding_window", "max_window_layers")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> MixtureSpec:
        num_layers, slides = layer_count(config), config.flag("use_sliding_window", False)
        first = config.count("max_window_layers", 28, minimum=0)
        kinds = read_layer_types(config, ["sliding_attention" if slides and index < first and index % 2 == 0
                                          else "full_attention" for index in range(num_layers)])
        if "sliding_attention" in kinds and not slides:
            raise config.fault("layer_types", "no sliding_attention, because use_sliding_window is false")
        experts = _read_experts(
            config, num_layers, count=60, chosen=4, renormalises=config.flag("norm_topk_prob", False),
            size="moe_intermediate_size", default_size=1408,
            shared_size=config.count("shared_expert_intermediate_size", 5632, maximum=MAX_WIDTH))
        return read_decoder_spec(config, architecture, windows=windows_of(config, kinds,
                                                                          read_window(config) if slides else None),
                                 qkv_bias=config.flag("qkv_bias", True), num_kv_heads=16, max_positions=32768,
                                 default_norm_epsilon=1e-6, default_theta=10000.0, spec_class=MixtureSpec,
                                 experts=experts)


class Qwen3Moe(Decoder):
    """Implements Qwen3MoeForCausalLM of transformers."""

    layer, per_layer = _Layer, ("attention", "experts")
    understands = ("sliding_window",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> MixtureSpec:
        slides, bias = config.flag("use_sliding_window", False), config.flag("attention_bias", False)
        windows = read_uniform_windows(config, read_window(config) if slides else None)
        experts = _read_experts(config, len(windows), count=128, chosen=8,
                                renormalises=config.flag("norm_topk_prob", False), size="moe_intermediate_size",
                                default_size=768)
        return read_decoder_spec(config, architecture, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True,
                                 num_kv_heads=4, max_positions=32768, default_norm_epsilon=1e-6, default_theta=10000.0,
                                 spec_class=MixtureSpec, experts=experts)


class Olmoe(Decoder):
    """Implements OlmoeForCausalLM of transformers."""

    layer, per_layer = _Layer, ("attention", "experts")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> MixtureSpec:
        bias = config.flag("attention_bias", False)
        experts = _read_experts(config, layer_count(config), count=64, chosen=8,
                                renormalises=config.flag("norm_topk_prob", False))
        return read_decoder_spec(config, architecture, qkv_bias=bias, out_bias=bias,
                                 qk_norm=True, max_positions=4096, default_norm_epsilon=1e-5, default_theta=10000.0,
                                 spec_class=MixtureSpec, experts=experts, norms_rows=True,
                                 clip=config.number("clip_qkv", None))


class GraniteMoe(Granite):
    """Implements GraniteMoeForCausalLM of transformers."""

    layer, per_layer = _GraniteLayer, ("attention", "experts")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> MixtureSpec:
        bias = config.flag("attention_bias", False)
        experts = _read_experts(config, layer_count(config), count=8, chosen=2, renormalises=True,
                                name="num_local_experts", alias="num_experts")
        return read_decoder_spec(config, architecture, qkv_bias=bias, out_bias=bias,
                                 max_positions=2048, default_norm_epsilon=1e-6, default_theta=10000.0,
                                 spec_class=MixtureSpec, experts=experts, **read_factors(config))
