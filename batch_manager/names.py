"""The enumerations of the field, spelled as TensorRT-LLM spells them."""

from enum import Enum, IntEnum


class TrtGptModelType(IntEnum):
    """Batching scheme.

    V1                      a padded batch runs in lockstep until its last member is done, and finals go out then
    InflightBatching        requests join and leave every iteration; context and generation in two calls
    InflightFusedBatching   the same in one packed call
    """

    V1 = 0
    InflightBatching = 1
    InflightFusedBatching = 2


class SchedulerPolicy(IntEnum):
    """Who may start when KV cache blocks are short.

    MAX_UTILIZATION       start while one more step fits; pause the youngest when it no longer does
    GUARANTEED_NO_EVICT   start only what can run to its last token; never pause
    """

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1


class ContextChunkingPolicy(IntEnum):
    """How a token budget too small for all waiting prompts is divided among them."""

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


class LlmRequestState(Enum):
    """Where a request stands. The order is chronological: comparing `.value` asks "has it got that far"."""

    UNKNOWN = 0
    ENCODER_INIT = 1
    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20


class FinishReason(IntEnum):
    """Why a sequence ended; the content of the response tensor `finish_reason`."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5

    @property
    def is_natural(self) -> bool:
        """The sequence itself came to an end; it was not cut short."""
        return self in (FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH)


class ErrorCode(Enum):
    """What the text of an error response starts with, in brackets."""

    __hash__ = object.__hash__    # one instruction where Enum's own calls a function: see loop/unanswered.py

    INVALID_REQUEST = "INVALID_REQUEST"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    TOO_LARGE_FOR_KV_CACHE = "TOO_LARGE_FOR_KV_CACHE"
    QUEUE_FULL = "QUEUE_FULL"
    NON_FINITE_LOGITS = "NON_FINITE_LOGITS"
    INVALID_TOKEN = "INVALID_TOKEN"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    MODEL_ERROR = "MODEL_ERROR"
    DEADLINE = "DEADLINE"
    SHUTDOWN = "SHUTDOWN"
    ENGINE_FAILED = "ENGINE_FAILED"

    @classmethod
    def of(cls, text: str) -> "tuple[ErrorCode, str]":
        """(code, message) of the text of an error response. Raises ValueError where the text is no such text, as
        that of a response without an error, which is empty."""
        if not isinstance(text, str):
            raise TypeError(f"the text is of type {type(text).__name__}; a str is expected; pass the error_message of "
                            "a response")
        code, closing, message = text.removeprefix("[").partition("] ")
        if not text.startswith("[") or not closing or code not in cls.__members__:
            raise ValueError(f"{text[:80]!r} is no text of an error response: those begin with a code in brackets")
        return cls[code], message

    @property
    def is_retryable(self) -> bool:
        """The request may still be answered: the same request may succeed later, or at another instance."""
        return self in (ErrorCode.QUEUE_FULL, ErrorCode.SHUTDOWN, ErrorCode.ENGINE_FAILED)

    @property
    def http_status(self) -> int:
        """The status code of an HTTP response that says the same."""
        return _HTTP_STATUS[self]


_HTTP_STATUS = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.DUPLICATE_REQUEST_ID: 409,           # Conflict
    ErrorCode.TOO_LARGE_FOR_KV_CACHE: 413,         # Content Too Large
    ErrorCode.QUEUE_FULL: 429,                     # Too Many Requests
    ErrorCode.NON_FINITE_LOGITS: 500,
    ErrorCode.INVALID_TOKEN: 500,
    ErrorCode.OUT_OF_MEMORY: 500,
    ErrorCode.MODEL_ERROR: 500,
    ErrorCode.DEADLINE: 504,                       # Gateway Timeout
    ErrorCode.SHUTDOWN: 503,                       # Service Unavailable
    ErrorCode.ENGINE_FAILED: 503,
}
