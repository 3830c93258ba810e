"""`InferenceRequest`, and the table of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidRequestError, type_name
from ..names import RequestType
from ..sampling_config import PARAMETERS, UINT64_MAX, shown
from .retention import KvCacheRetentionConfig
from .tensor_attributes import TensorAttributes


class Shape(Enum):
    """The shape of a tensor's values."""

    SCALAR = "one value: 0-d, [1] or [1, 1]"
    FEW = "1 to 8 values: 0-d, [n] or [1, n]"
    ROW = "[n] or [1, n] (the batch dimension must be 1)"
    TABLE = "[rows, columns] or [1, rows, columns] (the batch dimension must be 1)"
    WORDS = ("[1, 2, m] or [2, m] (the tokens of all words, then the running sums of the words' lengths, padded with "
             "-1), or a list of lists of tokens")


class Content(Enum):
    """The kind of a tensor's values. NUMBER includes integers, but not bools."""

    FLAG = "a bool, or an integer 0 or 1"
    INTEGER = "integers of any width"
    NUMBER = "floats or integers"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One documented tensor of a request.

    name       the wire name
    content    the kind of its values
    shape      the shape of its values
    default    its value if the tensor is missing; None: no default
    parameter  the field of SamplingConfig that the tensor sets, or None
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


# Wire name -> specification. The table defines the properties of InferenceRequest and the checks of admission.
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
    TensorSpec("context_phase_params", Content.INTEGER, Shape.ROW),
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

    Each documented tensor is a property under its wire name and its aliases, such as `max_new_tokens` for
    `request_output_len`. Reading a property returns the value that was set, or None. Setting None removes the tensor.
    Values are torch CPU tensors, numpy arrays, plain ints, floats and bools, or lists of plain values.

    request_id              0 <= id < 2^64; an id can be used again after its final response
    is_streaming            send a response for each new token. The tensor `streaming` does the same; either suffices
    logits_post_processor   (request_id, logits [1, beams, vocab], token_ids of each beam) -> logits. The engine calls
                            the function on the worker thread once before each token is sampled, and again if a failed
                            step is rerun. The value "batched" selects Parts(logits_post_processor_batched=...), which
                            the engine calls once for all requests that name it. See
                            decoding/logits_post_processors.py
    priority                0..1; requests of larger priority go first
    deadline_s              seconds from arrival until the request is ended: as timed out if it has generated tokens,
                            otherwise with an error. None: no deadline
    arrival_time            time at which the server received the request, in seconds of `time.monotonic()`, or of the
                            clock in Parts; the queue time and deadline_s count from it. None: the time of admission
    cache_salt              only requests with the same salt reuse each other's cached prefixes
    request_type            a RequestType, or its value: "context_only" computes the prompt for another engine, and the
                            final response has the tensor `context_phase_params`; "generation_only", with this tensor,
                            generates there. See KvTransferConfig
    kv_cache_retention_config   how long to keep the request's cached blocks; None: with retention priority 35
    speculation             False: the engine drafts no tokens for the request (speculative_config)

    The constructor checks only the id and the names. The engine checks and copies the values when the get callback
    returns the request. A subclass can add attributes if it declares them in its class body.

    Raises InvalidRequestError for an invalid id or an unknown name. For an unknown name, the error suggests the nearest
    known name.
    """

    __slots__ = ("_request_id", "_tensors", "is_streaming", "logits_post_processor", "priority", "deadline_s",
                 "cache_salt", "kv_cache_retention_config", "arrival_time", "request_type", "speculation",
                 "__weakref__")

    def __init__(self, request_id: int, tensors: Mapping[str, Any] | None = None, *, is_streaming: bool = False,
                 logits_post_processor: Callable[..., Any] | str | None = None, priority: float = 0.5,
                 deadline_s: float | None = None, cache_salt: str | bytes | None = None,
                 kv_cache_retention_config: KvCacheRetentionConfig | None = None,
                 arrival_time: float | None = None,
                 request_type: RequestType | str = RequestType.CONTEXT_AND_GENERATION,
                 speculation: bool = True) -> None:
        self._request_id = checked_request_id(request_id)
        self._tensors = {} if tensors is None else _named(tensors)
        self.is_streaming = is_streaming
        self.logits_post_processor = logits_post_processor
        self.priority = priority
        self.deadline_s = deadline_s
        self.cache_salt = cache_salt
        self.kv_cache_retention_config = kv_cache_retention_config
        self.arrival_time = arrival_time
        self.request_type = request_type
        self.speculation = speculation

    if TYPE_CHECKING:
        @property
        def request_id(self) -> int: ...
    else:
        # Read in C, because an asynchronous exception in a Python property would look like an error in reading the id.
        request_id = property(attrgetter("_request_id"))

    @property
    def input_tensors(self) -> dict[str, Any]:
        """A new dictionary of the tensors that are set, by wire name."""
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
    """Return the id as a plain int.

    Raises InvalidRequestError for a bool, for any other type that is not an integer, and for an integer outside
    0..2^64-1.
    """
    # The methods of the base types run no code of the object's class.
    if issubclass(type(request_id), np.integer):
        request_id = np.integer.item(request_id)
    if not issubclass(type(request_id), int) or type(request_id) is bool:
        raise InvalidRequestError(f"request_id is of type {type_name(request_id)}", "it must be an integer",
                                  "number the requests, and map your own names to the numbers")
    plain: int = int.__int__(request_id)
    if not 0 <= plain <= UINT64_MAX:
        raise InvalidRequestError(f"request_id is {shown(plain)}", "it must be in 0..2^64-1")
    return plain


# Names of other engines that are not similar to the name here.
_WORDS_OF_OTHER_ENGINES = {
    "stop": "stop_words_list takes a list of tokens for each stop word",
    "stop_sequences": "stop_words_list takes a list of tokens for each stop word",
    "stop_token_ids": "end_id takes up to 8 end ids",
    "eos_token_id": "the tensor is called end_id",
    "prompt": "input_ids takes the tokens of the prompt",
    "messages": "input_ids takes the tokens of the messages, formatted with the tokenizer's chat template",
    "n": "send one request for each output, with different seeds",
    "best_of": "send one request for each output, with different seeds",
    "seed": "the tensor is called random_seed",
    "stream": "set is_streaming=True, or the tensor streaming",
    "logprobs": "return_log_probs=True returns the log-probability of each token, and "
                "return_top_log_probs=k those of the k likeliest tokens",
    "top_logprobs": "return_top_log_probs=k returns the k likeliest tokens with their log-probabilities",
    "logit_bias": "embedding_bias takes a number for each token of the vocabulary",
    "ignore_eos": "leave end_id out",
    "min_tokens": "the tensor is called min_length",
    "user": "a request has an id and no user: map ids to users yourself",
    "priority": "pass it as an option of InferenceRequest: priority=0.5",
}


def unknown_name(name: object) -> InvalidRequestError:
    """Make the error for an unknown tensor name. Suggests the nearest known name."""
    if not isinstance(name, str):
        return InvalidRequestError(f"a tensor name is of type {type_name(name)}", "names are strings",
                                   f"the names are {', '.join(TENSORS)}")
    if name in _WORDS_OF_OTHER_ENGINES:
        return InvalidRequestError(f"Invalid tensor name: {name!r}", "it is not one of the documented names",
                                   _WORDS_OF_OTHER_ENGINES[name])
    near = ([known for known in _WIRE_NAMES if len(name) > 2 and name in known]
            or get_close_matches(name[:64], _WIRE_NAMES, n=1))
    return InvalidRequestError(
        f"Invalid tensor name: {name[:64]!r}", "it is not one of the documented names",
        f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(TENSORS)}")


def request_options() -> tuple[str, ...]:
    """Return the names of the options of InferenceRequest."""
    return tuple(InferenceRequest.__init__.__kwdefaults__ or ())


def unknown_request_option(name: str) -> str:
    """The text of the error for an option of a request that does not exist, with what was meant."""
    names = [known for known in request_options() if known != "is_streaming"]
    if name in _WIRE_NAMES:
        return f"{name} is a tensor, and no option: put it into the tensors, {{..., {name!r}: ...}}"
    near = get_close_matches(name[:64], names, n=1)
    if name in _WORDS_OF_OTHER_ENGINES:
        way_out = _WORDS_OF_OTHER_ENGINES[name]
    elif near:
        way_out = f"did you mean {near[0]}?"
    else:
        near = get_close_matches(name[:64], _WIRE_NAMES, n=1)
        way_out = f"did you mean the tensor {near[0]!r}?" if near else f"the options are {', '.join(names)}"
    return f"unknown option {name[:64]!r}; {way_out}"


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
            names = [given for given in tensors if _WIRE_NAMES.get(given) == wire_name]
            raise InvalidRequestError(f"{wire_name} is given twice, as {' and as '.join(names)}",
                                      "expected one of its names", f"leave {name} out")
        named[wire_name] = value
    return named
