"""A scheduler made of a capacity scheduler and a micro-batch scheduler."""

from collections.abc import Collection, Sequence
from typing import Any

from ..errors import SchedulerContractError, counted, type_name
from .contract import as_list
from .interfaces import CapacityScheduler, MicroBatchScheduler, RequestList, RequestScheduler, SchedulerOutput


class SimpleScheduler(RequestScheduler):
    """Runs a capacity scheduler, then a micro-batch scheduler on its fitting requests."""

    def __init__(self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler) -> None:
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler

    @property
    def part_names(self) -> tuple[str, ...]:
        return type_name(self.capacity_scheduler), type_name(self.micro_batch_scheduler)

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Collection[int]) -> SchedulerOutput:
        elsewhere: list[RequestList]
        fitting, *elsewhere, paused = _returned_by(
            self.capacity_scheduler, "schedule_request", self.capacity_scheduler.schedule_request(active_requests),
            (2, 3), "(fitting requests, paused requests)")
        if any(elsewhere):
            raise SchedulerContractError(self.capacity_scheduler, "schedule_request returned three lists, and the "
                                                                  "second has requests; expected it to be empty")
        fitting = as_list(fitting, len(active_requests))
        context, generation, *sizes = _returned_by(
            self.micro_batch_scheduler, "schedule", self.micro_batch_scheduler.schedule(fitting, inflight_request_ids),
            (2, 3, 4), "(context requests, generation requests[, chunk sizes[, draft lengths]])")
        return SchedulerOutput(context, generation, paused, *sizes)


def _returned_by(scheduler: object, method: str, values: Any, counts: Sequence[int], expected: str) -> Any:
    """Return `values`, the result of a scheduler's method.

    counts     permitted numbers of values
    expected   the values in words

    Raises SchedulerContractError for another number of values, and for a result that is no tuple or list.
    """
    if not isinstance(values, tuple | list):
        raise SchedulerContractError(scheduler,
                                     f"{method} returned a value of type {type_name(values)}, not {expected}")
    if len(values) not in counts:
        raise SchedulerContractError(scheduler, f"{method} returned {counted(len(values), 'value')}, not {expected}")
    return values
