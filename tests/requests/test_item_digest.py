"""The digest by which ranks find out whether they were handed the same requests."""

import numpy as np
import pytest

from batch_manager import InferenceRequest
from batch_manager.requests.item_digest import item_digest


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
