"""Creates a model of transformers on the meta device, without memory for its parameters.

A model that is too large is refused.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...errors import ModelLoadError, UnsupportedModelError
from ...weights.json_file import shown
from ..spec_reading import MAX_WEIGHTS
from .installed import SAVED_BY_ANOTHER_VERSION, first_words, transformers

MOST_CALLS = 500_000             # calls of torch, several for each module; they take about half a minute
MOST_BUFFER_BYTES = 2**30        # size of the buffers that transformers computes


class _TooManyCallsError(Exception):
    pass


class _Bounded(TorchFunctionMode):
    """Context manager: stop the creation of a model whose configuration implies too many modules."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise _TooManyCallsError
        return function(*args, **(kwargs or {}))


def make_skeleton(configuration: Any, architecture: str, where: str, attention: str, experts: str | None = None) -> Any:
    """Create the model of class `architecture` on the meta device, in float32 and evaluation mode.

    attention   registered name of the model's attention function
    experts     registered name of the model's implementation of experts; None: transformers chooses
    Raises      ModelLoadError, or its subclass UnsupportedModelError if `architecture` is neither transformers' class
                for `configuration` nor its base model; the message begins with `where`
    """
    library = transformers()
    model_class = library.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(configuration), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    base_class = library.MODEL_MAPPING.get(type(configuration), None)      # a folder without a head names its class
    if model_class is None or architecture not in (model_class.__name__, getattr(base_class, "__name__", None)):
        raise UnsupportedModelError(
            f"{where}: the architecture is {shown(architecture)} and the model type is {configuration.model_type!r}",
            "expected transformers' text generation class for this model type"
            + ("" if model_class is None else f", {model_class.__name__}"),
            "save the model with AutoModelForCausalLM of transformers")
    configuration._attn_implementation = attention
    configuration._experts_implementation = experts
    try:
        with torch.device("meta"), _Bounded():
            model = model_class(configuration)
    except _TooManyCallsError:
        raise ModelLoadError(f"{where}: creating the model takes more than {MOST_CALLS:,} calls of torch",
                             "expected a model with fewer modules", "check that config.json belongs to this checkpoint"
                             ) from None
    except Exception as fault:
        raise ModelLoadError(f"{where}: transformers cannot create the model ({first_words(fault)})",
                             "expected a configuration saved by transformers",
                             SAVED_BY_ANOTHER_VERSION) from None
    model.eval().requires_grad_(False)
    total = sum(parameter.numel() for parameter in model.parameters())
    if total > MAX_WEIGHTS:
        raise ModelLoadError(f"{where}: the sizes imply {total:,} weights", f"expected at most {MAX_WEIGHTS:,}",
                             "check that config.json belongs to this checkpoint")
    num_bytes = sum(buffer.nbytes for buffer in model.buffers())
    if num_bytes > MOST_BUFFER_BYTES:
        raise ModelLoadError(f"{where}: the sizes imply buffers of {num_bytes:,} bytes",
                             f"expected at most {MOST_BUFFER_BYTES:,}", "lower max_position_embeddings")
    return model
