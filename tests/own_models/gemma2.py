"""Gemma 2 as a user would add it: one file that imports only public names of batch_manager.

A layer has norms before and after its attention, and before and after its MLP. The weight of a norm is its factor minus
one. Attention has a sliding window in every other layer, soft-capped scores and a configured scale. Embeddings are
scaled, and logits are soft-capped.

Source   "Gemma 2" (arXiv 2408.00118); checkpoints as transformers saves Gemma2ForCausalLM.
"""

from dataclasses import dataclass

import torch

from batch_manager import (
    Attention,
    Embedding,
    Fields,
    GatedMlp,
    Head,
    LayerContext,
    Linear,
    ModelSpec,
    RmsNorm,
    Rotary,
    Weights,
    read_decoder_spec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Spec(ModelSpec):
    """logits_softcap   soft cap of the logits; None for no cap"""

    logits_softcap: float | None


class Gemma2:
    """A user's model class for checkpoints with the architecture Gemma2ForCausalLM."""

    deterministic = True
    harmless_tensors = ()

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> Gemma2Spec:
        def cap(name: str, default: float) -> float | None:
            return config.number(name, None if name in config.values else default)

        num_layers = config.count("num_hidden_layers", 26, maximum=4096)
        window = config.count("sliding_window", None if "sliding_window" in config.values else 4096)
        kinds = config.texts("layer_types", ["sliding_attention", "full_attention"] * num_layers)[:num_layers]
        if not set(kinds) <= {"sliding_attention", "full_attention"} or len(kinds) < num_layers:
            raise config.fault("layer_types", "sliding_attention or full_attention for each layer")
        return read_decoder_spec(
            config, architecture, spec_class=Gemma2Spec,
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
            scale=config.number("query_pre_attn_scalar", 256) ** -0.5, softcap=cap("attn_logit_softcapping", 50.0),
            qkv_bias=config.flag("attention_bias", False), out_bias=config.flag("attention_bias", False),
            activation="hidden_activation", default_activation="gelu_pytorch_tanh", head_size=256, num_kv_heads=4,
            tie_word_embeddings=True, max_positions=8192, default_norm_epsilon=1e-6, default_theta=10000.0,
            logits_softcap=cap("final_logit_softcapping", 30.0))

    def __init__(self, spec: Gemma2Spec, weights: Weights, context: LayerContext) -> None:
        self.embedding = Embedding(weights, context, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size,
                                   scale=spec.hidden_size**0.5)
        self.layers = [_Layer(spec, weights, context, index) for index in range(spec.num_layers)]
        self.norm = RmsNorm(weights, context, "model.norm", spec.hidden_size, spec.norm_epsilon, weight_offset=1.0)
        self.head = Head(weights, context, "lm_head.weight", spec.vocab_size, spec.hidden_size,
                         tied_to=self.embedding if spec.tie_word_embeddings else None, softcap=spec.logits_softcap)
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
    def __init__(self, spec: Gemma2Spec, weights: Weights, context: LayerContext, index: int) -> None:
        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights, context, f"model.layers.{index}.{name}_layernorm", spec.hidden_size,
                           spec.norm_epsilon, weight_offset=1.0)

        name = f"model.layers.{index}"
        self.index, self.head_size = index, spec.head_size
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.norms = [norm("input"), norm("post_attention"), norm("pre_feedforward"), norm("post_feedforward")]
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], spec.hidden_size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="columns")
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [spec.hidden_size],
                          bias=spec.out_bias, split="rows")
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", spec.hidden_size, spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        qkv = self.qkv(before_attention(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = hidden + after_attention(self.out(attention.run(self.index, query, key, value, rotary)))
        return hidden + after_mlp(self.mlp(before_mlp(hidden)))
