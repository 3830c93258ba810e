"""Checks a history: the items that the get callback returned, the responses and the polls, all with their times.

The checker sees no blocks and no schedulers. Its rules are:

    I1  each item gets one final response                   I5  the streamed parts, in order, are the output
    I2  no response follows a final one                     I6  invalid items are refused once; other items are not
    I3  no response has an unknown id                       I7  a stop is answered before any other call
    I4  an error has a text, is final, has no tensors       I8  the output is the oracle's, or its beginning

The checker gets a history call by call while it happens, or reads it from a file (one JSON object a line):

    python -m tests.simulation.history FILE

The first line describes the scripted model: {"vocab_size", "key", "window", "sink", "max_seq_len"}. Exit status 0: no
anomalies; 1: anomalies, one a line.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .beams_judged import CANCELLED, NATURAL, REASONS, TIMED_OUT, beams_wrong
from .oracle import Oracle

CODES = {"INVALID_REQUEST", "DUPLICATE_REQUEST_ID", "TOO_LARGE_FOR_KV_CACHE", "LORA_TASK_NOT_CACHED",
         "QUEUE_FULL", "NON_FINITE_LOGITS",
         "INVALID_TOKEN", "OUT_OF_MEMORY", "MODEL_ERROR", "DEADLINE", "SHUTDOWN", "ENGINE_FAILED",
         "KV_TRANSFER_FAILED"}
FAULTY = {"INVALID_REQUEST", "TOO_LARGE_FOR_KV_CACHE"}
BEFORE_LOOKING = {"DUPLICATE_REQUEST_ID", "SHUTDOWN", "ENGINE_FAILED"}    # given before the request is checked


@dataclass(slots=True)
class Handed:
    """An item that the engine has read. The request_id of an unaddressable item is None.

    must       "": must not be refused as faulty; a code: must be refused with that code; None: both are right
    streams    whether responses before the final one are allowed
    excludes   whether the responses leave out the prompt
    seed       seed of sampling; None: greedy
    top_log_probs   number of likeliest tokens for which the request wants log-probabilities, at each position
    penalizes  whether the request has a penalty
    waited_s   seconds from the arrival time that the request states to the reading
    metrics    whether the request wants timings in its response
    brings     digest of the adapter that the request brings along, in hexadecimal digits
    mark       what the adapter adds to the hash of each token; 0 without an adapter
    salt       the cache_salt
    is_context_only   whether another engine goes on with its blocks
    may_fail_to_load   whether it may end with KV_TRANSFER_FAILED
    """

    time: float
    request_id: int | None
    must: str | None = ""
    prompt: list[int] = field(default_factory=list)
    max_new_tokens: int = 0
    end_id: int = -1
    more_end_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    streams: bool = False
    excludes: bool = False
    log_probs: bool = False
    top_log_probs: int = 0
    deadline_s: float | None = None
    waited_s: float = 0.0
    metrics: bool = False
    stop_words: list[list[int]] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    penalizes: bool = False
    beam_width: int = 1
    len_penalty: float = 0.0
    early_stopping: int = 1
    diversity_rate: float = 0.0
    lora_task_id: int | None = None
    brings: str = ""
    mark: int = 0
    salt: str | None = None
    is_context_only: bool = False
    may_fail_to_load: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the text depends on the prompt, the seed and the end ids alone."""
        return not (self.beam_width > 1 or self.mark or self.bad_words or self.no_repeat_ngram_size
                    or self.min_length or self.penalizes)

    @property
    def end_ids(self) -> set[int]:
        """Return all end ids of the request."""
        return {self.end_id, *self.more_end_ids} - {-1}


@dataclass(slots=True)
class Sent:
    """A response.

    tokens      tokens of the response; None without tensors
    log_probs   None if not requested
    beams       with several beams: [tokens, reason, cumulative log-probability, log-probability of each token] of each
                beam, where the last two are None if not requested; `tokens` and `reason` are those of the first beam
    """

    time: float
    request_id: int
    final: bool
    error: str
    tokens: list[int] | None = None
    reason: int = 0
    log_probs: list[float] | None = None
    beams: list[list] | None = None

    @property
    def code(self) -> str:
        return self.error[1:].split("]")[0] if self.error and self.error[0] == "[" else ""


@dataclass(slots=True)
class Polled:
    time: float
    request_ids: list[int]


@dataclass(slots=True)
class Other:
    """Any call of a callback that no other class here describes, such as get or stats."""

    time: float


@dataclass(slots=True)
class Closed:
    """The end of the worker, with the engine's counts of items if they are known."""

    time: float
    accepted: int | None = None
    refused: int | None = None
    unaddressable: int | None = None


EVENTS = {cls.__name__: cls for cls in (Handed, Sent, Polled, Other, Closed)}


@dataclass(slots=True)
class Open:
    """An item that has had no final response so far, with the output of its responses."""

    handed: Handed
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class HistoryChecker:
    """Checks a history call by call.

    anomalies   the anomalies so far; each begins with the rule that is broken
    """

    def __init__(self, oracle: Oracle, max_seq_len: int, is_static: bool = False) -> None:
        self._oracle, self._max_seq_len, self._is_static = oracle, max_seq_len, is_static
        self.anomalies: list[str] = []
        self.open: dict[int, list[Open]] = defaultdict(list)
        self._known: set[int] = set()
        self._stopped: dict[int, Open] = {}
        self.num_handed = self.num_unaddressable = self.num_finals = 0

    def feed(self, event: Handed | Sent | Polled | Other | Closed) -> None:
        if type(event) is Sent:
            self._sent(event)
            return
        for request_id in self._stopped:
            self._wrong(event, "I7", f"request {request_id} was stopped and not told")
        self._stopped = {}
        if type(event) is Handed:
            self._handed(event)
        elif type(event) is Polled:
            self._stopped = {request_id: self.open[request_id][0] for request_id in event.request_ids
                             if self.open.get(request_id)}
        elif type(event) is Closed:
            self._closed(event)

    def _wrong(self, event: object, rule: str, what: str) -> None:
        self.anomalies.append(f"{rule} at {event.time:.6f}: {what}")

    def _handed(self, item: Handed) -> None:
        self.num_handed += 1
        if item.request_id is None:
            self.num_unaddressable += 1
        else:
            self._known.add(item.request_id)
            self.open[item.request_id].append(Open(item))

    def _sent(self, sent: Sent) -> None:
        waiting = self.open.get(sent.request_id)
        if not waiting:
            rule, when = ("I2", "after its final one") if sent.request_id in self._known else ("I3", "that nobody sent")
            self._wrong(sent, rule, f"a response for request {sent.request_id} {when}")
            return
        if sent.error and (not sent.final or sent.tokens is not None or sent.code not in CODES):
            self._wrong(sent, "I4", f"request {sent.request_id}: an error with tensors, without a code or not final")
        if not sent.error and sent.tokens is None:
            self._wrong(sent, "I4", f"request {sent.request_id}: neither tensors nor a text")

        place = 0
        if sent.code == "DUPLICATE_REQUEST_ID":
            if len(waiting) > 1:
                place = 1
            else:
                self._wrong(sent, "I6", f"request {sent.request_id} has a double only it can see")
        one = waiting[place]
        if sent.code == "KV_TRANSFER_FAILED" and not one.handed.may_fail_to_load:
            self._wrong(sent, "I4", f"request {sent.request_id} ended with {sent.error}")
        self._judge_refusal(sent, one.handed)
        if not sent.error and sent.tokens is not None:
            self._judge_output(sent, one)
        if not sent.final:
            return
        self.num_finals += 1
        self._judge_stop(sent, one)
        del waiting[place]
        if not waiting:
            del self.open[sent.request_id]

    def _judge_refusal(self, sent: Sent, item: Handed) -> None:
        if item.must is None:
            return
        if item.must:
            if sent.code != item.must and sent.code not in BEFORE_LOOKING:
                self._wrong(sent, "I6", f"request {item.request_id} had to be refused with {item.must}, "
                                        f"not {sent.code or 'answered'}")
        elif sent.code in FAULTY:
            self._wrong(sent, "I6", f"request {item.request_id} is fair and was refused: {sent.error}")

    def _judge_output(self, sent: Sent, one: Open) -> None:
        item, tokens = one.handed, sent.tokens
        if not sent.final:
            if not item.streams:
                self._wrong(sent, "I5", f"request {item.request_id} does not stream")
            if not tokens or sent.reason:
                self._wrong(sent, "I5", f"request {item.request_id}: an empty piece, or one that has finished")
        if not item.streams and not item.excludes:
            if tokens[:len(item.prompt)] != item.prompt:
                self._wrong(sent, "I8", f"request {item.request_id} does not begin with its prompt")
            tokens = tokens[len(item.prompt):]
        one.tokens += tokens
        one.log_probs += sent.log_probs or ()
        if (sent.beams is not None) != (item.beam_width > 1):
            self._wrong(sent, "I8", f"request {item.request_id} asked for {item.beam_width} beams")
        elif sent.final:
            wrong = beams_wrong(self._oracle, self._max_seq_len, item, sent) if item.beam_width > 1 else (
                self._text_wrong(sent, one))
            if wrong is not None:
                self._wrong(sent, "I5" if item.streams else "I8", f"request {item.request_id} {wrong}")

    def _text_wrong(self, sent: Sent, one: Open) -> str | None:
        item, got, reason = one.handed, one.tokens, sent.reason
        limit = min(item.max_new_tokens, self._max_seq_len - len(item.prompt))
        text = self._oracle.text(item, limit, min(len(got) + 1, limit))
        expected = text.tokens[:len(got)]
        if got != expected:
            wrong_at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), len(expected))
            return f"has token {wrong_at} of {len(got)} that is not the oracle's"
        if item.log_probs and one.log_probs != text.log_probs[:len(got)]:
            return "has log-probabilities that are not the oracle's"
        if reason not in REASONS or (reason in NATURAL and (text.reason, len(text.tokens)) != (reason, len(got))):
            return f"ended after {len(got)} of {limit} tokens, reason {reason}"
        return None

    def _judge_stop(self, sent: Sent, one: Open) -> None:
        request_id, item = sent.request_id, one.handed
        if self._stopped.get(request_id) is one:
            del self._stopped[request_id]
            natural = self._is_static and sent.reason in NATURAL    # it had ended, and its final was held
            if sent.code != "ENGINE_FAILED" and (sent.error or not (sent.reason == CANCELLED or natural)):
                self._wrong(sent, "I7", f"request {request_id} was stopped and got {sent.error or sent.reason}")
        elif sent.reason == CANCELLED:
            self._wrong(sent, "I7", f"request {request_id} was cancelled and nobody had asked for that")
        if ((sent.reason == TIMED_OUT or sent.code == "DEADLINE")
                and (item.deadline_s is None or sent.time < item.time - item.waited_s + item.deadline_s)):
            self._wrong(sent, "I7", f"request {request_id} timed out before its time")
        elif sent.reason in NATURAL and item.deadline_s is not None and item.waited_s >= item.deadline_s:
            self._wrong(sent, "I7", f"request {request_id} arrived behind its deadline and ran")

    def _closed(self, event: Closed) -> None:
        for request_id, waiting in self.open.items():
            self._wrong(event, "I1", f"request {request_id} has {len(waiting)} finals to come")
        counted = event.accepted, event.refused, event.unaddressable
        if None not in counted and (sum(counted) != self.num_handed or counted[2] != self.num_unaddressable
                                    or counted[0] + counted[1] != self.num_finals + sum(map(len, self.open.values()))):
            self._wrong(event, "I6", f"accepted, refused and unaddressable are {counted}; handed over were "
                                     f"{self.num_handed}, {self.num_unaddressable} of them without an id")


def scripted_oracle(model: dict) -> Oracle:
    """Return the oracle of a scripted model. `model` has vocab_size, key, window and sink."""
    return Oracle(**{name: model[name] for name in ("vocab_size", "key", "window", "sink")})


def judge(model: dict, events: Iterable[object]) -> list[str]:
    """Return the anomalies of the history `events` of a scripted model. `model` is its description."""
    checker = HistoryChecker(scripted_oracle(model), model["max_seq_len"], model.get("is_static", False))
    for event in events:
        checker.feed(event)
    return checker.anomalies


def to_line(event: object) -> str:
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def from_line(line: str) -> object:
    record = json.loads(line)
    return EVENTS[record.pop("event")](**record)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    first, *lines = parser.parse_args(arguments).file.read_text().splitlines()
    anomalies = judge(json.loads(first), map(from_line, lines))
    print("\n".join(anomalies) or f"{len(lines)} calls, nothing wrong")
    return 1 if anomalies else 0


if __name__ == "__main__":
    sys.exit(main())
