"""What an engine needs to continue a prompt that another engine has computed: the tensor `context_phase_params`."""

import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from ..config import is_host
from ..errors import InvalidRequestError, is_a, type_name
from ..option_values import shown_option

MAGIC = b"BMcp"
VERSION = 1
TICKET_BYTES = 16
MOST_BYTES = 512                 # of the tensor
_FIELDS = struct.Struct(f"<4sBBHI{TICKET_BYTES}sB")     # magic, version, 0, port, tokens, ticket, length of the host
_CHECKSUM = struct.Struct("<I")
_EXPECTED = "expected the tensor of that name from the final response of a context_only request"
_WAY_OUT = "pass it on unchanged"


@dataclass(frozen=True, slots=True)
class ContextPhaseParams:
    """Where the blocks of a prompt wait. The ticket is the only right to them, and works once: keep it secret.

    host, port   address of the engine that holds them
    ticket       16 random bytes
    num_tokens   leading tokens of the prompt whose blocks are held; the others are computed again

    Raises InvalidRequestError for values that no engine hands out.
    """

    host: str
    port: int
    ticket: bytes = field(repr=False)
    num_tokens: int

    def __post_init__(self) -> None:
        for name, is_right, expected in (
                ("host", is_host(self.host), "a name or an address of 1 to 255 ASCII characters"),
                ("port", type(self.port) is int and 1 <= self.port <= 65535, "an integer in 1..65535"),
                ("ticket", type(self.ticket) is bytes and len(self.ticket) == TICKET_BYTES, f"{TICKET_BYTES} bytes"),
                ("num_tokens", type(self.num_tokens) is int and 0 <= self.num_tokens < 2**32,
                 "an integer in 0..2^32-1")):
            if not is_right:
                raise InvalidRequestError(f"ContextPhaseParams.{name} is {_shown(getattr(self, name))}",
                                          f"expected {expected}", _WAY_OUT)

    def to_array(self) -> np.ndarray:
        """Return the values as a tensor, uint8 [n]."""
        host = self.host.encode("ascii")
        fields = _FIELDS.pack(MAGIC, VERSION, 0, self.port, self.num_tokens, self.ticket, len(host)) + host
        return np.frombuffer(fields + _CHECKSUM.pack(crc32(fields)), np.uint8).copy()

    @classmethod
    def of(cls, array: np.ndarray) -> "ContextPhaseParams":
        """Read the tensor, a row of integers. Raises InvalidRequestError."""
        if not is_a(array, np.ndarray) or array.dtype.kind not in "iu":
            raise _refused(f"is an array of {array.dtype}" if is_a(array, np.ndarray) else f"is {_shown(array)}")
        if array.size > MOST_BYTES or ((array < 0) | (array > 255)).any():
            raise _refused(f"has {array.size} elements" if array.size > MOST_BYTES else "has values outside of 0..255")
        data = array.astype(np.uint8).tobytes()
        fields, checksum = data[:-_CHECKSUM.size], data[-_CHECKSUM.size:]
        if len(fields) < _FIELDS.size or _CHECKSUM.pack(crc32(fields)) != checksum:
            raise _refused("is damaged or cut off")
        magic, version, zero, port, num_tokens, ticket, length = _FIELDS.unpack_from(fields)
        host = fields[_FIELDS.size:].decode("latin-1")
        if magic != MAGIC or version != VERSION:
            raise _refused("has another form" if magic != MAGIC else f"is of version {version}, not {VERSION}")
        with suppress(InvalidRequestError):
            if not zero and len(host) == length:
                return cls(host, port, ticket, num_tokens)
        raise _refused("is damaged or cut off")

    def to_json(self) -> dict[str, Any]:
        """Return the values as fields of `kv_transfer_params` in OpenAI's requests, with vLLM's names."""
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": self.host,
                "remote_port": self.port, "remote_request_id": self.ticket.hex(), "remote_num_tokens": self.num_tokens}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> "ContextPhaseParams":
        """Read what `to_json` returned; other fields are ignored. Raises InvalidRequestError."""
        if not isinstance(fields, Mapping):
            raise InvalidRequestError(f"kv_transfer_params are {_shown(fields)}", "expected a mapping, as of to_json",
                                      _WAY_OUT)
        ticket: Any = fields.get("remote_request_id")
        with suppress(KeyError, TypeError, ValueError):       # an InvalidRequestError is a ValueError
            made = cls(fields["remote_host"], fields["remote_port"], bytes.fromhex(ticket),
                       fields.get("remote_num_tokens", 0))
            if made.ticket.hex() == ticket:
                return made
        raise InvalidRequestError("kv_transfer_params are not those of an answer",
                                  "expected remote_host, remote_port, remote_request_id and remote_num_tokens of the "
                                  "answer to a request with do_remote_decode", _WAY_OUT)


def _shown(value: object) -> str:
    """Format a wrong value. Of a text or bytes, which may be a ticket, nothing but the length is shown."""
    if is_a(value, (str, bytes, bytearray)):
        return f"of type {type_name(value)} and length {len(value)}"
    return shown_option(value) if is_a(value, (int, float)) else f"of type {type_name(value)}"


def _refused(fact: str) -> InvalidRequestError:
    return InvalidRequestError(f"context_phase_params {fact}", _EXPECTED, _WAY_OUT)
