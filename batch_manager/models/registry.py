"""Which class runs which architecture, and loading a folder with it."""

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch

from ..attention.interface import Attention
from ..config import DTYPES, LOAD_FORMATS
from ..errors import ConfigError, InsufficientMemoryError, UnsupportedModelError
from ..layers.context import LayerContext
from ..weights.folder import CheckpointFolder
from ..weights.json_file import Fields, read_json_file, shown
from ..weights.safetensors_source import SafetensorsWeights
from ..weights.source import DummyWeights, Weights
from .class_check import refuse_wrong_class, refuse_wrong_spec
from .end_ids import CONFIG_FILE, read_end_ids
from .model_spec import ModelSpec, check_spec, refuse_unknown_numerics, refuse_unread_names


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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `weight_bytes` counts the tensors and the copies made for speed.

    end_ids   tokens that end a text, as the checkpoint says
    """

    spec: ModelSpec
    model: Model
    weight_bytes: int
    device: torch.device
    dtype: torch.dtype
    deterministic: bool = False
    end_ids: tuple[int, ...] = ()


# Classes by architecture; a shipped family is named by module and class and imported when it is asked for.
_SHIPPED = {
    "GPT2LMHeadModel": ("gpt2", "Gpt2"),
    "Cohere2ForCausalLM": ("cohere2", "Cohere2"),
    "CohereForCausalLM": ("cohere", "Cohere"),
    "GPTJForCausalLM": ("gptj", "GptJ"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3"),
    "GemmaForCausalLM": ("gemma", "Gemma"),
    "GPTNeoXForCausalLM": ("gpt_neox", "GptNeoX"),
    "GraniteForCausalLM": ("granite", "Granite"),
    "Olmo2ForCausalLM": ("olmo2", "Olmo2"),
    "Olmo3ForCausalLM": ("olmo3", "Olmo3"),
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
                "Olmo3ForCausalLM": "olmo3"}


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


def read_spec(folder: str | os.PathLike) -> ModelSpec:
    """The spec of the checkpoint in `folder`, from its config.json alone."""
    return _read_spec(CheckpointFolder(folder))[1]


def load_model(folder: str | os.PathLike, *, device: torch.device | str, dtype: torch.dtype | str = "auto",
               load_format: str = "auto", seed: int = 0, deterministic: bool = False, compiled_step: bool = False,
               free_bytes: int | None = None) -> LoadedModel:
    """Load the checkpoint in `folder`.

    dtype         a torch dtype or its name; "auto": the checkpoint's on a GPU, float32 on a CPU
    load_format   "auto": safetensors; "dummy": random weights from `seed`, config.json is enough
    deterministic   a row's bits come from that row alone; ConfigError where the model's class does not promise it
    compiled_step   for a CPU: matrices as the compiled step takes them, see triton_kernels/cpu/native
    free_bytes    of the device's memory; weights that take more are refused before any is allocated. None: tried anyhow
    Raises ModelLoadError naming file and field, UnsupportedModelError, or InsufficientMemoryError.
    """
    device = torch.device(device)
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format is {load_format!r}", f"one of {', '.join(LOAD_FORMATS)}",
                          "leave it out for files")
    opened = CheckpointFolder(folder)
    model_class, spec = _read_spec(opened)
    end_ids = read_end_ids(opened, spec.vocab_size)
    dtype = _resolve_dtype(dtype, spec, device)
    if deterministic and not getattr(model_class, "deterministic", False):
        raise ConfigError(f"deterministic was asked for with {model_class.__name__}, which does not promise it",
                          "a class with deterministic = True: nothing but layers of batch_manager.layers and "
                          "element-wise sums and products between them", "set it, or leave deterministic out")

    context = LayerContext(device=device, dtype=dtype, deterministic=deterministic, compiled_step=compiled_step)
    try:
        with torch.inference_mode():
            if load_format == "dummy":
                _refuse_too_many(spec.num_weights, opened, device, dtype, free_bytes)
                weights = DummyWeights(seed, device, dtype)
                model = model_class(spec, weights, context)
                return LoadedModel(spec, model, weights.num_bytes, device, dtype, deterministic, end_ids)
            weights = SafetensorsWeights(opened, device, dtype)
            # What is allocated is both asked for by the configuration and there: where the two differ, which is refused
            # by name below, the smaller bounds it.
            _refuse_too_many(min(spec.num_weights, weights.num_weights), opened, device, dtype, free_bytes)
            model = model_class(spec, weights, context)
            weights.finish(model_class.harmless_tensors)
            return LoadedModel(spec, model, weights.num_bytes, device, dtype, deterministic, end_ids)
    except (MemoryError, RuntimeError) as fault:
        if not isinstance(fault, MemoryError) and "allocate" not in str(fault):
            raise
        raise InsufficientMemoryError(f"the weights of {opened.path} in {dtype} do not fit into the memory of {device}",
                                      "room for all of them", "a smaller dtype, or a larger device") from fault


def _refuse_too_many(num_weights: int, folder: CheckpointFolder, device: torch.device, dtype: torch.dtype,
                     free_bytes: int | None) -> None:
    """Raise InsufficientMemoryError where the weights alone are larger than what is free.

    Pages of a large allocation are taken as they are written: the allocation may well succeed, and the system then ends
    the process while it loads.
    """
    num_bytes = num_weights * dtype.itemsize
    if free_bytes is not None and num_bytes > free_bytes:
        raise InsufficientMemoryError(
            f"the weights of {folder.path} in {dtype} do not fit into the memory of {device}: they take "
            f"{num_bytes:,} bytes", f"{free_bytes:,} bytes are free", "take a smaller dtype or a larger device")


def _read_spec(folder: CheckpointFolder) -> tuple[type[Model], ModelSpec]:
    file = folder.file(CONFIG_FILE)
    config = Fields(read_json_file(file.real_path, str(file)), str(file))
    names = config.texts("architectures")
    if len(names) != 1:
        raise config.fault("architectures", "a list with one name")
    _refuse_composite(config, names[0])
    model_class = find_model(names[0], named_by=f"{file}: architectures: ")
    expected = _MODEL_TYPES.get(names[0])
    if expected is not None and config.text("model_type", expected) != expected:
        raise config.fault("model_type", f"{expected!r}, as architectures is {shown(names)}",
                           "correct the one of the two that is wrong")
    understood = getattr(model_class, "understands", ())
    module, name = _SHIPPED.get(names[0], ("", ""))
    is_shipped = (model_class.__module__, model_class.__qualname__) == (f"{__package__}.{module}", name)
    refuse_unknown_numerics(config, understood, is_shipped=is_shipped)
    spec = model_class.read_spec(config, names[0])
    refuse_wrong_spec(model_class, spec)
    if not is_shipped:
        refuse_unread_names(config, understood)
    check_spec(config, spec, model_class.__name__, is_shipped=is_shipped)
    return model_class, spec


def _refuse_composite(config: Fields, architecture: str) -> None:
    """Raise UnsupportedModelError for a model of text and something else, which no class here runs."""
    text = config.values.get("text_config")
    if architecture in _models or not isinstance(text, dict) or not text:
        return
    kind = text.get("model_type")
    raise UnsupportedModelError(
        f"{config.where}: the architecture {shown(architecture)} joins a text model"
        + (f" of type {shown(kind)}" if isinstance(kind, str) else "") + " with another one",
        f"a text model alone: {', '.join(known_architectures())}",
        "save its text part as a checkpoint of its own, with AutoModelForCausalLM of transformers")


def _resolve_dtype(dtype: torch.dtype | str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}", f"one of {', '.join(DTYPES)}", "leave it out for the checkpoint's")
    if name == "auto":
        name = "float32" if device.type == "cpu" else spec.dtype or "float32"
    return getattr(torch, name)
