"""Publishes events of the prefix cache over ZeroMQ, as vLLM does, for routers that read vLLM's. Needs pyzmq and
msgspec: the extra `events`.

    with KvEventPublisher("tcp://*:5557", replay_endpoint="tcp://*:5558") as publisher:
        manager = GptManager(..., parts=Parts(kv_events=publisher))

A PUB socket sends each list of events as three frames: topic, number of the batch in 8 bytes, and the batch in
msgpack, with `KvEvent.to_vllm()` as its events. A subscriber that misses a number asks the ROUTER socket of
`replay_endpoint`: it sends an empty frame and the first number that it wants, and gets number and batch of each kept
batch from there, and at the end the number -1.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
import zmq

from ..contained_log import RateLimitedLog
from ..errors import ConfigError
from ..kv_events import KvEvent
from ..option_values import exact_integer, is_text, object_of_option

__all__ = ["KvEventPublisher"]

SECONDS_BETWEEN_LOOKS = 0.005         # for batches, and for requests to replay
SECONDS_BETWEEN_IDLE_LOOKS = 0.05     # for requests to replay; a batch ends the wait
LOOKS_UNTIL_IDLE = 200                # without a batch: a second
END = (-1).to_bytes(8, "big", signed=True)
LARGEST_COUNT = 2**31 - 1
LAYOUTS = "maps", "arrays", "mixed"
# A kind of event in arrays -> its fields in order. Subscribers ignore further ones that they do not know.
FIELDS = {"BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
                          "lora_name"),
          "BlockRemoved": ("block_hashes", "medium"), "AllBlocksCleared": ()}


class KvEventPublisher:
    """The hook `Parts.kv_events` that publishes. A thread of its own has the sockets.

    endpoint          where to publish. An address with `*`, of this machine's loopback, `ipc://` or `inproc://` is
                      bound; to another one the publisher connects
    replay_endpoint   where subscribers ask for batches that they missed; always bound; None: nowhere
    buffer_steps      batches to keep for them
    hwm               batches that a socket keeps for a slow subscriber before it drops some
    max_queue_size    batches that wait for the thread; further ones are dropped, which leaves a gap in the numbers
    topic             first frame
    layout            "maps": batches and events are maps, as of vLLM in 2026; "arrays": arrays, as before; "mixed":
                      batches are arrays and events maps, as of SGLang 0.5.23
    timestamp         () -> seconds since 1970

    Raises ConfigError for wrong values, and for an address that cannot be used.
    """

    def __init__(self, endpoint: str = "tcp://127.0.0.1:5557", *, replay_endpoint: str | None = None,
                 buffer_steps: int = 10_000, hwm: int = 100_000, max_queue_size: int = 100_000, topic: str = "",
                 layout: str = "maps", timestamp: Callable[[], float] = time.time) -> None:
        for name, value in (("buffer_steps", buffer_steps), ("hwm", hwm), ("max_queue_size", max_queue_size)):
            count = exact_integer(value)
            if count is None or not 1 <= count <= LARGEST_COUNT:
                raise ConfigError(f"{name} is {value!r:.200}", f"expected an integer in 1..{LARGEST_COUNT:,}")
        for name, text in (("endpoint", endpoint), ("topic", topic), ("replay_endpoint", replay_endpoint or "")):
            if not is_text(text):
                raise ConfigError(f"{name} is {text!r:.200}", "expected a text that UTF-8 can encode")
        if layout not in LAYOUTS:
            raise ConfigError(f"layout is {layout!r:.200}", f"expected one of {', '.join(LAYOUTS)}",
                              "maps is the default")
        self._topic, self._layout, self._timestamp = topic.encode(), layout, timestamp
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._publisher = self._socket(zmq.PUB, endpoint, hwm, binds=_is_here(endpoint))
            self._router = None if replay_endpoint is None else self._socket(zmq.ROUTER, replay_endpoint, hwm)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._waiting, self._most_waiting = deque[tuple[int, Sequence[KvEvent]]](), max_queue_size
        self._kept = deque[tuple[bytes, bytes]](maxlen=buffer_steps)
        self._next, self.num_dropped, self._is_closed = 0, 0, False
        self._is_idle, self._wakes = False, threading.Event()
        self._thread = threading.Thread(target=self._publish_for_ever, name="batch_manager KV events", daemon=True)
        self._thread.start()

    @classmethod
    def of_json(cls, text: str) -> "KvEventPublisher | None":
        """Make a publisher of the JSON text of vLLM's --kv-events-config. None: it says that there are no events.

        Known are `publisher` ("zmq" or "null"), `enable_kv_cache_events` and the parameters of the constructor.

        Raises ConfigError.
        """
        options = object_of_option("the configuration of KV events", text, '{"endpoint": "tcp://*:5557"}')
        known = {*cls.__init__.__annotations__, "publisher", "enable_kv_cache_events"} - {"return", "timestamp"}
        if unknown := sorted(options.keys() - known):
            raise ConfigError(f"the configuration of KV events has {unknown[0]!r:.100}",
                              f"known are {', '.join(sorted(known))}", "leave the others out")
        kind, is_on = options.pop("publisher", "zmq"), options.pop("enable_kv_cache_events", True)
        if kind not in ("zmq", "null") or not isinstance(is_on, bool):
            raise ConfigError(f"publisher is {kind!r:.100} and enable_kv_cache_events is {is_on!r:.100}",
                              "expected zmq or null, and true or false", "leave them out")
        return cls(**options) if kind == "zmq" and is_on else None

    def __call__(self, events: Sequence[KvEvent]) -> None:
        """Hand events over to the thread. Does not wait.

        A busy thread looks for them, because waking it would cost the worker more than all else that events cost it.
        """
        number, self._next = self._next, self._next + 1
        if len(self._waiting) >= self._most_waiting:
            self.num_dropped += 1
            return
        self._waiting.append((number, events))
        if self._is_idle:
            self._wakes.set()

    def close(self) -> None:
        """Publish what waits, and close the sockets. Idempotent. Call it after the engine has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._wakes.set()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def addresses(self) -> list[str]:
        """Where the sockets are bound, with their ports; the endpoint itself if the publisher has connected."""
        return [socket.get_string(zmq.LAST_ENDPOINT) for socket in self._sockets]

    def _socket(self, kind: int, endpoint: str, hwm: int, binds: bool = True) -> "zmq.Socket[bytes]":
        port = re.search("^tcp://.*:0*([0-9]+)$", endpoint)
        if port is not None and int(port[1][:6]) > 65535:
            raise ConfigError(f"the address of KV events is {endpoint!r:.200}", "expected a port in 0..65535",
                              "pass another endpoint, such as tcp://*:5557")     # ZeroMQ takes the last 16 bits
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(hwm)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"the address of KV events is {endpoint!r:.200}", str(error),
                              "pass another endpoint, such as tcp://*:5557") from error
        return socket

    def _publish_for_ever(self) -> None:
        num_empty_looks, failures = 0, RateLimitedLog(time.monotonic)
        while self._waiting or not self._is_closed:
            self._wait(num_empty_looks >= LOOKS_UNTIL_IDLE)
            num_empty_looks = 0 if self._waiting else num_empty_looks + 1
            try:
                while self._waiting:
                    self._publish(*self._waiting.popleft())
                while self._router is not None and self._router.poll(0):
                    self._replay(self._router)
            except Exception as error:             # a batch that cannot be encoded, or a subscriber that has gone
                failures.log(logging.WARNING, "KV events were not published: %s", error, raised=error)
        self._context.destroy(linger=1000)

    def _wait(self, is_idle: bool) -> None:
        """Wait until the next look. A batch ends the wait of an idle thread, and `close` any."""
        self._is_idle = is_idle                    # before the look, so that a batch after it sees it
        if not self._waiting:
            self._wakes.wait(SECONDS_BETWEEN_IDLE_LOOKS if is_idle else SECONDS_BETWEEN_LOOKS)
        self._is_idle = False
        self._wakes.clear()

    def _publish(self, number: int, events: Sequence[KvEvent]) -> None:
        name, payload = number.to_bytes(8, "big"), self._encoded(events)
        self._kept.append((name, payload))
        self._publisher.send_multipart((self._topic, name, payload))

    def _encoded(self, events: Sequence[KvEvent]) -> bytes:
        listed: list[Any] = [each for event in events for each in event.to_vllm()]
        if self._layout == "arrays":
            listed = [[each["type"], *(each[field] for field in FIELDS[each["type"]])] for each in listed]
        batch = {"ts": self._timestamp(), "events": listed, "data_parallel_rank": 0}
        return msgspec.msgpack.encode(batch if self._layout == "maps" else [*batch.values()])

    def _replay(self, router: "zmq.Socket[bytes]") -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        who, first = frames[0], frames[2]
        for name, payload in [kept for kept in self._kept if kept[0] >= first]:
            router.send_multipart((who, b"", name, payload))
        router.send_multipart((who, b"", END, b""))


def _is_here(endpoint: str) -> bool:
    here = "*", "127.0.0.1", "localhost", "[::]", "[::1]"
    return endpoint.startswith(("ipc://", "inproc://")) or any(f"//{host}:" in endpoint for host in here)
