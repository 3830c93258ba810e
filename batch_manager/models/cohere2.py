"""Command-R7B, Command A (Cohere 2): Cohere with sliding windows and rotary positions. Every fourth layer has neither.

Source   "Command A" (arXiv 2504.00698); checkpoints of transformers' Cohere2ForCausalLM.
"""

from dataclasses import dataclass

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.embedding import Embedding, Head
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotary, half_split_rows
from ..weights.json_file import Fields
from ..weights.source import Weights
from .spec import ModelSpec
from .spec_reading import read_alternating_windows, read_decoder_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohere2Spec(ModelSpec):
    """The spec of Cohere 2 models.

    slides        for each layer: whether it has a window and rotary positions; otherwise it has neither
    logit_scale   factor by which the logits are multiplied
    """

    slides: tuple[bool, ...]
    logit_scale: float


class Cohere2:
    """Implements Cohere2ForCausalLM of transformers."""

    deterministic = True
    harmless_tensors = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
    understands = ("logit_scale", "sliding_window", "layer_types")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> Cohere2Spec:
        windows = read_alternating_windows(config, config.count("sliding_window_pattern", 4))
        bias = config.flag("attention_bias", False)
        spec = read_decoder_spec(
            config, architecture, windows=windows, qkv_bias=bias, out_bias=bias,
            max_positions=8192, tie_word_embeddings=True, norm_epsilon="layer_norm_eps", default_norm_epsilon=1e-5,
            default_theta=10000.0, spec_class=Cohere2Spec, logit_scale=config.number("logit_scale", 0.0625),
            slides=tuple(window is not None for window in windows))
        if spec.head_size * spec.num_heads != spec.hidden_size:
            raise config.fault("head_dim", "hidden_size / num_attention_heads, or no value")
        return spec

    def __init__(self, spec: Cohere2Spec, weights: Weights, context: LayerContext) -> None:
        self.embedding = Embedding(weights, context, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.layers = [_Layer(spec, weights, context, index) for index in range(spec.num_layers)]
        self.norm = LayerNorm(weights, context, "model.norm", spec.hidden_size, spec.norm_epsilon, bias=False)
        self.head = Head(weights, context, "lm_head.weight", spec.vocab_size, spec.hidden_size, scale=spec.logit_scale,
                         tied_to=self.embedding if spec.tie_word_embeddings else None)
        self.rotary = Rotary(context, spec.rotary, spec.head_size, spec.max_position_embeddings)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(token_ids)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, self.rotary if layer.slides else None, attention)
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


class _Layer:
    def __init__(self, spec: Cohere2Spec, weights: Weights, context: LayerContext, index: int) -> None:
        name, size = f"model.layers.{index}", spec.hidden_size
        self.index, self.slides, self.head_size = index, spec.slides[index], spec.head_size
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.input_norm = LayerNorm(weights, context, f"{name}.input_layernorm", size, spec.norm_epsilon, bias=False)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="columns",
                          row_order=half_split_rows(spec.num_heads + spec.num_kv_heads, spec.num_kv_heads,
                                                    spec.head_size, spec.head_size, context.device))
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary | None, attention: Attention) -> torch.Tensor:
        normed = self.input_norm(hidden)
        qkv = self.qkv(normed).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, normed)
