"""The enumerations of the API, with TensorRT-LLM's names."""

from enum import Enum, IntEnum


class TrtGptModelType(IntEnum):
    """Batching scheme.

    V1                      a padded static batch runs in lockstep until its last member ends; all final responses of
                            the batch are then sent
    InflightBatching        requests join and leave every iteration; context and generation run in two calls
    InflightFusedBatching   requests join and leave every iteration; a step is one packed call
    """

    V1 = 0
    InflightBatching = 1
    InflightFusedBatching = 2


class SchedulerPolicy(IntEnum):
    """Which requests may start when KV cache blocks are short.

    MAX_UTILIZATION       start requests while the blocks suffice for the next step. When blocks run out, pause the
                          last requests in line
    GUARANTEED_NO_EVICT   start a request only if blocks for all its tokens can be reserved; never pause
    """

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1


class ContextChunkingPolicy(IntEnum):
    """How to divide a token budget that is too small for all waiting prompts.

    FIRST_COME_FIRST_SERVED   each prompt, in order, takes as many tokens as are left
    EQUAL_PROGRESS            the prompts take turns, with one block per turn
    """

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


class LlmRequestState(Enum):
    """Phase of a request, in chronological order. Compare `.value` to test whether a request has reached a phase."""

    UNKNOWN = 0
    ENCODER_INIT = 1
    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20


class FinishReason(IntEnum):
    """The reason why a sequence ended, which is the content of the response tensor `finish_reason`."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5

    @property
    def is_natural(self) -> bool:
        """Whether the sequence completed. False for a sequence that was cancelled, timed out or has not ended."""
        return self in (FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH)


class RequestType(Enum):
    """What an engine computes of a request.

    CONTEXT_AND_GENERATION   all of it
    CONTEXT_ONLY             the prompt and the first token; another engine goes on with its blocks
    GENERATION_ONLY          the output of a prompt that another engine has computed
    """

    CONTEXT_AND_GENERATION = "context_and_generation"
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"


class ErrorCode(Enum):
    """The kind of an error. The text of an error response starts with the code in brackets."""

    __hash__ = object.__hash__    # one instruction; Enum's own __hash__ calls a function, see loop/unanswered.py

    INVALID_REQUEST = "INVALID_REQUEST"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    TOO_LARGE_FOR_KV_CACHE = "TOO_LARGE_FOR_KV_CACHE"
    LORA_TASK_NOT_CACHED = "LORA_TASK_NOT_CACHED"
    KV_TRANSFER_FAILED = "KV_TRANSFER_FAILED"
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
        """Split the text of an error response, or `str` of an exception of this package, into (code, message).

        `str(exception)` must be the untouched object: a slice, an f-string or JSON loses its code. Pass on
        `exception.response_text()`, which starts with the code.

        Raises ValueError for any other text, such as the empty text of a response without an error.
        """
        if not isinstance(text, str):
            raise TypeError(f"the text is of type {type(text).__name__}; expected a str; pass the error of a response, "
                            "or str(exception)")
        code, closing, message = text.removeprefix("[").partition("] ")
        if not text.startswith("[") or not closing or code not in cls.__members__:
            code_of_exception = getattr(text, "code", None)     # of errors.ErrorText
            if isinstance(code_of_exception, cls):
                return code_of_exception, text
            raise ValueError(f"{text[:80]!r} is not the text of an error response; expected a code in brackets first")
        return cls[code], message

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later, or at another instance."""
        return self in (ErrorCode.KV_TRANSFER_FAILED, ErrorCode.QUEUE_FULL, ErrorCode.SHUTDOWN, ErrorCode.ENGINE_FAILED)

    @property
    def http_status(self) -> int:
        """The HTTP status code of a response with this error."""
        return _HTTP_STATUS[self]


_HTTP_STATUS = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.DUPLICATE_REQUEST_ID: 409,           # Conflict
    ErrorCode.TOO_LARGE_FOR_KV_CACHE: 413,         # Content Too Large
    ErrorCode.LORA_TASK_NOT_CACHED: 404,           # Not Found
    ErrorCode.KV_TRANSFER_FAILED: 503,
    ErrorCode.QUEUE_FULL: 429,                     # Too Many Requests
    ErrorCode.NON_FINITE_LOGITS: 500,
    ErrorCode.INVALID_TOKEN: 500,
    ErrorCode.OUT_OF_MEMORY: 500,
    ErrorCode.MODEL_ERROR: 500,
    ErrorCode.DEADLINE: 504,                       # Gateway Timeout
    ErrorCode.SHUTDOWN: 503,                       # Service Unavailable
    ErrorCode.ENGINE_FAILED: 503,
}
