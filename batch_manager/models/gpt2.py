"""GPT-2: LayerNorm, learned positions, an ungated MLP.

Source   "Language Models are Unsupervised Multitask Learners", 2019; checkpoints of transformers' GPT2LMHeadModel.
"""

import torch

from ..attention.interface import Attention, LayerAttention
from ..layers.context import LayerContext
from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..layers.mlp import Mlp
from ..layers.norm import LayerNorm
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder, Names
from .spec import ModelSpec
from .spec_reading import (
    MAX_HEADS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    even_share,
    layer_count,
    read_activation,
    read_dtype,
    refuse_rope_scaling,
    refuse_windows,
)

# Aliases of four fields. As in transformers, the alias takes precedence.
_ALIASES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
            "n_positions": "max_position_embeddings"}


class _Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index, self.head_size, self.heads = index, spec.head_size, [spec.num_heads] * 3
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.attention_norm = LayerNorm(weights, context, f"{name}.ln_1", size, epsilon)
        self.qkv = Linear(weights, context, [f"{name}.attn.c_attn"], size, spec.qkv_sizes, bias=True, transposed=True,
                          split="heads")
        self.out = Linear(weights, context, [f"{name}.attn.c_proj"], spec.qkv_sizes[0], [size], bias=True,
                          transposed=True, split="rows")
        self.mlp_norm = LayerNorm(weights, context, f"{name}.ln_2", size, epsilon)
        self.mlp = Mlp(weights, context, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", size, spec.intermediate_size,
                       spec.activation, transposed=True)

    def __call__(self, hidden: torch.Tensor, rotary: None, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class Gpt2(Decoder):
    """Implements GPT2LMHeadModel of transformers."""

    layer = _Layer
    names = Names("transformer.wte", "transformer.h", "transformer.ln_f")
    last_norm = LayerNorm
    harmless_tensors = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        if not config.flag("scale_attn_weights", True):
            raise config.fault("scale_attn_weights", "true")
        for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
            if config.flag(name, False):
                raise config.fault(name, "false")
        names = {name: alias if alias in config else name for name, alias in _ALIASES.items()}
        num_layers = layer_count(config, names["n_layer"])
        refuse_windows(config, num_layers)
        refuse_rope_scaling(config)
        num_heads = config.count(names["n_head"], maximum=MAX_HEADS)
        hidden_size = config.count(names["n_embd"], maximum=MAX_WIDTH)
        head_size = even_share(config, names["n_embd"], hidden_size, num_heads)
        return ModelSpec(
            architecture=architecture,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=head_size,
            hidden_size=hidden_size,
            intermediate_size=config.count("n_inner", 4 * hidden_size, maximum=4 * MAX_WIDTH),
            vocab_size=config.count("vocab_size", maximum=MAX_VOCAB),
            max_position_embeddings=config.count(names["n_positions"], 1024, maximum=MAX_POSITIONS),
            attention=(LayerAttention(scale=head_size**-0.5),) * num_layers,
            norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
            tie_word_embeddings=config.flag("tie_word_embeddings", True),
            activation=read_activation(config, "activation_function", "gelu_new"),
            rotary=None,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            gated_mlp=False,
            dtype=read_dtype(config),
        )

    def make_entry(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> None:
        self.positions = Embedding(weights, context, "transformer.wpe.weight", spec.max_position_embeddings,
                                   spec.hidden_size)

    def enter(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return hidden + self.positions(positions)
