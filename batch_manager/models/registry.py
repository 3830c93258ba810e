"""The registry of model classes by architecture."""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

import torch

from ..attention.interface import Attention
from ..errors import ConfigError, UnsupportedModelError
from ..layers.context import LayerContext
from ..weights.json_file import Fields, shown
from ..weights.source import Weights
from .class_check import refuse_wrong_class
from .spec import ModelSpec


class Model(Protocol):
    """The protocol of model classes. An object is one model on one device, used by one thread at a time.

    harmless_tensors   regular expressions for tensors that a checkpoint may contain but the model does not need, such
                       as "model.rotary.inv_freq"; an expression matches the whole name. A checkpoint with any other
                       tensor that `__init__` does not request is refused, with an error that names the tensor
    understands        optional. Fields of config.json that `read_spec` reads without a method of `config`, or not
                       in every file
    ignores            optional. Fields of config.json that change nothing about what this model computes. A checkpoint
                       is refused by name of the field if it has a field that `read_spec` does not read and that is in
                       neither list. Fields of no model's computation, such as "initializer_range", need no entry
    prompt_tuning_scale   optional; absent means 1. Factor by which the engine multiplies the embeddings of a
                       prompt-tuning table before they replace rows of the result of `embed`
    deterministic      optional; absent means False. True if the class computes only with layers of
                       batch_manager.layers, attention, and element-wise sums and products between them. If the
                       LayerContext is deterministic, a row's bits then depend on that row only
    has_stages         optional; absent means False. True if the constructor takes a `Stage` as its fourth argument, and
                       `per_layer` names the fields of the spec with an entry for each layer; see decoder.py
    """

    harmless_tensors: tuple[str, ...]
    understands: tuple[str, ...]
    ignores: tuple[str, ...]
    deterministic: bool

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        """Return the spec, parsed from config.json and checked. Raises ModelLoadError, which names file and field."""
        ...

    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> None:
        """Create the layers from `weights` and `context`.

        The layers must request every tensor of the checkpoint, except those that match `harmless_tensors`.
        """
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [T, hidden_size] with the embeddings of packed tokens [T] int64, without position terms.

        The engine can replace rows of this tensor before it calls `forward`.
        """
        ...

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Return the hidden states [T, hidden_size] after the last norm. May overwrite `hidden`.

        hidden      [T, hidden_size] from `embed`
        positions   [T] position of each token in its sequence
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [r, vocab_size] of hidden states [r, hidden_size], in float32 or the dtype of the weights."""
        ...


# Architecture -> (module and class of a shipped family, which is imported when it is first needed; its model type in
# transformers, which chooses the class by the model type).
_FAMILIES = {
    "GPT2LMHeadModel": ("gpt2", "Gpt2", "gpt2"),
    "BloomForCausalLM": ("bloom", "Bloom", "bloom"),
    "Cohere2ForCausalLM": ("cohere2", "Cohere2", "cohere2"),
    "CohereForCausalLM": ("cohere", "Cohere", "cohere"),
    "FalconForCausalLM": ("falcon", "Falcon", "falcon"),
    "GPTJForCausalLM": ("gptj", "GptJ", "gptj"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2", "gemma2"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3", "gemma3_text"),
    "GemmaForCausalLM": ("gemma", "Gemma", "gemma"),
    "GPTNeoXForCausalLM": ("gpt_neox", "GptNeoX", "gpt_neox"),
    "GraniteForCausalLM": ("granite", "Granite", "granite"),
    "GraniteMoeForCausalLM": ("mixtures", "GraniteMoe", "granitemoe"),
    "MixtralForCausalLM": ("mixtures", "Mixtral", "mixtral"),
    "Olmo2ForCausalLM": ("olmo2", "Olmo2", "olmo2"),
    "Olmo3ForCausalLM": ("olmo3", "Olmo3", "olmo3"),
    "OlmoeForCausalLM": ("mixtures", "Olmoe", "olmoe"),
    "OPTForCausalLM": ("opt", "Opt", "opt"),
    "Phi3ForCausalLM": ("phi3", "Phi3", "phi3"),
    "PhiForCausalLM": ("phi", "Phi", "phi"),
    "SmolLM3ForCausalLM": ("smollm3", "SmolLm3", "smollm3"),
    "StableLmForCausalLM": ("stablelm", "StableLm", "stablelm"),
    "Starcoder2ForCausalLM": ("starcoder2", "StarCoder2", "starcoder2"),
    "LlamaForCausalLM": ("llama", "Llama", "llama"),
    "MistralForCausalLM": ("mistral", "Mistral", "mistral"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2", "qwen2"),
    "Qwen2MoeForCausalLM": ("mixtures", "Qwen2Moe", "qwen2_moe"),
    "Qwen3MoeForCausalLM": ("mixtures", "Qwen3Moe", "qwen3_moe"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3", "qwen3"),
}
_SHIPPED = {architecture: (module, name) for architecture, (module, name, _) in _FAMILIES.items()}
_MODEL_TYPES = {architecture: model_type for architecture, (_, _, model_type) in _FAMILIES.items()}
_models: dict[str, type[Model] | tuple[str, str]] = dict(_SHIPPED)


def register_model(architecture: str, model_class: type[Model]) -> None:
    """Register `model_class`, which implements `Model`, for checkpoints whose config.json names `architecture`.

    Replaces the class registered before for `architecture`. Raises ConfigError if a member is missing or invalid.
    """
    if not isinstance(architecture, str) or not architecture:
        raise ConfigError(f"the architecture is {shown(architecture)}",
                          "expected a name, as in architectures of config.json",
                          "")
    refuse_wrong_class(model_class)
    _models[architecture] = model_class


def registered_names() -> dict[str, tuple[str, str]]:
    """Return architecture -> (module, name) of each class that `register_model` got, by which others can import it."""
    return {architecture: (found.__module__, found.__qualname__) for architecture, found in _models.items()
            if isinstance(found, type) and not is_shipped(architecture, found)}


def register_names(names: Mapping[str, tuple[str, str]]) -> None:
    """Register the classes of another process, a result of `registered_names`. Each is imported when it is needed."""
    _models.update(names)


def known_architectures() -> list[str]:
    return sorted(_models)


def find_model(architecture: str, named_by: str = "") -> type[Model]:
    """Return the class registered for `architecture`. Raises UnsupportedModelError.

    named_by   start of the error's message, which says where the name comes from
    """
    if architecture not in _models:
        raise UnsupportedModelError(
            f"{named_by}the architecture {shown(architecture)} is not known",
            f"expected one of {', '.join(known_architectures())}",
            "add it with register_model(architecture, model_class)")
    found = _models[architecture]
    if isinstance(found, type):
        return found
    module, name = found
    if found == _SHIPPED.get(architecture):
        _models[architecture] = getattr(import_module(f".{module}", __package__), name)
    else:
        try:
            _models[architecture] = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UnsupportedModelError(
                f"the class {module}.{name}, registered for {architecture}, cannot be imported here: {error}",
                "expected a class of a module that the engine process can import, not of __main__",
                "move it into a module, or start the engine with process=False") from error
    return _models[architecture]


def is_shipped(architecture: str, model_class: type[Model]) -> bool:
    """Whether `model_class` is this package's class for `architecture`."""
    module, name = _SHIPPED.get(architecture, ("", ""))
    return (model_class.__module__, model_class.__qualname__) == (f"{__package__}.{module}", name)


def model_type_of(architecture: str) -> str | None:
    """Return transformers' model type for an architecture of this package; None for any other architecture."""
    return _MODEL_TYPES.get(architecture)


def causal_class_of(name: str | None, model_type: str) -> str | None:
    """Return the architecture of this package for a file whose `architectures` is `name`; None if there is none.

    As in transformers, the model type decides if the file names no class, or a base model without a head.
    """
    if name in _models or name is not None and not name.endswith("Model"):
        return name
    return next((known for known, its_type in _MODEL_TYPES.items() if its_type == model_type), name)


def is_shipped_type(model_type: str) -> bool:
    """Whether `model_type` is the model type that transformers gives to an architecture of this package."""
    return model_type in _MODEL_TYPES.values()
