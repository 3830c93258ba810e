"""TensorRT-LLM's estimates of how many blocks a request needs, from its lengths and the cache.

The loop and the built-in policies do not use them. A claim may take more or fewer blocks than estimated if a prompt is
longer than its window, if two first chunks share a prefix, or if a request that will be paused holds cached prompt
blocks. kv/ledger.py has the exact numbers, and kv/reservations.py has the bounds.

Source: TensorRT-LLM's getNeededBlocksOneStep and getRemainingBlocksToCompletion.
"""

from batch_manager.kv.block_needs import blocks_of_prompt, blocks_to_last_token, ceil_div
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.window import AttentionWindow
from batch_manager.requests.llm_request import LlmRequest


class Estimates:
    """Estimates how many blocks of `kv` requests need, and how many of their tokens are cached.

    temporary   number of tokens by which a context may exceed the window during its computation
    """

    def __init__(self, kv: KvCacheManager, temporary: int = 0) -> None:
        self._kv, self._sequences, self._window, self._cache = kv, kv.sequences, kv.window, kv.cache
        self._longest_stored = self._window.size + temporary
        self.held_by_others = kv.blocks_held_by_others

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Number of blocks that the request may still take until its last token."""
        held = self._sequences.held(request) if self._sequences.has(request) else 0
        return blocks_to_last_token(
            request.prompt_len, request.max_new_tokens, request.num_generated_tokens, held, self._window,
            request.beam_width, self.held_by_others(request) if request.is_first_context_chunk else 0,
            longest_stored=self._longest_stored)

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
        longest = (min(request.prompt_len, self._longest_stored) + self._window.bubble) // unit
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
