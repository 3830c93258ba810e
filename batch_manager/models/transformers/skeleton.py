"""A model of transformers without memory for its parameters: on the meta device, and of bounded size."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...errors import ModelLoadError, UnsupportedModelError
from ...weights.json_file import shown
from ..model_spec import MAX_WEIGHTS
from .installed import first_words, transformers

MOST_CALLS = 500_000             # of torch while a model is made: some for each module; half a minute's worth
MOST_BUFFER_BYTES = 2**30        # of tables that no file holds


class _TooManyCallsError(Exception):
    pass


class _Bounded(TorchFunctionMode):
    """Ends the making of a model whose configuration asks for very many modules."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise _TooManyCallsError
        return function(*args, **(kwargs or {}))


def make_skeleton(configuration: Any, architecture: str, where: str, attention: str, experts: str | None = None) -> Any:
    """The model of class `architecture` on the meta device, in float32, for evaluation.

    attention   the registered name of the attention that it calls
    experts     the registered name of the way in which experts compute; None: transformers chooses
    Raises      ModelLoadError naming `where`
    """
    library = transformers()
    model_class = library.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(configuration), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is None or model_class.__name__ != architecture:
        raise UnsupportedModelError(
            f"{where}: the architecture is {shown(architecture)} and the model type {configuration.model_type!r}",
            "the class for generating text that transformers has for this model type"
            + ("" if model_class is None else f", {model_class.__name__}"),
            "save the model with AutoModelForCausalLM of transformers")
    configuration._attn_implementation = attention
    configuration._experts_implementation = experts
    try:
        with torch.device("meta"), _Bounded():
            model = model_class(configuration)
    except _TooManyCallsError:
        raise ModelLoadError(f"{where}: the model is made of more than {MOST_CALLS:,} pieces",
                             "sizes of a model that exists", "check that config.json belongs to this checkpoint"
                             ) from None
    except Exception as fault:
        raise ModelLoadError(f"{where}: transformers cannot make the model ({first_words(fault)})",
                             "a configuration as transformers saves it") from None
    model.eval().requires_grad_(False)
    total = sum(parameter.numel() for parameter in model.parameters())
    if total > MAX_WEIGHTS:
        raise ModelLoadError(f"{where}: the sizes ask for {total:,} weights", f"at most {MAX_WEIGHTS:,}",
                             "check that config.json belongs to this checkpoint")
    tables = sum(buffer.nbytes for buffer in model.buffers())
    if tables > MOST_BUFFER_BYTES:
        raise ModelLoadError(f"{where}: the sizes ask for tables of {tables:,} bytes", f"at most {MOST_BUFFER_BYTES:,}",
                             "lower max_position_embeddings")
    return model
