"""GPT-2: LayerNorm, learned positions, an ungated MLP.

Source   "Language Models are Unsupervised Multitask Learners", 2019; checkpoints of transformers' GPT2LMHeadModel.
"""

import torch

from ..layers.context import LayerContext
from ..layers.embedding import Embedding
from ..layers.norm import LayerNorm
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder, Names
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import MAX_WIDTH, read_activation, read_multi_head_spec

# Aliases of four fields. As in transformers, the alias takes precedence.
_ALIASES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
            "n_positions": "max_position_embeddings"}


class _Layer(Layer):
    names = LayerNames("ln_1", ("attn.c_attn",), "attn.c_proj", "ln_2", ("mlp.c_fc",), "mlp.c_proj")
    norm = LayerNorm
    transposed = True


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
        hidden_size = config.count(names["n_embd"], maximum=MAX_WIDTH)
        return read_multi_head_spec(
            config, architecture, hidden_size=hidden_size, width=names["n_embd"], layers=names["n_layer"],
            heads=names["n_head"], positions=names["n_positions"], max_positions=1024,
            intermediate_size=config.count("n_inner", 4 * hidden_size, maximum=4 * MAX_WIDTH),
            norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
            activation=read_activation(config, "activation_function", "gelu_new"), qkv_bias=True, out_bias=True,
            mlp_bias=True)

    def make_entry(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> None:
        self.positions = Embedding(weights, context, "transformer.wpe.weight", spec.max_position_embeddings,
                                   spec.hidden_size)

    def enter(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return hidden + self.positions(positions)
