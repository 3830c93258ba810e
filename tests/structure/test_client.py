"""The client of the tests loses no response when two threads ask for the list of an id that has none yet."""

import gc

from tests.harness.client import ListsById


def test_a_list_that_is_made_inside_the_first_access_of_another_thread_keeps_its_values():
    lists, threshold, request_id, told = ListsById(), gc.get_threshold(), 0, set()

    def other_thread(phase: str, _info: dict) -> None:
        if phase == "start":
            lists[request_id].append("a response")
            told.add(request_id)

    gc.callbacks.append(other_thread)
    gc.set_threshold(1)
    try:
        for request_id in range(1000):
            lists[request_id].append("another")
    finally:
        gc.callbacks.remove(other_thread)
        gc.set_threshold(*threshold)
    assert len(told) > 10 and all("a response" in lists[request_id] for request_id in told)
