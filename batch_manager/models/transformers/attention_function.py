"""The attention that models of transformers call, and how a call finds the step that it belongs to.

A model hands its attention function some keywords, and families differ in which they drop. What a step needs travels
in a context variable instead, which each thread has for itself.
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

RUNNING = "batch_manager"                 # transformers makes no masks for a name that it knows no mask function of
DISCOVERING = "batch_manager_discovery"   # its mask function hands on what the mask would be made from

# What changes scores, as a layer says it; and what says nothing that is not known otherwise.
SAID = ("scaling", "sliding_window", "softcap")
SINK_LOGITS = "s_aux"                     # a tensor of one logit for each query head
_UNSAID = {"dropout", "position_ids", "is_causal", "output_attentions", "use_cache", "cache_position", "layer_idx",
           "position_embeddings", "past_key_values", "past_key_value", "output_hidden_states", "return_dict",
           "output_router_logits", "logits_to_keep", "deterministic", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
           "max_length_k", "labels", "num_items_in_batch"}


class StepInProgress(Protocol):
    def attend(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
               keywords: dict[str, Any]) -> torch.Tensor:
        """query [1, heads, T, D], key [1, kv heads, T, D], value [1, kv heads, T, Dv] -> [1, T, heads, Dv]"""
        ...


_step: ContextVar[StepInProgress | None] = ContextVar("step_in_progress", default=None)


@contextmanager
def in_step(step: StepInProgress) -> Iterator[None]:
    """Within it, attention functions that this thread calls are calls of `step.attend`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _attend(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            attention_mask: Any = None, **keywords: Any) -> tuple[torch.Tensor, None]:
    step = _step.get()
    if step is None:
        raise InternalError("attention was called outside of a step", "a call inside one",
                            "report it with the model's type")
    return step.attend(module, query, key, value, attention_mask, keywords), None


@dataclass(frozen=True, slots=True)
class MaskDescription:
    """What a mask would be made from.

    sees   (batch, head, query position, key position) -> whether the query sees the key; tensors of integers
    """

    sees: Callable[..., Any]


def _describe_mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> MaskDescription:
    return MaskDescription(mask_function)


def register(library: Any) -> None:
    """Make the functions known to transformers. Again and again changes nothing."""
    library.AttentionInterface.register(RUNNING, _attend)
    library.AttentionInterface.register(DISCOVERING, _attend)
    library.AttentionMaskInterface.register(DISCOVERING, _describe_mask)


def said(keywords: dict[str, Any]) -> tuple[Any, ...]:
    """What a layer says of its scores, in the order of SAID."""
    return tuple(keywords.get(name) for name in SAID)


def unknown_keyword(keywords: dict[str, Any]) -> str | None:
    """A keyword that is not read here and may change scores; None: there is none."""
    return next((name for name, value in keywords.items()
                 if value is not None and name != SINK_LOGITS and name not in SAID and name not in _UNSAID), None)


class RunningStep:
    """A step that goes through the engine's attention.

    layers   id of an attention module -> (layer, what it said when the model was made, `said`)
    """

    __slots__ = ("_layers", "_attention")

    def __init__(self, layers: dict[int, tuple[int, tuple[Any, ...]]], attention: Attention) -> None:
        self._layers, self._attention = layers, attention

    def attend(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
               keywords: dict[str, Any]) -> torch.Tensor:
        layer, expected = self._layers[id(module)]
        if mask is not None or said(keywords) != expected:
            raise InternalError(f"layer {layer} attends with {said(keywords)}"
                                + ("" if mask is None else " and a mask of its own"),
                                f"{expected}, as when the model was loaded", "report it with the model's type")
        width = value.shape[3]
        if width < key.shape[3]:                 # of DeepSeek's relatives: the KV cache has heads of one width
            value = functional.pad(value, (0, key.shape[3] - width))
        # One tensor of which all three are views, tokens first: what attention takes without a copy of its own.
        rows = torch.cat([query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)], dim=1)
        query, key, value = rows.split_with_sizes([query.shape[1], key.shape[1], value.shape[1]], 1)
        sinks = keywords.get(SINK_LOGITS)
        more = () if sinks is None else (sinks.float().contiguous(),)
        result = self._attention.run(layer, query, key, value, None, *more).view(1, len(rows), query.shape[1], -1)
        return result[..., :width]
