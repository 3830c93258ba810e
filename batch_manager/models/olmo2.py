"""OLMo 2: Llama with norms after attention and MLP instead of before, and queries and keys normed over all heads.

Source   "2 OLMo 2 Furious" (arXiv 2501.00656); checkpoints of transformers' Olmo2ForCausalLM.
"""

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.embedding import Embedding, Head
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import RmsNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, refuse_windows


class Olmo2:
    """Implements Olmo2ForCausalLM of transformers."""

    deterministic = True
    harmless_tensors = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        num_layers, bias = layer_count(config), config.flag("attention_bias", False)
        refuse_windows(config, num_layers)
        return read_decoder_spec(config, architecture, windows=(None,) * num_layers, qkv_bias=bias, out_bias=bias,
                                 qk_norm=True, max_positions=2048, default_norm_epsilon=1e-5, default_theta=10000.0)

    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> None:
        self.embedding = Embedding(weights, context, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.layers = [_Layer(spec, weights, context, index) for index in range(spec.num_layers)]
        self.norm = RmsNorm(weights, context, "model.norm", spec.hidden_size, spec.norm_epsilon)
        self.head = Head(weights, context, "lm_head.weight", spec.vocab_size, spec.hidden_size,
                         tied_to=self.embedding if spec.tie_word_embeddings else None)
        self.rotary = Rotary(context, spec.rotary, spec.head_size, spec.max_position_embeddings)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(token_ids)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, self.rotary, attention)
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


class _Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, index: int) -> None:
        name = f"model.layers.{index}"
        self.index = index
        self.head_size = spec.head_size
        self.sizes = spec.qkv_sizes
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="columns")
        self.query_norm = RmsNorm(weights, context, f"{name}.self_attn.q_norm", spec.qkv_sizes[0], epsilon)
        self.key_norm = RmsNorm(weights, context, f"{name}.self_attn.k_norm", spec.qkv_sizes[1], epsilon)
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.attention_norm = RmsNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)
        self.mlp_norm = RmsNorm(weights, context, f"{name}.post_feedforward_layernorm", size, epsilon)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        query, key, value = self.qkv(hidden).split_with_sizes(self.sizes, 1)
        query, key, value = (rows.view(len(hidden), -1, self.head_size)
                             for rows in (self.query_norm(query), self.key_norm(key), value))
        hidden = hidden + self.attention_norm(self.out(attention.run(self.index, query, key, value, rotary)))
        return hidden + self.mlp_norm(self.mlp(hidden))
