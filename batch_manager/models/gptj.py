"""GPT-J: parallel attention and MLP, an ungated MLP, partial rotary positions with interleaved pairs.

Source   "GPT-J-6B" (EleutherAI, 2021); checkpoints of transformers' GPTJForCausalLM.
"""

from typing import Any

from ..layers.context import LayerContext
from ..layers.embedding import Head
from ..layers.norm import LayerNorm
from ..layers.rotary import RotaryParameters, half_split_rows
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder, Names
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import MAX_WIDTH, read_activation, read_multi_head_spec


class _Layer(Layer):
    names = LayerNames("ln_1", ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.out_proj", "", ("mlp.fc_in",),
                       "mlp.fc_out")
    norm = LayerNorm

    def order_of_heads(self, spec: ModelSpec, context: LayerContext) -> dict[str, Any]:
        return {"row_order": half_split_rows(2 * spec.num_heads, spec.num_heads, spec.head_size, spec.rotary_size)}


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
        hidden_size = config.count("n_embd", maximum=MAX_WIDTH)
        rotary_size = config.count("rotary_dim") if "rotary_dim" in config.values else 64      # null is refused
        spec = read_multi_head_spec(
            config, architecture, hidden_size=hidden_size, width="n_embd", layers="n_layer", heads="n_head",
            positions="n_positions", max_positions=2048, tie_word_embeddings=False, rotary=RotaryParameters(),
            rotary_size=rotary_size, intermediate_size=config.count("n_inner", 4 * hidden_size, maximum=4 * MAX_WIDTH),
            norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
            activation=read_activation(config, "activation_function", "gelu_new"), mlp_bias=True)
        if rotary_size % 2 or rotary_size > spec.head_size:
            raise config.fault("rotary_dim", f"an even number, at most the head size, {spec.head_size}")
        return spec

    def make_head(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, bias=True)
