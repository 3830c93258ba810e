"""The model class that runs a model of transformers in the engine."""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ...attention.interface import Attention
from ...errors import UnsupportedModelError, counted
from ...layers.context import LayerContext
from ...weights.json_file import Fields, shown
from ...weights.source import Weights
from ..spec import ModelSpec
from ..spec_reading import read_dtype
from .attention_function import DISCOVERING, RUNNING, RunningStep, in_step, register
from .configuration import make_configuration, most_positions, refuse_untested_kinds
from .discovery import DiscoveredLayer, discover
from .installed import ANOTHER_TYPE, first_words, transformers
from .load_check import refuse_different_logits
from .parameters import fill
from .skeleton import make_skeleton

ANY_POSITIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(ModelSpec):
    """The spec of a model of transformers, read before its parameters are loaded.

    where           the file that was read
    configuration   transformers' configuration object
    layers          how each layer attends, in order
    parameters      number of elements in all parameters
    """

    where: str
    configuration: Any
    layers: tuple[DiscoveredLayer, ...]
    parameters: int

    @property
    def num_weights(self) -> int:
        return self.parameters


class TransformersModel:
    """A decoder of transformers, run with the engine's attention and KV cache. PROVEN lists the possible model types.

    Each layer calls the engine's attention in place of transformers' attention. Nothing else is replaced. The
    constructor computes prompts with both attentions and refuses the model if the logits differ. Rows of a
    prompt-tuning table correspond to transformers' `inputs_embeds`.

    Raises   ModelLoadError, or UnsupportedModelError for a model that the engine's attention does not support
    """

    harmless_tensors: tuple[str, ...] = (r".*\.inv_freq",)

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> TransformersSpec:
        register(transformers())
        configuration = make_configuration(config, config.text("model_type"))
        refuse_untested_kinds(configuration, config.where)
        positions = most_positions(configuration, config.where)
        # Eager experts run one by one, so none runs on "meta". Other implementations multiply all experts, which fails.
        model = make_skeleton(configuration, architecture, config.where, DISCOVERING, experts="eager")
        _check_tokens(model, configuration, config.where)
        layers = discover(model, _base_of(model, config.where), configuration.hidden_size, positions or ANY_POSITIONS,
                          config.where)
        if positions is None:
            raise config.missing("max_position_embeddings", "the number of positions that the model can run",
                                 "add it to the file")
        _check_tables_and_logits(model, configuration, positions, config.where)
        heads, kv_heads, head_size = layers[0].sizes
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return TransformersSpec(
            architecture=architecture, num_layers=len(layers), num_heads=heads, num_kv_heads=kv_heads,
            head_size=head_size, hidden_size=configuration.hidden_size, intermediate_size=_widest(model),
            vocab_size=configuration.vocab_size, max_position_embeddings=positions,
            attention=tuple(layer.attention for layer in layers), norm_epsilon=1e-5,
            tie_word_embeddings=bool(model.all_tied_weights_keys), activation="transformers", rotary=None,
            dtype=read_dtype(config), where=config.where, configuration=configuration, layers=layers,
            parameters=parameters)

    def __init__(self, spec: TransformersSpec, weights: Weights, context: LayerContext) -> None:
        configuration = copy.deepcopy(spec.configuration)
        model = make_skeleton(configuration, spec.architecture, spec.where, RUNNING)
        fill(model, weights, context.device, context.dtype, spec.where)
        self.harmless_tensors = (*self.harmless_tensors, *(
            f".*(?:{pattern}).*" for pattern in model._keys_to_ignore_on_load_unexpected or ()))
        modules = dict(model.named_modules())
        self._layers = {id(modules[layer.module]): (index, layer.score_arguments)
                        for index, layer in enumerate(spec.layers)}
        self._base = _base_of(model, spec.where)
        self._embedding = model.get_input_embeddings()
        self._head = _Head(model, self._base)
        refuse_different_logits(self, model, spec, context)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(token_ids[None])[0]

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        with in_step(RunningStep(self._layers, attention)):
            return self._base(inputs_embeds=hidden.unsqueeze(0), position_ids=positions.unsqueeze(0),
                              use_cache=False)[0][0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)


class _Head:
    """Computes logits from hidden states.

    Runs the model's own forward with a stand-in for the base model. The stand-in returns the hidden states.
    """

    def __init__(self, model: Any, base: Any) -> None:
        self._model = copy.copy(model)
        names = [name for name, module in model._modules.items() if module is not None
                 and (module is base or base in module.modules())]
        self._model.__dict__["_modules"] = {**model._modules, **dict.fromkeys(names, _StandIn())}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [r, vocab] of hidden states [r, hidden size]."""
        return self._model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]


class _StandIn(torch.nn.Module):
    """Replaces a base model, or the decoder in a base model. `forward` returns its input embeddings unchanged."""

    @property
    def decoder(self) -> "_StandIn":
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> "_StandInOutput":
        return _StandInOutput(inputs_embeds)


class _StandInOutput:
    """The output of a base model, with hidden states only; all other attributes are None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _base_of(model: Any, where: str) -> Any:
    """Return the part of a model that computes hidden states."""
    base = model.base_model
    if base is model:                              # the model's base_model_prefix belongs to a larger model
        base = getattr(model, "model", model)
    if base is model or not isinstance(base, torch.nn.Module):
        raise UnsupportedModelError(f"{where}: {type(model).__name__} has no base model that computes hidden states",
                                    "expected a base model and a head", ANOTHER_TYPE)
    return base


def _check_tokens(model: Any, configuration: Any, where: str) -> None:
    """Raise UnsupportedModelError unless the embedding is [vocab_size, hidden_size]. In OPT-350m it is narrower."""
    tokens = model.get_input_embeddings()
    sizes = tuple(getattr(getattr(tokens, "weight", None), "shape", ()))
    if sizes != (configuration.vocab_size, configuration.hidden_size):
        raise UnsupportedModelError(f"{where}: the embedding of {type(model).__name__} has shape {shown(list(sizes))}",
                                    f"expected [vocab_size, hidden_size], which is [{configuration.vocab_size}, "
                                    f"{configuration.hidden_size}]",
                                    f"leave model_implementation out, or {ANOTHER_TYPE}")


def _check_tables_and_logits(model: Any, configuration: Any, positions: int, where: str) -> None:
    """Raise UnsupportedModelError for a position table with too few rows, or logits that are not [1, vocab_size]."""
    tokens = model.get_input_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and module is not tokens and module.num_embeddings < positions and (
                "pos" in name.lower() or "wpe" in name):
            raise UnsupportedModelError(f"{where}: {name} has {counted(module.num_embeddings, 'row')}",
                                        f"expected {positions:,}, one for each position",
                                        ANOTHER_TYPE)
    hidden = torch.empty(1, configuration.hidden_size, dtype=torch.float32, device="meta")
    try:
        with torch.inference_mode():
            logits = _Head(model, _base_of(model, where))(hidden)
    except Exception as fault:
        raise UnsupportedModelError(f"{where}: {type(model).__name__} cannot compute logits from hidden states alone "
                                    f"({first_words(fault)})", "expected a base model and a head",
                                    ANOTHER_TYPE) from None
    if logits.shape != (1, configuration.vocab_size):
        raise UnsupportedModelError(f"{where}: {type(model).__name__} computes logits of shape {list(logits.shape)} "
                                    "for one token",
                                    f"expected [1, {configuration.vocab_size}], where the last size is vocab_size",
                                    ANOTHER_TYPE)


def _widest(model: Any) -> int:
    """Return the size per token of the widest intermediate result in a layer, in elements.

    The estimate of a step's memory uses this size.
    """
    head = model.get_output_embeddings()
    widths = [max(module.weight.shape) for module in model.modules() if module is not head
              and isinstance(getattr(module, "weight", None), torch.Tensor) and module.weight.dim() == 2
              and not isinstance(module, torch.nn.Embedding)]
    experts = [parameter.shape[-2] * max(1, _experts_of_a_token(model)) for parameter in model.parameters()
               if parameter.dim() == 3]
    return max([1, *widths, *experts])


def _experts_of_a_token(model: Any) -> int:
    for name in ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "num_experts_per_token"):
        count = getattr(model.config, name, None)
        if type(count) is int and 0 < count < 1024:
            return count
    return 8
