"""Micro-batch schedulers, which fill the step with requests that the capacity scheduler has selected."""

from collections.abc import Callable, Collection
from math import inf

from ..requests.llm_request import GENERATING, LlmRequest
from .chunking import ContextChunking, drafts_kept, force_chunk
from .interfaces import MicroBatch, MicroBatchScheduler, RequestList


class TokenBudgetScheduler(MicroBatchScheduler):
    """Fills the step in order, up to its limits of requests and tokens.

    A generating request costs one token per beam plus its drafts. A context costs its whole prompt. The first request
    that does not fit ends the step, so that later requests do not overtake it. A generating request is skipped if its
    beam width differs from the beam width of the generating requests already in the step. With chunking, contexts are
    first chosen by max_batch_size alone. Then they divide the tokens that the generating requests leave. Cached tokens
    of a first chunk cost nothing.

    Contexts and generating requests are ordered by adapter, requests without an adapter first. If contexts are cut,
    contexts that run their last chunk come after the others.

    max_batch_size     largest number of requests in a step
    max_num_tokens     largest number of tokens in a step; None: no bound
    chunking           how to cut contexts; None: contexts are not cut, with one exception. The context of a paused
                       request can have become longer than max_num_tokens. If the part left to compute does not fit
                       into the step, its chunk is as many whole blocks as fit
    tokens_per_block   tokens of a KV cache block; used only to cut such a context when `chunking` is None
    credit_of          function (request) -> number of tokens of its first chunk that are certain to be cached; None: 0
                       for every request
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
        if self._only_generates(fitting_requests):
            taken = min(len(fitting_requests), self.max_batch_size)
            return contexts, fitting_requests[:taken if taken <= budget else int(budget)]
        for request in fitting_requests:
            if request.state in GENERATING:
                width, cost = request.beam_width, request.step_tokens
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
    def _only_generates(requests: RequestList) -> bool:
        """Whether each request takes exactly one token and no request has an adapter.

        This is the common case, for which `schedule` has a shortcut.
        """
        tokens = [request.step_tokens for request in requests
                  if request.state in GENERATING and request.lora_task_id is None]
        return len(tokens) == len(requests) == sum(tokens)

    def _credit(self, request: LlmRequest) -> int:
        if self.credit_of is None or not request.is_first_context_chunk:
            return 0
        return min(self.credit_of(request), request.prompt_len)

    def _uncut(self, request: LlmRequest, left: int | float) -> tuple[int, int]:
        """Return the size of the chunk of a request when contexts are not cut, and the cost of the chunk in tokens.

        The chunk is all that remains of the context, or 0 if it does not fit. It costs the whole prompt with its
        drafts, minus cached tokens, even if a part of the prompt is computed already.

        The exception is a paused request whose context with its drafts is longer than max_num_tokens. Its chunk
        costs only the uncomputed part of the context with the drafts, minus cached tokens. If this cost does not
        fit, the chunk has as many whole blocks as fit. The chunk then costs its number of tokens.
        """
        whole, drafts, credit = request.remaining_context, request.draft_len, self._credit(request)
        if (request.num_pauses and self.max_num_tokens is not None
                and request.prompt_len + drafts > self.max_num_tokens):
            cost = max(whole + drafts - credit, 1)
            if cost <= left:
                return whole, cost
            chunk = min(int(left), whole - 1) // self.tokens_per_block * self.tokens_per_block
            return chunk, chunk    # the chunk begins after the cached tokens
        cost = max(request.prompt_len + drafts - credit, 1)
        return (whole if cost <= left else 0), cost

    def _cut(self, chunking: ContextChunking, contexts: RequestList, generation: RequestList,
             capacity: int | None) -> MicroBatch:
        """Return the micro-batch with a chunk for each context. Contexts that get no chunk are left out."""
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
        # A chunk begins after the cached tokens, so every chunk but the last is as long as its cost.
        sizes = [left if chunk == left else cost for chunk, left, cost in zip(chunks, remaining, costs, strict=True)]
        rows = [row for row in zip(contexts, sizes, kept, strict=True) if row[1] > 0]
        rows.sort(key=lambda row: (row[1] == row[0].remaining_context, _adapter(row[0])))    # stable
        return [row[0] for row in rows], generation, [row[1] for row in rows], [row[2] for row in rows]


class EvenMicroBatches(MicroBatchScheduler):
    """Divides the requests evenly among several micro-batches in flight.

    Without this scheduler, requests that start together would stay together and leave the other micro-batches empty.

    num_micro_batches   number of micro-batches in flight at a time
    """

    def __init__(self, micro_batch_scheduler: MicroBatchScheduler, num_micro_batches: int) -> None:
        self.micro_batch_scheduler = micro_batch_scheduler
        self.num_micro_batches = num_micro_batches

    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Collection[int]) -> MicroBatch:
        share = -(-len(fitting_requests) // self.num_micro_batches)
        ready = [request for request in fitting_requests if request.request_id not in inflight_request_ids]
        return self.micro_batch_scheduler.schedule(ready[:share], ())


def _adapter(request: LlmRequest) -> tuple[int, bytes]:
    """The place of a request in the order by adapter. After a change of content, an id has an old and a new one."""
    return (-1, b"") if request.lora_task_id is None else (request.lora_task_id, request.adapter_digest or b"")


def _by_adapter(requests: RequestList) -> RequestList:
    """Sort the requests by adapter. The sort is stable. Usually no request has an adapter."""
    if not [request for request in requests if request.lora_task_id is not None]:
        return requests
    return sorted(requests, key=_adapter)
