"""The numbers schedulers know from TensorRT-LLM: what a request needs, estimated from its lengths and the cache.

They are estimates: a prompt longer than its window, two first chunks that share a prefix or a victim that holds a part
of it make a claim take more or less. What a claim takes for certain is in ledger.py and reservations.py.
"""

from collections.abc import Sequence

from ..requests.llm_request import LlmRequest
from . import block_needs
from .prefix_cache import PrefixCache
from .sequence_table import SequenceTable
from .window import AttentionWindow


class Estimates:
    """Blocks that requests need and tokens they need not compute."""

    def __init__(self, sequences: SequenceTable, window: AttentionWindow, cache: PrefixCache | None) -> None:
        self._sequences = sequences
        self._window = window
        self._cache = cache

    def to_completion(self, request: LlmRequest) -> int:
        """Blocks the request may still take until its last token."""
        held = self._sequences.held(request) if self._sequences.has(request) else 0
        return block_needs.blocks_to_last_token(
            request.prompt_len, request.max_new_tokens, request.num_generated_tokens, held, self._window,
            request.beam_width, self.held_by_others(request) if request.is_first_context_chunk else 0)

    def one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """Blocks the request takes in its next step; with look-ahead, in its next two."""
        started = self._sequences.has(request)
        if request.is_context and (started or not request.is_first_context_chunk):
            return 0
        if not started:
            return block_needs.blocks_for_first_chunk(
                request.prompt_len, request.draft_len, request.max_new_tokens, self._window, request.beam_width,
                self.held_by_others(request))
        kv_length = int(self._sequences.kv_lengths[request.seq_slot])
        return block_needs.blocks_for_generation_step(
            kv_length, request.prompt_len + request.max_new_tokens - kv_length, request.draft_len, self._window,
            request.beam_width, two_step_lookahead)

    def one_step_of_generating(self, requests: Sequence[LlmRequest], two_step_lookahead: bool = False) -> int:
        """`one_step` summed over requests that all generate, at once for those without drafts."""
        drafting = [request for request in requests if request.draft_len]
        if drafting:
            requests = [request for request in requests if not request.draft_len]

        # A request that generates has two tokens to go or more, so a look-ahead of two steps adds two.
        sequences, window = self._sequences, self._window
        slots = sequences.slots_of(requests)
        lengths = sequences.kv_lengths[slots]
        grown = lengths + (2 if two_step_lookahead else 1)
        blocks = block_needs.ceil_div(grown, window.tokens_per_block) - block_needs.ceil_div(
            lengths, window.tokens_per_block)
        if sequences.max_beam_width > 1:
            blocks *= sequences.beam_widths[slots]
        needed = int(blocks[grown <= max(window.size, window.max_seq_len) + window.bubble].sum())
        return needed + sum(self.one_step(request, two_step_lookahead) for request in drafting)

    def held_by_others(self, request: LlmRequest) -> int:
        """Full blocks of the prompt that are cached and that running sequences hold, from the first on."""
        return 0 if self._cache is None else sum(map(self._cache.is_owned, self._cache.matched(request)))

    def reusable_tokens(self, request: LlmRequest, to_completion: bool) -> int:
        """Tokens of a first chunk that need not be computed, as the two estimates of needed blocks count them."""
        if self._cache is None:
            return 0
        if not to_completion:
            return self.held_by_others(request) * self._window.tokens_per_block
        unit = self._window.tokens_per_block
        longest = (min(request.prompt_len, self._window.longest_stored) + self._window.bubble) // unit
        return min(len(self._cache.matched(request)), longest) * unit
