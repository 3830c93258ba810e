"""BLOOM, BLOOMZ: ALiBi as the only positions, a norm after the embedding, LayerNorm, an ungated MLP.

Source   "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model" (arXiv 2211.05100); checkpoints of
         transformers' BloomForCausalLM.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.norm import LayerNorm
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder, Names
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import MAX_WIDTH, name_or_alias, read_multi_head_spec

DEFAULT_POSITIONS = 2048       # the models' training length; ALiBi has no limit, so a file can state another number


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomSpec(ModelSpec):
    """The spec of BLOOM models.

    adds_to_normed   whether attention and the MLP add their outputs to their normed input; otherwise to the input
                     before the norm
    """

    adds_to_normed: bool


class _Layer(Layer):
    names = LayerNames(qkv=("self_attention.query_key_value",), out="self_attention.dense",
                       expand=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h")
    norm = LayerNorm

    def order_of_heads(self, spec: BloomSpec, context: LayerContext) -> dict[str, Any]:
        """The file orders the rows by head. Each head has its query, key and value."""
        return {"by_head": spec.num_heads}

    def __call__(self, hidden: torch.Tensor, rotary: None, attention: Attention) -> torch.Tensor:
        if not self.spec.adds_to_normed:
            return super().__call__(hidden, rotary, attention)
        normed = self.input_norm(hidden)
        hidden = self.out.add_to(normed, self.attended(normed, rotary, attention))
        normed = self.mlp_norm(hidden)
        return self.mlp.add_to(normed, normed)


class Bloom(Decoder):
    """Implements BloomForCausalLM of transformers."""

    layer = _Layer
    names = Names("transformer.word_embeddings", "transformer.h", "transformer.ln_f")
    last_norm = LayerNorm
    harmless_tensors = ()

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> BloomSpec:
        if not config.flag("alibi", True):
            raise config.fault("alibi", "true or no value, because this architecture has no other encoding of "
                                        "positions")
        # These two make transformers multiply in slices, without the biases after attention and the MLP.
        if config.flag("slow_but_exact", False) and config.count("pretraining_tp", 1) > 1:
            raise config.fault("slow_but_exact", "false, because pretraining_tp is above 1")
        width = name_or_alias(config, "hidden_size", "n_embed")
        hidden_size = config.count(width, maximum=MAX_WIDTH)
        return read_multi_head_spec(
            config, architecture, hidden_size=hidden_size, width=width,
            layers=name_or_alias(config, "n_layer", "num_hidden_layers"),
            heads=name_or_alias(config, "n_head", "num_attention_heads"),
            positions=next((name for name in ("seq_length", "n_positions") if name in config),
                           "max_position_embeddings"),
            max_positions=DEFAULT_POSITIONS, alibi=True, intermediate_size=4 * hidden_size,
            norm_epsilon=config.number("layer_norm_epsilon", 1e-5), activation="gelu_new", qkv_bias=True,
            out_bias=True, mlp_bias=True, spec_class=BloomSpec,
            adds_to_normed=config.flag("apply_residual_connection_post_layernorm", False))

    def make_entry(self, spec: BloomSpec, weights: Weights, context: LayerContext) -> None:
        self.embedding_norm = LayerNorm(weights, context, "transformer.word_embeddings_layernorm", spec.hidden_size,
                                        spec.norm_epsilon)

    def enter(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the embeddings after their norm, which applies to rows of a prompt-tuning table, too."""
        return self.embedding_norm(hidden)
