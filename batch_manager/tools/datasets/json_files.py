"""JSON files with token ids: workloads of this package, and datasets of gptManagerBenchmark."""

from collections.abc import Iterator
from typing import Any

from .errors import FIX_RECORD, DatasetError, quoted
from .json_document import JsonDocument
from .json_lines import JsonLines
from .records import Record, note_unread, seconds, tokens_of, whole_number

WORKLOAD_KEYS = ("id", "arrival_s", "max_tokens", "prompt")
SESSION_KEYS = ("session", "think_s")
DESCRIPTION = ("seed", "vocab", "mode", "rate", "n", "prompt_tokens", "output_tokens", "prompt_len", "output_len",
               "sampling", "source", "sessions", "requests")
TOKENS, LENGTHS = "input_ids", ("output_len", "output_tokens")


class WorkloadRecords:
    """Reads the requests of a file of `batch-manager workload`. Implements `RecordReader`.

    Requests with the same `session` are the turns of a session, in the order of the file. A later turn may have
    `think_s`, the seconds from the answer to the previous turn; its `arrival_s` is that of the first turn.

    vocab_size   token ids must be below this number; None: at most 2^31 - 1
    """

    is_whole = True

    def __init__(self, document: JsonDocument, vocab_size: int | None) -> None:
        self.members = document.members
        self.place = document.place
        self.unread: dict[str, int] = {}
        self._document = document
        self._vocab_size = vocab_size

    def __iter__(self) -> Iterator[Record]:
        ids: set[int] = set()
        arrivals: dict[int, float] = {}         # session -> arrival of its first turn
        for number, (position, request) in enumerate(self._document.items(["requests"])):
            place, name = self.place(position), f"requests[{number}]"
            _check_keys(request, place, name, WORKLOAD_KEYS)
            note_unread(self.unread, request, (*WORKLOAD_KEYS, *SESSION_KEYS))
            request_id = request["id"]
            is_id = type(request_id) is int and 0 <= request_id < 2**64
            if not is_id or request_id in ids:
                expected = "expected unique ids" if is_id else "expected an integer, 0 to 2^64-1"
                raise DatasetError(place, f"{name}.id is {quoted(request_id)}", expected)
            ids.add(request_id)
            prompt = tokens_of(request["prompt"], place, f"{name}.prompt", self._vocab_size)
            time_s = seconds(request["arrival_s"], place, f"{name}.arrival_s")
            output_tokens = whole_number(request["max_tokens"], place, f"{name}.max_tokens", 1)
            session, think_s = _turn(request, place, name, arrivals, time_s)
            yield Record(position, number, time_s, len(prompt), output_tokens, prompt=prompt, session=session,
                         think_s=think_s, own=request)
        note_unread(self.unread, self.members, DESCRIPTION)


def _turn(request: dict[str, Any], place: str, name: str, arrivals: dict[int, float],
          time_s: float) -> tuple[int | None, float]:
    """Return the session and the think time of a request, and add the session to `arrivals`.

    Raises DatasetError for a think time without an answer before it, and for a later turn with an own arrival.
    """
    session = request.get("session")
    if session is not None and (type(session) is not int or not 0 <= session < 2**63):
        raise DatasetError(place, f"{name}.session is {quoted(session)}", "expected an integer, 0 to 2^63-1",
                           "leave it out for a request that is no turn of a session")
    is_later = session in arrivals
    if "think_s" in request and not is_later:
        raise DatasetError(place, f"{name}.think_s is {quoted(request['think_s'])}",
                           "expected it only in a request with the session of an earlier request",
                           "leave it out; arrival_s is the time of a first turn")
    if session is None:
        return None, 0.0
    if arrivals.setdefault(session, time_s) != time_s:
        raise DatasetError(place, f"{name}.arrival_s is {time_s:g}, that of the first turn of session {session} is "
                                  f"{arrivals[session]:g}", "expected the same arrival in all turns",
                           "set think_s, the seconds from the answer to the next turn")
    return session, seconds(request.get("think_s", 0.0), place, f"{name}.think_s")


class SampleRecords:
    """Reads the samples of a dataset of gptManagerBenchmark. Implements `RecordReader`.

    The file is an array of samples, an object with `metadata` and `samples`, or JSON lines with one sample per line. A
    sample has `input_ids`, and `output_len` or `output_tokens`. Either all samples or none have `delay`, the seconds
    until the next sample. `task_id` is ignored.
    """

    def __init__(self, document: JsonDocument | JsonLines, vocab_size: int | None) -> None:
        self.members = document.members
        self.place = document.place
        self.is_whole = isinstance(document, JsonDocument)
        self.unread: dict[str, int] = {}
        self._document = document
        self._vocab_size = vocab_size

    def __iter__(self) -> Iterator[Record]:
        time_s, has_delays = 0.0, None
        for number, (position, sample) in enumerate(self._document.items(["samples"])):
            place, name = self.place(position), f"samples[{number}]"
            length = next((key for key in LENGTHS if type(sample) is dict and key in sample), LENGTHS[0])
            _check_keys(sample, place, name, (TOKENS, length))
            note_unread(self.unread, sample, (TOKENS, length, "delay", "task_id"))
            if has_delays is None:
                has_delays = "delay" in sample
            elif has_delays != ("delay" in sample):
                raise DatasetError(place, f"{name} has {'a' if 'delay' in sample else 'no'} delay",
                                   "expected a delay in all samples or in none")
            prompt = tokens_of(sample[TOKENS], place, f"{name}.{TOKENS}", self._vocab_size)
            yield Record(position, number, time_s if has_delays else None, len(prompt),
                         whole_number(sample[length], place, f"{name}.{length}", 1), prompt=prompt)
            time_s += seconds(sample["delay"], place, f"{name}.delay") if has_delays else 0.0


def _check_keys(item: Any, place: str, name: str, keys: tuple[str, ...]) -> None:
    missing = [key for key in keys if key not in item] if type(item) is dict else keys
    if missing:
        raise DatasetError(place, f"{name} has no {', '.join(missing)}" if type(item) is dict
                           else f"{name} is {quoted(item)}", f"expected an object with {', '.join(keys)}",
                           FIX_RECORD)
