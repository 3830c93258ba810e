"""The attention function that models of transformers call.

Each call must find the step that it belongs to. Keyword arguments cannot carry the step, because some families drop
them on the way to the attention function. A context variable, which is separate for each thread, carries the step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from ...attention.interface import Attention
from ...errors import InternalError

RUNNING = "batch_manager"                 # no mask function has this name, so transformers makes no masks
DISCOVERING = "batch_manager_discovery"   # the mask function of this name returns a MaskDescription in place of a mask

# Keyword arguments that change scores.
SCORE_KEYWORDS = ("scaling", "sliding_window", "softcap")
SINK_LOGITS = "s_aux"                     # a tensor of one logit for each query head
# Keyword arguments that can be ignored: they change nothing, or their values are known from elsewhere.
_IGNORED_KEYWORDS = {
    "dropout", "position_ids", "is_causal", "output_attentions", "use_cache", "cache_position", "layer_idx",
    "position_embeddings", "past_key_values", "past_key_value", "output_hidden_states", "return_dict",
    "output_router_logits", "logits_to_keep", "deterministic", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "labels", "num_items_in_batch"}


class StepInProgress(Protocol):
    """A step that handles the attention calls of a model."""

    def attend(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
               keywords: dict[str, Any]) -> torch.Tensor:
        """Return the attention [1, T, heads, Dv] of one layer, which is `module`.

        Shapes   query [1, heads, T, D]; key [1, kv heads, T, D]; value [1, kv heads, T, Dv]
        """
        ...


_step: ContextVar[StepInProgress | None] = ContextVar("step_in_progress", default=None)


@contextmanager
def in_step(step: StepInProgress) -> Iterator[None]:
    """Context manager: send the attention calls of this thread to `step.attend`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _attend(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            attention_mask: Any = None, **keywords: Any) -> tuple[torch.Tensor, None]:
    step = _step.get()
    if step is None:
        raise InternalError("attention was called outside of a step", "expected calls within `in_step`",
                            "report it with the model type")
    return step.attend(module, query, key, value, attention_mask, keywords), None


@dataclass(frozen=True, slots=True)
class MaskDescription:
    """Stands for an attention mask, and holds the function with which transformers would compute the mask.

    sees   (batch, head, query position, key position) -> whether the query sees the key; all are integer tensors
    """

    sees: Callable[..., Any]


def _describe_mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> MaskDescription:
    return MaskDescription(mask_function)


def register(library: Any) -> None:
    """Register the attention functions and the mask function with transformers. Repeated calls have no effect."""
    library.AttentionInterface.register(RUNNING, _attend)
    library.AttentionInterface.register(DISCOVERING, _attend)
    library.AttentionMaskInterface.register(DISCOVERING, _describe_mask)


def score_arguments(keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of the keyword arguments that change scores, in a fixed order; None for an absent argument."""
    return tuple(keywords.get(name) for name in SCORE_KEYWORDS)


def unknown_keyword(keywords: dict[str, Any]) -> str | None:
    """Return the name of a keyword argument that this file does not handle and that could change scores, or None."""
    return next((name for name, value in keywords.items() if value is not None and name != SINK_LOGITS
                 and name not in SCORE_KEYWORDS and name not in _IGNORED_KEYWORDS), None)


class RunningStep:
    """A step whose attention calls go to the engine's attention.

    layers   id() of an attention module -> (index of its layer, expected result of `score_arguments` for its calls)
    """

    __slots__ = ("_layers", "_attention")

    def __init__(self, layers: dict[int, tuple[int, tuple[Any, ...]]], attention: Attention) -> None:
        self._layers, self._attention = layers, attention

    def attend(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
               keywords: dict[str, Any]) -> torch.Tensor:
        layer, expected = self._layers[id(module)]
        if mask is not None or score_arguments(keywords) != expected:
            raise InternalError(f"layer {layer} attends with (scaling, sliding_window, softcap) = "
                                f"{score_arguments(keywords)}" + ("" if mask is None else " and a mask"),
                                f"{expected} without a mask is expected, as when the model was loaded",
                                "report it with the model type")
        width = value.shape[3]
        if width < key.shape[3]:                 # DeepSeek and relatives; heads of the KV cache have one width
            value = functional.pad(value, (0, key.shape[3] - width))
        # Make all three views of one tensor, tokens first: attention takes these without another copy.
        rows = torch.cat([query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)], dim=1)
        query, key, value = rows.split_with_sizes([query.shape[1], key.shape[1], value.shape[1]], 1)
        sinks = keywords.get(SINK_LOGITS)
        optional = () if sinks is None else (sinks.float().contiguous(),)
        result = self._attention.run(layer, query, key, value, None, *optional).view(1, len(rows), query.shape[1], -1)
        return result[..., :width]
