"""The server around an engine in a soak: callbacks that return mixed requests, check each response and rarely fail.

The server forgets its records after each round, because a growing server would hide a growing engine. A `Client` of
tests/harness keeps all records, so it is not used here.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from random import Random
from threading import Event
from typing import Any

import numpy as np
import orjson

from batch_manager import InferenceRequest
from tests.simulation.history import CANCELLED, Handed, HistoryChecker, Other, Polled, Sent, scripted_oracle

from .engines import MAX_SEQ_LEN, VOCAB, Engine, HurriedClock, Planted

IDS = 1500                  # so few that each id is used many times, sometimes while a request has it
CALLBACK_FAULTS = 0.002
STOPPED, INVALID = 0.12, 0.05
LULL = 0.15
MOST_ALIVE = 40
BEAMS, BEAM_OUTPUT = 0.3, 6


class Server:
    """Callbacks of one manager.

    notify        wakes the worker; set once the manager exists
    round_over    set when all items of a round are read and answered
    counts        number of each kind of event since the start
    """

    def __init__(self, engine: Engine, clock: HurriedClock, rng: Random) -> None:
        self.engine, self.clock, self.rng = engine, clock, rng
        self.notify: Callable[[], None] = lambda: None
        self.round_over = Event()
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.prefixes = [self._tokens(MAX_SEQ_LEN) for _ in range(3)]
        self.begin(0)

    def begin(self, count: int) -> None:
        """Begin a round of `count` items, and forget the previous round."""
        self.left = count
        self.history = HistoryChecker(scripted_oracle(self.engine.model), MAX_SEQ_LEN, self.engine.is_static)
        self.to_stop: dict[int, list[int]] = defaultdict(list)     # call of poll -> ids to return
        self.num_polls = 0
        self.round_over.clear()
        self.is_at_work = count > 0

    def callbacks(self) -> dict[str, Callable]:
        """The callbacks, as arguments of `GptManager`."""
        return {"get_inference_requests_cb": self.get, "send_response_cb": self.send,
                "poll_stop_signal_cb": self.poll, "return_batch_manager_stats_cb": self.stats}

    # callbacks

    def get(self, max_num_requests: int) -> Any:
        if not self.is_at_work:
            return ()
        rng, alive = self.rng, self.history.open
        self.history.feed(Other(self.clock.monotonic()))
        if not self.left:
            if not alive:
                self.is_at_work = False
                self.round_over.set()
            return ()
        fault = rng.random()
        if fault < CALLBACK_FAULTS:
            return self._faulty_get(fault)
        if len(alive) >= MOST_ALIVE or rng.random() < (LULL if alive else 2 * LULL):
            if not alive:
                self.counts["lulls"] += 1
                self.notify()                   # more items will come; without a call, the worker would sleep
            return ()
        return self._items(rng.choice((1, 1, 2, 3, 8, 20)))

    def send(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        now = self.clock.monotonic()
        sent = Sent(now, request_id, final, error)
        if tensors:
            output_ids, lengths, *_, log_probs, _, reason = [named.tensor for named in tensors]
            sent.tokens = output_ids[0, 0, :lengths[0, 0]].tolist()
            sent.reason = int(reason[0, 0])
            waiting = self.history.open.get(request_id)
            if waiting and waiting[0].handed.log_probs:
                sent.log_probs = log_probs[0, 0].tolist()
            if output_ids.shape[1] > 1:
                rows = zip(output_ids[0], lengths[0].tolist(), reason[0].tolist())
                sent.beams = [[row[:length].tolist(), why, None, None] for row, length, why in rows]
            if sent.reason == CANCELLED:
                self.counts["cancelled"] += 1
        self.history.feed(sent)
        self.counts["tokens"] += len(sent.tokens or ())
        if error:
            self.counts[f"errors {sent.code}"] += 1
        if self.rng.random() < CALLBACK_FAULTS:
            self._fail("send", self.rng.choice((Planted, SystemExit, KeyboardInterrupt)))

    def poll(self) -> Any:
        if not self.is_at_work:
            return ()
        self.num_polls += 1
        named = self.to_stop.pop(self.num_polls, [])
        fault = self.rng.random() < CALLBACK_FAULTS
        if fault and not named:
            self.history.feed(Polled(0.0, []))
            self._fail("poll", Planted)
        alive = [request_id for request_id in named if request_id in self.history.open]
        self.history.feed(Polled(self.clock.monotonic(), alive))
        if fault:
            return [*named, "x", None, -5, 2**64]
        return set(named)

    def stats(self, record: str) -> None:
        self.counts["iterations"] += 1
        if self.counts["iterations"] % 100 == 0:
            orjson.loads(record)
        if self.rng.random() < CALLBACK_FAULTS:
            self._fail("stats", Planted)

    # items

    def _items(self, count: int) -> Any:
        count = min(count, self.left)
        items = [self._item() for _ in range(count)]
        if self.rng.random() < 0.2:
            return self._taken_one_by_one(items)
        return _Taken(self, items)

    def _faulty_get(self, fault: float) -> Any:
        kind = int(fault / CALLBACK_FAULTS * 4)
        if kind == 0:
            self._fail("get", self.rng.choice((Planted, SystemExit, MemoryError)))
        if kind == 1:
            self.failures["get"] += 1
            return 5
        if kind == 2:
            return None
        self.failures["get"] += 1
        return self._breaks_midway([self._item() for _ in range(min(2, self.left))])

    def _breaks_midway(self, items: list[tuple[Any, Handed]]) -> Iterator[Any]:
        yield from self._taken_one_by_one(items)
        raise Planted

    def _taken_one_by_one(self, items: list[tuple[Any, Handed]]) -> Iterator[Any]:
        for item, handed in items:
            self.taken(handed)
            yield item

    def taken(self, handed: Handed) -> None:
        """Record that the engine has read an item."""
        handed.time = self.clock.monotonic()
        self.history.feed(handed)
        self.left -= 1
        self.counts["items"] += 1
        if handed.request_id is not None and self.rng.random() < STOPPED:
            self.counts["stops"] += 1
            self.to_stop[self.num_polls + 1 + self.rng.randrange(6)].append(handed.request_id)

    def _item(self) -> tuple[Any, Handed]:
        rng = self.rng
        request_id = rng.randrange(IDS)
        if rng.random() < 0.1:
            request_id = 2**64 - 1 - request_id
        return self._unfair(request_id) if rng.random() < INVALID else self._fair(request_id)

    def _fair(self, request_id: int) -> tuple[InferenceRequest, Handed]:
        rng, engine = self.rng, self.engine
        die = rng.random
        prompt = self._tokens(rng.choice((1, 3, 4, 8, 15, 20, rng.randint(1, 40))))
        if die() < 0.4:
            prompt = (rng.choice(self.prefixes)[:rng.randint(1, len(prompt))] + prompt)[:len(prompt)]
        output = rng.choice((1, 2, 4, 8, 8, 12, rng.randint(1, MAX_SEQ_LEN)))
        handed = Handed(0.0, request_id, "", prompt, output)
        tensors: dict[str, Any] = {}
        options: dict[str, Any] = {}
        width = rng.randint(2, engine.max_beam_width) if engine.max_beam_width > 1 and die() < BEAMS else 1
        if width > 1:
            tensors["beam_width"] = handed.beam_width = width
            handed.max_new_tokens = min(output, BEAM_OUTPUT)
        elif die() < 0.2:
            handed.seed = rng.getrandbits(64)
            tensors |= {"runtime_top_p": 1.0, "random_seed": handed.seed, "temperature": 0.7}
        tensors["input_ids"] = np.array(prompt, np.int32) if die() < 0.2 else prompt
        tensors["request_output_len"] = handed.max_new_tokens
        if die() < 0.3:
            tensors["end_id"] = handed.end_id = rng.randrange(VOCAB)
        if die() < 0.05 and width == 1:
            tensors["return_log_probs"] = handed.log_probs = True
        if die() < 0.02:
            tensors |= {"return_context_logits": True, "return_generation_logits": True}
        streams = width == 1 and die() < 0.4
        handed.streams = streams and not engine.is_static
        handed.excludes = streams
        if die() < 0.05:
            options["deadline_s"] = handed.deadline_s = rng.choice((0.05, 0.3, 2.0))
        if die() < 0.1:
            options["priority"] = rng.choice((0.0, 1.0))
        if engine.salts and die() < 0.3:
            options["cache_salt"] = rng.choice(("a", "b", str(rng.getrandbits(40))))
        return InferenceRequest(request_id, tensors, is_streaming=streams, **options), handed

    def _unfair(self, request_id: int) -> tuple[Any, Handed]:
        bad = self.rng.choice((
            None,
            {"input_ids": []},
            {"input_ids": [VOCAB]},
            {"input_ids": [0] * MAX_SEQ_LEN},
            {"input_ids": np.zeros((2, 2), np.int32)},
            {"request_output_len": 0},
            {"temperature": float("nan")},
            {"end_id": VOCAB},
            {"beam_width": 9},
        ))
        if bad is None:
            return self.rng.choice((None, 5, "request")), Handed(0.0, None)
        tensors = {"input_ids": [0], "request_output_len": 2} | bad
        return InferenceRequest(request_id, tensors), Handed(0.0, request_id, "INVALID_REQUEST")

    def _tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(VOCAB), k=count)

    def _fail(self, name: str, error: type[BaseException]) -> None:
        self.failures[name] += 1
        raise error


class _Taken(list):
    """A list of items that the get callback returns. It reports to its server when the engine reads an item."""

    def __init__(self, server: Server, items: list[tuple[Any, Handed]]) -> None:
        super().__init__(items)
        self._server = server

    def __iter__(self) -> Iterator[Any]:
        return self._server._taken_one_by_one(list(super().__iter__()))
