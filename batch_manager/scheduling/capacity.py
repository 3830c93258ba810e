"""Capacity schedulers, which decide which requests get blocks: policies of TensorRT-LLM.

Each scheduler takes the active requests in service order and returns (fitting, paused). It spends from a ledger and
changes neither requests nor blocks.
"""

from collections.abc import Iterable

from ..kv.kv_cache_manager import KvCacheManager
from ..kv.ledger import KvLedger
from ..kv.peft_cache_manager import PageLedger, PeftCacheManager
from ..requests.llm_request import GENERATING, LlmRequest
from .duplicates import DuplicateDelay
from .interfaces import CapacityScheduler, RequestList, schedulable

STARVED_PLANS = 64    # plans that may skip a context for its adapter before others have to wait for it


class GuaranteedNoEvictScheduler(CapacityScheduler):
    """Starts a request only when it can run to its last token without pausing another request.

    The scheduler first reserves the blocks that started requests may still need, whatever their order. Then it admits
    contexts in order. A context between two chunks holds blocks and is always admitted. The first new context that does
    not fit closes the admission gate, so that later, smaller requests cannot overtake it for ever. A context is skipped
    if its adapter does not fit, or if another request is computing the context's next block. After STARVED_PLANS plans
    that skipped a context for its adapter, no other adapter is admitted before it.

    Never pauses.

    in_line   False: the order above. True: TensorRT-LLM's order. Only generating requests then go first, and
              contexts between chunks take their turn among the other contexts. A new context that is earlier in
              this order may take the blocks that a context between chunks needs, or may close the gate for it. With
              priorities, requests may then deadlock
    """

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager,
                 peft_cache_manager: PeftCacheManager | None = None, in_line: bool = False) -> None:
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager
        self.peft_cache_manager = peft_cache_manager
        self.in_line = in_line
        self._plans_skipped: dict[LlmRequest, int] = {}    # for want of adapter pages, while it waits

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        fitting, contexts = _generating_first(active_requests, self.max_num_requests)
        if contexts and len(fitting) < self.max_num_requests:
            gate = _AdmissionGate(self.kv_cache_manager, self.peft_cache_manager,
                                  fitting if self.in_line else active_requests, self.in_line)
            gate.starved = next((request for request in contexts
                                 if self._plans_skipped.get(request, 0) >= STARVED_PLANS), None)
            delay = DuplicateDelay(self.kv_cache_manager, active_requests)
            undelayed = (request for request in contexts if not delay.holds_back(request))
            fitting += gate.admitted(undelayed, self.max_num_requests - len(fitting))
            if gate.skipped or self._plans_skipped:
                self._note_skipped(gate.skipped, contexts, fitting)
        return fitting, []

    def _note_skipped(self, skipped: RequestList, contexts: RequestList, fitting: RequestList) -> None:
        before, started = self._plans_skipped, set(fitting)
        self._plans_skipped = {request: before[request] for request in contexts
                               if request in before and request not in started}
        for request in skipped:
            self._plans_skipped[request] = before.get(request, 0) + 1


class StaticBatchScheduler(CapacityScheduler):
    """Starts the requests of a batch together. The next batch starts once no request is generating any more.

    Once a request generates, only generating requests run. Requests between two chunks of their prompts wait for the
    next batch.

    Never pauses. Source: TensorRT-LLM's STATIC_BATCH, which serves the V1 batching scheme.

    in_line   True: start a batch in TensorRT-LLM's order of requests. A request between two chunks may then have to
              wait again; see GuaranteedNoEvictScheduler. False: blocks are reserved for such requests before new
              requests get any
    """

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager,
                 peft_cache_manager: PeftCacheManager | None = None, in_line: bool = False) -> None:
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager
        self.peft_cache_manager = peft_cache_manager
        self.in_line = in_line

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        fitting, contexts = _generating_first(active_requests, self.max_num_requests)
        if not fitting:
            gate = _AdmissionGate(self.kv_cache_manager, self.peft_cache_manager,
                                  [] if self.in_line else active_requests, self.in_line)
            fitting = gate.admitted(contexts, self.max_num_requests)
        return fitting, []


class MaxUtilizationScheduler(CapacityScheduler):
    """Runs each request whose next step fits. When blocks run out, pauses the requests that are last in line.

    The line is the list of requests in service order. If a request does not fit, the scheduler pauses a victim. The
    victim is the last started request in the line that is in no step in flight. It may be the request that does not
    fit, unless this request is the first in line and a step is in flight. The scheduler counts the victim's blocks
    as free. The victim and all requests after it do not run in this iteration. If the request that does not fit
    comes before the victim, the scheduler tries it again. Requests before it are never paused, so the first in line
    always advances. A context is skipped if another request is computing the context's next block, unless the
    context is the first in line, and if the plan loads so many adapters already that it may not load the context's.

    two_step_lookahead   run a generating request only if the blocks of its next two steps fit, as two micro-batches in
                         flight need; otherwise, only those of its next step must fit
    """

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager,
                 two_step_lookahead: bool = False, peft_cache_manager: PeftCacheManager | None = None) -> None:
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager
        self.two_step_lookahead = two_step_lookahead
        self.peft_cache_manager = peft_cache_manager

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        ledger = self.kv_cache_manager.start_scheduling()
        pages = None if self.peft_cache_manager is None else self.peft_cache_manager.start_scheduling()
        line = schedulable(active_requests)
        if pages is not None:
            pages.spend(*(request for request in line if not ledger.is_refundable(request)))
        taken = self._front_that_fits_at_once(line, ledger, pages)
        delay = DuplicateDelay(self.kv_cache_manager, line) if taken < len(line) else None
        paused: RequestList = []
        while taken < len(line):
            request = line[taken]
            if delay is not None and delay.holds_back(request) and taken:
                del line[taken]
                continue
            if taken < self.max_num_requests:
                if pages is not None and not pages.may_load(request):
                    del line[taken]
                    continue
                need = ledger.blocks_for_next_step(request, self.two_step_lookahead)
                if ledger.fits(need) and (pages is None or pages.fits(request)):
                    ledger.spend(need, request)
                    if pages is not None:
                        pages.spend(request)
                    taken += 1
                    continue

            # While a step is in flight, the first in line waits for the blocks of that step's requests.
            first = max(taken, 1) if self.kv_cache_manager.inflight_request_ids else taken
            victim = next((index for index in reversed(range(first, len(line)))
                           if line[index].is_started and ledger.is_refundable(line[index])), None)
            if victim is None:
                break
            ledger.refund(line[victim])
            paused.append(line[victim])
            del line[victim:]
        return line[:taken], paused

    def _front_that_fits_at_once(self, line: RequestList, ledger: KvLedger, pages: PageLedger | None) -> int:
        """Spend blocks and pages for the generating requests at the front of the line.

        Only the first `max_num_requests` of them count. Returns their number. If they do not all fit, spends nothing
        and returns 0.

        This is a shortcut with the same result as the loop in `schedule_request`, for the common case that all
        generating requests fit.
        """
        generating = len([request for request in line if request.state in GENERATING])
        if generating < len(line):
            generating = next(index for index, request in enumerate(line) if request.state not in GENERATING)
        front = line[:min(generating, self.max_num_requests)]
        need = ledger.blocks_for_next_step_of_generating(front, self.two_step_lookahead)
        if not ledger.fits(need) or (pages is not None and not pages.fits(*front)):
            return 0
        ledger.spend(need)
        if pages is not None:
            pages.spend(*front)
        return len(front)


class _AdmissionGate:
    """Admits contexts that can run to their last token within the budgets of blocks and adapter pages.

    starved   a context without which no other adapter is admitted; None: there is none
    skipped   contexts that were passed over because their adapter did not fit

    promised   requests that go before all contexts. For those that hold blocks, the gate first sets aside the blocks
               that they still need and the pages of their adapters
    in_line    True: started contexts, of which some but not all chunks were computed, must fit like new contexts,
               as in TensorRT-LLM; see GuaranteedNoEvictScheduler. All of `promised` must then hold blocks. False:
               started contexts are always admitted
    """

    def __init__(self, kv_cache_manager: KvCacheManager, peft_cache_manager: PeftCacheManager | None,
                 promised: RequestList, in_line: bool) -> None:
        self.starved: LlmRequest | None = None
        self.skipped: RequestList = []
        self._owns = kv_cache_manager.owns
        self._in_line = in_line
        self._ledger = kv_cache_manager.start_scheduling()
        self._ledger.spend(sum(map(self._ledger.blocks_to_completion, promised)) if in_line
                           else self._ledger.blocks_to_completion_of_started())
        self._pages = None
        if peft_cache_manager is not None:
            self._pages = peft_cache_manager.start_scheduling()
            self._pages.spend(*filter(self._owns, promised))

    def admitted(self, contexts: Iterable[LlmRequest], max_num_requests: int) -> RequestList:
        """Return the admitted contexts, in order."""
        fitting: RequestList = []
        is_open = True
        for request in contexts:
            if len(fitting) == max_num_requests:
                break
            if self._owns(request) and not self._in_line:
                fitting.append(request)
            elif is_open:
                need = self._ledger.blocks_to_completion(request)
                if not self._ledger.fits(need):
                    is_open = False
                elif self._pages is None or request.adapter is None:
                    self._ledger.spend(need, request)
                    fitting.append(request)
                elif self._admits_adapter(self._pages, request):
                    self._ledger.spend(need, request)
                    self._pages.spend(request)
                    fitting.append(request)
                else:
                    self.skipped.append(request)
        return fitting

    def _admits_adapter(self, pages: PageLedger, request: LlmRequest) -> bool:
        is_held_back = self.starved is not None and request.adapter_digest != self.starved.adapter_digest
        return not is_held_back and pages.fits(request) and pages.may_load(request)


def _generating_first(active_requests: RequestList, max_num_requests: int) -> tuple[RequestList, RequestList]:
    """Return (the first `max_num_requests` generating requests, the contexts).

    If there are at least `max_num_requests` generating requests, contexts after the last returned generating request
    are left out.
    """
    generating = [request for request in active_requests if request.state in GENERATING]
    if len(generating) == len(active_requests) <= max_num_requests:
        return generating, []    # the common case; takes a third of the time
    generating = []
    contexts: RequestList = []
    for request in active_requests:
        if len(generating) == max_num_requests:
            break
        if request.state in GENERATING:
            generating.append(request)
        elif request.is_context:
            contexts.append(request)
    return generating, contexts
