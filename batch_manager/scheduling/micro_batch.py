"""Who gets into the step, of those that have blocks."""

from collections.abc import Callable, Collection
from math import inf

from ..requests.llm_request import LlmRequest
from .chunking import ContextChunking, drafts_kept, force_chunk
from .interfaces import GENERATING, MicroBatch, MicroBatchScheduler, RequestList


class TokenBudgetScheduler(MicroBatchScheduler):
    """Fill the step in order until its sequences or its tokens are used up.

    A generating request costs one token per beam plus its drafts, a context its whole prompt. The first request that
    does not fit ends the step: later ones do not overtake it. With chunking, each context only takes its row of the
    batch at first; then all contexts divide the tokens that generation has left. Cached tokens of a first chunk cost
    nothing.

    Requests are ordered by adapter, those without one first.

    max_batch_size     sequences in a step
    max_num_tokens     tokens in a step; None: no bound
    chunking           how contexts are cut; None: they are not, with one exception: a pause can make a context longer
                       than any step, and it is then computed in whole blocks, because it could never go on otherwise
    tokens_per_block   of the KV cache; used in that one case only
    credit_of          tokens of a first chunk that are certain to be cached; None: none
    """

    def __init__(self, max_batch_size: int, max_num_tokens: int | None = None,
                 chunking: ContextChunking | None = None, tokens_per_block: int = 1,
                 credit_of: Callable[[LlmRequest], int] | None = None) -> None:
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.chunking = chunking
        self.tokens_per_block = tokens_per_block
        self.credit_of = credit_of

    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Collection[int]) -> MicroBatch:
        budget = inf if self.max_num_tokens is None else self.max_num_tokens
        tokens = beam_width = 0
        contexts: RequestList = []
        chunks: list[int] = []
        generation: RequestList = []
        if inflight_request_ids:
            fitting_requests = [request for request in fitting_requests
                                if request.request_id not in inflight_request_ids]
        if self._is_plain_generation(fitting_requests):
            taken = min(len(fitting_requests), self.max_batch_size)
            return contexts, fitting_requests[:taken if taken <= budget else int(budget)]
        for request in fitting_requests:
            if request.state in GENERATING:
                width = request.beam_width
                cost = width + request.draft_len
                if tokens + cost > budget:
                    break
                if width != beam_width and generation:
                    continue
                generation.append(request)
                beam_width = width
                tokens += cost
            elif request.is_context:
                if self.chunking is None:
                    chunk, cost = self._uncut(request, budget - tokens)
                    if chunk == 0:
                        break
                    chunks.append(chunk)
                    tokens += cost
                contexts.append(request)
            else:
                continue
            if len(contexts) + len(generation) == self.max_batch_size:
                break

        generation = _by_adapter(generation)
        if not contexts:
            return contexts, generation
        if self.chunking is not None:
            capacity = None if self.max_num_tokens is None else self.max_num_tokens - tokens
            return self._cut(self.chunking, contexts, generation, capacity)
        chunk_of = dict(zip(contexts, chunks, strict=True))
        contexts = _by_adapter(contexts)
        return contexts, generation, [chunk_of[request] for request in contexts]

    @staticmethod
    def _is_plain_generation(requests: RequestList) -> bool:
        """Whether each request takes exactly one token in this step and none has an adapter. This is the usual case,
        and needs no loop over the requests.
        """
        tokens = [request.beam_width + request.draft_len for request in requests
                  if request.state in GENERATING and request.lora_task_id is None]
        return len(tokens) == len(requests) == sum(tokens)

    def _credit(self, request: LlmRequest) -> int:
        if self.credit_of is None or not request.is_first_context_chunk:
            return 0
        return min(self.credit_of(request), request.prompt_len)

    def _uncut(self, request: LlmRequest, left: int | float) -> tuple[int, int]:
        """Tokens of the request's chunk when contexts are not cut (all of them, or 0), and their cost.

        The whole prompt is charged, even when some of it has been computed.
        """
        whole, drafts, credit = request.remaining_context, request.draft_len, self._credit(request)
        if (request.num_pauses and self.max_num_tokens is not None
                and request.prompt_len + drafts > self.max_num_tokens):
            cost = max(whole + drafts - credit, 1)
            if cost <= left:
                return whole, cost
            chunk = min(int(left), whole - 1) // self.tokens_per_block * self.tokens_per_block
            return chunk, chunk    # it begins after the cached tokens, so all of it is computed
        cost = max(request.prompt_len + drafts - credit, 1)
        return (whole if cost <= left else 0), cost

    def _cut(self, chunking: ContextChunking, contexts: RequestList, generation: RequestList,
             capacity: int | None) -> MicroBatch:
        """Give each context its chunk; those that get none wait."""
        remaining = [request.remaining_context for request in contexts]
        drafts = [request.draft_len for request in contexts]
        credits = [self._credit(request) for request in contexts]
        bounds = capacity, chunking.max_context_length
        whole = [max(left - credit, 0) + draft
                 for left, draft, credit in zip(remaining, drafts, credits, strict=True)]
        if (chunking.divide is not force_chunk and (capacity is None or sum(whole) <= capacity)
                and (chunking.max_context_length is None or max(whole) <= chunking.max_context_length)):
            return _by_adapter(contexts), generation

        if any(credits):
            chunks = chunking.divide(remaining, chunking.unit, *bounds, credits)
        else:
            chunks = chunking.divide(remaining, chunking.unit, *bounds)
        costs = [chunking.cost(*row) for row in zip(chunks, remaining, credits, strict=True)]
        kept = drafts_kept(chunks, remaining, drafts, chunking.unit, *bounds, used=sum(costs))
        # A chunk begins after the cached tokens: one that is not the last is as long as what it computes.
        sizes = [left if chunk == left else cost for chunk, left, cost in zip(chunks, remaining, costs, strict=True)]
        rows = [row for row in zip(contexts, sizes, kept, strict=True) if row[1] > 0]
        rows.sort(key=lambda row: (row[1] == row[0].remaining_context, _adapter(row[0])))    # stable
        return [row[0] for row in rows], generation, [row[1] for row in rows], [row[2] for row in rows]


class EvenMicroBatches(MicroBatchScheduler):
    """Give each of several micro-batches in flight an even share of the requests.

    Without it, requests that start together would stay together and leave the other micro-batches empty.

    num_micro_batches   steps in flight at a time
    """

    def __init__(self, micro_batch_scheduler: MicroBatchScheduler, num_micro_batches: int) -> None:
        self.micro_batch_scheduler = micro_batch_scheduler
        self.num_micro_batches = num_micro_batches

    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Collection[int]) -> MicroBatch:
        share = -(-len(fitting_requests) // self.num_micro_batches)
        ready = [request for request in fitting_requests if request.request_id not in inflight_request_ids]
        return self.micro_batch_scheduler.schedule(ready[:share], ())


def _adapter(request: LlmRequest) -> int:
    return -1 if request.lora_task_id is None else request.lora_task_id


def _by_adapter(requests: RequestList) -> RequestList:
    """In order, but with requests of one adapter together; most of the time no request has one."""
    if not [request for request in requests if request.lora_task_id is not None]:
        return requests
    return sorted(requests, key=_adapter)
