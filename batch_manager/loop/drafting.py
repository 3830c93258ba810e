"""Drafts tokens for generating requests after the plan is made, so that schedulers never see them."""

from collections.abc import Mapping, Sequence

from ..config import Limits, SpeculativeConfig
from ..handover import DeviceOperation, SlotSetup
from ..kv.kv_cache_manager import KvCacheManager
from ..requests.llm_request import LlmRequest
from ..sampling_config import NEUTRAL, PARAMETERS
from ..scheduling.interfaces import SchedulerOutput

# Parameters that `sample_token` itself applies; they are the same for each row of a sequence.
_OF_THE_DRAW = frozenset({"temperature", "top_k", "top_p", "min_p", "random_seed"})
_OTHERS = tuple(name for name in PARAMETERS if name not in _OF_THE_DRAW)
MOST_MISSES, TOKENS_OF_A_REST = 4, 16


def is_verified(setup: SlotSetup) -> bool:
    """Whether a step can verify drafts of the sequence: nothing but its logits decides a token, and only tokens, their
    log-probabilities and end ids are wanted. Other sequences get no drafts."""
    return not (setup.has_beams or setup.stop_words or setup.bad_words or setup.embedding_bias is not None
                or setup.logits_post_processor is not None or setup.return_generation_logits or setup.top_log_probs
                or setup.raw_log_probs or any(getattr(setup.sampling, name) != getattr(NEUTRAL, name)
                                              for name in _OTHERS))


class Ngrams:
    """What followed each n-gram of a request's tokens, for n in shortest..longest. Grows with the request."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(longest, shortest - 1, -1)}
        self._known = 0

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return `most` tokens or none: those after the newest earlier occurrence of the last n, longest n first.

        If fewer follow it, the text repeats itself, and the drafts go on with that.

        tokens   prompt and output; those of the call before, and more
        """
        for end in range(self._known, len(tokens)):
            for n, ends in self._ends.items():
                if n <= end:
                    ends[tuple(tokens[end - n : end])] = end
        self._known = len(tokens)
        for n, ends in self._ends.items():
            if n < len(tokens) and (end := ends.get(tuple(tokens[-n:]), 0)):
                period = len(tokens) - end
                return [tokens[end + place % period] for place in range(most)]
        return ()


class _Draft:
    """The drafting of one request.

    most      drafts of its next step: more after steps whose drafts were all accepted, fewer after others
    misses    steps in a row without an accepted draft
    rests_until   number of tokens from which on the request gets drafts again
    before, count   number of its tokens before its last step with drafts, and the number of drafts; 0: it was counted
    """

    __slots__ = ("ngrams", "most", "misses", "rests_until", "before", "count")

    def __init__(self, ngrams: Ngrams, most: int) -> None:
        self.ngrams, self.most = ngrams, most
        self.misses = self.rests_until = self.before = self.count = 0


class Drafting:
    """A Resource that proposes drafts for the generating requests of a plan.

    Drafts take what the plan leaves of max_num_tokens, and of free blocks without cached content. So they never make a
    request wait or pause, and never evict a block.
    """

    def __init__(self, config: SpeculativeConfig, limits: Limits, kv_cache_manager: KvCacheManager) -> None:
        self._config, self._kv = config, kv_cache_manager
        self._most = min(config.num_speculative_tokens, limits.max_draft_tokens)
        self._max_num_tokens = limits.max_num_tokens
        self._of: dict[LlmRequest, _Draft] = {}
        self._num_steps = self._num_drafts = self._num_accepted = 0

    def claim(self, requests: Sequence[LlmRequest]) -> Sequence[DeviceOperation]:
        return ()

    def set_up(self, request: LlmRequest, setup: SlotSetup) -> SlotSetup:
        if is_verified(setup):
            config = self._config
            self._of[request] = _Draft(Ngrams(config.prompt_lookup_min, config.prompt_lookup_max), self._most)
        return setup

    def release(self, request: LlmRequest) -> None:
        if draft := self._of.pop(request, None):
            self._count(draft, request.num_tokens)

    def figures(self) -> Mapping[str, int | str]:
        return {"Draft Steps": self._num_steps, "Draft Tokens": self._num_drafts,
                "Accepted Draft Tokens": self._num_accepted}

    def fit(self, plan: SchedulerOutput) -> None:
        """Propose drafts for requests of the plan. The plan is right, and its pauses are done."""
        generation, contexts = plan.generation_requests, plan.context_requests
        if not generation:
            return
        left = self._max_num_tokens - len(generation) - (sum(plan.sizes) if contexts else 0)
        if any(request.beam_width > 1 for request in (*generation, *contexts)):
            return
        drafted = []
        for request in generation:
            draft = self._of.get(request)
            if draft is None:
                continue
            length = request.num_tokens
            self._count(draft, length)
            most = min(draft.most, left, request.final_length - length - 1)
            if most < 1 or length < draft.rests_until:
                continue
            if tokens := draft.ngrams.propose(request.tokens[0], most):
                request.propose(tokens)
                draft.before, draft.count = length, len(tokens)
                left -= len(tokens)
                drafted.append(draft)
        if drafted and self._kv.usage().free_blocks < self._kv.blocks_to_claim(
                [request for request in contexts if request.is_first_context_chunk], generation, (),
                [request.draft_len for request in generation]):
            for request in generation:
                request.propose(())
            for draft in drafted:
                draft.count = 0
            return
        self._num_steps += len(drafted)
        self._num_drafts += sum(draft.count for draft in drafted)

    def _count(self, draft: _Draft, num_tokens: int) -> None:
        """Count what the last step with drafts of a request accepted, and choose how many drafts it gets next."""
        if not draft.count:
            return
        accepted = min(max(num_tokens - draft.before - 1, 0), draft.count)
        self._num_accepted += accepted
        draft.most = min(2 * draft.most, self._most) if accepted == draft.count else accepted + 1
        draft.misses = 0 if accepted else draft.misses + 1
        if draft.misses == MOST_MISSES:
            draft.misses, draft.rests_until = 0, num_tokens + TOKENS_OF_A_REST
        draft.count = 0
