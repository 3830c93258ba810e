"""Drafts tokens for generating requests after the plan is made, so that schedulers never see them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..config import Limits, SpeculativeConfig
from ..errors import counted
from ..guard import Guard
from ..handover import DeviceOperation, LogitsPostProcessor, SlotSetup
from ..kv.kv_cache_manager import ContextDrafts, KvCacheManager
from ..option_values import exact_integer
from ..requests.llm_request import LlmRequest
from ..scheduling.contract import context_drafts
from ..scheduling.interfaces import SchedulerOutput
from ..seams import MemoryUsage
from .draft_model import DraftModel
from .ngrams import NgramDrafter
from .suffix_trees import SuffixDrafter

MOST_MISSES, TOKENS_OF_A_REST, TOKENS_WITHOUT = 4, 16, 1024
TOKENS_AHEAD = 4       # with run-ahead: tokens without drafts after a drafter of the user had none
FADING = 0.99          # of a time for a draft that keeps a request without drafts, so that it is measured again
MEMORY = 0.9           # weight of a step's drafts in the acceptance of a request, after each later step with drafts


def share_of_a_draft(num_rows: int, draft_cost: float, drafting: float = 0.0) -> float:
    """Return what a draft for each of `num_rows` sequences adds to the time of their step, of its time without drafts.

    draft_cost   what it adds to a step of one sequence, see BackendInfo
    drafting     time of making one for all sequences, of the time of a step
    """
    rows = draft_cost * num_rows
    return rows / (1 - draft_cost + rows) + drafting if rows else drafting


def is_verified(setup: SlotSetup) -> bool:
    """Whether a step can verify drafts of the sequence: it has no beams, and no post-processor that knows no drafts."""
    return not setup.has_beams and (setup.logits_post_processor is None
                                    or setup.logits_post_processor.allowed_drafts is not None)


class Drafter(Protocol):
    """Guesses the next tokens of requests, for SpeculativeConfig("custom"). Passed as Parts.drafter.

    All calls come from the worker thread. A wrong guess costs time and changes no token.
    """

    def propose(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return a list of draft tokens for each request, which may be empty. Lists may be tuples.

        requests      generating requests of the next step; `tokens[0]` has a copy of prompt and output. Change nothing
                      else of them
        max_lengths   most drafts of each

        If the method raises, or returns anything else, the step has no drafts; the failure is counted and logged. So
        does a list that is too long, and a token that is no int, a bool or a number of NumPy for example.
        """
        ...

    # Optional. Called when a request ends or pauses, with a request of an earlier call or one that had none:
    #     def release(self, request: LlmRequest) -> None


class _Draft:
    """The drafting of one request.

    accepted, tried   drafts that were accepted, and these with the first one of each step that was not. Older ones
                      count less, and each request begins as if one of two had been accepted
    misses    steps in a row without an accepted draft
    rests_until   number of tokens from which on the request gets drafts again
    processor   the logits post-processor of the request, which allows drafts; None: it has none
    before, count   number of its tokens before its last step with drafts, and the number of drafts; 0: it was counted
    """

    __slots__ = ("accepted", "tried", "misses", "rests_until", "before", "count", "processor")

    def __init__(self, processor: LogitsPostProcessor | None = None) -> None:
        self.processor = processor
        self.accepted = self.tried = 0.0
        self.misses = self.rests_until = self.before = self.count = 0

    def most(self, share: float, length: int, most: int) -> int:
        """Return how many drafts pay in a step, at most `most`: the draft at place k does if its expected acceptance,
        rate ** k, exceeds what its time would yield without it. That is its share of the time of the step, times the
        tokens that the drafts before it bring in that time.

        If none pays, a request still gets a draft every TOKENS_OF_A_REST tokens, as the text may have changed. If none
        could pay, as a draft takes as long as a token, it gets none for TOKENS_WITHOUT tokens.

        share    see `share_of_a_draft`
        length   number of tokens of the request
        """
        if share >= 1:
            self.rests_until = length + TOKENS_WITHOUT
            return 0
        rate = (1 + self.accepted) / (2 + self.tried)
        count, expected, tokens, time = 0, rate, 1.0, 1.0
        while count < most and expected * time > share * tokens:
            count, expected, tokens, time = count + 1, expected * rate, tokens + expected, time + share
        if count:
            return count
        self.rests_until = length + TOKENS_OF_A_REST
        return 1


class Drafting:
    """A Resource that proposes drafts for the generating requests of a plan.

    Drafts take what the plan leaves of max_num_tokens, and of free blocks without cached content. So they never make
    another request wait or pause, and never evict a block.

    With run-ahead, only a request that is in no step gets drafts, because they follow its newest token. Its next step
    is launched when they have been verified. A request without drafts runs ahead, until `awaits` says that its next
    step has to wait: then an earlier occurrence of its last tokens goes on, or a drafter of the user is to be asked.

    config    None: the engine proposes none, and those of clients are counted
    drafter   runs in a guarded block: if it raises, or returns something else, the step has no drafts
    draft_cost   of the backend, see BackendInfo
    """

    def __init__(self, config: SpeculativeConfig | None, limits: Limits, kv_cache_manager: KvCacheManager,
                 drafter: Drafter | None, guard: Guard, draft_cost: float) -> None:
        self._kv, self._limits, self._drafter, self._draft_cost = kv_cache_manager, limits, drafter, draft_cost
        self._most = 0 if config is None else min(config.num_speculative_tokens, limits.max_draft_tokens)
        self._model = drafter if isinstance(drafter, DraftModel) else None
        self._ngrams = drafter if isinstance(drafter, NgramDrafter) else None
        self._guard, self._monotonic, self._fitted_at, self._step_seconds = guard, guard.monotonic, 0.0, 0.0
        self._first: LlmRequest | None = None
        self._forget: Callable[[LlmRequest], None] | None = getattr(drafter, "release", None)
        self._in_propose = guard.containing("propose", kind="method of the drafter")
        self._in_allowed = guard.containing("allowed_drafts", kind="method of a logits post-processor")
        self._in_release = guard.containing("release", kind="method of the drafter")
        self._of: dict[LlmRequest, _Draft] = {}
        self._of_clients: dict[LlmRequest, _Draft] = {}        # drafts that came with a prompt, until they are counted
        self._num_steps = self._num_drafts = self._num_now = 0
        self._accepted_at = [0] * limits.max_draft_tokens

    def claim(self, requests: Sequence[LlmRequest]) -> Sequence[DeviceOperation]:
        return ()

    def set_up(self, request: LlmRequest, setup: SlotSetup) -> SlotSetup:
        if self._most and request.speculation and is_verified(setup):
            self._of[request] = _Draft(setup.logits_post_processor)
            if self._model is not None:
                self._model.set_up(request, setup)
        return setup

    def release(self, request: LlmRequest) -> None:
        if draft := self._of_clients.pop(request, None):
            self._count(draft, request.num_tokens)
        if draft := self._of.pop(request, None):
            self._count(draft, request.num_tokens)
            if self._forget is not None:
                with self._in_release:
                    self._forget(request)

    def figures(self) -> Mapping[str, int | str]:
        seconds = self._in_propose.seconds + self._in_allowed.seconds
        self._in_propose.seconds = self._in_allowed.seconds = 0.0
        num_now, self._num_now = self._num_now, 0
        return {"Draft Steps": self._num_steps, "Draft Tokens": self._num_drafts,
                "Accepted Draft Tokens": sum(self._accepted_at), "Requests With Draft Tokens": num_now,
                "Draft Time Microseconds": round(seconds * 1e6),
                **{f"Accepted Draft Tokens At {place}": count for place, count in enumerate(self._accepted_at, 1)}}

    def memory_usage(self) -> MemoryUsage:
        """Return the bytes that a draft model takes."""
        return MemoryUsage() if self._model is None else self._model.memory_usage()

    def close(self) -> None:
        if self._model is not None:
            self._model.close()

    def fit(self, plan: SchedulerOutput) -> None:
        """Propose drafts for requests of the plan. The plan is right, and its pauses are done."""
        if self._model is None:
            self._fit(plan)
            return
        self._time_step(plan)
        self._fit(plan)
        self._fitted_at = self._monotonic()

    def _time_step(self, plan: SchedulerOutput) -> None:
        """Note the time since the last plan, if that and this one only generate, for the same requests."""
        first = plan.generation_requests[0] if plan.generation_requests and not plan.context_requests else None
        if first is not None and first is self._first:
            seconds = self._monotonic() - self._fitted_at
            self._step_seconds += (seconds - self._step_seconds) * (0.2 if self._step_seconds else 1)
        self._first = first

    def _fit(self, plan: SchedulerOutput) -> None:
        generation, contexts = plan.generation_requests, plan.context_requests
        after_contexts = context_drafts(plan, self._kv) if contexts else []
        left = self._limits.max_num_tokens - len(generation) - (sum(plan.sizes) if contexts else 0)
        left -= sum(count for _, count in after_contexts)
        self._num_now = 0
        self._note_clients(generation, after_contexts)
        if left < 1 or any(request.beam_width > 1 for request in (*generation, *contexts)):
            return
        asked, max_lengths, drafting = [], [], 0.0
        if self._model is not None and self._step_seconds:
            drafting = self._model.seconds_per_draft / self._step_seconds
        share = share_of_a_draft(len(generation), self._draft_cost, drafting)
        for request in generation:
            draft, length = self._of.get(request), request.num_tokens
            if draft is None or self._limits.runs_ahead and self._kv.kv_length(request) >= length:    # it is in a step
                continue
            self._count(draft, length)
            if length >= draft.rests_until and request.final_length - length > 1:
                most = min(self._most, left, request.final_length - length - 1)
                if most := draft.most(share, length, most):
                    asked.append(request)
                    max_lengths.append(most)
                elif self._model is not None:
                    self._model.seconds_per_draft *= FADING
        proposed: list[tuple[LlmRequest, Sequence[int]]] = []
        for request, tokens in zip(asked, self._propose(asked, max_lengths)):
            if tokens := self._allowed(request, tokens[:left]):
                proposed.append((request, tokens))
                left -= len(tokens)
            elif self._limits.runs_ahead and self._ngrams is None:
                self._of[request].rests_until = request.num_tokens + TOKENS_AHEAD
        for request, tokens in self._with_blocks(proposed, generation, contexts, after_contexts):
            self._note(self._of[request], request, len(tokens))

    def awaits(self, request: LlmRequest) -> bool:
        """Whether the next step of a request in flight has to wait for this one, because it may have drafts."""
        draft, length = self._of.get(request), request.num_tokens
        if draft is None or not request.is_generating or length < draft.rests_until or (
                request.final_length - length <= 2):
            return False
        return self._ngrams is None or self._ngrams.goes_on(request)

    def _propose(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the drafts of each request; none for any if the drafter raises or breaks its contract."""
        if not requests or self._drafter is None:
            return []
        if isinstance(self._drafter, NgramDrafter | SuffixDrafter | DraftModel):
            with self._in_propose:                         # a prompt may have ids at and above the vocabulary size
                return [tokens if max(tokens, default=0) < self._limits.vocab_size else ()
                        for tokens in self._drafter.propose(requests, max_lengths)]
            return []
        lent = [(request, request.tokens) for request in requests]
        try:
            for request, tokens in lent:
                request.tokens = [tokens[0].copy()]        # a drafter may append its guesses to them
            with self._in_propose:
                return self._read(self._drafter.propose(requests, [*max_lengths]), max_lengths)
        finally:
            for request, tokens in lent:
                request.tokens = tokens
        return []

    def _allowed(self, request: LlmRequest, drafts: Sequence[int]) -> Sequence[int]:
        """Return the first drafts, those that the request's post-processor lets through; none if it fails."""
        processor = self._of[request].processor
        if processor is None or processor.allowed_drafts is None or not drafts:
            return drafts
        with self._in_allowed:
            answer = processor.allowed_drafts(request.request_id, request.tokens[0].copy(), [*drafts])
            count = exact_integer(answer)
            if count is not None:
                return drafts[:max(count, 0)]
            self._guard.note_misuse("allowed_drafts", answer, "expected the number of drafts")
        return ()

    def _read(self, answer: Any, max_lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return a copy of a drafter's answer; nothing if it is not what `Drafter.propose` promises.

        Checks exact types, whose values run no foreign code and end.
        """
        if type(answer) not in (list, tuple) or len(answer) != len(max_lengths):
            return self._refuse(answer, f"expected {counted(len(max_lengths), 'list')}")
        lists, last = [], self._limits.vocab_size - 1
        for place, (tokens, most) in enumerate(zip(answer, max_lengths)):
            if type(tokens) not in (list, tuple):
                return self._refuse(tokens, f"expected a list of ints in place {place}")
            if len(tokens) > most:
                return self._refuse(tokens, f"expected at most {counted(most, 'draft')} in place {place}, "
                                            f"and it has {len(tokens):,}")
            for token in tokens:
                if type(token) is not int or not 0 <= token <= last:
                    return self._refuse(token, f"expected ints in 0..{last} in place {place}")
            lists.append([*tokens])
        return lists

    def _refuse(self, value: object, expectation: str) -> Sequence[Sequence[int]]:
        self._guard.note_misuse("propose", value, expectation)
        return []

    def _with_blocks(self, proposed: list[tuple[LlmRequest, Sequence[int]]], generation: Sequence[LlmRequest],
                     contexts: Sequence[LlmRequest], after_contexts: ContextDrafts
                     ) -> list[tuple[LlmRequest, Sequence[int]]]:
        """Return the first proposals for which there are free blocks without cached content, and give them to their
        requests. The others are dropped by halves, because the blocks of a plan are counted together."""
        first_chunks = [request for request in contexts if request.is_first_context_chunk]
        while proposed:
            for request, tokens in proposed:
                request.propose(tokens)
            if self._kv.usage().free_blocks >= self._kv.blocks_to_claim(
                    first_chunks, generation, (), [request.draft_len for request in generation], after_contexts):
                break
            for request, _ in proposed:
                request.propose(())
            del proposed[len(proposed) // 2 :]
        return proposed

    def _note_clients(self, generation: Sequence[LlmRequest], after_contexts: ContextDrafts) -> None:
        """Note clients' drafts in the step, and count those of requests whose step with them has been read."""
        if self._of_clients:
            for request in generation:
                if draft := self._of_clients.pop(request, None):
                    self._count(draft, request.num_tokens)
        for request, count in after_contexts:
            self._of_clients[request] = draft = _Draft()
            self._note(draft, request, count)

    def _note(self, draft: _Draft, request: LlmRequest, count: int) -> None:
        draft.before, draft.count = request.num_tokens, count
        self._num_drafts += count
        self._num_now += 1
        self._num_steps += 1

    def _count(self, draft: _Draft, num_tokens: int) -> None:
        """Count what the last step with drafts of a request accepted, and choose how many drafts it gets next."""
        if not draft.count:
            return
        accepted = min(max(num_tokens - draft.before - 1, 0), draft.count)
        for place in range(accepted):
            self._accepted_at[place] += 1
        draft.accepted = MEMORY * draft.accepted + accepted
        draft.tried = MEMORY * draft.tried + accepted + (accepted < draft.count)
        draft.misses = 0 if accepted else draft.misses + 1
        if draft.misses == MOST_MISSES:
            draft.misses, draft.rests_until = 0, num_tokens + TOKENS_OF_A_REST
        draft.count = 0
