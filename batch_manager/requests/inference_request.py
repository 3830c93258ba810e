"""`InferenceRequest`, and the table of the tensors that it may have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidRequestError, type_name
from ..sampling_config import PARAMETERS, UINT64_MAX, shown
from .retention import KvCacheRetentionConfig
from .tensor_attributes import TensorAttributes


class Shape(Enum):
    """How the values of a tensor are arranged."""

    SCALAR = "one value: 0-d, [1] or [1, 1]"
    FEW = "1 to 8 values: 0-d, [n] or [1, n]"
    ROW = "[n] or [1, n]; the batch dimension must be 1"
    TABLE = "[rows, columns] or [1, rows, columns]; the batch dimension must be 1"
    WORDS = ("[1, 2, m] or [2, m]: the tokens of all words, then the running sums of the words' lengths, padded with "
             "-1; or a list of lists of tokens")


class Content(Enum):
    """The kind of a tensor's values. A bool is no number; an integer is one."""

    FLAG = "a bool, or an integer 0 or 1"
    INTEGER = "integers of any width"
    NUMBER = "floats or integers"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One documented tensor of a request.

    name       on the wire
    content    the kind of its values
    shape      how they are arranged
    default    the value of a missing tensor; None: it has none
    parameter  the field of SamplingConfig that it sets; None: it sets none
    aliases    further names in Python
    """

    name: str
    content: Content
    shape: Shape
    default: object = None
    parameter: str | None = None
    aliases: tuple[str, ...] = ()


def _sampling_specs() -> list[TensorSpec]:
    aliases = {"len_penalty": ("length_penalty",)}
    return [TensorSpec(parameter.tensor, Content.INTEGER if parameter.range.whole else Content.NUMBER, Shape.SCALAR,
                       parameter.neutral, name, aliases.get(parameter.tensor, ()))
            for name, parameter in PARAMETERS.items()]


# wire name -> specification. The properties of InferenceRequest are made from this table, and admission uses it.
TENSORS: dict[str, TensorSpec] = {spec.name: spec for spec in [
    TensorSpec("input_ids", Content.INTEGER, Shape.ROW),
    TensorSpec("input_token_extra_ids", Content.INTEGER, Shape.ROW),
    TensorSpec("request_output_len", Content.INTEGER, Shape.SCALAR, aliases=("max_new_tokens",)),
    TensorSpec("input_lengths", Content.INTEGER, Shape.SCALAR),         # obsolete: accepted and ignored
    TensorSpec("end_id", Content.INTEGER, Shape.FEW, -1),
    TensorSpec("pad_id", Content.INTEGER, Shape.SCALAR, -1),
    *_sampling_specs(),
    TensorSpec("bad_words_list", Content.INTEGER, Shape.WORDS),
    TensorSpec("stop_words_list", Content.INTEGER, Shape.WORDS),
    TensorSpec("embedding_bias", Content.NUMBER, Shape.ROW),
    TensorSpec("prompt_embedding_table", Content.NUMBER, Shape.TABLE),
    TensorSpec("prompt_vocab_size", Content.INTEGER, Shape.SCALAR),
    TensorSpec("lora_task_id", Content.INTEGER, Shape.SCALAR),
    TensorSpec("lora_weights", Content.NUMBER, Shape.TABLE),
    TensorSpec("lora_config", Content.INTEGER, Shape.TABLE),
    TensorSpec("draft_input_ids", Content.INTEGER, Shape.ROW),
    TensorSpec("draft_logits", Content.NUMBER, Shape.TABLE),
    TensorSpec("return_log_probs", Content.FLAG, Shape.SCALAR, False),
    TensorSpec("return_top_log_probs", Content.INTEGER, Shape.SCALAR, 0),
    TensorSpec("raw_log_probs", Content.FLAG, Shape.SCALAR, False),
    TensorSpec("return_context_logits", Content.FLAG, Shape.SCALAR, False),
    TensorSpec("return_generation_logits", Content.FLAG, Shape.SCALAR, False),
    TensorSpec("return_perf_metrics", Content.FLAG, Shape.SCALAR, False),
    TensorSpec("streaming", Content.FLAG, Shape.SCALAR, False),
]}

_WIRE_NAMES: dict[str, str] = {name: spec.name for spec in TENSORS.values() for name in (spec.name, *spec.aliases)}


class InferenceRequest(TensorAttributes):
    """One request: an id, named tensors, and a few options that are not tensors.

    Each documented tensor is a property under its wire name (and its aliases, such as `max_new_tokens` for
    `request_output_len`): reading gives the value as it was set, or None; setting None removes it. Values are torch
    CPU tensors, numpy arrays, or plain ints, floats, bools and lists of them.

    request_id              0 <= id < 2^64; it may be used again when its final response has been sent
    is_streaming            a response for each new token; the tensor `streaming` says the same
    logits_post_processor   (request_id, logits [1, beams, vocab], token_ids of each beam) -> logits: called on the
                            worker thread before each token is sampled, once per token, and again if a step that failed
                            runs again. Or "batched": the one of Parts(logits_post_processor_batched=...), which is
                            called once for all requests that name it. See decoding/logits_post_processors.py
    priority                0..1; a request of larger priority goes first
    deadline_s              seconds from arrival until the request is ended as timed out; None: never
    arrival_time            when the server received it: seconds of `time.monotonic()`, or of the clock in Parts. Its
                            queue time and deadline_s count from then; None: from admission
    cache_salt              only requests with the same salt reuse each other's cached prefixes
    kv_cache_retention_config   how long the request's cached blocks should be kept; None: as long as others

    Only the id and the names are checked here. The values belong to the user until the request is handed over; they
    are copied and checked then. A subclass may add attributes of its own if it declares them in its class body.

    Raises InvalidRequestError for an unusable id and for an unknown name, with the nearest known one.
    """

    __slots__ = ("_request_id", "_tensors", "is_streaming", "logits_post_processor", "priority", "deadline_s",
                 "cache_salt", "kv_cache_retention_config", "arrival_time", "__weakref__")

    def __init__(self, request_id: int, tensors: Mapping[str, Any] | None = None, *, is_streaming: bool = False,
                 logits_post_processor: Callable[..., Any] | str | None = None, priority: float = 0.5,
                 deadline_s: float | None = None, cache_salt: str | bytes | None = None,
                 kv_cache_retention_config: KvCacheRetentionConfig | None = None,
                 arrival_time: float | None = None) -> None:
        self._request_id = checked_request_id(request_id)
        self._tensors = {} if tensors is None else _named(tensors)
        self.is_streaming = is_streaming
        self.logits_post_processor = logits_post_processor
        self.priority = priority
        self.deadline_s = deadline_s
        self.cache_salt = cache_salt
        self.kv_cache_retention_config = kv_cache_retention_config
        self.arrival_time = arrival_time

    if TYPE_CHECKING:
        @property
        def request_id(self) -> int: ...
    else:
        # Read in C: an exception of another thread cannot be mistaken for one of reading the id.
        request_id = property(attrgetter("_request_id"))

    @property
    def input_tensors(self) -> dict[str, Any]:
        """The tensors that were set, by wire name: a new dictionary with the values as given."""
        return dict(self._tensors)

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name):
            raise unknown_name(name)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"InferenceRequest({self._request_id}, tensors: {', '.join(self._tensors) or 'none'})"


def _tensor_property(name: str, doc: str) -> property:
    def get(self: InferenceRequest) -> Any:
        return self._tensors.get(name)

    def put(self: InferenceRequest, value: Any) -> None:
        if value is None:
            self._tensors.pop(name, None)
        else:
            self._tensors[name] = value

    return property(get, put, doc=doc)


for _name, _wire_name in _WIRE_NAMES.items():
    _spec = TENSORS[_wire_name]
    setattr(InferenceRequest, _name, _tensor_property(
        _wire_name, f"Tensor `{_wire_name}`: {_spec.content.value}; {_spec.shape.value}. Default: {_spec.default}."))


def checked_request_id(request_id: Any) -> int:
    """The id as a plain int. Raises InvalidRequestError unless it is an integer in 0..2^64-1; a bool is none."""
    # By the types' own methods, so that no code of the object's class is run.
    if issubclass(type(request_id), np.integer):
        request_id = np.integer.item(request_id)
    if not issubclass(type(request_id), int) or type(request_id) is bool:
        raise InvalidRequestError(f"request_id is of type {type_name(request_id)}", "it must be an integer",
                                  "number the requests, and keep names of your own in a dictionary")
    plain: int = int.__int__(request_id)
    if not 0 <= plain <= UINT64_MAX:
        raise InvalidRequestError(f"request_id is {shown(plain)}", "it must be in 0..2^64-1",
                                  "number the requests from 0")
    return plain


# Names in other engines that are not similar to the name here.
_WORDS_OF_OTHER_ENGINES = {
    "stop": "stop_words_list takes the tokens of each stop word, [1, 2, n]",
    "stop_sequences": "stop_words_list takes the tokens of each stop word, [1, 2, n]",
    "stop_token_ids": "end_id takes up to 8 tokens that end a text",
    "eos_token_id": "the tensor is called end_id",
    "prompt": "input_ids takes tokens: a tokenizer makes them of a text",
    "messages": "input_ids takes tokens: a tokenizer makes them of messages, with its chat template",
    "n": "send one request for each text, with seeds of their own",
    "best_of": "send one request for each text, with seeds of their own",
    "seed": "the tensor is called random_seed",
    "stream": "is_streaming=True, or the tensor streaming",
    "logprobs": "return_log_probs=True returns the log-probability of each token, and "
                "return_top_log_probs=k those of the k likeliest tokens",
    "top_logprobs": "return_top_log_probs=k returns the k likeliest tokens with their log-probabilities",
    "logit_bias": "embedding_bias takes a number for each token of the vocabulary",
    "ignore_eos": "leave end_id out",
    "min_tokens": "the tensor is called min_length",
    "user": "a request has an id and no user: keep yours in a dictionary by id",
    "priority": "it is an option of InferenceRequest and no tensor: priority=0.5",
}


def unknown_name(name: object) -> InvalidRequestError:
    """The error for a tensor name that is not in the table; suggests the nearest one."""
    if not isinstance(name, str):
        return InvalidRequestError(f"a tensor name is of type {type_name(name)}", "names are strings",
                                   f"the names are {', '.join(TENSORS)}")
    if name in _WORDS_OF_OTHER_ENGINES:
        return InvalidRequestError(f"Invalid tensor name: {name!r}", "it is not one of the documented names",
                                   _WORDS_OF_OTHER_ENGINES[name])
    near = ([known for known in _WIRE_NAMES if len(name) > 2 and name in known]
            or get_close_matches(name[:64], _WIRE_NAMES, n=1, cutoff=0.5))
    return InvalidRequestError(
        f"Invalid tensor name: {name[:64]!r}", "it is not one of the documented names",
        f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(TENSORS)}")


def _named(tensors: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(tensors, Mapping):
        raise InvalidRequestError(f"tensors is of type {type_name(tensors)}", "it must be a mapping of names to values",
                                  "pass a dict")
    named: dict[str, Any] = {}
    for name, value in tensors.items():
        wire_name = _WIRE_NAMES.get(name)
        if wire_name is None:
            raise unknown_name(name)
        if value is None:
            continue
        if wire_name in named:
            raise InvalidRequestError(f"{wire_name} is given twice", f"{name!r} is another name of it",
                                      "give one of the two")
        named[wire_name] = value
    return named
