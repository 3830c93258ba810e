"""A scheduler made of a capacity scheduler and a micro-batch scheduler."""

from collections.abc import Collection

from ..errors import SchedulerContractError, type_name
from .contract import plain_list
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
        fitting, *elsewhere, paused = self.capacity_scheduler.schedule_request(active_requests)
        if any(elsewhere):
            raise SchedulerContractError(self.capacity_scheduler, "schedule_request returned three lists, of which "
                                                                  "the second is not empty")
        fitting = plain_list(fitting, len(active_requests))
        context, generation, *sizes = self.micro_batch_scheduler.schedule(fitting, inflight_request_ids)
        return SchedulerOutput(context, generation, paused, *sizes)
