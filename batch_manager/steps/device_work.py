"""Device work before the next step: block table updates, copies, clears, adapter loads."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import InternalError
from ..handover import NO_UPDATES, BlockTableUpdates, DeviceOperation, ScheduledBatch

MOST_PENDING_OPERATIONS = 1 << 20


class DeviceWork:
    """Collects device work and attaches it to every batch until the work is certain to have run.

    Device work consists of block table updates and operations (`DeviceOperation`). A launch that raises may have
    done all of its device work, a part of it, or none. Block table updates can be applied twice. Every batch
    therefore carries them until a launch succeeds. An asynchronous device may fail in an operation after later
    steps are launched. Every batch therefore carries an operation until a step with this operation is read.
    Operations are numbered, so that the device runs each of them only once (`ScheduledBatch.new_operations`).

    has_pending   whether there is work to repeat
    """

    def __init__(self) -> None:
        self.has_pending = False
        self._updates = NO_UPDATES
        self._operations: list[DeviceOperation] = []
        self._first_operation = 0

    @property
    def num_done(self) -> int:
        """Number of operations that the device has certainly carried out, in its life."""
        return self._first_operation

    @property
    def num_added(self) -> int:
        """Number of operations that the device was asked to carry out, in its life."""
        return self._first_operation + len(self._operations)

    def add(self, operations: Iterable[DeviceOperation]) -> None:
        """Append operations, which the device runs before the next step.

        Raises InternalError if too many operations are pending, which means that no launch succeeds.
        """
        self._operations += operations
        self.has_pending = self.has_pending or bool(self._operations)
        if len(self._operations) > MOST_PENDING_OPERATIONS:
            raise InternalError(f"{len(self._operations):,} operations on KV cache blocks are pending",
                                f"expected the launch of a step after at most {MOST_PENDING_OPERATIONS:,} operations",
                                "shut the manager down, make a new one, and report the log")

    def update_tables(self, updates: BlockTableUpdates, started_rows: Sequence[int]) -> None:
        """Add changed block table entries, which the device applies before the next step.

        started_rows   table rows in which a sequence starts: pending entries of these rows belong to earlier sequences
                       and are dropped
        """
        pending = self._updates
        if len(pending.slots):
            if started_rows:
                pending = pending.where(~np.isin(pending.slots, started_rows))
            updates = pending.then(updates)
        self._updates = updates
        self.has_pending = True

    def attached_to(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return the batch with all pending work attached, for its first or a repeated launch.

        The batch may be a part of a batch that failed. A first chunk resets its sequence on the device, so each launch
        of the chunk repeats the sequence's block table.
        """
        if (batch.block_table_updates is self._updates and batch.first_operation == self._first_operation
                and len(batch.operations) == len(self._operations)):
            return batch
        updates, width = self._updates, batch.max_beam_width
        started_slots = [work.slot for work in batch.context if work.setup is not None]
        if started_slots:
            attached = batch.block_table_updates
            updates = attached.where(np.isin(attached.slots // width, started_slots)).then(updates)
        return ScheduledBatch(    # `replace` takes seven times as long
            batch.iteration, batch.micro_batch_id, batch.context, batch.generation, updates, batch.num_padded_rows,
            batch.max_beam_width, tuple(self._operations), self._first_operation)

    def launched(self) -> None:
        """Stop repeating the table updates, because a batch with all pending work was launched."""
        self._updates = NO_UPDATES
        self.has_pending = bool(self._operations)

    def done(self, batch: ScheduledBatch) -> None:
        """Stop repeating the operations of this batch, whose step was read. The batch must have operations."""
        end = batch.first_operation + len(batch.operations)
        if end > self._first_operation:
            del self._operations[:end - self._first_operation]
            self._first_operation = end
            self.has_pending = bool(self._operations) or self._updates is not NO_UPDATES
