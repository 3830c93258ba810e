"""Errors in the format of OpenAI's API."""

import orjson

from ...aio.mailbox import RequestFailed
from ...errors import BatchManagerError
from ..sampling import in_names_of_options

SECONDS_UNTIL_A_RETRY = {429: 1, 503: 5}
_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


class OpenAIError(Exception):
    """An error response.

    status    HTTP status
    message   text for the client
    param     field of the body that caused the error, or None
    code      machine-readable code, or None
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @classmethod
    def of(cls, error: BatchManagerError) -> "OpenAIError":
        """Return the OpenAIError that answers a request on which the engine raised or reported `error`.

        The message has the names of options in place of those of tensors.
        """
        message = error.message if isinstance(error, RequestFailed) else str(error)
        return cls(error.code.http_status, in_names_of_options(message), code=error.code.value.lower())

    @property
    def headers(self) -> dict[str, str]:
        """Response headers: Retry-After, if the same request may succeed later."""
        seconds = SECONDS_UNTIL_A_RETRY.get(self.status)
        return {} if seconds is None else {"Retry-After": str(seconds)}

    def body(self) -> bytes:
        """Return the JSON of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return orjson.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


def refused(param: str, message: str) -> OpenAIError:
    return OpenAIError(400, f"{param}: {message}", param)
