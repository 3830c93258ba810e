"""Accepted requests that wait for another thread before they can run: the check of an adapter that they bring along."""

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from queue import SimpleQueue

from ..adapter_values import AdapterContent
from ..contained_log import log
from ..errors import AdapterNotCachedError, InvalidRequestError, RequestError, type_name, where_raised
from ..requests.adapter_content import GivenAdapter
from ..requests.adapter_store import AdapterStore
from ..requests.admission import Admitted
from ..thread_stack import start_with_enough_stack

Check = Callable[[GivenAdapter], AdapterContent]


class _Job:
    """The check of one adapter. `error` or `content` is set before `is_done`."""

    def __init__(self, given: GivenAdapter) -> None:
        self.given: GivenAdapter | None = given
        self.content: AdapterContent | None = None
        self.error: RequestError | None = None
        self.is_done = False

    def run(self, check: Check) -> None:
        given, self.given = self.given, None
        try:
            if given is not None:
                self.content = check(given)
        except RequestError as error:
            self.error = error
        except Exception as error:
            log.error("the check of an adapter raised %s\n%s", type_name(error), where_raised(error))
            self.error = InvalidRequestError(f"the adapter could not be read ({type_name(error)})",
                                             "expected lora_weights and lora_config that fit into memory",
                                             "report this error with the log")
        finally:
            self.is_done = True


@dataclass(slots=True, eq=False)
class Waiting:
    admitted: Admitted
    job: _Job | None


class Preparing:
    """Finds the adapters of requests. A request with the tensors of an adapter waits here until they are checked.

    A request that only names an adapter waits here while an earlier request brings an adapter of the same id. One
    helper thread checks the adapters in order; the first such request starts it. All methods belong to the worker.

    check   makes the content of an adapter, or raises a RequestError. Runs on the helper thread; any thread may call it
    store   the adapters that the engine knows
    largest   most rows of an adapter, and most elements of a row; None: not known
    wake    called by the helper thread after each check
    waiting   the requests that wait here, in order of arrival
    """

    def __init__(self, check: Check, store: AdapterStore, largest: tuple[int, int] | None = None) -> None:
        self.check, self.store, self.largest = check, store, largest
        self.wake: Callable[[], None] = lambda: None
        self.waiting: list[Waiting] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._helper: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def request_ids(self) -> set[int]:
        """Ids of the requests that wait here."""
        return {waiting.admitted.request.request_id for waiting in self.waiting}

    def look_up(self, admitted: Admitted) -> None:
        """Find the adapter of a request that only names it. Other requests, and those that come after a request with an
        adapter of the same id, get their adapter later.

        Raises AdapterNotCachedError.
        """
        request = admitted.request
        assert request.lora_task_id is not None
        if admitted.adapter is None and all(waiting.admitted.request.lora_task_id != request.lora_task_id
                                            for waiting in self.waiting):
            try:
                request.adapter = self.store.find(request.lora_task_id)
            except AdapterNotCachedError as error:
                raise AdapterNotCachedError(f"request {request.request_id}: {error.fact}", error.expectation,
                                            error.fix) from None

    def add(self, admitted: Admitted) -> None:
        """Let a request wait."""
        job = None
        if admitted.adapter is not None:
            job = _Job(admitted.adapter)
            if self._helper is None:
                helper = threading.Thread(target=_serve, args=(self._jobs, self.check, self), daemon=True,
                                          name="batch_manager helper")
                start_with_enough_stack(helper)
                self._helper = helper
            self._jobs.put(job)
        self.waiting.append(Waiting(replace(admitted, adapter=None), job))

    def take_ready(self) -> tuple[list[Admitted], list[tuple[Admitted, RequestError]]]:
        """Return the requests that can run, and those whose adapter was refused with the error, in order of arrival."""
        ready, refused, left = [], [], []
        unready_ids = set()
        for waiting in self.waiting:
            request, job = waiting.admitted.request, waiting.job
            if request.lora_task_id in unready_ids or job is not None and not job.is_done:
                unready_ids.add(request.lora_task_id)
                left.append(waiting)
                continue
            try:
                self._find(waiting)
                ready.append(waiting.admitted)
            except RequestError as error:
                refused.append((waiting.admitted, error))
        self.waiting = left
        return ready, refused

    def _find(self, waiting: Waiting) -> None:
        request, job = waiting.admitted.request, waiting.job
        assert request.lora_task_id is not None
        if job is None:
            request.adapter = self.store.find(request.lora_task_id)
        elif job.content is None:
            assert job.error is not None
            raise job.error
        else:
            request.adapter = self.store.put(request.lora_task_id, job.content)
        self.store.use(request)

    def withdraw(self, request_ids: Set[int]) -> list[Admitted]:
        """Remove the requests with these ids and return them."""
        taken = [waiting for waiting in self.waiting if waiting.admitted.request.request_id in request_ids]
        for waiting in taken:
            self.waiting.remove(waiting)
            if waiting.job is not None:
                waiting.job.given = None    # not checked any more, unless the check runs
        return [waiting.admitted for waiting in taken]

    def clear(self) -> None:
        """Forget all requests, also as users of adapters."""
        self.withdraw(self.request_ids)
        self.store.leave_all()

    def close(self) -> None:
        """End the helper thread. Idempotent."""
        helper, self._helper = self._helper, None
        if helper is not None:
            self._jobs.put(None)
            helper.join()


def without_adapters() -> Preparing:
    """Return what takes the place of a Preparing in an engine without adapters: no request waits in it."""
    def refuse(given: GivenAdapter) -> AdapterContent:
        raise AssertionError("an engine without adapters accepted one")

    return Preparing(refuse, AdapterStore(0, 0))


def _serve(jobs: "SimpleQueue[_Job | None]", check: Check, owner: Preparing) -> None:
    """The helper thread: run jobs until None comes."""
    while (job := jobs.get()) is not None:
        job.run(check)
        del job    # its content may be large
        owner.wake()
