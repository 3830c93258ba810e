"""Numbered and checked frames between two ranks, or two engines, over a transport: a socket (control.py), or memory.

A frame is a header and a payload:

    magic (4 bytes), version (1), kind (1), 2 zero bytes, sequence number (8), length (4),
    checksum of these 20 bytes (4), checksum of the payload (4), payload

The sequence number counts the frames of one direction from 0. A frame that is missing, repeated, altered or cut has the
wrong number or a wrong checksum. There is no retry: the first wrong frame ends the channel. The header has a checksum
of its own, because a wrong length would make the frames that follow a part of this one, and no rank would miss them.
"""

import struct
import threading
from collections import deque
from enum import IntEnum
from typing import Any, Protocol
from zlib import crc32

from .wire import WireError, pack, unpack

MAGIC = b"BMrk"
VERSION = 1
MOST_PAYLOAD = 1 << 31           # bytes
MOST_AT_ONCE = 1 << 20           # bytes handed to a transport, which may take fewer
MOST_BEFORE_HELLO = 1 << 12      # bytes of a frame before the key is known
_HEADER = struct.Struct("<4sBBHQI")
_CHECKSUMS = struct.Struct("<II")
HEADER_SIZE = _HEADER.size + _CHECKSUMS.size


class Kind(IntEnum):
    """What a frame is for.

    HELLO   a phase of the start
    STEP    a step, from rank 0
    DONE    the end of a step, with an error if there was one
    ASK     what a callback gets or returns
    BEAT    the sender is not stopped
    END     the sender ends, or asks for the end of all
    FETCH   the blocks of a ticket, from another engine
    BLOCK   one of them
    """

    HELLO = 1
    STEP = 2
    DONE = 3
    ASK = 4
    BEAT = 5
    END = 6
    FETCH = 7
    BLOCK = 8


KINDS = {int(kind): kind for kind in Kind}


class LostError(Exception):
    """The other end is gone, or what it sends cannot be trusted. The text completes "rank 2 ..."."""


class Transport(Protocol):
    """An ordered stream of bytes to another rank."""

    def send(self, data: bytes) -> int:
        """Send bytes without waiting and return how many were taken. Raises OSError when the other end is gone."""
        ...

    def wait_to_send(self, seconds: float) -> None:
        """Wait until `send` takes bytes again, up to `seconds`."""
        ...

    def receive(self) -> bytes | None:
        """Return the bytes that are there; None: none now; b"": the other end has closed. Raises OSError."""
        ...

    def close(self) -> None: ...


class Channel:
    """Frames over a transport. Any thread may send. One thread at a time receives.

    silence   beats of this process since something came from the other end
    version   version of the frames that the other end sends
    """

    def __init__(self, transport: Transport, send_timeout_s: float) -> None:
        self._transport = transport
        self._send_timeout_s = send_timeout_s
        self._sending = threading.Lock()
        self._unsent = b""                             # the rest of a beat that the transport did not take
        self._num_sent = self._num_received = 0
        self._received = bytearray()
        self.most_payload = MOST_BEFORE_HELLO
        self.silence, self.version = 0, VERSION

    def send(self, kind: Kind, value: Any = None) -> None:
        """Send a frame with the bytes of `value`. Raises LostError, also if the other end takes no bytes for too long,
        and WireError for a value that cannot travel."""
        payload = pack(value)
        if len(payload) > MOST_PAYLOAD:
            raise WireError(f"a frame has {len(payload):,} bytes; expected at most {MOST_PAYLOAD:,}")
        with self._sending:
            self._unsent += self._framed(kind, payload)
            self._flush(wait=True)

    def beat(self) -> None:
        """Send a BEAT, unless another thread is sending or earlier bytes are not taken yet. Never waits."""
        if self._sending.acquire(blocking=False):
            try:
                if not self._unsent:
                    self._unsent = self._framed(Kind.BEAT, b"")
                self._flush(wait=False)
            finally:
                self._sending.release()

    def _framed(self, kind: Kind, payload: bytes) -> bytes:
        header = _HEADER.pack(MAGIC, VERSION, kind, 0, self._num_sent, len(payload))
        self._num_sent += 1
        return header + _CHECKSUMS.pack(crc32(header), crc32(payload)) + payload

    def _flush(self, *, wait: bool) -> None:
        unsent = memoryview(self._unsent)
        try:
            while unsent:
                taken = self._transport.send(bytes(unsent[:MOST_AT_ONCE]))
                if taken == 0:
                    if not wait:
                        break
                    self._transport.wait_to_send(self._send_timeout_s)
                    taken = self._transport.send(bytes(unsent[:MOST_AT_ONCE]))
                    if taken == 0:
                        raise LostError(f"takes no bytes for {self._send_timeout_s:g} s")
                unsent = unsent[taken:]
        except OSError as error:
            unsent = unsent[:0]
            raise LostError("has closed its connection") from error
        finally:
            self._unsent = bytes(unsent)

    def receive(self) -> list[tuple[Kind, Any]]:
        """Return the frames that are there, without BEATs. Never waits.

        Raises LostError. Frames before the one at fault are lost with it, because nothing goes on after a loss.
        """
        received = self._received
        try:
            while data := self._transport.receive():
                self.silence = 0
                received += data
                if len(data) < 4096 or len(received) > self.most_payload:
                    break
        except OSError as error:
            raise LostError("has broken its connection") from error
        frames: list[tuple[Kind, Any]] = []
        while len(received) >= HEADER_SIZE:
            frame = self._next_frame(received)
            if frame is None:
                break
            if frame[0] is not Kind.BEAT:
                frames.append(frame)
        if data == b"" and not frames:                 # what came before is handed over first
            raise LostError("has closed its connection" + (" inside a frame" if received else ""))
        return frames

    def _next_frame(self, received: bytearray) -> tuple[Kind, Any] | None:
        """Take the first frame out of `received`; None if it is not whole yet."""
        magic, version, number, zero, sequence, length = _HEADER.unpack_from(received)
        if magic != MAGIC or zero:
            raise LostError("sent bytes that are no frame")
        self.version = version
        if version != VERSION and self.most_payload != MOST_BEFORE_HELLO:      # first the key, then the version
            raise LostError(f"speaks version {version} of the frames, and this rank version {VERSION}")
        of_header, of_payload = _CHECKSUMS.unpack_from(received, _HEADER.size)
        if crc32(received[:_HEADER.size]) != of_header:
            raise LostError("sent a header with a wrong checksum")
        kind = KINDS.get(number)
        if kind is None or length > self.most_payload:
            raise LostError(f"sent a frame of kind {number} with {length:,} bytes")
        if sequence != self._num_received:
            raise LostError(f"sent frame {sequence} where frame {self._num_received} was due")
        end = HEADER_SIZE + length
        if len(received) < end:
            return None
        payload = bytes(received[HEADER_SIZE:end])
        if crc32(payload) != of_payload:
            raise LostError("sent a frame with a wrong checksum")
        del received[:end]
        self._num_received += 1
        if kind is Kind.BEAT:
            return kind, None
        try:
            return kind, unpack(payload)
        except WireError as error:
            raise LostError(f"sent a frame that cannot be read: {error}") from error

    def trust(self) -> None:
        """Allow frames of any length from now on: the other end has shown the key."""
        self.most_payload = MOST_PAYLOAD

    def close(self) -> None:
        self._transport.close()


class MemoryTransport:
    """One end of a connection inside a process. `pair` makes both. Never blocks.

    arrives   bytes on their way to this end; a test may alter, drop, repeat or hold them back
    """

    def __init__(self) -> None:
        self.arrives: deque[bytes] = deque()
        self.peer = self
        self.is_closed = False

    @classmethod
    def pair(cls) -> "tuple[MemoryTransport, MemoryTransport]":
        first, second = cls(), cls()
        first.peer, second.peer = second, first
        return first, second

    def send(self, data: bytes) -> int:
        if self.is_closed or self.peer.is_closed:
            raise BrokenPipeError
        self.peer.arrives.append(data)
        return len(data)

    def wait_to_send(self, seconds: float) -> None:
        return None

    def receive(self) -> bytes | None:
        if self.is_closed:
            raise BrokenPipeError
        if self.arrives:
            return self.arrives.popleft()
        return b"" if self.peer.is_closed else None

    def close(self) -> None:
        self.is_closed = True
