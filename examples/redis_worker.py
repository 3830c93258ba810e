"""A worker that takes requests from a Redis stream. Several workers act as replicas.

    python examples/redis_worker.py --model examples/models/austen-4m --redis redis://localhost --consumer a

An entry may run twice, but is answered once. A script (redis_worker.lua) atomically writes the answer and acknowledges
the entry, and refuses the answer of a worker that has lost the entry. When a worker dies, another worker continues
after the tokens that are already in Redis. redis_worker.md describes what clients send and read.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError:
    sys.exit('redis_worker: redis is not installed; pip install -e ".[examples]"')

from batch_manager import (
    BatchManagerError,
    ErrorCode,
    FinishReason,
    GptManager,
    InferenceRequest,
    InvalidRequestError,
    Parts,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
    resume,
)
from batch_manager.extras.repeated_names import unique_names
from batch_manager.tools.command_parser import CommandParser

log = logging.getLogger("redis_worker")
GROUP = "workers"                    # consumer group
SECONDS_TO_KEEP_TOKENS = 3600        # after the answer, for late clients
LONGEST_LEASE = 86_400               # seconds
MOST_DELIVERIES = 10                 # an entry that so many workers got without answering it gets an error


@dataclass
class Entry:
    """An entry that this worker has taken from the stream and runs.

    num_written   number of the entry's tokens that are in Redis
    """

    name: str
    deliveries: int
    tokens: list[int]
    num_written: int
    answer: str = ""

    def end(self, **reason: str) -> None:
        self.answer = json.dumps({"tokens": self.tokens, **reason})


class Worker:
    """Connects Redis and the engine.

    The engine's thread runs the callbacks, and the main thread communicates with Redis. The threads exchange data
    through two deques. The deques stay small, because the worker fetches only as many entries as the engine has room
    for.
    """

    def __init__(self, client: redis.Redis, options: argparse.Namespace) -> None:
        self.redis, self.options = client, options
        self.lease_ms = int(options.lease * 1000)
        self.script = client.register_script(Path(__file__).with_suffix(".lua").read_text())
        self.entries: dict[int, Entry] = {}                  # by request id
        self.numbers, self.cursor, self.next_keep = count(1), "0-0", 0.0
        self.trouble: str | None = None                      # with Redis; "": none; None: not tried yet
        self.lock, self.inbox, self.room = threading.Lock(), deque(), 0
        self.outbox, self.news = deque(), threading.Event()
        self.stopped: frozenset[int] = frozenset()

    # ------------------------------------------------------------------ on the engine's thread

    def get_inference_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        with self.lock:
            num_taken = min(max_num_requests, len(self.inbox))
            self.room = max_num_requests - num_taken
            return [self.inbox.popleft() for _ in range(num_taken)]

    def send_response(self, request_id: int, tensors: list, final_response: bool, error: str) -> None:
        named = {tensor.name: tensor.array for tensor in tensors}
        tokens = named["output_ids"][0, 0].tolist() if named else []
        reason = FinishReason(named["finish_reason"][0, 0]).name if named and final_response else ""
        self.outbox.append((request_id, tokens, reason, error))

    # ------------------------------------------------------------------ on the main thread

    def run(self, manager: GptManager, must_end: threading.Event) -> bool:
        """Serve until must_end is set or the engine fails. Returns whether the engine is healthy."""
        while is_healthy(manager) and not must_end.is_set():
            self.exchange(self.keep, self.fetch, self.look_for_cancels, self.write)
            if self.inbox:
                manager.notify()
        give_up = time.monotonic() + self.options.drain
        while is_healthy(manager) and self.entries and time.monotonic() < give_up:
            self.exchange(self.keep, self.look_for_cancels, self.write)
        self.exchange(self.write, lambda: self.set_idle(self.lease_ms))          # release the rest
        log.info("%d entries are left to other workers", len(self.entries))
        return is_healthy(manager)

    def exchange(self, *steps: Callable[[], None]) -> None:
        """Wait up to 0.1 s for responses if the worker has pending entries, then call the functions `steps` in order.

        An entry is a request in the Redis stream.

        A Redis error ends the call early and is not raised: the next call does the missing work.
        """
        self.news.wait(0.1 if self.entries else 0)           # without entries, `fetch` waits
        self.news.clear()
        try:
            if self.trouble != "":
                self.call("make_group")
            for step in steps:
                step()
        except redis.RedisError as error:
            trouble = trouble_of(error, self.options.stream)
            if self.trouble != trouble:
                log.warning("%s (%s); the worker tries again every 0.1 s", trouble, error)
            self.trouble = trouble
            time.sleep(0.1)
        else:
            if self.trouble != "":
                log.info("Redis answers")
            self.trouble = ""

    def call(self, command: str, *arguments: str | int, client: redis.Redis | None = None) -> Any:
        """Run a command of redis_worker.lua; with a Redis pipeline as `client`, append it to the pipeline."""
        return self.script([self.options.stream], [command, GROUP, self.options.consumer, *arguments], client)

    def keep(self) -> None:
        """Renew the lease of this worker's entries."""
        if self.entries and time.monotonic() >= self.next_keep:
            self.set_idle(0)
            self.next_keep = time.monotonic() + self.options.lease / 4

    def set_idle(self, milliseconds: int) -> None:
        owned = ((entry.name, entry.deliveries) for entry in self.entries.values())
        self.call("set_idle", milliseconds, *chain.from_iterable(owned))

    def fetch(self) -> None:
        """Fetch as many entries as the engine has room for. Entries of dead workers come before new entries."""
        with self.lock:
            room = self.room - len(self.inbox)
        if room <= 0:
            return
        self.cursor, claimed = self.call("claim", self.lease_ms, self.cursor, room)
        for name, fields, deliveries, pieces in claimed:
            self.accept(name, dict(zip(fields[::2], fields[1::2])), deliveries, pieces)
        if room > len(claimed):
            streams = self.redis.xreadgroup(GROUP, self.options.consumer, {self.options.stream: ">"},
                                            count=room - len(claimed), block=None if self.entries else 100)
            for name, fields in streams[0][1] if streams else ():
                self.accept(name, fields, 1, [])

    def accept(self, name: bytes, fields: dict[bytes, bytes], deliveries: int, pieces: list) -> None:
        tokens = [int(token) for _, (_, text) in pieces for token in text.split()]
        number = next(self.numbers)
        entry = self.entries[number] = Entry(name.decode(), deliveries, tokens, len(tokens))
        if deliveries > MOST_DELIVERIES:
            entry.end(error=f"[MODEL_ERROR] {deliveries - 1} workers got the entry and did not answer it; at most "
                            f"{MOST_DELIVERIES} try; see their logs")
            return
        try:
            # The last token is written with the answer. An unanswered entry therefore has at least one token left.
            self.inbox.append(resume(request_of(number, fields, seed=zlib.crc32(name)), tokens))
        except InvalidRequestError as error:
            entry.end(error=error.response_text())

    def look_for_cancels(self) -> None:
        running = {number: entry for number, entry in self.entries.items() if not entry.answer}
        if running:
            found = self.redis.mget([f"{self.options.stream}:cancel:{entry.name}" for entry in running.values()])
            self.stopped |= {number for number, value in zip(running, found) if value is not None}

    def write(self) -> None:
        """Write to Redis the responses that arrived since the last call of this method.

        Forgets entries that are answered or lost.
        """
        while self.outbox:
            self.take_response(*self.outbox.popleft())
        news = {number: entry for number, entry in self.entries.items()
                if entry.answer or entry.num_written < len(entry.tokens)}
        pipeline = self.redis.pipeline(transaction=False)
        for entry in news.values():
            self.call("write", entry.name, entry.deliveries, entry.num_written, entry.answer, SECONDS_TO_KEEP_TOKENS,
                      *entry.tokens[entry.num_written:], client=pipeline)
        for (number, entry), num_there in zip(news.items(), pipeline.execute()):
            if num_there is None:
                log.info("entry %s was answered or belongs to another worker now; it ends here", entry.name)
                self.stopped |= set() if entry.answer else {number}
            else:
                entry.num_written = num_there
            if num_there is None or entry.answer and num_there == len(entry.tokens):
                del self.entries[number]

    def take_response(self, number: int, tokens: list[int], reason: str, error: str) -> None:
        if reason or error:
            self.stopped -= {number}
        if entry := self.entries.get(number):
            entry.tokens += tokens
            if error and ErrorCode.of(error)[0].is_retryable:
                del self.entries[number]                     # another worker claims it after the lease
            elif error:
                entry.end(error=error)
            elif reason:
                entry.end(finish_reason=reason)


def trouble_of(error: redis.RedisError, stream: str) -> str:
    """Say what an error of Redis means for the worker."""
    if "NOGROUP" in str(error):
        return (f"the stream {stream} or its group is gone, for example after FLUSHALL, with the entries that were not "
                "answered; the worker makes both again; clients must send their requests again")
    if isinstance(error, redis.ResponseError | redis.AuthenticationError | redis.BusyLoadingError):
        return "Redis refuses a command of the worker; check the server's settings and the user's rights"
    return "Redis does not answer; check the server and its URL"


def request_of(number: int, fields: dict[bytes, bytes], seed: int) -> InferenceRequest:
    """Build the request of an entry. Raises InvalidRequestError."""
    try:
        tensors = json.loads(fields[b"request"], object_pairs_hook=unique_names)
        tensors = {"random_seed": seed, **tensors}           # every worker samples the same tokens
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = f": {error}" if type(error) is ValueError else ""
        raise InvalidRequestError(f"the entry has no field `request` with a JSON object{why}",
                                  "expected request tensors by name",
                                  """XADD STREAM '*' request '{"input_ids": [5], "request_output_len": 8}'""") from None
    return InferenceRequest(number, tensors, is_streaming=True)


def is_healthy(manager: GptManager) -> bool:
    health = manager.health()
    return health["state"] == "RUNNING" and not health["is_hanging"]


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a checkpoint")
    parser.add_argument("--redis", required=True, help="redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]")
    parser.add_argument("--consumer", required=True, help="unique name of this worker")
    parser.add_argument("--stream", default="requests", help="name of the stream, and prefix of the other keys")
    parser.add_argument("--in-flight", type=int, default=16, help="number of entries that run at the same time")
    parser.add_argument("--lease", type=float, default=10.0, help="seconds until others claim a dead worker's entries")
    parser.add_argument("--drain", type=float, default=20.0, help="seconds for running entries after SIGTERM")
    parser.add_argument("--threads", type=int, default=None, help="processor threads of the engine")
    parser.add_argument("--dtype", default="auto", help="dtype of weights and activations: float32, bfloat16, ...")
    parser.add_argument("--deterministic", action="store_true", help="bitwise equal tokens on every worker")
    options = parser.parse_args(arguments)
    if not 1 <= options.lease <= LONGEST_LEASE:              # a shorter lease may end before the worker renews it
        parser.error(f"--lease is {options.lease}; expected 1 to {LONGEST_LEASE:,} seconds; leave it out for 10")
    if not options.drain >= 0:                               # also refuses nan
        parser.error(f"--drain is {options.drain}; expected at least 0 seconds; 0 releases running entries at once")
    if options.in_flight < 1:
        parser.error(f"--in-flight is {options.in_flight}; expected at least 1; leave it out for 16")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads is {options.threads}; expected at least 1; leave it out for the default")
    try:
        client = redis.Redis.from_url(options.redis, protocol=2, socket_timeout=5, socket_connect_timeout=5,
                                      retry=Retry(NoBackoff(), 0))
    except ValueError:                                       # its text, like the address, may contain a password
        parser.error("--redis is not an address of Redis; expected redis://HOST:PORT, rediss://HOST:PORT or "
                     "unix://PATH, with a port up to 65535; correct it")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    must_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: must_end.set())
    worker = Worker(client, options)
    try:
        manager = GptManager(
            options.model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT,
            worker.get_inference_requests, worker.send_response, lambda: worker.stopped,
            optional_params=TrtGptModelOptionalParams(
                max_batch_size=options.in_flight, num_threads=options.threads, dtype=options.dtype,
                deterministic=options.deterministic),
            exclude_input_in_output=True, parts=Parts(after_responses=worker.news.set))
    except BatchManagerError as error:
        print(f"redis_worker: {error}", file=sys.stderr)
        return 2
    with manager:
        log.info("%s serves %s", options.consumer, options.stream)
        ended_healthy = worker.run(manager, must_end)
        if not manager.shutdown(drain=False, timeout=5):
            os._exit(1)                                      # the engine hangs; its thread cannot be stopped
    return 0 if ended_healthy else 1


if __name__ == "__main__":
    raise SystemExit(main())
