"""Every error of the project, sorted by what dies.

    BatchManagerError
    ├── ConfigError (ValueError)            nothing started: raised in the constructor's caller
    │   ├── ModelLoadError                  a checkpoint that cannot be read; names file and field
    │   │   └── UnsupportedModelError       an architecture that is not registered; lists what is known
    │   └── InsufficientMemoryError         bytes wanted, bytes free, the knob that helps
    ├── RequestError                        one request dies; its final response carries the text
    │   ├── InvalidRequestError (ValueError)
    │   ├── DuplicateRequestIdError
    │   ├── RequestTooLargeError            would never fit, however long it waited
    │   └── QueueFullError
    ├── SchedulerContractError              a custom scheduler broke a stated rule; names class and rule
    ├── DeviceLostError                     the device cannot be used again in this process
    ├── ManagerClosedError                  used after shutdown, or in a forked child
    └── InternalError                       a bug of ours
        └── OutOfResourceError              or a plan of a custom scheduler's that asks for more than is free

A message is three parts: the fact with its value; the expectation; the way out.
"""

import traceback
from typing import Any, TypeGuard, TypeVar

from .names import ErrorCode

Kind = TypeVar("Kind")

LONGEST_ERROR_TEXT = 1000              # characters, of an exception's own text in a log


class BatchManagerError(Exception):
    """Base of all errors raised by this package. `code` is what a response's text starts with."""

    code = ErrorCode.ENGINE_FAILED

    def __init__(self, fact: str, expectation: str = "", fix: str = "") -> None:
        self.fact, self.expectation, self.fix = fact, expectation, fix
        super().__init__("; ".join(part for part in (fact, expectation, fix) if part))

    def response_text(self) -> str:
        """The text a final response carries: `[CODE] fact; expectation; way out`."""
        return error_text(self.code, str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is not made by the constructors of subclasses, which take other arguments than `args`.
        return _copied, (type(self), self.args, self.__dict__)


def _copied(error_class: type[BatchManagerError], args: tuple[Any, ...],
            attributes: dict[str, Any]) -> BatchManagerError:
    error = error_class.__new__(error_class, *args)
    error.__dict__.update(attributes)
    return error


class ConfigError(BatchManagerError, ValueError):
    """The configuration cannot be run. Raised before any thread exists."""


class ModelLoadError(ConfigError):
    """The checkpoint cannot be loaded. Names the file and the field; what they say is escaped where it is not text."""

    def __init__(self, fact: str, expectation: str = "a checkpoint as it was written",
                 fix: str = "download or save it again, or correct the file") -> None:
        super().__init__(printable(fact), printable(expectation), printable(fix))


class UnsupportedModelError(ModelLoadError):
    """The architecture is not known."""


class InsufficientMemoryError(ConfigError):
    """The weights or the KV cache do not fit."""

    code = ErrorCode.OUT_OF_MEMORY


class RequestError(BatchManagerError):
    """One request is refused or ends early; all others are untouched."""

    code = ErrorCode.INVALID_REQUEST


class InvalidRequestError(RequestError, ValueError):
    """A tensor or an option of the request is not usable."""


class DuplicateRequestIdError(RequestError):
    """The id belongs to a request that is alive."""

    code = ErrorCode.DUPLICATE_REQUEST_ID


class RequestTooLargeError(RequestError):
    """The request's worst case is larger than the whole KV cache pool."""

    code = ErrorCode.TOO_LARGE_FOR_KV_CACHE


class QueueFullError(RequestError):
    """A bound on waiting work is reached."""

    code = ErrorCode.QUEUE_FULL


class SchedulerContractError(BatchManagerError):
    """A scheduler broke a rule. The process lives; every active request is answered."""

    def __init__(self, scheduler: object, rule: str) -> None:
        # A scheduler made of parts names them: one of them is the one to look at.
        parts = _part_names(scheduler)
        name = type_name(scheduler) + (f"({', '.join(parts)})" if parts else "")
        super().__init__(f"{name} broke the scheduler contract: {rule}",
                         "a plan is checked before anything of it is carried out",
                         "correct the scheduler, or use SimpleScheduler")


class DeviceLostError(BatchManagerError):
    """The device's context is lost; nothing can run on it in this process any more."""


class ManagerClosedError(BatchManagerError):
    """The manager was shut down, or belongs to the parent of this forked process."""

    code = ErrorCode.SHUTDOWN


class InternalError(BatchManagerError):
    """An invariant of this package does not hold: a bug, please report it."""

    def __init__(self, fact: str, expectation: str = "an invariant of this package says otherwise",
                 fix: str = "please report it") -> None:
        super().__init__(fact, expectation, fix)


class OutOfResourceError(InternalError):
    """More of something was asked for than is free. Nothing was changed.

    Under our own policies a bug of ours; after a custom scheduler's plan the loop says whose plan it was, and what is
    to be done about it.
    """

    def __init__(self, fact: str, expectation: str = "a plan asks for no more than is free", fix: str = "") -> None:
        super().__init__(fact, expectation, fix)


def _part_names(scheduler: Any) -> tuple[str, ...]:
    """What the scheduler says it is made of; nothing where that cannot be read: the error is the one to be told."""
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


# A class of the user's, or its metaclass, may have attributes of these names that raise.
_NAME_OF_A_TYPE, _CLASSES_OF_A_TYPE = type.__dict__["__name__"], type.__dict__["__mro__"]
_TRACEBACK = BaseException.__dict__["__traceback__"]


def type_name(value: object) -> str:
    """The name of a value's type, short enough for a message and on one line; runs no code of the type's own."""
    return printable(_NAME_OF_A_TYPE.__get__(type(value))[:64])


def names_of_classes(value: object) -> set[str]:
    """The names of the value's type and of all it inherits from; runs no code of the type's own."""
    return {_NAME_OF_A_TYPE.__get__(cls) for cls in _CLASSES_OF_A_TYPE.__get__(type(value))}


def is_a(value: object, types: type[Kind] | tuple[type[Kind], ...]) -> TypeGuard[Kind]:
    """isinstance for classes of this package and of Python's; runs no code of the value's type, which may raise."""
    return issubclass(type(value), types)


def where_raised(error: BaseException) -> str:
    """The lines an exception came through, for a log. Not what it says, which may quote a prompt."""
    return "".join(traceback.format_tb(_TRACEBACK.__get__(error)))


def text_of(error: BaseException) -> str:
    """What an exception says, on one line, or that it cannot say it. Runs code of the exception's class."""
    try:
        return printable(str(error))[:LONGEST_ERROR_TEXT]
    except BaseException:
        return "its text cannot be read"


def printable(text: str) -> str:
    """The text, with whatever is not printable as an escape sequence."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
