"""GPT-J: parallel attention and MLP, an ungated MLP, partial rotary positions with interleaved pairs.

Source   "GPT-J-6B" (EleutherAI, 2021); checkpoints of transformers' GPTJForCausalLM.
"""

import torch

from ..attention.interface import Attention, LayerAttention
from ..layers.context import LayerContext
from ..layers.embedding import Head
from ..layers.linear import Linear
from ..layers.mlp import Mlp
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotary, RotaryParameters, half_split_rows
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


class _Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        size = spec.hidden_size
        self.index, self.head_size, self.heads = index, spec.head_size, [spec.num_heads] * 3
        self.input_norm = LayerNorm(weights, context, f"{name}.ln_1", size, spec.norm_epsilon)
        self.qkv = Linear(weights, context, [f"{name}.attn.{part}_proj" for part in "qkv"], size, spec.qkv_sizes,
                          split="heads", row_order=half_split_rows(
                              2 * spec.num_heads, spec.num_heads, spec.head_size, spec.rotary_size, context.device))
        self.out = Linear(weights, context, [f"{name}.attn.out_proj"], spec.qkv_sizes[0], [size], split="rows")
        self.mlp = Mlp(weights, context, f"{name}.mlp.fc_in", f"{name}.mlp.fc_out", size, spec.intermediate_size,
                       spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        normed = self.input_norm(hidden)
        qkv = self.qkv(normed).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, normed)


class GptJ(Decoder):
    """Implements GPTJForCausalLM of transformers."""

    layer = _Layer
    names = Names("transformer.wte", "transformer.h", "transformer.ln_f")
    last_norm = LayerNorm
    harmless_tensors = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        for name, alias in (("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"),
                            ("n_embd", "hidden_size"), ("n_positions", "max_position_embeddings")):
            if alias in config:
                raise config.fault(alias, f"no value, because this architecture uses the name {name}")
        num_layers = layer_count(config, "n_layer")
        refuse_windows(config, num_layers)
        refuse_rope_scaling(config)
        num_heads = config.count("n_head", maximum=MAX_HEADS)
        hidden_size = config.count("n_embd", maximum=MAX_WIDTH)
        head_size = even_share(config, "n_embd", hidden_size, num_heads)
        rotary_size = config.count("rotary_dim") if "rotary_dim" in config.values else 64      # null is refused
        if rotary_size % 2 or rotary_size > head_size:
            raise config.fault("rotary_dim", f"an even number, at most the head size, {head_size}")
        return ModelSpec(
            architecture=architecture,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=head_size,
            hidden_size=hidden_size,
            intermediate_size=config.count("n_inner", 4 * hidden_size, maximum=4 * MAX_WIDTH),
            vocab_size=config.count("vocab_size", maximum=MAX_VOCAB),
            max_position_embeddings=config.count("n_positions", 2048, maximum=MAX_POSITIONS),
            attention=(LayerAttention(scale=head_size**-0.5),) * num_layers,
            norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            activation=read_activation(config, "activation_function", "gelu_new"),
            rotary=RotaryParameters(),
            rotary_size=rotary_size,
            mlp_bias=True,
            gated_mlp=False,
            dtype=read_dtype(config),
        )

    def make_head(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, bias=True)
