"""Carries out the device operations of batches: once each, in order, before a form of the step is chosen."""

from collections.abc import Callable, Mapping

from ..handover import DeviceOperation, ScheduledBatch

Handler = Callable[[DeviceOperation], None]


class Operations:
    """Carries out device operations.

    handlers   type of an operation -> what carries it out, on the stream of the steps

    num_done   number of operations carried out so far
    """

    def __init__(self, handlers: Mapping[type, Handler]) -> None:
        self._handlers = dict(handlers)
        self.num_done = 0

    def carry_out(self, batch: ScheduledBatch) -> None:
        """Carry out the operations of the batch that were not carried out for an earlier one.

        Raises   NotImplementedError for an operation without a handler
        """
        for operation in batch.new_operations(self.num_done):
            handler = self._handlers.get(type(operation))
            if handler is None:
                raise NotImplementedError(f"this version does not carry out {type(operation).__name__}")
            handler(operation)
            self.num_done += 1
