"""Plants past bugs in the files that move items between lists. An asynchronous exception at the right instruction
reveals each bug.

This module does not import torch, because the sweep forks the process at every instruction where it raises.
"""

from itertools import islice

import pytest

from batch_manager.loop.callbacks import GuardedCallbacks
from batch_manager.loop.fetched_items import FetchedItems
from tests.sweep.interrupted import WHERE_ITEMS_MOVE, sweep


def a_final_counts_as_answered_before_its_call_begins(patch) -> None:
    send_last = GuardedCallbacks._send_last

    def early(self, listed, key, *response):
        entry = listed[key]
        del listed[key]
        send_last(self, {key: entry}, key, *response)
    patch.setattr(GuardedCallbacks, "_send_last", early)


def an_item_is_read_outside_the_list_of_undecided_items(patch) -> None:
    def read_next(self):
        while self._returned:
            oldest, items = self._returned[0], []
            if self._begin(oldest):
                with self.in_get:
                    items = list(islice(oldest.iterator[0], 1))
                self._undecided += items
                if items:
                    return True
            del self._returned[0]
        return False
    patch.setattr(FetchedItems, "read_next", read_next)


INTERRUPTION_BUGS = {
    "a final counts as answered before its call begins": a_final_counts_as_answered_before_its_call_begins,
    "an item is read outside the list of undecided items": an_item_is_read_outside_the_list_of_undecided_items,
}


def sweep_with(name: str) -> list[str]:
    """Plant the bug `name`, and raise an exception at each instruction in the files that move items, in turn.

    Returns the violations at the first instruction that has any.
    """
    with pytest.MonkeyPatch.context() as patch:
        INTERRUPTION_BUGS[name](patch)
        _, _, wrong = sweep("mixed", files=WHERE_ITEMS_MOVE, stops_at_first=True)
    return wrong
