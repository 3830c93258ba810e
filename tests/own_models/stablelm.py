"""StableLM 2 as a user would add it. It has layer norms, and rotates a part of each head, by default a quarter.

Source   the StableLM 2 technical report (arXiv 2402.17834); checkpoints as transformers saves StableLmForCausalLM.
"""

import torch

from batch_manager import (
    Attention,
    Embedding,
    Fields,
    GatedMlp,
    Head,
    LayerContext,
    LayerNorm,
    Linear,
    ModelSpec,
    Rotary,
    Weights,
    read_decoder_spec,
)


class StableLm:
    """A user's model class for checkpoints with the architecture StableLmForCausalLM."""

    deterministic = True
    harmless_tensors = ()

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        if config.flag("qk_layernorm", False):
            raise config.fault("qk_layernorm", "false")
        return read_decoder_spec(
            config, architecture, windows=(None,) * config.count("num_hidden_layers", maximum=4096),
            qkv_bias=config.flag("use_qkv_bias", False), norm_epsilon="layer_norm_eps", partial_rotary_factor=0.25,
            max_positions=4096, default_norm_epsilon=1e-5, default_theta=10000.0)

    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> None:
        self.embedding = Embedding(weights, context, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.layers = [_Layer(spec, weights, context, index) for index in range(spec.num_layers)]
        self.norm = LayerNorm(weights, context, "model.norm", spec.hidden_size, spec.norm_epsilon)
        self.head = Head(weights, context, "lm_head.weight", spec.vocab_size, spec.hidden_size,
                         tied_to=self.embedding if spec.tie_word_embeddings else None)
        self.rotary = Rotary(context, spec.rotary, spec.rotary_size, spec.max_position_embeddings)

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
        name, size, epsilon = f"model.layers.{index}", spec.hidden_size, spec.norm_epsilon
        self.index, self.head_size = index, spec.head_size
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.input_norm = LayerNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size, spec.qkv_sizes,
                          bias=spec.qkv_bias, split="columns")
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], split="rows")
        self.mlp_norm = LayerNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))
