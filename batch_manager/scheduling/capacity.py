"""Who gets blocks: the four policies of TensorRT-LLM.

Each looks at the active requests in the order they are to be served and answers (fitting, paused). What a policy may
spend is a ledger; requests and blocks stay as they are.
"""

from ..kv.kv_cache_manager import KvCacheManager
from ..kv.ledger import KvLedger
from .interfaces import GENERATING, CapacityScheduler, RequestList, schedulable


class MaxRequestsScheduler(CapacityScheduler):
    """The first requests up to a number. For models without a KV cache. Never pauses."""

    def __init__(self, max_num_requests: int) -> None:
        self.max_num_requests = max_num_requests

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        return schedulable(active_requests)[:self.max_num_requests], []


class GuaranteedNoEvictScheduler(CapacityScheduler):
    """Start a request only when it can run to its last token without evicting anybody.

    Generating requests keep their promise first: what they may still need is set aside before a context is looked at.
    Contexts then enter in order, and the first new one that does not fit closes the door to others, so that a large
    request is not overtaken for ever by small ones behind it. Contexts between chunks already hold blocks and still
    pass the closed door when they fit: what they hold would come free in no other way.

    Never pauses.
    """

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager) -> None:
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        fitting, contexts = _generating_first(active_requests, self.max_num_requests)
        if contexts and len(fitting) < self.max_num_requests:
            ledger = self.kv_cache_manager.start_scheduling()
            ledger.spend(ledger.blocks_to_completion_of_owners(fitting))
            fitting += _contexts_that_fit(contexts, self.max_num_requests - len(fitting), ledger)
        return fitting, []


class StaticBatchScheduler(CapacityScheduler):
    """A batch starts together and nobody joins it until its last member is done.

    Once one request generates, only generating requests run: a context between chunks waits for the next batch.

    Never pauses. Source: TensorRT-LLM's STATIC_BATCH, which serves the V1 batching scheme.
    """

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager) -> None:
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        fitting, contexts = _generating_first(active_requests, self.max_num_requests)
        if not fitting:
            fitting = _contexts_that_fit(contexts, self.max_num_requests, self.kv_cache_manager.start_scheduling())
        return fitting, []


class MaxUtilizationScheduler(CapacityScheduler):
    """Run whoever has room for one more step; when room runs out, pause from the back of the line.

    A request that does not fit looks for a victim: the last one in the line, itself included, that has computed
    something. The victim's blocks count as free, the line now ends before it, and the request tries again. Requests
    ahead of it are never touched, so the first in line always advances; a request that has not started makes nobody
    pause who stands ahead of it.

    two_step_lookahead   plan for two steps of each generating request, as two micro-batches in flight need
    """

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager,
                 two_step_lookahead: bool = False) -> None:
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager
        self.two_step_lookahead = two_step_lookahead

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        ledger = self.kv_cache_manager.start_scheduling()
        line = schedulable(active_requests)
        taken = self._front_that_fits_at_once(line, ledger)
        paused: RequestList = []
        while taken < len(line):
            if taken < self.max_num_requests:
                need = ledger.blocks_for_next_step(line[taken], self.two_step_lookahead)
                if ledger.fits(need):
                    ledger.spend(need)
                    taken += 1
                    continue

            victim = next((place for place in reversed(range(taken, len(line)))
                           if line[place].is_started and ledger.is_refundable(line[place])), None)
            if victim is None:
                break
            ledger.refund(line[victim])
            paused.append(line[victim])
            del line[victim:]
        return line[:taken], paused

    def _front_that_fits_at_once(self, line: RequestList, ledger: KvLedger) -> int:
        """How many generating requests at the front of the line fit together; 0 when somebody will have to give way.

        It is what the walk would find, in one sum: most of the time everybody who generates goes on.
        """
        length = next((place for place, request in enumerate(line) if request.state not in GENERATING), len(line))
        front = line[:min(length, self.max_num_requests)]
        need = ledger.blocks_for_next_step_of_generating(front, self.two_step_lookahead)
        if not ledger.fits(need):
            return 0
        ledger.spend(need)
        return len(front)


def _generating_first(active_requests: RequestList, max_num_requests: int) -> tuple[RequestList, RequestList]:
    """The generating requests up to a number, and the contexts met on the way."""
    generating: RequestList = []
    contexts: RequestList = []
    for request in active_requests:
        if len(generating) == max_num_requests:
            break
        if request.state in GENERATING:
            generating.append(request)
        elif request.is_context:
            contexts.append(request)
    return generating, contexts


def _contexts_that_fit(contexts: RequestList, max_num_requests: int, ledger: KvLedger) -> RequestList:
    """The contexts, in order, that can run to their last token within the ledger."""
    fitting: RequestList = []
    door_is_open = True
    for request in contexts:
        if len(fitting) == max_num_requests:
            break
        if door_is_open or request.is_started:
            need = ledger.blocks_to_completion(request)
            if ledger.fits(need):
                ledger.spend(need)
                fitting.append(request)
            else:
                door_is_open = False
    return fitting
