"""BLOOM, BLOOMZ: ALiBi as the only positions, a norm after the embedding, LayerNorm, an ungated MLP.

Source   "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model" (arXiv 2211.05100); checkpoints of
         transformers' BloomForCausalLM.
"""

from dataclasses import dataclass

import torch

from ..attention.interface import Attention, LayerAttention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import Mlp
from ..layers.norm import LayerNorm
from ..weights.json_file import Fields
from ..weights.source import Weights
from .alibi_slopes import alibi_slopes
from .decoder import Decoder, Names
from .spec import ModelSpec
from .spec_reading import (
    MAX_HEADS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    even_share,
    layer_count,
    name_or_alias,
    read_dtype,
    refuse_rope_scaling,
    refuse_windows,
)

DEFAULT_POSITIONS = 2048       # the models' training length; ALiBi has no limit, so a file can state another number


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomSpec(ModelSpec):
    """The spec of BLOOM models.

    adds_to_normed   whether attention and the MLP add their outputs to their normed input; otherwise to the input
                     before the norm
    """

    adds_to_normed: bool


class _Layer:
    def __init__(self, spec: BloomSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index, self.adds_to_normed = index, spec.adds_to_normed
        self.heads, self.head_size = [spec.num_heads] * 3, spec.head_size
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.attention_norm = LayerNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        # The file orders the rows by head. Each head has its query, key and value.
        self.qkv = Linear(weights, context, [f"{name}.self_attention.query_key_value"], size, spec.qkv_sizes, bias=True,
                          split="heads", by_head=spec.num_heads)
        self.out = Linear(weights, context, [f"{name}.self_attention.dense"], spec.qkv_sizes[0], [size], bias=True,
                          split="rows")
        self.mlp_norm = LayerNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = Mlp(weights, context, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h", size,
                       spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: None, attention: Attention) -> torch.Tensor:
        normed = self.attention_norm(hidden)
        qkv = self.qkv(normed).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        attended = attention.run(self.index, query, key, value, rotary)
        hidden = self.out.add_to(normed if self.adds_to_normed else hidden, attended)
        normed = self.mlp_norm(hidden)
        return self.mlp.add_to(normed if self.adds_to_normed else hidden, normed)


class Bloom(Decoder):
    """Implements BloomForCausalLM of transformers."""

    layer = _Layer
    names = Names("transformer.word_embeddings", "transformer.h", "transformer.ln_f")
    last_norm = LayerNorm
    harmless_tensors = ()

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> BloomSpec:
        num_layers = layer_count(config, name_or_alias(config, "n_layer", "num_hidden_layers"))
        refuse_windows(config, num_layers)
        refuse_rope_scaling(config)
        if not config.flag("alibi", True):
            raise config.fault("alibi", "true or no value, because this architecture has no other encoding of "
                                        "positions")
        # These two make transformers multiply in slices, without the biases after attention and the MLP.
        if config.flag("slow_but_exact", False) and config.count("pretraining_tp", 1) > 1:
            raise config.fault("slow_but_exact", "false, because pretraining_tp is above 1")
        num_heads = config.count(name_or_alias(config, "n_head", "num_attention_heads"), maximum=MAX_HEADS)
        width = name_or_alias(config, "hidden_size", "n_embed")
        hidden_size = config.count(width, maximum=MAX_WIDTH)
        head_size = even_share(config, width, hidden_size, num_heads)
        positions = next((name for name in ("seq_length", "n_positions") if name in config), "max_position_embeddings")
        return BloomSpec(
            architecture=architecture,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=head_size,
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            vocab_size=config.count("vocab_size", maximum=MAX_VOCAB),
            max_position_embeddings=config.count(positions, DEFAULT_POSITIONS, maximum=MAX_POSITIONS),
            attention=(LayerAttention(scale=head_size**-0.5, alibi_slopes=alibi_slopes(num_heads)),) * num_layers,
            norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
            tie_word_embeddings=config.flag("tie_word_embeddings", True),
            activation="gelu_new",
            rotary=None,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            gated_mlp=False,
            dtype=read_dtype(config),
            adds_to_normed=config.flag("apply_residual_connection_post_layernorm", False))

    def make_entry(self, spec: BloomSpec, weights: Weights, context: LayerContext) -> None:
        self.embedding_norm = LayerNorm(weights, context, "transformer.word_embeddings_layernorm", spec.hidden_size,
                                        spec.norm_epsilon)

    def enter(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the embeddings after their norm, which applies to rows of a prompt-tuning table, too."""
        return self.embedding_norm(hidden)
