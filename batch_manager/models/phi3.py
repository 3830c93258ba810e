"""Phi-3, Phi-3.5, Phi-4: Mistral with fused projections and optional partial rotary positions.

Source   "Phi-3" (arXiv 2404.14219); checkpoints of transformers' Phi3ForCausalLM.
"""

from ..weights.json_file import Fields
from .decoder import Decoder
from .layer import Layer, LayerNames
from .spec import ModelSpec
from .spec_reading import read_decoder_spec, read_uniform_windows


class _Layer(Layer):
    names = LayerNames(qkv=("self_attn.qkv_proj",), expand=("mlp.gate_up_proj",))


class Phi3(Decoder):
    """Implements Phi3ForCausalLM of transformers."""

    layer = _Layer
    understands = ("original_max_position_embeddings",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        windows = read_uniform_windows(config, config.count("sliding_window", None))
        return read_decoder_spec(_with_longrope(config), architecture, windows=windows,
                                 partial_rotary_factor=1.0, max_positions=4096, default_norm_epsilon=1e-5,
                                 default_theta=10000.0)


def _with_longrope(config: Fields) -> Fields:
    """Return the configuration with the current name of longrope, and with its defaults.

    Early files call longrope "su". The default of `original_max_position_embeddings` is 4096.
    """
    values = dict(config.values)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.fields(name, Fields({}, config.where))
        kind = rope.text("rope_type", rope.text("type", "default"))
        if kind not in ("default", "longrope", *(["su"] if name == "rope_scaling" else [])):
            raise rope.fault("rope_type" if "rope_type" in rope else "type", "longrope or default")
        if rope.values:
            values[name] = {**rope.values, "rope_type": "default" if kind == "default" else "longrope"}
            values[name].pop("type", None)
    if "original_max_position_embeddings" not in config:
        values["original_max_position_embeddings"] = 4096
    return config.replaced(values)
