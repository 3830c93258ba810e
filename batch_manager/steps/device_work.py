"""What the device must do before its next step: block tables, copies, clears, adapter loads."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..errors import InternalError
from ..handover import NO_UPDATES, BlockTableUpdates, DeviceOperation, ScheduledBatch

MOST_PENDING_OPERATIONS = 1 << 20


class DeviceWork:
    """Collects what has to be done, and repeats it until it certainly was.

    A launch that raises may have done all of it, a part, or nothing. Block table updates may be applied twice; they are
    repeated until a launch has succeeded. An asynchronous device may fail in an operation after later steps were
    launched. So operations are repeated in every batch until a step that had them was read. They are numbered, and a
    device does each of them once (`ScheduledBatch.new_operations`).

    has_pending   there is something to repeat
    """

    def __init__(self) -> None:
        self.has_pending = False
        self._updates = NO_UPDATES
        self._operations: list[DeviceOperation] = []
        self._first_operation = 0

    def add(self, operations: Iterable[DeviceOperation]) -> None:
        """To be done in order, after what was added before.

        Raises InternalError when a device has not been launched for so long that the list has no bound.
        """
        self._operations += operations
        self.has_pending = self.has_pending or bool(self._operations)
        if len(self._operations) > MOST_PENDING_OPERATIONS:
            raise InternalError(f"{len(self._operations):,} operations on KV cache blocks wait for a step that can be "
                                "launched", "a launch now and then that does not raise",
                                "shut the manager down, make a new one, and report the log")

    def update_tables(self, updates: BlockTableUpdates, started_rows: Sequence[int]) -> None:
        """Entries that changed.

        started_rows   rows of the tables in which a sequence starts: what is still pending for them was of another one
        """
        pending = self._updates
        if len(pending.slots):
            if started_rows:
                pending = pending.where(~np.isin(pending.slots, started_rows))
            updates = pending.then(updates)
        self._updates = updates
        self.has_pending = True

    def attached_to(self, batch: ScheduledBatch) -> ScheduledBatch:
        """The batch as it is to be launched now: for the first time, or again, whole or in part.

        All that is pending is to be done before it. A device takes the first chunk of a sequence for that of a new one,
        of which it knows nothing, so the tables of these are in it each time.
        """
        if (batch.block_table_updates is self._updates and batch.first_operation == self._first_operation
                and len(batch.operations) == len(self._operations)):
            return batch
        updates, width = self._updates, batch.max_beam_width
        started_slots = [work.slot for work in batch.context if work.setup is not None]
        if started_slots:
            told = batch.block_table_updates
            updates = told.where(np.isin(told.slots // width, started_slots)).then(updates)
        return replace(batch, block_table_updates=updates, operations=tuple(self._operations),
                       first_operation=self._first_operation)

    def launched(self) -> None:
        """A batch with all that was pending was launched."""
        self._updates = NO_UPDATES
        self.has_pending = bool(self._operations)

    def done(self, batch: ScheduledBatch) -> None:
        """A step with this batch, which has operations, was read."""
        end = batch.first_operation + len(batch.operations)
        if end > self._first_operation:
            del self._operations[:end - self._first_operation]
            self._first_operation = end
            self.has_pending = bool(self._operations) or self._updates is not NO_UPDATES
