"""Errors in the format of OpenAI's API."""

import re
from pathlib import Path

import orjson

from ...aio.mailbox import RequestFailed
from ...errors import BatchManagerError
from ...names import ErrorCode
from ..sampling import OPTION_OF_TENSOR

SECONDS_UNTIL_A_RETRY = {429: 1, 503: 5}
_WHAT_A_CLIENT_CAN_DO = "send the request again after the seconds in Retry-After, or ask for fewer outputs at once"
_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
_REQUEST = re.compile(r"request \d+: ")     # the engine's id of a request, which clients do not know
# An absolute path: in quotes, or of at least two parts.
_PATH = re.compile(r"""(['"])(?:/|[A-Za-z]:\\)[^'"\n]+\1|(?<![\w:./])/[^\s/'",;:()]+(?:/[^\s'",;:()]*)+""")
# Request tensor -> field of a body. Tensors that have the name of their field are listed too.
FIELDS = {
    **OPTION_OF_TENSOR, "input_ids": "prompt", "return_log_probs": "logprobs", "return_top_log_probs": "logprobs",
    **{name: name for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty",
                               "logit_bias", "stop_token_ids", "priority")},
    "request_type": "kv_transfer_params", "context_phase_params": "kv_transfer_params",
    "kv_transfer_config": "--kv-transfer-config",
}
_FIELDS_OF_A_CHAT = {**FIELDS, "input_ids": "messages", "return_top_log_probs": "top_logprobs"}
# A value of request_type -> what the client sent instead.
_TRANSFERS = {f"kv_transfer_params is '{kind}_only'": f"kv_transfer_params has {flag}: true" for kind, flag in (
    ("context", "do_remote_decode"), ("generation", "do_remote_prefill"))}
_TENSOR = re.compile(rf"\b(?:{'|'.join(FIELDS)})\b")


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
    def of(cls, error: BatchManagerError, *, is_chat: bool = False) -> "OpenAIError":
        """Return the OpenAIError that answers a request on which the engine raised or reported `error`.

        The message of an invalid or too large request names the fields of the body in place of the request tensors.
        `param` is the first field named in the part of the message before the first semicolon. The message of a full
        queue ends with what a client can do, in place of what the host of the engine can do. Paths are left out.
        """
        message = _REQUEST.sub("", error.message if isinstance(error, RequestFailed) else str(error), count=1)
        message = without_paths(message)
        param = None
        if error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE_FOR_KV_CACHE):
            names = _FIELDS_OF_A_CHAT if is_chat else FIELDS
            if (found := _TENSOR.search(message.partition(";")[0])) is not None:
                param = names[found[0]]
            message = _TENSOR.sub(lambda tensor: names[tensor[0]], message)
            for said, sent in _TRANSFERS.items():
                message = message.replace(said, sent)
        elif error.code is ErrorCode.QUEUE_FULL:
            message = f"{message.rpartition('; ')[0] or message}; {_WHAT_A_CLIENT_CAN_DO}"
        return cls(error.code.http_status, message, param, error.code.value.lower())

    @property
    def headers(self) -> dict[str, str]:
        """Response headers: Retry-After, if the same request may succeed later."""
        seconds = SECONDS_UNTIL_A_RETRY.get(self.status)
        return {} if seconds is None else {"Retry-After": str(seconds)}

    def body(self) -> bytes:
        """Return the JSON of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return orjson.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


def without_paths(text: str, *known: str, given: str = "") -> str:
    """Return a text without paths of the server: absolute ones, and those of folders or files in `known`.

    given   text of the client, whose own paths stay
    """
    for path in {*known, *(str(Path(path)) for path in known)}:
        whole = re.escape(path)
        # Without quotes, a name without a slash may be a word of the text, and "." its full stop.
        plain = rf"""(?<![\w./-]){whole}(/[^\s'",;:()]*[^\s'",;:().]){"?" if "/" in path else ""}(?![\w/-]|\.\w)"""
        text = re.sub(rf"""(['"]){whole}(/[^'"\n]*)?\1|{plain}""",
                      lambda found: "a file of the model" if found[2] or found[3] else "of the model", text)
    return _PATH.sub(lambda found: found[0] if found[0].strip("'\"") in given else "of the server", text)


def refused(param: str, message: str) -> OpenAIError:
    return OpenAIError(400, f"{param}: {message}", param)
