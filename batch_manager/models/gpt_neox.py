"""GPT-NeoX, Pythia: LayerNorm, partial rotary positions, parallel attention and MLP, an ungated MLP.

Source   "GPT-NeoX-20B" (arXiv 2204.06745), "Pythia" (2304.01373); checkpoints of transformers' GPTNeoXForCausalLM.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from .decoder import Decoder, Names
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import read_decoder_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class GptNeoXSpec(ModelSpec):
    """The spec of GPT-NeoX models.

    is_parallel   whether attention and the MLP read the same hidden states; otherwise the MLP follows attention
    """

    is_parallel: bool


class _Layer(Layer):
    names = LayerNames(qkv=("attention.query_key_value",), out="attention.dense", expand=("mlp.dense_h_to_4h",),
                       down="mlp.dense_4h_to_h")
    norm = LayerNorm

    def order_of_heads(self, spec: GptNeoXSpec, context: LayerContext) -> dict[str, Any]:
        """The file orders the rows by head. Each head has its query, key and value."""
        return {"by_head": spec.num_heads}

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        if not self.spec.is_parallel:
            return super().__call__(hidden, rotary, attention)
        attended = self.attended(self.input_norm(hidden), rotary, attention)
        normed = self.mlp_norm(hidden)                 # before add_to, which can overwrite `hidden`
        return self.mlp.add_to(self.out.add_to(hidden, attended), normed)


class GptNeoX(Decoder):
    """Implements GPTNeoXForCausalLM of transformers."""

    layer = _Layer
    names = Names("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out")
    last_norm = LayerNorm
    harmless_tensors = (r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> GptNeoXSpec:
        bias = config.flag("attention_bias", True)
        # Drop fields that this family does not have; transformers ignores them too.
        kept = {name: value for name, value in config.values.items()
                if name not in ("num_key_value_heads", "rope_theta", "partial_rotary_factor")}
        if "head_dim" in config:
            raise config.fault("head_dim", "no value, because heads have hidden_size / num_attention_heads entries")
        return read_decoder_spec(
            config.replaced(kept), architecture, qkv_bias=bias, out_bias=bias,
            mlp_bias=True, gated_mlp=False, default_activation="gelu", norm_epsilon="layer_norm_eps",
            default_norm_epsilon=1e-5, default_theta=config.number("rotary_emb_base", 10000.0),
            partial_rotary_factor=config.number("rotary_pct", 0.25), max_positions=2048, spec_class=GptNeoXSpec,
            is_parallel=config.flag("use_parallel_residual", True))
