"""Bugs in the code that reads new requests, reintroduced as in bugs.py. Fuzzed requests must find them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from batch_manager.loop import intake
from batch_manager.loop.intake import Intake
from batch_manager.requests import admission, tensor_values
from batch_manager.requests.admission import usable_id
from batch_manager.requests.inference_request import Content
from batch_manager.sampling_config import Range

from .bugs import ids_are_those_of_a_tokenizer, values_are_checked_and_read_again_later

WITH_LARGE_TENSORS = (52, 105)


@dataclass(frozen=True, slots=True)
class RequestBug:
    """A bug and the blocks of fuzzed requests that find it.

    failure   the number of a known failure, or how the bug was found
    blocks    numbers of the fuzzer's blocks with requests that trigger the bug
    """

    name: str
    failure: str
    plant: Callable[[Any], None]
    blocks: Iterable[int] = range(12)


def an_id_is_read_twice(patch) -> None:
    decide = Intake._decide

    def trusting(self, item, request_id, is_alive, *, has_room):
        return decide(self, item, usable_id(item) or request_id, lambda _: is_alive(request_id), has_room=has_room)
    patch.setattr(Intake, "_decide", trusting)


def a_type_is_named_without_a_guard(patch) -> None:
    patch.setattr(intake, "type_name", lambda item: type(item).__name__)


def integers_are_read_one_by_one(patch) -> None:
    def integers(given, allowed):
        rows = np.array(given.source).tolist() if isinstance(given.source, np.ndarray) else given.source
        for row in rows:
            for value in row:
                allowed.check(given.spec.name, value)
        return [list(row) for row in rows]
    patch.setattr(admission, "integers", integers)


def bytes_are_counted_as_given(patch) -> None:
    patch.setattr(tensor_values, "_BYTES_KEPT", {Content.INTEGER: 0, Content.NUMBER: 0})


def a_range_lets_pass_what_is_no_number(patch) -> None:
    patch.setattr(Range, "__contains__", lambda self, value: type(value) in (int, float) and not (
        value < self.low or value > self.high or (self.whole and type(value) is float)))


def a_bool_is_a_number(patch) -> None:
    scalar = admission.scalar

    def generous(spec, value):
        return scalar(spec, int(value) if type(value) is bool else value)
    patch.setattr(admission, "scalar", generous)


def a_table_without_rows_is_reshaped(patch) -> None:
    patch.setattr(tensor_values, "_int64", lambda spec, rows: np.array(rows, np.int64).reshape(len(rows), -1))


REQUEST_BUGS = [
    RequestBug("an id is read twice, and need not be the same", "found here", an_id_is_read_twice),
    RequestBug("a type is named without a guard", "found here", a_type_is_named_without_a_guard),
    RequestBug("integers of a table are read one by one", "found here", integers_are_read_one_by_one,
               WITH_LARGE_TENSORS),
    RequestBug("bytes are counted as given, not as copied", "found here", bytes_are_counted_as_given,
               WITH_LARGE_TENSORS),
    RequestBug("a table without rows is reshaped", "found by hypothesis", a_table_without_rows_is_reshaped, range(40)),
    RequestBug("a range lets pass what is no number", "one of its kind", a_range_lets_pass_what_is_no_number),
    RequestBug("a bool is a number", "one of its kind", a_bool_is_a_number),
    RequestBug("ids are those of a tokenizer", "F48", ids_are_those_of_a_tokenizer),
    RequestBug("values are checked, and read again later", "F49", values_are_checked_and_read_again_later),
]
