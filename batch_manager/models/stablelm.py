"""StableLM: Llama with LayerNorm and partial rotary positions; attention and MLP can be parallel.

Source   "Stable LM 2 1.6B" (arXiv 2402.17834); checkpoints of transformers' StableLmForCausalLM.
"""

from dataclasses import dataclass, replace

from ..layers.context import LayerContext
from ..layers.norm import HeadLayerNorm, LayerNorm, QueryKeyNorms
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import read_decoder_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLmSpec(ModelSpec):
    """The spec of StableLM models.

    is_parallel   whether attention and the MLP read the same normed hidden states; otherwise the MLP follows attention
    """

    is_parallel: bool


class _Layer(Layer):
    norm = LayerNorm

    def names_of(self, spec: StableLmSpec) -> LayerNames:
        return replace(self.names, mlp_norm="") if spec.is_parallel else self.names

    def make_head_norms(self, spec: StableLmSpec, weights: Weights, context: LayerContext,
                        name: str) -> QueryKeyNorms | None:
        if not spec.qk_norm:
            return None
        return QueryKeyNorms(*(HeadLayerNorm(
            weights, context, [(f"{name}.{part}_layernorm.norms.{head}.weight", (spec.head_size,))
                               for head in range(count * context.split.size // copies)], count, spec.head_size,
            spec.norm_epsilon, copies=copies)
            for part, count, copies in (("q", spec.num_heads, 1), ("k", spec.num_kv_heads, spec.kv_copies))))


class StableLm(Decoder):
    """Implements StableLmForCausalLM of transformers."""

    layer = _Layer
    last_norm = LayerNorm

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> StableLmSpec:
        if "head_dim" in config:
            raise config.fault("head_dim", "no value, because heads have hidden_size / num_attention_heads entries")
        return read_decoder_spec(
            config, architecture, qkv_bias=config.flag("use_qkv_bias", False), num_kv_heads=32, max_positions=4096,
            norm_epsilon="layer_norm_eps", default_norm_epsilon=1e-5,
            default_theta=10000.0, qk_norm=config.flag("qk_layernorm", False),
            partial_rotary_factor=0.25, spec_class=StableLmSpec,
            is_parallel=config.flag("use_parallel_residual", False))
