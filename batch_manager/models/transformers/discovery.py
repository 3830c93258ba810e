"""Finds out how each layer of a model attends, with a forward pass on the meta device, which computes nothing."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...attention.interface import LayerAttention
from ...errors import ConfigError, ModelLoadError, UnsupportedModelError, counted
from ...weights.json_file import shown
from .attention_function import SINK_LOGITS, MaskDescription, in_step, score_arguments, unknown_keyword
from .installed import ANOTHER_TYPE, first_words

NUM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DiscoveredLayer:
    """How one layer attends, found from its attention call in the forward pass.

    module            name of the calling module
    sizes             (query heads, key heads, head size)
    score_arguments   (scaling, sliding_window, softcap) of the call; None for an argument that is absent
    """

    module: str
    sizes: tuple[int, int, int]
    score_arguments: tuple[Any, ...]
    attention: LayerAttention


class _Discovery:
    """Takes the attention calls of a forward pass, checks each call and records it as a DiscoveredLayer."""

    def __init__(self, model: Any, max_positions: int) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._max_positions = max_positions
        self._windows: dict[int, tuple[Any, int | None]] = {}
        self.layers: list[DiscoveredLayer] = []

    def attend(self, module, query, key, value, mask, keywords):
        name = self._names.get(id(module), type(module).__name__)
        if not (query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == 1
                and query.shape[2] == key.shape[2] == value.shape[2] == NUM_TOKENS):
            raise _unsupported(f"{name} attends to tokens that are not in the step", "self-attention over one sequence")
        sizes = query.shape[1], key.shape[1], query.shape[3]
        if not (key.shape[1] == value.shape[1] and key.shape[3] == query.shape[3] >= value.shape[3]):
            raise _unsupported(f"queries, keys and values of {name} are {query.shape[3]}, {key.shape[3]} and "
                               f"{value.shape[3]} wide, with {key.shape[1]} key and "
                               f"{counted(value.shape[1], 'value head')}",
                               "queries and keys of equal width, values no wider, and as many key as value heads")
        if sizes[0] % sizes[1]:
            raise _unsupported(f"{name} has {counted(sizes[0], 'query head')} and {counted(sizes[1], 'key head')}",
                               "a number of query heads that is a multiple of the number of key heads")
        if name in (layer.module for layer in self.layers):
            raise _unsupported(f"{name} attends twice in one forward pass", "one attention call per layer")
        self.layers.append(DiscoveredLayer(name, sizes, score_arguments(keywords),
                                           self._read(name, sizes, mask, keywords)))
        return query.new_empty(1, NUM_TOKENS, query.shape[1], value.shape[3])

    def _read(self, name, sizes, mask, keywords):
        unknown = unknown_keyword(keywords)
        if unknown is not None:
            raise _unsupported(f"{name} attends with {unknown}", "only a scale, a window, a softcap and sink logits")
        sinks = keywords.get(SINK_LOGITS)
        if sinks is not None and tuple(sinks.shape) != sizes[:1]:
            raise _unsupported(f"sink logits of {name} have shape {list(sinks.shape)}",
                               f"shape [{sizes[0]}], one value for each query head")
        if not isinstance(mask, MaskDescription):
            raise _unsupported(f"{name} attends with {'no mask' if mask is None else 'its own mask'}",
                               "a mask that transformers makes from a mask function")
        from .mask_reading import read_window

        if id(mask) not in self._windows:
            self._windows[id(mask)] = mask, read_window(mask.sees, self._max_positions, name)
        window = self._windows[id(mask)][1]
        scale, stated, softcap = score_arguments(keywords)
        if stated is not None and stated != window and not (window is None and stated >= self._max_positions):
            raise _unsupported(f"{name} passes sliding_window={shown(stated)}, but the window of its mask is {window}",
                               "equal windows")
        try:
            return LayerAttention(scale=sizes[2] ** -0.5 if scale is None else scale, window=window, softcap=softcap,
                                  has_sink_logits=sinks is not None)
        except ConfigError as error:
            raise UnsupportedModelError(f"{name}: {error.fact}", error.expectation,
                                        ANOTHER_TYPE) from None


class _WithoutValues(TorchFunctionMode):
    """Lets code that reads tensor values run on the meta device, which has no values.

    `nonzero`, `argwhere` and `where` with one argument find nothing. Conditions are False, except for `all`, which
    returns True. Experts therefore get no tokens and compute nothing, and position-dependent tables stay unchanged.
    The comparison at loading (load_check.py) catches a model that takes another path with real values.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = args[0] if args else None
        if isinstance(given, torch.Tensor) and given.device.type == "meta":
            if function in (torch.nonzero, torch.Tensor.nonzero, torch.argwhere):
                return torch.empty((0, given.dim()), dtype=torch.int64, device="meta")
            if function in (torch.all, torch.Tensor.all) and len(args) == 1 and not kwargs:
                return torch.ones((), dtype=torch.bool, device="cpu")       # models check for a single sequence with it
            if function is torch.where and len(args) == 1:
                return tuple(torch.empty(0, dtype=torch.int64, device="meta") for _ in range(given.dim()))
            if function in (torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__index__,
                            torch.Tensor.__float__):
                return {torch.Tensor.__bool__: False, torch.Tensor.__float__: 0.0}.get(function, 0)
            if function is torch.Tensor.tolist and given.dim() == 1:
                return [0] * len(given)
        return function(*args, **kwargs)


def discover(model: Any, base: Any, hidden_size: int, max_positions: int, where: str) -> tuple[DiscoveredLayer, ...]:
    """Return how each layer of a model on the meta device attends, in the order of the attention calls.

    base   the part of the model that computes hidden states
    where  name of the model in error messages
    Raises UnsupportedModelError for a model that the engine does not run, or ModelLoadError
    """
    discovery = _Discovery(model, max_positions)
    hidden = torch.empty(1, NUM_TOKENS, hidden_size, dtype=torch.float32, device="meta")
    try:
        with torch.device("meta"), _WithoutValues(), torch.inference_mode(), in_step(discovery):
            result = base(inputs_embeds=hidden, use_cache=False)
        last = result[0]
    except ModelLoadError as error:
        raise type(error)(f"{where}: {error.fact}", error.expectation, error.fix) from None
    except Exception as fault:
        raise UnsupportedModelError(f"{where}: {type(model).__name__} on the meta device raised {first_words(fault)}",
                                    "expected a decoder that attends through transformers' interface",
                                    ANOTHER_TYPE) from None
    if last.shape != hidden.shape:
        raise UnsupportedModelError(f"{where}: {type(model).__name__} turns embeddings {list(hidden.shape)} into "
                                    f"hidden states {list(last.shape)}",
                                    "expected equal shapes", ANOTHER_TYPE)
    layers = discovery.layers
    if not layers:
        raise UnsupportedModelError(f"{where}: no layer of {type(model).__name__} calls transformers' attention "
                                    "interface", "expected a decoder in which every layer calls it",
                                    ANOTHER_TYPE)
    if len(layers) != model.config.num_hidden_layers:
        raise UnsupportedModelError(f"{where}: {len(layers)} of {model.config.num_hidden_layers} layers attend",
                                    "expected attention in every layer, because other layers, such as recurrent "
                                    "ones, keep state outside the KV cache", ANOTHER_TYPE)
    if len({layer.sizes for layer in layers}) > 1:
        different = next(layer for layer in layers if layer.sizes != layers[0].sizes)
        raise UnsupportedModelError(f"{where}: (query heads, key heads, head size) are {layers[0].sizes} in "
                                    f"{layers[0].module} and {different.sizes} in {different.module}",
                                    "expected the same in all layers", ANOTHER_TYPE)
    return tuple(layers)


def _unsupported(fact: str, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(fact, f"expected {expected}", ANOTHER_TYPE)
