"""Plants past bugs in the files that move items between lists. An asynchronous exception at the right instruction
reveals each bug.

This module does not import torch, because the sweep forks the process at every instruction where it raises.
"""

import pytest

from batch_manager.loop.callbacks import GuardedCallbacks
from batch_manager.loop.fetched_items import FetchedItems
from tests.sweep.interrupted import WHERE_ITEMS_MOVE, sweep


def a_final_counts_as_answered_before_its_call_begins(patch) -> None:
    send_last = GuardedCallbacks.send_last

    def early(self, listed, key, *response):
        entry = listed[key]
        del listed[key]
        send_last(self, {key: entry}, key, *response)
    patch.setattr(GuardedCallbacks, "send_last", early)


def an_item_is_in_no_list_for_a_moment(patch) -> None:
    def read_next(self):
        if self._returned:
            self._read()
        if not self._unread:
            return False
        with self.in_get:
            item = self._unread.popleft()
        self._undecided.append(item)
        return True
    patch.setattr(FetchedItems, "read_next", read_next)


INTERRUPTION_BUGS = {
    "a final counts as answered before its call begins": a_final_counts_as_answered_before_its_call_begins,
    "an item is in no list for a moment": an_item_is_in_no_list_for_a_moment,
}


def sweep_with(name: str) -> list[str]:
    """Plant the bug `name`, and raise an exception at each instruction in the files that move items, in turn.

    Returns the violations at the first instruction that has any.
    """
    with pytest.MonkeyPatch.context() as patch:
        INTERRUPTION_BUGS[name](patch)
        _, _, wrong = sweep("mixed", files=WHERE_ITEMS_MOVE, stops_at_first=True)
    return wrong
