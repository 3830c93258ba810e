"""The digest by which ranks find out whether they were handed the same requests."""

import numpy as np
import pytest

from batch_manager import InferenceRequest
from batch_manager.parallel.same_inputs import difference
from batch_manager.parallel.wire import pack, unpack
from batch_manager.requests.item_digest import item_digest, item_fields


def digest(number=1, *, priority=0.5, **tensors):
    return item_digest(InferenceRequest(number, {"input_ids": [1, 2], "request_output_len": 3, **tensors},
                                        priority=priority))


@pytest.mark.parametrize("tensors", [
    {"input_ids": (1, 2)}, {"input_ids": np.array([1, 2])}, {"input_ids": np.array([1, 2], np.int32)},
    {"input_ids": np.array([1, 2], np.uint64)}, {"request_output_len": np.int16(3)}], ids=str)
def test_the_same_numbers_are_the_same_request_in_whatever_they_are(tensors):
    assert digest(**tensors) == digest()


@pytest.mark.parametrize("tensors", [
    {"input_ids": [1, 3]}, {"input_ids": [[1, 2]]}, {"input_ids": [1.0, 2.0]}, {"request_output_len": 4},
    {"runtime_top_k": 1}, {"number": 2}, {"priority": 0.6}, {"input_ids": [1, [2]]}, {"input_ids": "12"},
    {"random_seed": 2**63}, {"random_seed": np.uint64(2**64 - 1)}], ids=str)
def test_other_contents_are_other_requests(tensors):
    number, found = digest(**tensors)
    assert found != digest()[1] and number == tensors.get("number", 1)


@pytest.mark.parametrize("changed, says", [
    ({"input_ids": [1, 3]}, "input_ids[1] is 2 on ranks 0, 2 and 3 on rank 1"),
    ({"input_ids": np.array([1, 2], np.float32)}, "input_ids is int64 of shape [2] on ranks 0, 2 and float64"),
    ({"input_ids": [1, 2, 3]}, "input_ids is int64 of shape [2] on ranks 0, 2 and int64 of shape [3] on rank 1"),
    ({"temperature": 0.5}, "temperature is left out on ranks 0, 2 and 0.5 on rank 1"),
    ({"request_output_len": 4}, "request_output_len is 3 on ranks 0, 2 and 4 on rank 1"),
    ({"priority": 0.75}, "priority is 0.5 on ranks 0, 2 and 0.75 on rank 1"),
    ({"prompt_embedding_table": np.array([[0, np.nan], [1, 2]])}, "prompt_embedding_table[1, 0] is 0.0 on"),
    ({"input_ids": range(10**6)}, "input_ids is int64 of shape [2]"), ({"input_ids": "x" * 10**6}, "input_ids is "),
], ids=str)
def test_the_first_difference_is_named_with_its_values(changed, says):
    table = {"prompt_embedding_table": np.array([[0, np.nan], [0, 2]])} if "prompt_embedding_table" in changed else {}

    def fields(*, priority=0.5, **tensors):
        all_tensors = {"input_ids": [1, 2], "request_output_len": 3, **table, **tensors}
        return unpack(pack(item_fields(InferenceRequest(1, all_tensors, priority=priority))))
    found = difference({0: fields(), 1: fields(**changed), 2: fields()})
    assert found.startswith(f": {says}") and len(found) < 200
    assert difference({0: fields(**changed), 1: fields(**changed)}) == ""


def test_an_item_whose_code_raises_has_a_digest_all_the_same():
    class Hostile:
        def __array__(self, *given, **more):
            raise SystemExit

    item = InferenceRequest(1, {"input_ids": Hostile(), "request_output_len": 3})
    assert item_digest(item) == (1, b"unreadable")
    assert item_fields(item)[-1] == ("its content", (), "unreadable")
