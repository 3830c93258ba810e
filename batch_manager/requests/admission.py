"""Turns an item of the get callback into a request that can run, or into an error with the reason.

Every check of a request that involves neither other requests nor the clock starts here. Admission checks type, rank
and element count first, and bytes next. It then copies the tensors and checks the values of the copies. The engine uses
the copies, so later changes of a tensor have no effect.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from inspect import signature
from itertools import count
from typing import Any

import numpy as np

from ..config import KvTransferConfig, Limits
from ..errors import InvalidRequestError, RequestError, RequestTooLargeError, counted, type_name
from ..guard import ForeignCodeError, Guard
from ..handover import LogitsPostProcessor, SlotSetup
from ..names import RequestType
from ..sampling_config import (
    BITS_64,
    FLOAT32_MAX,
    INT32_MAX,
    MAX_TOP_K,
    PARAMETERS,
    SHARE,
    Range,
    SamplingConfig,
    shown,
)
from .adapter_content import TENSORS_OF_AN_ADAPTER, GivenAdapter, copied_adapter
from .context_phase import MOST_BYTES, ContextPhaseParams
from .dependent_tensors import check_dependent_tensors
from .inference_request import (
    TENSORS,
    Content,
    InferenceRequest,
    Shape,
    TensorSpec,
    checked_request_id,
    unknown_name,
)
from .llm_request import LlmRequest
from .prompt_table import PromptTable
from .response_options import ResponseOptions
from .retention import KvCacheRetentionConfig, copied_retention
from .tensor_values import (
    MAX_WORD_LIST_SIZE,
    Bound,
    GivenTensor,
    few,
    floats,
    ids,
    integers,
    read_tensor,
    scalar,
    words,
)

# Refused with static batching, as in TensorRT-LLM's padded batch.
NOT_IN_STATIC_BATCHES: dict[str, str] = {
    "embedding_bias": "a bias on the logits",
    "draft_input_ids": "speculative decoding",
    "draft_logits": "speculative decoding",
}

# Refused with several beams: a draft continues one sequence, and a beam search ranks by its own log-probabilities.
NOT_WITH_BEAMS: dict[str, str] = {
    "return_top_log_probs": "the likeliest tokens",
    "raw_log_probs": "log-probabilities of the model's own logits",
    "draft_input_ids": "speculative decoding",
    "draft_logits": "speculative decoding",
}

# Members of a static batch must set the same subset of these options; the values may differ.
SAMPLING_OPTIONS = frozenset(parameter.tensor for parameter in PARAMETERS.values()) - {"beam_width"}

MAX_CACHE_SALT = 1024
MAX_TOP_LOG_PROBS = 20     # as in OpenAI's API
LATEST_S = 4e9             # above time.time(), which the intake refuses with advice; as nanoseconds it is an int64
BATCHED = "batched"        # the name of TensorRT-LLM's batched post-processor

_IS_STREAMING = TensorSpec("is_streaming", Content.FLAG, Shape.SCALAR)
_SPECULATION = TensorSpec("speculation", Content.FLAG, Shape.SCALAR)
_PRIORITY = TensorSpec("priority", Content.NUMBER, Shape.SCALAR)
_DEADLINE = TensorSpec("deadline_s", Content.NUMBER, Shape.SCALAR)
_ARRIVAL = TensorSpec("arrival_time", Content.NUMBER, Shape.SCALAR)

_POSITIVE = Range(1, INT32_MAX, whole=True)
_DEADLINE_RANGE = Range(0, FLOAT32_MAX, above_low=True)
_ARRIVAL_RANGE = Range(-LATEST_S, LATEST_S)
_TOP_LOG_PROBS = Range(0, MAX_TOP_LOG_PROBS, whole=True)
_EXTRA_ID = Range(0, 2**63 - 1, whole=True)
_BYTE = Range(0, 255, whole=True)


@dataclass(frozen=True, slots=True)
class Admitted:
    """An accepted request.

    request      the request as schedulers and the loop see it
    setup        options of the request that the device needs
    response     options that decide what the request's responses contain, and its deadline
    num_bytes    bytes of the request's tensors, and of the logits and likeliest tokens that the request asks for
    warnings     changes made to the request so that it fits max_seq_len, one sentence each
    prompt_table   embeddings of the request's prompt-tuning tokens; None: the request has no embedding table
    draft_logits   [drafts, vocab] float32: logits from which the client drew its draft tokens; None: it has none
    adapter      the adapter that the request brings along, unchecked; None: it has none, or only names one
    context_phase   where the blocks of the prompt wait, for a generation_only request; None for others
    arrival_time   arrival of the request in seconds of the engine's clock; None if the request does not set it
    """

    request: LlmRequest
    setup: SlotSetup
    response: ResponseOptions
    num_bytes: int
    warnings: tuple[str, ...] = ()
    prompt_table: PromptTable | None = None
    draft_logits: np.ndarray | None = None
    adapter: GivenAdapter | None = None
    context_phase: ContextPhaseParams | None = None
    arrival_time: float | None = None


@dataclass(slots=True)
class _RawRequest:
    """A request after the first checks, with plain scalars and with tensors of an allowed type and size."""

    scalars: dict[str, Any] = field(default_factory=dict)
    few: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tensors: dict[str, GivenTensor] = field(default_factory=dict)
    num_bytes: int = 0
    is_streaming: bool = False
    priority: float = 0.5
    deadline_s: float | None = None
    arrival_time: float | None = None
    cache_salt: str | bytes | None = None
    retention: KvCacheRetentionConfig | None = None
    speculation: bool = True
    logits_post_processor: Callable[..., Any] | str | None = None
    type: RequestType = RequestType.CONTEXT_AND_GENERATION


class Admission:
    """Accepts or refuses one item at a time, independently of earlier items.

    max_request_bytes         largest number of bytes of one request's tensors
    gather_context_logits, gather_generation_logits   whether requests may ask for these logits
    exclude_input_in_output   whether responses that are not streamed leave the prompt out
    logits_post_processor_batched   the post-processor that requests select with "batched"; None: there is none
    static_batching           whether requests run in static batches. If so, each request gets a batch_key, and a
                              streaming request gets a single response, which leaves the prompt out
    transfer                  which prompts are computed for or by other engines; None: none
    deterministic             whether requests with draft_logits are refused, see `_check_drafts`
    blocks_of                 function of a request: the largest number of KV cache blocks that it holds at a time;
                              None: count the blocks of all its tokens
    guard                     the engine's guard, in which code of the user's classes runs
    """

    def __init__(self, limits: Limits, *, max_request_bytes: int = 64 * 1024 * 1024, gather_context_logits: bool = True,
                 gather_generation_logits: bool = True, exclude_input_in_output: bool = False,
                 static_batching: bool = False,
                 logits_post_processor_batched: Callable[..., Any] | None = None,
                 transfer: KvTransferConfig | None = None, deterministic: bool = False,
                 blocks_of: Callable[[LlmRequest], int] | None = None, guard: Guard | None = None) -> None:
        self.limits = limits
        self._blocks_of = blocks_of or (lambda request: -(-request.final_length // limits.tokens_per_block))
        self.max_request_bytes = max_request_bytes
        self.gather_context_logits = gather_context_logits
        self.gather_generation_logits = gather_generation_logits
        self.exclude_input_in_output = exclude_input_in_output
        self.static_batching = static_batching
        self.logits_post_processor_batched = logits_post_processor_batched
        self._transfer, self._deterministic = transfer, deterministic
        self._own_salts = count()

        vocab, longest = limits.vocab_size, limits.max_seq_len - 1
        prompt = (longest, f"the maximum input length is max_seq_len - 1 = {longest:,}, as one more token must fit")
        word_list = (MAX_WORD_LIST_SIZE, f"the maximum size of a word list is {MAX_WORD_LIST_SIZE:,}")
        table = (max_request_bytes, f"max_request_bytes is {max_request_bytes:,}")
        self._max_sizes: dict[str, tuple[int, str]] = {
            "input_ids": prompt,
            "input_token_extra_ids": prompt,
            "draft_input_ids": prompt,
            "bad_words_list": word_list,
            "stop_words_list": word_list,
            "embedding_bias": (vocab, f"there must be one for each id of the vocabulary of {vocab:,}"),
            "draft_logits": (longest * vocab, f"there must be {vocab:,} for each draft token"),
            "prompt_embedding_table": table,
            "lora_weights": table,
            "lora_config": table,
            "context_phase_params": (MOST_BYTES, f"the tensor of a response has at most {MOST_BYTES}"),
        }
        self._id_or_none, self._id = Range(-1, vocab - 1, whole=True), Range(0, vocab - 1, whole=True)
        self._in_request = (Guard() if guard is None else guard).raising("reading a request")
        self._top_k = Range(0, min(MAX_TOP_K, vocab), whole=True)

    def admit(self, item: object) -> Admitted:
        """Check and copy an item. Returns a request that is ready to run.

        Raises RequestTooLargeError for a request larger than the KV cache, and InvalidRequestError for any other
        reason. The method raises no other exception, whatever the item is or does.
        """
        request_id = usable_id(item)
        found = self._read_guarded(item)
        error: RequestError
        if isinstance(found, InvalidRequestError):
            error = found
        elif request_id is None:
            error = InvalidRequestError("an InferenceRequest has no usable request_id",
                                        "it must be an integer in 0..2^64-1", "do not override request_id")
        else:
            try:
                return self._decide(request_id, found)
            except RequestError as refusal:
                error = refusal
        where = "" if request_id is None else f"request {request_id}: "
        raise type(error)(where + error.fact, error.expectation, error.fix)

    def for_other_threads(self) -> "Admission":
        """Return an admission with the same rules for threads other than the worker.

        It does not write the worker's heartbeat, and Ctrl-C in its caller propagates.
        """
        twin = copy(self)
        twin._in_request = Guard().raising("reading a request", KeyboardInterrupt)
        return twin

    def bare_request(self, request_id: int, prompt: list[int], output_len: int) -> LlmRequest | None:
        """Return the request that `admit` makes of an item with a prompt, an output length and nothing else.

        Returns None if `admit` refuses the item or cuts its output, and with static batching. Does not check the
        tokens of the prompt. For simulations, which make millions of requests.
        """
        limits, length = self.limits, len(prompt)
        if (not 0 < output_len <= limits.max_seq_len - length or not prompt or self.static_batching
                or 4 * length + 64 > self.max_request_bytes
                or length > limits.max_num_tokens and not limits.enable_chunked_context):
            return None
        request = LlmRequest(request_id, prompt, output_len)
        return request if self._blocks_of(request) <= limits.num_blocks else None

    def _read_guarded(self, item: object) -> "_RawRequest | InvalidRequestError":
        """Read an item in a guarded block. Only this method and `usable_id` run code of the user's classes."""
        try:
            with self._in_request:
                return self._read(item)
        except ForeignCodeError as failure:
            if type(failure.error) is InvalidRequestError:
                return failure.error
        return InvalidRequestError("the request could not be read: one of its values raised an exception",
                                   "its values must be torch CPU tensors, numpy arrays, numbers or lists",
                                   "convert them with numpy.array(...)")

    def _read(self, item: object) -> _RawRequest:
        """Check type, rank, element count and bytes of all values. Reads scalars and copies no array."""
        if not isinstance(item, InferenceRequest):
            raise InvalidRequestError(f"the get callback returned an object of type {type_name(item)}",
                                      "it must return InferenceRequest objects", "make one for each prompt")
        raw = _RawRequest()
        for name, value in dict(item.input_tensors).items():
            spec = TENSORS.get(name)
            if spec is None:
                raise unknown_name(name)
            if name == "input_lengths":
                continue
            if spec.shape is Shape.SCALAR:
                raw.scalars[name] = scalar(spec, value)
                raw.num_bytes += 8
                continue
            if spec.shape is Shape.FEW:
                raw.few[name] = few(spec, value)
                raw.num_bytes += 8 * len(raw.few[name])
                continue
            given = read_tensor(spec, value, Bound(*self._max_sizes[name], self.max_request_bytes - raw.num_bytes))
            raw.tensors[name] = given
            raw.num_bytes += given.num_bytes
        if raw.num_bytes > self.max_request_bytes:              # `read_tensor` does not count later scalars
            raise InvalidRequestError(f"the request's tensors have {counted(raw.num_bytes, 'byte')}",
                                      f"max_request_bytes is {self.max_request_bytes:,}",
                                      "send less, or raise max_request_bytes")

        raw.is_streaming = bool(scalar(_IS_STREAMING, item.is_streaming) or raw.scalars.get("streaming", False))
        raw.priority = _number(_PRIORITY, item.priority, "a number")
        raw.deadline_s = _number(_DEADLINE, item.deadline_s, "a number of seconds, or None", optional=True)
        raw.arrival_time = _number(_ARRIVAL, item.arrival_time, "a time in seconds of time.monotonic(), or None",
                                   optional=True)
        raw.cache_salt = item.cache_salt
        salt = raw.cache_salt
        if type(salt) not in (str, bytes, type(None)):
            raise InvalidRequestError(f"cache_salt is of type {type_name(salt)}", "it must be a str, bytes or None")
        if salt and len(salt) > MAX_CACHE_SALT:
            raise InvalidRequestError(f"cache_salt has {len(salt):,} {'characters' if type(salt) is str else 'bytes'}",
                                      f"it must have at most {MAX_CACHE_SALT:,}", "pass a digest of the salt")
        raw.type = _request_type(item.request_type)
        raw.speculation = bool(scalar(_SPECULATION, item.speculation))
        raw.retention = copied_retention(item.kv_cache_retention_config)
        raw.logits_post_processor = self._post_processor_of(item)
        return raw

    def _post_processor_of(self, item: InferenceRequest) -> Callable[..., Any] | str | None:
        given = item.logits_post_processor
        if given is None:
            return None
        if type(given) is str:
            if given != BATCHED:
                raise InvalidRequestError(f"logits_post_processor is {given[:64]!r}",
                                          f"the only valid name is {BATCHED!r}", "pass a callable")
            if self.logits_post_processor_batched is None:
                raise InvalidRequestError(f"logits_post_processor is {BATCHED!r}",
                                          "the GptManager has no batched post-processor",
                                          "set Parts(logits_post_processor_batched=...), or pass a callable")
            return given
        if not callable(given):
            raise InvalidRequestError(f"logits_post_processor is of type {type_name(given)}",
                                      f"it must be a callable, {BATCHED!r} or None",
                                      "pass a function of (request_id, logits, token_ids) that returns the logits")
        try:
            signature(given).bind(0, None, [])
        except ValueError:                                         # some builtins have no signature
            pass
        except TypeError:
            raise InvalidRequestError("logits_post_processor cannot be called with three arguments",
                                      "it is called with (request_id, logits, token_ids)",
                                      "give it these three parameters; a parameter for the CUDA stream is not "
                                      "needed, because the engine's stream is the current one") from None
        return given

    def _decide(self, request_id: int, raw: _RawRequest) -> Admitted:
        """Copy and check the values, which are plain numbers and arrays at this point."""
        for name in ("input_ids", "request_output_len"):
            if name not in raw.scalars and name not in raw.tensors:
                raise InvalidRequestError(f"{name} is missing", "every request needs input_ids and request_output_len",
                                          f"set {name}")
        sampling = self._sampling(raw)
        values = self._values(raw)
        shapes = {name: given.shape for name, given in raw.tensors.items()}
        end_ids = self._end_ids(raw)
        check_dependent_tensors(raw.scalars, shapes, values, end_ids, self.limits)
        adapter = self._adapter(raw)
        self._check_options(raw, values)
        self._refuse_unsupported(raw, values, sampling.beam_width)

        prompt, scalars, drafts = values["input_ids"], raw.scalars, values.get("draft_input_ids", ())
        if drafts:
            self._check_drafts(raw, len(prompt), len(drafts))
        max_new_tokens, warnings = self._fit(len(prompt), scalars["request_output_len"])
        if len(drafts) >= max_new_tokens:
            warnings += (f"draft_input_ids was cut from {len(drafts):,} to {max_new_tokens - 1:,}: the request "
                         f"generates {counted(max_new_tokens, 'token')}",)
            drafts = drafts[:max_new_tokens - 1]
        return_context_logits = scalars.get("return_context_logits", False)
        return_generation_logits = scalars.get("return_generation_logits", False)
        return_log_probs = scalars.get("return_log_probs", False)
        top_log_probs = scalars.get("return_top_log_probs", 0)
        if raw.type is RequestType.CONTEXT_ONLY:               # its engine needs room for the first token only
            max_new_tokens = 1
        num_bytes, prompt_table = raw.num_bytes + 8 * top_log_probs * max_new_tokens, None
        if "prompt_embedding_table" in values:
            prompt_table = PromptTable(self.limits.vocab_size, values["prompt_embedding_table"])
            num_bytes += prompt_table.rows.nbytes - raw.tensors["prompt_embedding_table"].num_bytes
        returned_rows = (return_context_logits * len(prompt)
                         + return_generation_logits * max_new_tokens * sampling.beam_width)
        request = LlmRequest(
            request_id, prompt, max_new_tokens, beam_width=sampling.beam_width,
            draft_tokens=drafts, lora_task_id=scalars.get("lora_task_id"),
            priority=float(raw.priority), in_lockstep=raw.logits_post_processor is not None,
            token_extra_ids=values.get("input_token_extra_ids"),
            retention=raw.retention, speculation=raw.speculation,
            batch_key=_batch_key(raw, end_ids, sampling) if self.static_batching else None,
            # Logits exist for computed tokens only, so no part of the prompt may come from cached blocks. A unique salt
            # prevents block reuse. No other salt is an integer.
            cache_salt=next(self._own_salts) if return_context_logits else _cache_salt(raw, prompt_table))
        self._check_blocks(request)
        return Admitted(
            request=request,
            setup=SlotSetup(
                sampling=sampling,
                request_id=request_id,
                end_id=end_ids[0] if end_ids else -1,
                more_end_ids=end_ids[1:],
                bad_words=values.get("bad_words_list", ()),
                stop_words=values.get("stop_words_list", ()),
                embedding_bias=_unless_zero(values.get("embedding_bias")),
                return_log_probs=return_log_probs,
                top_log_probs=top_log_probs,
                raw_log_probs=scalars.get("raw_log_probs", False),
                return_context_logits=return_context_logits,
                return_generation_logits=return_generation_logits,
                logits_post_processor=self._post_processor_for(request, raw),
                prompt_length=len(prompt),
                max_new_tokens=max_new_tokens,
            ),
            response=ResponseOptions(
                is_streaming=raw.is_streaming and not self.static_batching,
                exclude_input=self.exclude_input_in_output or (self.static_batching and raw.is_streaming),
                return_log_probs=return_log_probs,
                top_log_probs=top_log_probs,
                return_context_logits=return_context_logits,
                return_generation_logits=return_generation_logits,
                return_perf_metrics=scalars.get("return_perf_metrics", False),
                is_context_only=raw.type is RequestType.CONTEXT_ONLY,
                deadline_s=None if raw.deadline_s is None else float(raw.deadline_s),
                pad_id=_pad_id(scalars, end_ids) if sampling.beam_width > 1 else 0,
            ),
            num_bytes=num_bytes + 4 * returned_rows * self.limits.vocab_size,
            warnings=warnings,
            prompt_table=prompt_table,
            draft_logits=values.get("draft_logits"),
            adapter=adapter,
            context_phase=values.get("context_phase_params"),
            arrival_time=None if raw.arrival_time is None else float(raw.arrival_time),
        )

    def _adapter(self, raw: _RawRequest) -> GivenAdapter | None:
        """Return a copy of the adapter in the request's tensors; None if it has none."""
        given = [name for name in ("lora_task_id", *TENSORS_OF_AN_ADAPTER)
                 if name in raw.scalars or name in raw.tensors]
        if given and not self.limits.max_adapter_size:
            raise InvalidRequestError(f"{given[0]} asks for a LoRA adapter", "this engine has no cache for adapters",
                                      f"set TrtGptModelOptionalParams.peft_cache_config, or leave {given[0]} out")
        if len(given) == 2:
            raise InvalidRequestError(f"{' and '.join(given)} are set without lora_task_id",
                                      "an adapter has an id, by which later requests name it", "set lora_task_id")
        weights, config = TENSORS_OF_AN_ADAPTER
        return copied_adapter(raw.tensors[weights], raw.tensors[config]) if len(given) == 3 else None

    def _post_processor_for(self, request: LlmRequest, raw: _RawRequest) -> LogitsPostProcessor | None:
        given = raw.logits_post_processor
        if given is None:
            return None
        is_batched = isinstance(given, str)
        function = self.logits_post_processor_batched if isinstance(given, str) else given
        assert function is not None    # `_post_processor_of` ensures it
        allowed_drafts = None
        with suppress(Exception):                                # of a user's __getattr__
            allowed_drafts = getattr(function, "allowed_drafts", None)
        return LogitsPostProcessor(request.request_id, function,
                                   lambda: [list(tokens) for tokens in request.tokens], is_batched,
                                   allowed_drafts if callable(allowed_drafts) else None)

    def _sampling(self, raw: _RawRequest) -> SamplingConfig:
        given = {name: raw.scalars[parameter.tensor] for name, parameter in PARAMETERS.items()
                 if parameter.tensor in raw.scalars}
        if "random_seed" in given:
            BITS_64.check("random_seed", given["random_seed"])
            given["random_seed"] %= 2**64
        # These ranges are narrower than SamplingConfig's, and their errors name the vocabulary's.
        self._top_k.check("runtime_top_k", given.get("top_k", 0))
        self._id_or_none.check("runtime_top_p_reset_ids", given.get("top_p_reset_ids", -1))
        sampling = SamplingConfig(**given)
        if raw.is_streaming and sampling.beam_width > 1:
            raise InvalidRequestError(f"the request is streaming and beam_width is {sampling.beam_width}",
                                      "Streaming mode is only supported with beam width of 1",
                                      "turn streaming off, or set beam_width to 1")
        if sampling.beam_width > self.limits.max_beam_width:
            raise InvalidRequestError(f"beam_width is {sampling.beam_width}",
                                      f"max_beam_width is {self.limits.max_beam_width}",
                                      "lower beam_width, or construct the GptManager with a larger max_beam_width")
        if sampling.beam_width > self.limits.max_num_tokens:
            raise InvalidRequestError(f"beam_width is {sampling.beam_width} and max_num_tokens is "
                                      f"{self.limits.max_num_tokens:,}",
                                      "a step runs one token of each beam, so the request could never run",
                                      "lower beam_width, or raise max_num_tokens")
        return sampling

    def _values(self, raw: _RawRequest) -> dict[str, Any]:
        """Return checked copies of the tensors, by name."""
        scalars, tensors = raw.scalars, raw.tensors
        _POSITIVE.check("request_output_len", scalars["request_output_len"])
        self._id_or_none.check("pad_id", scalars.get("pad_id", -1))
        _TOP_LOG_PROBS.check("return_top_log_probs", scalars.get("return_top_log_probs", 0))
        if "prompt_vocab_size" in scalars:
            _POSITIVE.check("prompt_vocab_size", scalars["prompt_vocab_size"])
        if "lora_task_id" in scalars:
            BITS_64.check("lora_task_id", scalars["lora_task_id"])
            scalars["lora_task_id"] %= 2**64

        vocab = self.limits.vocab_size
        num_tuning_ids = scalars.get("prompt_vocab_size", 0)
        values: dict[str, Any] = {"input_ids": ids(tensors["input_ids"], vocab, num_tuning_ids)}
        if not values["input_ids"]:
            raise InvalidRequestError("input_ids is empty", "a prompt has at least one token",
                                      "send at least the begin token of the model")
        for name, given in tensors.items():
            if name == "draft_input_ids":
                values[name] = ids(given, vocab)
            elif given.spec.shape is Shape.WORDS:
                values[name] = words(given, vocab)
            elif name == "input_token_extra_ids":
                values[name] = integers(given, _EXTRA_ID).tolist()
            elif name == "context_phase_params":
                values[name] = ContextPhaseParams.of(integers(given, _BYTE))
            elif name not in ("input_ids", *TENSORS_OF_AN_ADAPTER):
                values[name] = floats(given)
        return values

    def _end_ids(self, raw: _RawRequest) -> tuple[int, ...]:
        """The end ids, without duplicates, in the given order."""
        given = raw.few.get("end_id", (-1,))
        allowed = self._id_or_none if len(given) == 1 else self._id
        for end_id in given:
            allowed.check("end_id", end_id)
        return tuple(dict.fromkeys(given)) if given != (-1,) else ()

    def _check_options(self, raw: _RawRequest, values: Mapping[str, Any]) -> None:
        scalars = raw.scalars
        SHARE.check("priority", raw.priority)
        if raw.deadline_s is not None:
            _DEADLINE_RANGE.check("deadline_s", raw.deadline_s)
        if raw.arrival_time is not None:
            _ARRIVAL_RANGE.check("arrival_time", raw.arrival_time)
        for name, gathered in (("context", self.gather_context_logits), ("generation", self.gather_generation_logits)):
            if scalars.get(f"return_{name}_logits") and not gathered:
                raise InvalidRequestError(f"return_{name}_logits is set and gather_{name}_logits is off",
                                          f"gather_{name}_logits must be enabled to return them",
                                          f"enable gather_{name}_logits in TrtGptModelOptionalParams")
        self._check_type(raw, values)

    def _check_type(self, raw: _RawRequest, values: Mapping[str, Any]) -> None:
        has_params = "context_phase_params" in values
        if has_params != (raw.type is RequestType.GENERATION_ONLY):
            raise InvalidRequestError(
                f"request_type is {raw.type.value!r} and context_phase_params is {'set' if has_params else 'missing'}",
                "a generation_only request has this tensor, and no other request",
                "pass request_type='generation_only' with the tensor of the context_only request's final response")
        if raw.type is RequestType.CONTEXT_AND_GENERATION:
            return
        if self._transfer is None or not (self._transfer.produces if raw.type is RequestType.CONTEXT_ONLY
                                          else self._transfer.consumes):
            role = "no kv_transfer_config" if self._transfer is None else f"the role {self._transfer.role!r}"
            raise InvalidRequestError(f"request_type is {raw.type.value!r}", f"this engine has {role}",
                                      "give it another kv_transfer_config, or leave request_type out")
        if raw.scalars.get("return_context_logits"):
            raise InvalidRequestError(f"request_type is {raw.type.value!r} and return_context_logits is set",
                                      "the logits of a whole prompt are computed with it, by the engine that generates",
                                      "leave one of them out")

    def _refuse_unsupported(self, raw: _RawRequest, values: Mapping[str, Any], beam_width: int) -> None:
        asked = [name for name, value in raw.scalars.items() if value != TENSORS[name].default]
        # A bias of zeros is the same as none.
        asked += [name for name, value in values.items()
                  if (value.any() if name == "embedding_bias" else isinstance(value, np.ndarray) or value)]
        for name in asked:
            if self.static_batching and name in NOT_IN_STATIC_BATCHES:
                raise InvalidRequestError(f"{name} asks for {NOT_IN_STATIC_BATCHES[name]}",
                                          "static batching (TrtGptModelType.V1) does not support that",
                                          f"leave {name} out, or use InflightFusedBatching")
            if beam_width > 1 and name in NOT_WITH_BEAMS:
                raise InvalidRequestError(f"{name} asks for {NOT_WITH_BEAMS[name]} and beam_width is {beam_width}",
                                          "this is not supported with several beams",
                                          f"leave {name} out, or set beam_width to 1")

    def _fit(self, prompt_len: int, asked: int) -> tuple[int, tuple[str, ...]]:
        """Return how many tokens the request may generate, and a warning if this number is less than `asked`.

        Raises InvalidRequestError for a prompt that can never run.
        """
        limits = self.limits
        max_new_tokens = min(asked, limits.max_seq_len - prompt_len)
        warnings = () if max_new_tokens == asked else (
            f"request_output_len was cut from {asked:,} to {max_new_tokens:,}: the prompt has "
            f"{counted(prompt_len, 'token')} and max_seq_len is {limits.max_seq_len:,}",)

        if not limits.enable_chunked_context and prompt_len > limits.max_num_tokens:
            raise InvalidRequestError(
                f"input_ids has {counted(prompt_len, 'token')} and max_num_tokens is "
                f"{limits.max_num_tokens:,}",
                "without chunked context a prompt must fit one step",
                f"set enable_chunked_context, or raise max_num_tokens to {prompt_len:,}")

        return max_new_tokens, warnings

    def _check_drafts(self, raw: _RawRequest, prompt_len: int, num_drafts: int) -> None:
        """Raise InvalidRequestError for draft tokens that this engine cannot verify with the prompt."""
        limits, has = self.limits, f"draft_input_ids has {counted(num_drafts, 'token')}"
        if num_drafts > limits.max_draft_tokens:
            raise InvalidRequestError(has, f"max_draft_tokens of this engine is {limits.max_draft_tokens}",
                                      "send fewer, or construct the GptManager with a larger max_draft_tokens")
        if raw.logits_post_processor is not None:
            raise InvalidRequestError(f"{has}, and logits_post_processor is set",
                                      "a post-processor sees one row of logits of a sequence in a step",
                                      "leave one of them out")
        if raw.type is not RequestType.CONTEXT_AND_GENERATION:
            raise InvalidRequestError(f"{has}, and request_type is {raw.type.value!r}",
                                      "drafts are verified with the prompt, in the engine that generates",
                                      "leave draft_input_ids out")
        if self._deterministic and "draft_logits" in raw.tensors:
            raise InvalidRequestError("draft_logits is set, and the engine is deterministic",
                                      "how many drafts fit beside other requests decides which tokens are drawn by "
                                      "ratios", "leave draft_logits out: drafts then change no token")
        if not limits.enable_chunked_context and prompt_len + num_drafts > limits.max_num_tokens:
            raise InvalidRequestError(
                f"input_ids has {counted(prompt_len, 'token')}, draft_input_ids {num_drafts:,}, and max_num_tokens is "
                f"{limits.max_num_tokens:,}", "without chunked context, prompt and drafts must fit one step",
                f"send fewer, set enable_chunked_context, or raise max_num_tokens to {prompt_len + num_drafts:,}")

    def _check_blocks(self, request: LlmRequest) -> None:
        limits, blocks = self.limits, self._blocks_of(request)
        beams = f" for {request.beam_width} beams" if request.beam_width > 1 else ""
        if blocks > limits.num_blocks:
            raise RequestTooLargeError(
                f"input_ids has {counted(request.prompt_len, 'token')} and request_output_len is "
                f"{request.max_new_tokens:,}",
                f"together they may need {counted(blocks, 'block')} of {counted(limits.tokens_per_block, 'token')}"
                f"{beams}, and the pool has {limits.num_blocks:,}",
                f"raise KvCacheConfig.max_tokens to {blocks * limits.tokens_per_block:,}, or shorten the request")


def _number(spec: TensorSpec, value: Any, expected: str, *, optional: bool = False) -> Any:
    """Return the number in a request's attribute; None if the attribute is optional and None.

    expected   the words after "it must be" in the message

    Raises InvalidRequestError.
    """
    if optional and value is None:
        return None
    try:
        return scalar(spec, value)
    except InvalidRequestError:
        found = shown(value) if type(value) in (int, float, bool) else f"of type {type_name(value)}"
        raise InvalidRequestError(f"{spec.name} is {found}", f"it must be {expected}") from None


def _request_type(given: Any) -> RequestType:
    if type(given) is RequestType:
        return given
    for request_type in RequestType:
        if type(given) is str and given == request_type.value:
            return request_type
    shown_type = repr(given[:64]) if type(given) is str else f"of type {type_name(given)}"
    raise InvalidRequestError(f"request_type is {shown_type}",
                              f"it must be one of {', '.join(known.value for known in RequestType)}")


def _pad_id(scalars: Mapping[str, Any], end_ids: Sequence[int]) -> int:
    return scalars["pad_id"] if scalars.get("pad_id", -1) >= 0 else end_ids[0] if end_ids else 0


def _batch_key(raw: _RawRequest, end_ids: Sequence[int], sampling: SamplingConfig) -> Hashable:
    """The properties that members of a static batch share: end ids, pad_id, beam options, and which other sampling
    options are set."""
    beams: Hashable = sampling.beam_width
    if sampling.beam_width > 1:
        beams = (sampling.beam_width, sampling.len_penalty, sampling.early_stopping,
                 sampling.beam_search_diversity_rate)
    scalars = raw.scalars
    return frozenset(end_ids), scalars.get("pad_id", -1), beams, SAMPLING_OPTIONS & scalars.keys()


def _cache_salt(raw: _RawRequest, prompt_table: PromptTable | None) -> Hashable:
    """The salt of the request's blocks. Only prompts with the same salt share blocks.

    The salt includes the digest of the prompt table, because prompt-tuning ids have other embeddings in every table.
    """
    return raw.cache_salt if prompt_table is None else (raw.cache_salt, prompt_table.digest)


def usable_id(item: Any) -> int | None:
    """Return the id under which a refusal of `item` can be sent, or None. Never raises.

    Any object with a valid id in its attribute `request_id` has a usable id. A client that waits for this id then gets
    a response.
    """
    try:
        request_id = item.request_id    # the only line that runs user code
    except BaseException:  # noqa: B036  not even SystemExit of a hostile object may end the worker
        return None
    try:
        return checked_request_id(request_id)
    except InvalidRequestError:
        return None


def _unless_zero(bias: np.ndarray | None) -> np.ndarray | None:
    return bias if bias is not None and bias.any() else None
