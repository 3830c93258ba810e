"""OPT: learned positions with an offset of two rows, ReLU, norms before or after attention and MLP.

Source   "OPT: Open Pre-trained Transformer Language Models" (arXiv 2205.01068); checkpoints of transformers'
         OPTForCausalLM.
"""

from dataclasses import dataclass, replace

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.embedding import Embedding, Head
from ..layers.linear import Linear
from ..layers.norm import LayerNorm
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder, Names
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import MAX_WIDTH, read_activation, read_multi_head_spec

POSITION_OFFSET = 2      # unused rows at the start of the position table, inherited from fairseq
EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class OptSpec(ModelSpec):
    """The spec of OPT models.

    embedding_size       width of the embedding. If it differs from the hidden size, one matrix maps embeddings to the
                         hidden size, and another maps hidden states back before the head
    norms_first          whether norms come before attention and the MLP; otherwise after the residual sums
    has_last_norm        whether there is a norm after the last layer
    norms_have_weights   whether norms have weights and biases
    """

    embedding_size: int
    norms_first: bool
    has_last_norm: bool
    norms_have_weights: bool

    @property
    def num_weights(self) -> int:
        tables = self.vocab_size * (1 if self.tie_word_embeddings else 2) * (self.embedding_size - self.hidden_size)
        maps = 0 if self.embedding_size == self.hidden_size else 2 * self.embedding_size * self.hidden_size
        return ModelSpec.num_weights.fget(self) + tables + maps + POSITION_OFFSET * self.hidden_size


def _norm(spec: OptSpec, weights: Weights, context: LayerContext, name: str) -> LayerNorm:
    return LayerNorm(weights, context, name, spec.hidden_size, spec.norm_epsilon, bias=spec.norms_have_weights,
                     weight=spec.norms_have_weights)


class _Layer(Layer):
    names = LayerNames("self_attn_layer_norm", out="self_attn.out_proj", mlp_norm="final_layer_norm", expand=("fc1",),
                       down="fc2")

    def make_norm(self, spec: OptSpec, weights: Weights, context: LayerContext, name: str) -> LayerNorm:
        return _norm(spec, weights, context, name)

    def __call__(self, hidden: torch.Tensor, rotary: None, attention: Attention) -> torch.Tensor:
        if self.spec.norms_first:
            return super().__call__(hidden, rotary, attention)
        hidden = self.input_norm(self.out.add_to(hidden, self.attended(hidden, rotary, attention)))
        return self.mlp_norm(self.mlp.add_to(hidden, hidden))


class Opt(Decoder):
    """Implements OPTForCausalLM of transformers."""

    layer = _Layer
    names = Names("model.decoder.embed_tokens", "model.decoder.layers", "model.decoder.final_layer_norm")
    harmless_tensors = ()
    understands = ("_remove_final_layer_norm",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> OptSpec:
        hidden_size = config.count("hidden_size", maximum=MAX_WIDTH)
        bias, norms_first = config.flag("enable_bias", True), config.flag("do_layer_norm_before", True)
        return read_multi_head_spec(
            config, architecture, hidden_size=hidden_size, max_positions=2048,
            intermediate_size=config.count("ffn_dim", maximum=4 * MAX_WIDTH), norm_epsilon=EPSILON,
            activation=read_activation(config, "activation_function", "relu"), qkv_bias=bias, out_bias=bias,
            mlp_bias=bias, spec_class=OptSpec,
            embedding_size=config.count("word_embed_proj_dim", hidden_size, maximum=MAX_WIDTH),
            norms_first=norms_first,
            has_last_norm=norms_first and not config.flag("_remove_final_layer_norm", False),
            norms_have_weights=config.flag("layer_norm_elementwise_affine", True))

    def make_embedding(self, spec: OptSpec, weights: Weights, context: LayerContext) -> Embedding:
        return super().make_embedding(replace(spec, hidden_size=spec.embedding_size), weights, context)

    def make_entry(self, spec: OptSpec, weights: Weights, context: LayerContext) -> None:
        size, inner, self.project_in = spec.hidden_size, spec.embedding_size, None
        self.positions = Embedding(weights, context, "model.decoder.embed_positions.weight",
                                   spec.max_position_embeddings, size, first_row=POSITION_OFFSET)
        if inner != size:
            self.project_in = Linear(weights, context, ["model.decoder.project_in"], inner, [size])

    def make_norm(self, spec: OptSpec, weights: Weights, context: LayerContext) -> LayerNorm | None:
        return _norm(spec, weights, context, self.names.norm) if spec.has_last_norm else None

    def make_head(self, spec: OptSpec, weights: Weights, context: LayerContext) -> Head:
        size, inner, self.project_out = spec.hidden_size, spec.embedding_size, None
        if inner != size:
            self.project_out = Linear(weights, context, ["model.decoder.project_out"], size, [inner])
        return super().make_head(replace(spec, hidden_size=inner), weights, context)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, mapped to the hidden size. Rows of a prompt-tuning table must have the hidden size."""
        rows = self.embedding(token_ids)
        return rows if self.project_in is None else self.project_in(rows)

    def enter(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return hidden + self.positions(positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden if self.project_out is None else self.project_out(hidden))
