"""Builds items for the get callback: requests with random tensors and options, broken requests and other objects."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from batch_manager import InferenceRequest, InvalidRequestError

from .values import (
    ERRORS,
    FLOATS,
    HOSTILE,
    INTEGERS,
    LARGE,
    PYTHON,
    STRANGE,
    LyingClass,
    OfHostileType,
    Value,
    of_scalar,
    scribble,
    strange,
)

FIRST_ID, ANOTHER_ID = 1000, 2**50
REQUEST, BROKEN, STRANGER, NOBODY = "request", "broken", "stranger", "nobody"
ALIASES = {"request_output_len": "max_new_tokens", "len_penalty": "length_penalty"}
UNKNOWN_NAMES = ["temprature", "Temperature", "temperature ", "temperature\x00", "\x1b[2J", "\ud800", "tеmperature", "",
                 "x" * 100_000, None, 5, b"end_id", ("end_id",), "stop", "__class__", "max_new_token\n", "🙂"]
ATTRIBUTES = ["input_tensors", "is_streaming", "priority", "deadline_s", "cache_salt", "logits_post_processor"]
SALTS = [None, None, "tenant", b"tenant", "\x00\n\x1b", "\ud800", "ü" * 1024, b"x" * 1024, "", "x" * 1025, b"x" * 1025,
         5, ("a",), ["a"], True, bytearray(b"a"), HOSTILE[str][1]("a"), HOSTILE[bytes][0](b"a"), OfHostileType()]
GOOD_SALTS = 9


@dataclass(slots=True)
class Draw:
    """One item and its description.

    kind           REQUEST: a request with the fields below; BROKEN: a request with an attribute that raises or returns
                   a wrong value; STRANGER: an object that is not a request, but has an id; NOBODY: an object without a
                   usable id
    item           the object that is handed over; None if it could not be built
    tensors        wire name -> value
    options        name -> value; a Value for is_streaming, priority and deadline_s, and the object itself for
                   cache_salt and logits_post_processor
    build_error    the exception that the constructor of the request raised
    is_rewritten   whether another thread changes the item after the engine got it
    """

    number: int
    kind: str = REQUEST
    request_id: Any = 0
    item: Any = None
    tensors: dict[Any, Value] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    build_error: BaseException | None = None
    is_rewritten: bool = False
    changes_its_id: bool = False

    def rewrite(self) -> None:
        """Change the request as another thread may do after the engine got it."""
        for value in self.tensors.values():
            if value.kind is not STRANGE and not (value.kind is LARGE and isinstance(value.given, list)):
                scribble(value.given)
        if self.kind is REQUEST and type(self.item) is InferenceRequest:
            self.item.input_ids, self.item.priority, self.item.is_streaming = [0], "later", object()


def add_options(random: Random, drawn: Draw) -> None:
    options = drawn.options
    if random.random() < 0.25:
        options["is_streaming"] = of_scalar(random, random.choice((True, False, 1)))
    if random.random() < 0.1:
        options["priority"] = of_scalar(random, random.choice((0, 0.25, 1, 1.0)))
    if random.random() < 0.1:
        options["deadline_s"] = of_scalar(random, random.choice((5, 0.5, 1e6)))
    if random.random() < 0.15:
        options["cache_salt"] = SALTS[random.randrange(GOOD_SALTS)]
    chance = random.random()
    if chance < 0.04:
        options["cache_salt"] = random.choice(SALTS)
    elif chance < 0.12:
        name = random.choice(("is_streaming", "priority", "deadline_s"))
        number = random.choice((*FLOATS, *INTEGERS, True, False))
        options[name] = strange(random) if random.random() < 0.4 else of_scalar(random, number)
        if options[name].given is None:
            del options[name]
    elif chance < 0.14 and not {"beam_width"} & drawn.tensors.keys():
        options["logits_post_processor"] = random.choice(
            [leave_alone, leave_alone, fail_later, "batched", "Batched\x00\n", 5, lambda: None, HOSTILE[object][2](),
             HOSTILE[str][1]("batched"), OfHostileType(), LyingClass(str)])


def leave_alone(request_id: int, logits: Any, token_ids: Any) -> Any:
    return logits


def fail_later(request_id: int, logits: Any, token_ids: Any) -> Any:
    raise SystemExit("hostile")


def build(random: Random, drawn: Draw) -> None:
    chance = random.random()
    if chance < 0.04:
        drawn.request_id = random.choice([0, 2**64 - 1 - drawn.number, 2**63, np.uint64(2**64 - 1), np.int8(7), -1,
                                          2**64, True, 1.0, "1", None, np.float64(1), [1], 10**400,
                                          HOSTILE[int][1](77)])
    elif chance < 0.09:
        drawn.request_id = FIRST_ID + drawn.number - random.randrange(1, 20)
    given = {name: value.given for name, value in drawn.tensors.items()}
    chance = random.random()
    if chance < 0.03:
        name = random.choice(UNKNOWN_NAMES)
        given[name], drawn.tensors[name] = 1, Value(1, PYTHON, 1)
    elif chance < 0.1:
        for name in ALIASES.keys() & given.keys():
            given[ALIASES[name]] = given.pop(name)
    elif chance < 0.11 and "request_output_len" in given:
        given["max_new_tokens"], drawn.tensors["max_new_tokens"] = 2, Value(2, PYTHON, 2)
    options = {name: value.given if isinstance(value, Value) else value for name, value in drawn.options.items()}
    try:
        drawn.item = InferenceRequest(drawn.request_id, given, **options)
    except InvalidRequestError as error:
        drawn.build_error = error


def _raising(error: type[BaseException]) -> property:
    def get(self: Any) -> Any:
        raise error("hostile")
    return property(get)


def break_item(random: Random, drawn: Draw) -> None:
    """Replace the item by a request of a subclass with one attribute that raises or returns a wrong value."""
    drawn.kind = BROKEN
    way = random.randrange(4)
    if way == 0:
        drawn.changes_its_id = True
        ids = iter([drawn.item.request_id])
        members = {"request_id": property(lambda self: next(ids, ANOTHER_ID))}
    elif way == 1:
        lie = random.choice([None, 5, [("a", 1)], {"temprature": 1}, {None: 1}, HOSTILE[dict][1]()])
        members = {"input_tensors": property(lambda self: lie)}
    else:
        members = {random.choice(ATTRIBUTES): _raising(random.choice(ERRORS))}
    built = object.__new__(type("Broken", (InferenceRequest,), members))
    for name in InferenceRequest.__slots__:
        if name not in members and not name.startswith("__"):
            object.__setattr__(built, name, getattr(drawn.item, name))
    drawn.item = built


class Stranger:
    """An object that is not an InferenceRequest, but has a request id."""

    def __init__(self, request_id: Any) -> None:
        self.request_id = request_id


def be_someone_else(random: Random, drawn: Draw) -> None:
    if random.random() < 0.5:
        drawn.kind, drawn.item = STRANGER, Stranger(drawn.request_id)
        return
    drawn.kind = NOBODY
    drawn.item = random.choice([
        lambda: None, lambda: 5, lambda: "request", dict, object, lambda: InferenceRequest, OfHostileType,
        lambda: Stranger(-1), lambda: Stranger(2**64), lambda: Stranger(True), lambda: Stranger("1"),
        lambda: type("Raises", (), {"request_id": _raising(random.choice(ERRORS))})(),
        lambda: type("Raises", (InferenceRequest,), {"request_id": _raising(random.choice(ERRORS))})(1),
        lambda: InferenceRequest.__new__(InferenceRequest), lambda: LyingClass(InferenceRequest),
        lambda: LyingClass(None), lambda: HOSTILE[object][1](), lambda: HOSTILE[int][1](5)])()
