"""TensorRT-LLM's estimates of how many blocks a request needs, from its lengths and the cache.

The estimates serve conformance tests and schedulers written for TensorRT-LLM. The loop and the built-in policies do
not use them. A claim may take more or fewer blocks than estimated if a prompt is longer than its window, if two first
chunks share a prefix, or if a request that will be paused holds cached prompt blocks. ledger.py has the exact numbers,
and reservations.py has the bounds.

Source: TensorRT-LLM's getNeededBlocksOneStep and getRemainingBlocksToCompletion.
"""

from ..requests.llm_request import LlmRequest
from .block_needs import blocks_of_prompt, ceil_div
from .prefix_cache import PrefixCache
from .sequence_table import SequenceTable
from .window import AttentionWindow


class Estimates:
    """Estimates how many blocks requests need, and how many of their tokens are cached."""

    def __init__(self, sequences: SequenceTable, window: AttentionWindow, cache: PrefixCache | None) -> None:
        self._sequences = sequences
        self._window = window
        self._cache = cache

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Number of blocks that the request may still take until its last token."""
        held = self._sequences.held(request) if self._sequences.has(request) else 0
        return blocks_to_last_token(
            request.prompt_len, request.max_new_tokens, request.num_generated_tokens, held, self._window,
            request.beam_width, self.held_by_others(request) if request.is_first_context_chunk else 0)

    def get_needed_blocks_one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """Number of blocks that the request takes in its next step; with look-ahead, in its next two steps."""
        started = self._sequences.has(request)
        if request.is_context and (started or not request.is_first_context_chunk):
            return 0
        if not started:
            return blocks_for_first_chunk(
                request.prompt_len, request.draft_len, request.max_new_tokens, self._window, request.beam_width,
                self.held_by_others(request))
        kv_length = int(self._sequences.kv_lengths[request.seq_slot])
        return blocks_for_generation_step(
            kv_length, request.prompt_len + request.max_new_tokens - kv_length, request.draft_len, self._window,
            request.beam_width, two_step_lookahead)

    def reusable_blocks(self, request: LlmRequest) -> tuple[int, int]:
        """Return two counts of cached leading full blocks of the prompt.

        The first counts only the blocks that running sequences hold. The second counts all of the blocks.
        """
        return self.held_by_others(request), 0 if self._cache is None else len(self._cache.matched(request))

    def held_by_others(self, request: LlmRequest) -> int:
        """Number of cached leading full blocks of the prompt that running sequences hold."""
        return 0 if self._cache is None else sum(map(self._cache.is_owned, self._cache.matched(request)))

    def reusable_tokens(self, request: LlmRequest, to_completion: bool) -> int:
        """Number of prompt tokens that a first chunk finds in the cache, as TensorRT-LLM estimates it.

        to_completion   True: count the tokens of all cached leading full blocks, but at most as many as the window
                        stores; False: count only the tokens of those that running sequences hold
        """
        if self._cache is None:
            return 0
        unit = self._window.tokens_per_block
        if not to_completion:
            return self.held_by_others(request) * unit
        longest = (min(request.prompt_len, self._window.longest_stored) + self._window.bubble) // unit
        return min(len(self._cache.matched(request)), longest) * unit


# The arithmetic, on lengths alone.


def blocks_for_first_chunk(prompt_len: int, draft_len: int, max_new_tokens: int, window: AttentionWindow,
                           beam_width: int = 1, shared: int = 0) -> int:
    """Number of blocks that the first context chunk takes for the whole prompt and its drafts.

    shared   number of full blocks of the prompt that running sequences hold; these blocks are not counted
    """
    tokens = min(prompt_len + draft_len, window.size + max_new_tokens) + window.bubble
    return blocks_of_prompt(tokens, window.tokens_per_block, beam_width) - min(
        shared, tokens // window.tokens_per_block)


def blocks_for_generation_step(kv_length: int, tokens_left: int, draft_len: int, window: AttentionWindow,
                               beam_width: int = 1, two_step_lookahead: bool = False) -> int:
    """Number of blocks that the next generation step takes if every draft is accepted.

    With `two_step_lookahead`, it is the number for the next two steps.

    kv_length     number of tokens in the cache before the step
    tokens_left   prompt_len + max_new_tokens - kv_length
    """
    steps = 2 if two_step_lookahead else 1
    grown = kv_length + min(steps * (draft_len + 1), tokens_left)
    if grown > max(window.size, window.max_seq_len) + window.bubble:
        return 0
    return (ceil_div(grown, window.tokens_per_block) - ceil_div(kv_length, window.tokens_per_block)) * beam_width


def blocks_at_the_end(prompt_len: int, max_new_tokens: int, window: AttentionWindow) -> int:
    """The largest number of blocks that each beam of a sequence holds, without the additional block that a sliding
    window may need temporarily."""
    tokens, stored = prompt_len + max_new_tokens, window.longest_stored
    blocks = ceil_div(min(tokens, stored) + window.bubble, window.tokens_per_block)
    return blocks + window.sink_blocks if tokens > stored else blocks


def blocks_to_last_token(prompt_len: int, max_new_tokens: int, generated: int, held: int, window: AttentionWindow,
                         beam_width: int = 1, shared: int = 0) -> int:
    """Number of blocks that a request, with all its beams, may still take until its last token.

    Counts prompt_len + max_new_tokens tokens, as TensorRT-LLM does, although the last token is never stored. Counts one
    more block for a sliding window, because a sequence takes its new block before it releases the oldest one.

    generated   number of output tokens so far
    held        number of blocks that each beam holds; 0 before the first chunk
    shared      number of full blocks of the prompt that running sequences hold. If `held` is 0, these blocks are not
                counted; otherwise the number has no effect
    """
    unit = window.tokens_per_block
    context = (min(prompt_len, window.longest_stored) + window.bubble) // unit
    total = blocks_at_the_end(prompt_len, max_new_tokens, window)
    shared = min(shared, context) if not held else 0

    tokens, extra = prompt_len + max_new_tokens, 0
    if tokens > window.size:
        last = ceil_div(tokens, unit)
        extra = int(last > ceil_div(prompt_len + generated, unit) and last > total)
    if held < context - shared:
        return context - shared - held + (total - context + extra) * beam_width
    return max(total - shared - held + extra, 0) * beam_width
