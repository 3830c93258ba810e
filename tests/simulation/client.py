"""The server around the engine: callbacks and hooks that check their arguments, and that fail when a fault is chosen.

Every call is recorded for the history checker. Callbacks report violations through `check`, because the guard, which is
under test, would contain an exception.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from copy import copy
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from batch_manager.arguments import Callbacks
from batch_manager.build_rank import Shared, shared_callbacks
from batch_manager.names import FinishReason
from batch_manager.requests.inference_request import InferenceRequest
from batch_manager.responses.perf_metrics import PERF_TENSORS, PerfMetrics
from batch_manager.responses.tensors import RESPONSE_TENSORS, TOP_TENSORS
from tests.harness.client import Client

from .beams_judged import NATURAL
from .faults import Place
from .history import Handed, Other, Polled, Sent
from .rank_clients import OF_COMPARISON, heard
from .requests import Requests
from .swarm import TERMINATE_ID

if TYPE_CHECKING:
    from .world import SimulatedWorld

FLOOD, LARGE_FLOOD = 1_200, 100_000  # the longest queue holds 1,024 requests
FLOODS_DRAWN = 3                  # one of these is let through: it takes as long as a hundred iterations
MOST_ALIVE = 80                       # more live requests take long and find no more bugs
CANCELLED = int(FinishReason.CANCELLED)


class Planted(Exception):
    """An exception that a callback raises as a chosen fault."""


class PlantedInterrupt(KeyboardInterrupt):
    """A KeyboardInterrupt that a callback raises as a chosen fault."""


class Taken(list):
    """A list of items that the get callback returns. It appends each item that the engine reads to `read`."""

    def __init__(self, items: list[tuple[Any, Handed | None]], read: deque[tuple[Any, Handed | None, bool]]) -> None:
        super().__init__(items)
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        for item, handed in super().__iter__():
            self._read.append((item, handed, len(self) == 1))
            yield item


class SimulatedClient(Client):
    """The callbacks of one simulated server. Items are generated at random. `pending` of the base class is not used.

    again      ids of requests that the next get returns
    failures   callback -> number of failed calls; the engine must count the same number
    heard      the responses that every rank must have, if other ranks have callbacks
    calls_with_a_difference   calls of get, counted from 1, in which another rank was handed other items
    read       (item, record, whether get returned this item alone) of the items that the engine has read and not taken
               up, oldest first
    """

    def __init__(self, world: "SimulatedWorld", rng: Random) -> None:
        super().__init__()
        self.world, self.swarm, self.faults = world, world.swarm, world.faults
        self.rng = rng
        self.has_poll, self.has_stats = self.swarm.has_poll, self.swarm.has_stats
        self.next_id = 0
        self.again: deque[int] = deque()
        self.read: deque[tuple[Any, Handed | None, bool]] = deque()
        self._used_arrays: list[np.ndarray] = []
        self.recently_ended: deque[int] = deque(maxlen=4)
        self.ended_this_turn: list[int] = []
        self.reused_this_turn: list[int] = []
        self.means_to_stop_the_reused = False
        self.kept: deque[tuple[list, bytes]] = deque(maxlen=3)
        self.requests = Requests(self.swarm, rng, world.mark, world.adapters, world.transfers)
        self.failures = Counter()
        self.num_finals = 0
        self.errors: Counter[str] = Counter()
        self.last_iteration: int | None = None
        self.not_told = 0                                # responses since after_responses was called
        self.endings = 0                                 # calls of at_end
        self.asked_to_terminate = False
        self.heard: list[tuple] = []
        self.calls_with_a_difference: set[int] = set()
        self.num_polls = 0

    def callbacks(self) -> dict[str, Callable | None]:
        given, swarm = super().callbacks(), self.swarm
        if not swarm.rank_callbacks:
            return given
        shared = shared_callbacks(Callbacks(**given), Shared(True, swarm.has_stats), self.world.ranks.leader)
        return {name: getattr(shared, name) for name in (*given, "alike")}

    # callbacks and hooks

    def items(self, max_num_requests: int) -> Any:
        world = self.world
        world.record(Other(world.clock.now))
        world.check(not world.get_is_over, "I26: get was called after shutdown had been asked for")
        world.check(max_num_requests == world.expected_room(),
                    f"I32: get was asked for {max_num_requests}, and there is room for {world.expected_room()}")
        fault = self.faults.draw(Place.GET)
        if fault is not None:
            return self._faulty_get(fault, max_num_requests)
        if self.again:
            return self._hand_over(self._items(len(self.again)))
        if (not world.has_traffic or len(world.history.open) > MOST_ALIVE
                or self.rng.random() >= self.swarm.traffic.arrival):
            return ()
        count = self.rng.randint(1, self.swarm.traffic.burst)
        if 0 <= max_num_requests < count:
            world.mark("more handed over than there is room for")
        return self._hand_over(self._items(count))

    def received(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        self.not_told += 1
        if self.swarm.rank_callbacks and OF_COMPARISON not in error:
            self.heard.append(heard(request_id, tensors, final, error))
        self.world.check(not self.endings, "I31: a response behind at_end")
        sent, response = self._read(request_id, tensors, final, error)
        self.world.note_sent(sent)
        self.world.record(sent)
        if final:
            self.num_finals += 1
            self.ended_this_turn.append(request_id)
            self.recently_ended.append(request_id)
            if error:
                self.errors[sent.code] += 1
        fault = self.faults.draw(Place.SEND)
        if fault is not None:
            self._faulty_send(fault, request_id, response, final)

    def named_stops(self) -> Any:
        world, rng = self.world, self.rng
        self.num_polls += 1
        fault = self.faults.draw(Place.STOP)
        if self.means_to_stop_the_reused and self.reused_this_turn:
            self.means_to_stop_the_reused = False
            reused = [request_id for request_id in self.reused_this_turn if world.is_alive(request_id)]
            if reused:
                self.faults.hit("stop.reused")
                return self._stop(reused)
        if fault is not None:
            return self._faulty_poll(fault)
        if rng.random() >= self.swarm.traffic.stops or not world.alive():
            return self._stop([])
        alive = world.alive()
        return self._stop(rng.sample(alive, rng.randint(1, min(2, len(alive)))))

    def after_responses(self) -> None:
        with self.callback("after_responses"):
            self.world.check(self.not_told > 0, "I31: after_responses was called behind no response")
            self.not_told = 0
            fault = self.faults.draw(Place.HOOK)
            if fault == "hook.raises":
                self._fail("after_responses", fault)
            elif fault == "hook.blocks":
                self.faults.hit(fault)
                self.world.clock.now += 40.0

    def at_end(self, health: dict) -> None:
        with self.callback("at_end"):
            world = self.world
            self.endings += 1
            world.check(self.not_told == 0, "I31: at_end was called before after_responses")
            world.check(health["state"] == "STOPPED" and health["final_responses"] == self.num_finals,
                        f"I31: at_end was told {health}")
            if "hook.exits" in [self.faults.draw(Place.HOOK) for _ in range(20)]:      # at_end is called once in a run
                self._fail("at_end", "hook.exits", SystemExit)

    def record_received(self, record: str) -> None:
        world = self.world
        world.check(self.not_told == 0, "I31: statistics before after_responses")
        world.record(Other(world.clock.now))
        self._judge_stats(orjson.loads(record))
        fault = self.faults.draw(Place.STATS)
        if fault == "stats.raises":
            self._fail("stats", fault)
        elif fault == "stats.blocks":
            self.faults.hit(fault)
            world.clock.now += 40.0

    def begins(self, name: str) -> None:
        super().begins(name)
        for array in self._used_arrays:
            array.fill(0)
        self._used_arrays.clear()
        self.world.callback_begins(name)

    def wrong(self, complaint: str) -> None:
        self.world.check(False, complaint)

    # get

    def _faulty_get(self, fault: str, room: int) -> Any:
        world, rng = self.world, self.rng
        kind = fault.removeprefix("get.")
        if kind == "raises":
            self._fail("get", fault, rng.choice([Planted, KeyError, MemoryError]))
        if kind == "exits":
            self._fail("get", fault, rng.choice([SystemExit, PlantedInterrupt, GeneratorExit]))
        if kind == "none":
            self.faults.hit(fault)
            return None
        if kind == "no_iterable":
            self.faults.hit(fault)
            self.failures["get"] += 1
            return rng.choice([5, object(), 1.5, True])
        if not world.has_traffic:
            return ()
        if kind == "breaks_midway":
            self.faults.hit(fault)
            return self._breaks_midway(rng.randint(0, 2))
        if kind == "endless":
            if self.swarm.max_admissions > 64:
                return ()
            self.faults.hit(fault)
            return self._endless()
        if kind == "more_than_asked":
            self.faults.hit(fault)
            return self._hand_over(self._items(max(room, 0) + rng.randint(1, 5)))
        if kind == "same_object_twice":
            (item,) = self._items(1)
            self.faults.hit(fault)
            return self._hand_over([item, item])
        if kind == "duplicate":
            alive = world.alive()
            if not alive:
                return ()
            self.faults.hit(fault)
            return self._hand_over([self.requests.fair(rng.choice(alive))])
        assert kind == "flood"
        if self.swarm.max_admissions < 4096 or rng.randrange(FLOODS_DRAWN):
            return ()
        self.faults.hit(fault)
        (item,) = self._items(1)
        return self._hand_over([item] * (LARGE_FLOOD if rng.randrange(200) == 0 else FLOOD))

    def _breaks_midway(self, count: int) -> Iterator[Any]:
        yield from Taken(self._items(count), self.read)
        self.failures["get"] += 1
        raise Planted

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from Taken(self._items(1), self.read)

    def _hand_over(self, items: list[tuple[Any, Handed | None]]) -> Any:
        if self.rng.random() < self.swarm.traffic.as_generator:
            return iter(Taken(items, self.read))
        return Taken(items, self.read)

    def noting(self, read_next: Callable[[], bool]) -> Callable[[], bool]:
        """Return `read_next` of the engine with a record of each item that it takes up.

        If get returned only this item, and its prompt is an array, the next callback overwrites the array.
        """
        def noting() -> bool:
            has_item = read_next()
            if has_item:
                item, handed, is_alone = self.read.popleft()
                if is_alone and isinstance(item, InferenceRequest) and isinstance(item.input_ids, np.ndarray):
                    self._used_arrays.append(item.input_ids)
                self._taken(item, handed)
            return has_item
        return noting

    def _taken(self, item: Any, handed: Handed | None) -> None:
        """Record that the engine has taken up an item."""
        if handed is None:
            self.asked_to_terminate = True
            self.world.terminate_was_read()
            return
        handed = copy(handed)                                      # one object may be read several times
        handed.time = self.world.clock.now
        if type(item) is InferenceRequest and handed.must == "" and handed.request_id % 7 == 3:
            self.world.mark("says when it arrived")
            handed.waited_s = 0.25
            item.arrival_time = handed.time - handed.waited_s
        self.world.note_handed(handed)
        self.world.record(handed)

    def _items(self, count: int) -> list[tuple[Any, Handed | None]]:
        items = []
        for _ in range(count):
            if self.again:
                request_id = self.again.popleft()
                if not self.world.is_alive(request_id):
                    self.reused_this_turn.append(request_id)
                items.append(self.requests.fair(request_id))
            elif self.rng.random() < self.swarm.traffic.invalid:
                items.append(self.requests.unfair(self._new_id))
            else:
                items.append(self.requests.fair(self._new_id()))
        return items

    def hand_over_the_end(self) -> None:
        """Make the next call of get return only the terminate request."""
        self.again.clear()
        self._items = lambda count: [(InferenceRequest(TERMINATE_ID), None)]
        self.again.append(TERMINATE_ID)

    def _new_id(self) -> int:
        self.next_id += 1
        if self.rng.random() < 0.02:
            return 2**64 - 2 - self.next_id
        return self.next_id

    # send

    def _read(self, request_id: int, tensors: list, final: bool, error: str) -> tuple[Sent, list]:
        now = self.world.clock.now
        if not tensors:
            return Sent(now, request_id, final, error), []
        arrays = [named.tensor for named in tensors]
        names = tuple(named.name for named in tensors)
        handed = self.world.handed(request_id)
        top = handed.top_log_probs if handed is not None else 0
        has_metrics = final and handed is not None and handed.metrics
        more = TOP_TENSORS if top else ()
        last = ("context_phase_params",) if names[-1] == "context_phase_params" else ()
        self.world.check(names == RESPONSE_TENSORS + more + (PERF_TENSORS if has_metrics else ()) + last,
                         f"I33: a response has the tensors {names}")
        output_ids, lengths, _, _, log_probs, cum_log_probs, reason = arrays[:7]
        if has_metrics:
            self._check_metrics(handed, PerfMetrics.of(tensors), now, lengths.any() and log_probs.shape[2])
        asked = handed is not None and handed.log_probs
        if not asked:
            self.world.check(not log_probs.any() and not cum_log_probs.any(), "I33: log-probabilities nobody asked for")
        if handed is not None and handed.beam_width > 1:
            beams = self._read_beams(handed, output_ids, lengths, log_probs, cum_log_probs, reason)
            return Sent(now, request_id, final, error, beams[0][0], beams[0][1], beams=beams), arrays
        row = output_ids[0, 0].tolist()
        is_held = final and handed is not None and handed.is_context_only and int(reason[0, 0]) in NATURAL
        self.world.check(bool(last) == is_held, "I33: context_phase_params that nobody asked for, or none")
        if last:
            self.world.transfers.given(arrays[-1], handed)
        self.world.check(output_ids.shape == (1, 1, lengths[0, 0]) and log_probs.shape[:2] == (1, 1),
                         "I33: a response has other shapes than it says")
        if top:
            self._check_top(handed, row[len(row) - log_probs.shape[2]:], log_probs[0, 0], *arrays[7:9])
        return Sent(now, request_id, final, error, row, int(reason[0, 0]),
                    log_probs[0, 0].tolist() if asked else None), arrays

    def _check_metrics(self, handed: Handed, metrics: PerfMetrics, now: float, has_tokens: bool) -> None:
        moments = [metrics.arrival_time_ns, metrics.first_scheduled_time_ns, metrics.first_token_time_ns,
                   metrics.last_token_time_ns, int(now * 1e9) + 1]
        came = [moment for moment in moments if moment]
        self.world.check(came == sorted(came) or "clock.backward" in self.swarm.faults,
                         f"I33: times of a request that do not follow one another: {moments}")
        self.world.check(abs(metrics.arrival_time_ns / 1e9 - (handed.time - handed.waited_s)) < 1e-6 or (
            not handed.waited_s and metrics.arrival_time_ns / 1e9 > handed.time), "I33: a wrong arrival time")
        self.world.check(not has_tokens or bool(metrics.first_token_time_ns), "I33: tokens without a first one")

    def _check_top(self, handed: Handed, tokens: list[int], log_probs, ids, values) -> None:
        """Check the likeliest tokens of each position: the sampled token and the tokens with the next ids.

        The log-probability of each of them must be 1 below that of the token before it.
        """
        self.world.mark("likeliest tokens asked for")
        ranks, vocab = np.arange(handed.top_log_probs), self.world.swarm.vocab_size
        known = ranks < vocab
        expected = np.where(known, (np.array(tokens, int)[:, None] + ranks) % vocab, 0)
        fit = (ids.shape == values.shape == (1, 1, len(tokens), len(ranks)) and (ids[0, 0] == expected).all()
               and (values[0, 0] == np.where(known, log_probs[:, None] - ranks, -np.inf)).all())
        self.world.check(fit, "I33: the likeliest tokens are not those of the tokens that they came with")

    def _read_beams(self, handed: Handed, output_ids, lengths, log_probs, cum_log_probs, reason) -> list[list]:
        width, longest, start = handed.beam_width, int(lengths.max()), 0 if handed.excludes else len(handed.prompt)
        fit = (output_ids.shape == (1, width, longest) and log_probs.shape == (1, width, longest - start)
               and lengths.shape == cum_log_probs.shape == reason.shape == (1, width))
        self.world.check(fit, "I33: a response with beams has other shapes than it says")
        beams, pad = [], max(handed.end_id, 0)
        for beam, length in enumerate(lengths[0].tolist()):
            row, probs = output_ids[0, beam].tolist(), log_probs[0, beam].tolist()
            self.world.check(set(row[length:]) <= {pad} and not any(probs[length - start:]),
                             "I33: there is something behind the end of a beam")
            asked = (float(cum_log_probs[0, beam]), probs[:length - start]) if handed.log_probs else (None, None)
            beams.append([row[:length], int(reason[0, beam]), *asked])
        return beams

    def _faulty_send(self, fault: str, request_id: int, arrays: list, final: bool) -> None:
        kind = fault.removeprefix("send.")
        if kind == "raises" and not final or kind == "raises_on_final" and final:
            self._fail("send", fault, self.rng.choice([Planted, SystemExit, PlantedInterrupt]))
        elif kind == "shuts_down":
            if self.world.step_number > self.swarm.iterations // 2:
                self.faults.hit(fault)
                self.world.ask_to_drain()
        elif kind == "hands_over_again" and final and request_id not in self.again:
            self.faults.hit(fault)
            self.again.append(request_id)
        elif kind == "mutates" and arrays:
            self.faults.hit(fault)
            for array in arrays:
                array.fill(77)
        elif kind == "keeps" and arrays:
            self.faults.hit(fault)
            self.kept.append((arrays, b"".join(array.tobytes() for array in arrays)))

    # poll

    def _stop(self, request_ids: list, answer: Any = None) -> Any:
        """Record a poll that stops `request_ids`. Returns `answer`, or the set of the ids if `answer` is None."""
        world = self.world
        alive = [request_id for request_id in request_ids if world.is_alive(request_id)]
        world.note_stops(request_ids, alive)
        world.record(Polled(world.clock.now, alive))
        return set(request_ids) if answer is None else answer

    def _faulty_poll(self, fault: str) -> Any:
        rng, alive = self.rng, self.world.alive()
        kind = fault.removeprefix("stop.")
        if kind == "raises":
            self._stop([])
            if rng.random() < 0.5:
                self.faults.hit(fault)
                self.failures["poll"] += 1
                return self._breaks_off(alive)
            self._fail("poll", fault, rng.choice([Planted, SystemExit, PlantedInterrupt]))
        if kind == "junk":
            self.faults.hit(fault)
            some = rng.sample(alive, min(len(alive), rng.randint(0, 1)))
            return self._stop(some, ["x", None, 1.5, True, (3,), *map(np.uint64, some), -5])
        if kind == "unknown":
            self.faults.hit(fault)
            return self._stop([2**64 + 5, -1, 10**12, *list(self.recently_ended)])
        if kind == "all" and alive:
            self.faults.hit(fault)
            return self._stop(alive)
        if kind == "finisher" and self.ended_this_turn:
            self.faults.hit(fault)
            return self._stop(self.ended_this_turn)
        if kind == "reused" and self.recently_ended:               # the id is sent again and stopped at once
            self.again.append(self.recently_ended[-1])
            self.means_to_stop_the_reused = True
        return self._stop([])

    @staticmethod
    def _breaks_off(alive: list[int]) -> Iterator[int]:
        yield from alive
        raise Planted

    # stats

    def _judge_stats(self, record: dict) -> None:
        world, check = self.world, self.world.check
        iteration = record["Iteration Counter"]
        check(self.last_iteration is None or iteration == self.last_iteration + 1,
              f"I28: the iteration counter went from {self.last_iteration} to {iteration}")
        self.last_iteration = iteration
        check(record["Final Responses"] == self.num_finals,
              f"I28: {record['Final Responses']} finals in the statistics, {self.num_finals} received")
        check(record["Used KV cache blocks"] + record["Free KV cache blocks"] == record["Max KV cache blocks"]
              == world.swarm.num_blocks, "I28: blocks do not add up")
        check(record["Queued Requests"] == len(world.loop.intake), "I28: the queue has another length")
        check(record.get("Unaddressable Items") == world.history.num_unaddressable, "I28: unaddressable items")
        for code, count in self.errors.items():
            check(record.get(f"Errors {code}") == count, f"I28: errors {code}")
        for name, count in self.failures.items():
            check(record[f"Failed {name} Callbacks"] == count,
                  f"I28: {record[f'Failed {name} Callbacks']} failures of {name}, {count} happened")
        if not world.swarm.is_static:
            check(record["Scheduled Requests"] == record["Context Requests"] + record["Generation Requests"],
                  "I28: scheduled requests")

    # between iterations

    def new_turn(self) -> None:
        """Forget the ids that ended, and the ids that were used again, in the previous turn."""
        if self.ended_this_turn:
            self.ended_this_turn = []
        if self.reused_this_turn:
            self.reused_this_turn = []

    def judge_what_was_kept(self) -> None:
        for arrays, before in self.kept:
            self.world.check(b"".join(array.tobytes() for array in arrays) == before,
                             "F-keeps: somebody changed tensors that were sent")

    def _fail(self, name: str, fault: str, error: type[BaseException] = Planted) -> None:
        self.faults.hit(fault)
        self.failures[name] += 1
        raise error
