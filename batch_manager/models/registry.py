"""Which class runs which architecture."""

from importlib import import_module
from typing import Protocol

import torch

from ..attention.interface import Attention
from ..errors import ConfigError, UnsupportedModelError
from ..layers.context import LayerContext
from ..weights.json_file import Fields, shown
from ..weights.source import Weights
from .class_check import refuse_wrong_class
from .model_spec import ModelSpec


class Model(Protocol):
    """One model on one device. Used by one thread.

    harmless_tensors   regular expressions, each for the whole name of a tensor: tensors that a checkpoint may hold and
                       that the model does not need, such as "model.rotary.inv_freq". Any other tensor that
                       `__init__` does not take is refused by name. An empty tuple: there are none
    understands        may be left out. Fields of config.json that change what a model computes and that `read_spec`
                       reads, such as "sliding_window". Where a file says something with such a field that is not
                       neutral, and the class does not name it here, the file is refused by name; the fields are in the
                       tables of model_spec.py
    virtual_token_scale   may be left out. What rows that replace those of `embed` are multiplied with: a prompt-tuning
                       table holds what the embedding's own table does, before the model's factor
    deterministic      may be left out, which is False. True where all that the class does is done by layers of
                       batch_manager.layers, by attention, and by sums and products of single elements between them.
                       Then a row's bits depend on that row alone when the context is deterministic
    """

    harmless_tensors: tuple[str, ...]
    understands: tuple[str, ...]
    deterministic: bool

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        """Parse and check config.json. Raises ModelLoadError naming file and field."""
        ...

    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> None:
        """Make the layers, each from `weights` and `context`, and so take every tensor of the checkpoint."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Packed tokens [T] int64 -> a new tensor [T, hidden_size], what the first layer is given of them. Rows of it
        may be replaced before `forward`: whatever depends on positions is up to that."""
        ...

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """What `embed` gave and the positions [T] -> hidden states [T, hidden_size], after the last norm."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of hidden states [r, hidden_size] -> [r, vocab_size], float32 or in the dtype of the weights."""
        ...


# Classes by architecture; a shipped family is named by module and class and imported when it is asked for.
_SHIPPED = {
    "GPT2LMHeadModel": ("gpt2", "Gpt2"),
    "BloomForCausalLM": ("bloom", "Bloom"),
    "Cohere2ForCausalLM": ("cohere2", "Cohere2"),
    "CohereForCausalLM": ("cohere", "Cohere"),
    "FalconForCausalLM": ("falcon", "Falcon"),
    "GPTJForCausalLM": ("gptj", "GptJ"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3"),
    "GemmaForCausalLM": ("gemma", "Gemma"),
    "GPTNeoXForCausalLM": ("gpt_neox", "GptNeoX"),
    "GraniteForCausalLM": ("granite", "Granite"),
    "Olmo2ForCausalLM": ("olmo2", "Olmo2"),
    "Olmo3ForCausalLM": ("olmo3", "Olmo3"),
    "OPTForCausalLM": ("opt", "Opt"),
    "Phi3ForCausalLM": ("phi3", "Phi3"),
    "PhiForCausalLM": ("phi", "Phi"),
    "SmolLM3ForCausalLM": ("smollm3", "SmolLm3"),
    "StableLmForCausalLM": ("stablelm", "StableLm"),
    "Starcoder2ForCausalLM": ("starcoder2", "StarCoder2"),
    "LlamaForCausalLM": ("llama", "Llama"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
}
_models: dict[str, type[Model] | tuple[str, str]] = dict(_SHIPPED)

# What transformers calls the family of a shipped architecture. It chooses the class by this field.
_MODEL_TYPES = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral",
                "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "GemmaForCausalLM": "gemma",
                "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text", "GPTNeoXForCausalLM": "gpt_neox",
                "Olmo2ForCausalLM": "olmo2", "Phi3ForCausalLM": "phi3", "SmolLM3ForCausalLM": "smollm3",
                "StableLmForCausalLM": "stablelm", "Starcoder2ForCausalLM": "starcoder2",
                "CohereForCausalLM": "cohere", "GPTJForCausalLM": "gptj", "PhiForCausalLM": "phi",
                "GraniteForCausalLM": "granite", "Cohere2ForCausalLM": "cohere2",
                "Olmo3ForCausalLM": "olmo3", "OPTForCausalLM": "opt", "BloomForCausalLM": "bloom",
                "FalconForCausalLM": "falcon"}


def register_model(architecture: str, model_class: type[Model]) -> None:
    """Run checkpoints whose config.json names `architecture` with `model_class`, which satisfies `Model`.

    Replaces what was registered under that name. Raises ConfigError when a member is missing or is not what it must be.
    """
    if not isinstance(architecture, str) or not architecture:
        raise ConfigError(f"the architecture is {shown(architecture)}", "a name, as config.json has it",
                          "name the architecture that the class is for")
    refuse_wrong_class(model_class)
    _models[architecture] = model_class


def known_architectures() -> list[str]:
    return sorted(_models)


def find_model(architecture: str, named_by: str = "") -> type[Model]:
    """The class registered for `architecture`. `named_by` says, for the message, where the name came from.

    Raises UnsupportedModelError.
    """
    if architecture not in _models:
        raise UnsupportedModelError(
            f"{named_by}the architecture {shown(architecture)} is not known",
            f"one of {', '.join(known_architectures())}",
            "register_model(architecture, model_class) adds one")
    found = _models[architecture]
    if isinstance(found, tuple):
        module, name = found
        found = _models[architecture] = getattr(import_module(f".{module}", __package__), name)
    return found


def is_shipped(architecture: str, model_class: type[Model]) -> bool:
    """Whether this is the package's own class for `architecture`."""
    module, name = _SHIPPED.get(architecture, ("", ""))
    return (model_class.__module__, model_class.__qualname__) == (f"{__package__}.{module}", name)


def model_type_of(architecture: str) -> str | None:
    """What transformers calls the family of a shipped architecture; None for any other."""
    return _MODEL_TYPES.get(architecture)


def has_own_class(model_type: str) -> bool:
    """Whether a shipped architecture is what transformers makes of this model type."""
    return model_type in _MODEL_TYPES.values()
