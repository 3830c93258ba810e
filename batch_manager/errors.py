"""Every error of the project, grouped by the part that fails.

    BatchManagerError
    ├── ConfigError (ValueError)            the engine did not start: raised in the constructor's caller
    │   ├── ModelLoadError                  the checkpoint cannot be read; names file and field
    │   │   └── UnsupportedModelError       the architecture is not registered; lists the known ones
    │   └── InsufficientMemoryError         names the bytes needed, the bytes free and the option that helps
    ├── RequestError                        one request fails; its final response carries the text
    │   ├── InvalidRequestError (ValueError)
    │   ├── DuplicateRequestIdError
    │   ├── RequestTooLargeError            the request can never fit the KV cache
    │   └── QueueFullError
    ├── SchedulerContractError              a custom scheduler broke a rule; names class and rule
    ├── DeviceLostError                     the device cannot be used again in this process
    ├── ManagerClosedError                  the manager is used after shutdown, or in a forked child
    └── InternalError                       a bug of this package
        └── OutOfResourceError              a bug, or a custom scheduler's plan that needs more than is free

A message has up to three parts: the fact with its value, the expectation, and the way out.
"""

import traceback
from typing import Any, TypeGuard, TypeVar

from .names import ErrorCode

Kind = TypeVar("Kind")

LONGEST_ERROR_TEXT = 1000              # characters of an exception's text in the log


class ErrorText(str):
    """`str` of an error of this package. ErrorCode.of reads `code`, which copies of the text do not have."""

    code: ErrorCode


class BatchManagerError(Exception):
    """Base of all errors raised by this package. A response's error text starts with `code`."""

    code = ErrorCode.ENGINE_FAILED

    def __init__(self, fact: str, expectation: str = "", fix: str = "") -> None:
        self.fact, self.expectation, self.fix = fact, expectation, fix
        super().__init__("; ".join(part for part in (fact, expectation, fix) if part))

    def __str__(self) -> str:
        text = ErrorText(super().__str__())
        text.code = self.code
        return text

    def response_text(self) -> str:
        """The error text of a final response: `[CODE] fact; expectation; way out`."""
        return error_text(self.code, str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # The constructors of subclasses take other arguments than `args`, so a copy must not call them.
        return _copied, (type(self), self.args, self.__dict__)


def _copied(error_class: type[BatchManagerError], args: tuple[Any, ...],
            attributes: dict[str, Any]) -> BatchManagerError:
    error = error_class.__new__(error_class, *args)
    error.__dict__.update(attributes)
    return error


class ConfigError(BatchManagerError, ValueError):
    """The configuration cannot run. Raised before the worker starts."""


class ModelLoadError(ConfigError):
    """The checkpoint cannot be loaded. The message names the file and the field, with unprintable characters escaped.
    """

    def __init__(self, fact: str, expectation: str, fix: str = "") -> None:
        super().__init__(printable(fact), printable(expectation), printable(fix))


class UnsupportedModelError(ModelLoadError):
    """The model's architecture is not registered."""


class InsufficientMemoryError(ConfigError):
    """The weights or the KV cache do not fit."""

    code = ErrorCode.OUT_OF_MEMORY


class RequestError(BatchManagerError):
    """One request is refused or ends early. All other requests go on."""

    code = ErrorCode.INVALID_REQUEST


class InvalidRequestError(RequestError, ValueError):
    """A tensor or an option of the request is invalid."""


class DuplicateRequestIdError(RequestError):
    """The id belongs to a live request."""

    code = ErrorCode.DUPLICATE_REQUEST_ID


class RequestTooLargeError(RequestError):
    """The request may need more blocks than the whole KV cache pool has, or its adapter more than its cache has."""

    code = ErrorCode.TOO_LARGE_FOR_KV_CACHE


class AdapterNotCachedError(RequestError):
    """The request names a LoRA adapter that the engine does not know, and has no weights."""

    code = ErrorCode.LORA_TASK_NOT_CACHED


class KvTransferError(RequestError):
    """The blocks of a prompt did not come from the engine that computed it, and KvTransferConfig says to fail then."""

    code = ErrorCode.KV_TRANSFER_FAILED


class QueueFullError(RequestError):
    """A limit on queued requests, tokens or bytes is reached."""

    code = ErrorCode.QUEUE_FULL


class SchedulerContractError(BatchManagerError):
    """A scheduler broke a rule of its contract. Every active request ends with this error, and the engine goes on."""

    def __init__(self, scheduler: object, rule: str) -> None:
        # For a scheduler made of parts, the message names the parts, because a part is at fault.
        parts = _part_names(scheduler)
        name = type_name(scheduler) + (f"({', '.join(parts)})" if parts else "")
        super().__init__(f"{name} broke the scheduler contract: {rule}",
                         "every plan is checked before it runs",
                         "correct the scheduler, or use SimpleScheduler")


class DeviceLostError(BatchManagerError):
    """The device's context is lost. Nothing can run on the device in this process any more."""


class ManagerClosedError(BatchManagerError):
    """The manager was shut down or belongs to the parent of this forked process, or the interpreter exits."""

    code = ErrorCode.SHUTDOWN


class InternalError(BatchManagerError):
    """An invariant of this package does not hold. This is a bug; please report it."""

    def __init__(self, fact: str, expectation: str = "this breaks an invariant of the package",
                 fix: str = "please report it") -> None:
        super().__init__(fact, expectation, fix)


class OutOfResourceError(InternalError):
    """A plan needs more of a resource than is free. Nothing was changed.

    With the package's own schedulers this is a bug. With a custom scheduler the loop raises SchedulerContractError
    instead.
    """

    def __init__(self, fact: str, expectation: str = "a plan must not need more than is free", fix: str = "") -> None:
        super().__init__(fact, expectation, fix)


def _part_names(scheduler: Any) -> tuple[str, ...]:
    """The attribute `part_names` of a scheduler, or () if the attribute is missing, raises or is no list of strings."""
    try:
        names = scheduler.part_names
    except BaseException:    # a property of a user's class
        return ()
    if type(names) not in (tuple, list) or {type(name) for name in names} != {str}:
        return ()
    return tuple(printable(name[:64]) for name in names)


def error_text(code: ErrorCode, message: str) -> str:
    """`[CODE] message`, with control characters escaped so that a log line stays one line."""
    return f"[{code.value}] {printable(message)}"


# A user's class or metaclass may define attributes of these names that raise.
_NAME_OF_A_TYPE, _CLASSES_OF_A_TYPE = type.__dict__["__name__"], type.__dict__["__mro__"]
_TRACEBACK = BaseException.__dict__["__traceback__"]


def type_name(value: object) -> str:
    """The name of a value's type, shortened for a message and on one line. Runs no code of that type."""
    return printable(_NAME_OF_A_TYPE.__get__(type(value))[:64])


def names_of_classes(value: object) -> set[str]:
    """The names of the value's type and of all its base classes. Runs no code of that type."""
    return {_NAME_OF_A_TYPE.__get__(cls) for cls in _CLASSES_OF_A_TYPE.__get__(type(value))}


def is_a(value: object, types: type[Kind] | tuple[type[Kind], ...]) -> TypeGuard[Kind]:
    """isinstance without running code of the value's type, which may raise."""
    return issubclass(type(value), types)


def where_raised(error: BaseException) -> str:
    """The traceback lines of an exception, for a log. They leave out its text, which may quote a prompt."""
    return "".join(traceback.format_tb(_TRACEBACK.__get__(error)))


def forget_frames(error: BaseException) -> None:
    """Remove traceback, cause and context of an exception, which hold what the frames had, such as tensors."""
    BaseException.with_traceback(error, None)
    for name in ("__cause__", "__context__"):
        getattr(BaseException, name).__set__(error, None)


def text_of(error: BaseException) -> str:
    """The text of an exception on one line, or a note that it cannot be read. Runs code of the exception's class."""
    try:
        return printable(str(error))[:LONGEST_ERROR_TEXT]
    except BaseException:
        return "its text cannot be read"


def counted(count: int, noun: str, plural: str = "") -> str:
    """The count with its noun: "1 block", "1,024 blocks". `plural` is the noun with "s" by default."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def printable(text: str) -> str:
    """The text with unprintable characters as escape sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
