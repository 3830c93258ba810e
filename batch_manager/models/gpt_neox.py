"""GPT-NeoX, Pythia: LayerNorm, partial rotary positions, parallel attention and MLP, an ungated MLP.

Source   "GPT-NeoX-20B" (arXiv 2204.06745), "Pythia" (2304.01373); checkpoints of transformers' GPTNeoXForCausalLM.
"""

from dataclasses import dataclass

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import Mlp
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder, Names
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, refuse_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class GptNeoXSpec(ModelSpec):
    """The spec of GPT-NeoX models.

    is_parallel   whether attention and the MLP read the same hidden states; otherwise the MLP follows attention
    """

    is_parallel: bool


class _Layer:
    def __init__(self, spec: GptNeoXSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index, self.is_parallel = index, spec.is_parallel
        self.heads, self.head_size = [spec.num_heads] * 3, spec.head_size
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.attention_norm = LayerNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        # The file orders the rows by head. Each head has its query, key and value.
        self.qkv = Linear(weights, context, [f"{name}.attention.query_key_value"], size, spec.qkv_sizes,
                          bias=spec.qkv_bias, split="heads", by_head=spec.num_heads)
        self.out = Linear(weights, context, [f"{name}.attention.dense"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.mlp_norm = LayerNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = Mlp(weights, context, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h", size,
                       spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        attended = attention.run(self.index, query, key, value, rotary)
        if self.is_parallel:
            normed = self.mlp_norm(hidden)             # before add_to, which can overwrite `hidden`
            return self.mlp.add_to(self.out.add_to(hidden, attended), normed)
        hidden = self.out.add_to(hidden, attended)
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class GptNeoX(Decoder):
    """Implements GPTNeoXForCausalLM of transformers."""

    layer = _Layer
    names = Names("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out")
    last_norm = LayerNorm
    harmless_tensors = (r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> GptNeoXSpec:
        num_layers, bias = layer_count(config), config.flag("attention_bias", True)
        refuse_windows(config, num_layers)
        # Drop fields that this family does not have; transformers ignores them too.
        kept = {name: value for name, value in config.values.items()
                if name not in ("num_key_value_heads", "rope_theta", "partial_rotary_factor")}
        if "head_dim" in config:
            raise config.fault("head_dim", "no value, because heads have hidden_size / num_attention_heads entries")
        return read_decoder_spec(
            config.replaced(kept), architecture, windows=(None,) * num_layers, qkv_bias=bias, out_bias=bias,
            mlp_bias=True, gated_mlp=False, default_activation="gelu", norm_epsilon="layer_norm_eps",
            default_norm_epsilon=1e-5, default_theta=config.number("rotary_emb_base", 10000.0),
            partial_rotary_factor=config.number("rotary_pct", 0.25), max_positions=2048, spec_class=GptNeoXSpec,
            is_parallel=config.flag("use_parallel_residual", True))
