"""How many blocks a sequence needs: arithmetic on lengths alone.

    beam_width   blocks that beams do not share are counted once per beam
    held         blocks per beam the sequence holds already
    shared       full blocks of the prompt that running sequences hold already

Source: TensorRT-LLM's getNeededBlocksOneStep and getRemainingBlocksToCompletion.
"""

from .window import AttentionWindow


def ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)


def blocks_of_prompt(prompt_len: int, tokens_per_block: int, beam_width: int = 1, *, own_last: bool = False) -> int:
    """Blocks taken when a sequence starts: beams share all but a last, partly filled one.

    own_last   they do not share a last one that is full, either, as is so with block reuse
    """
    if own_last:
        return ceil_div(prompt_len, tokens_per_block) - 1 + beam_width
    shared, rest = divmod(prompt_len, tokens_per_block)
    return shared + (beam_width if rest else 0)


def most_blocks(prompt_len: int, max_new_tokens: int, window: AttentionWindow, beam_width: int = 1, *,
                own_last: bool = False) -> int:
    """Blocks a sequence holds at most while it is stored from its first token to its last, counted over all beams.

    Nothing leaves the window before the first generation step has taken what it needs.
    """
    start = blocks_of_prompt(prompt_len, window.tokens_per_block, beam_width, own_last=own_last)
    first_step = start + (0 if prompt_len % window.tokens_per_block else beam_width)
    return max(first_step, blocks_with_last_one(prompt_len, max_new_tokens, window, beam_width, own_last=own_last))


def blocks_with_last_one(prompt_len: int, max_new_tokens: int, window: AttentionWindow, beam_width: int = 1, *,
                         own_last: bool = False) -> int:
    """Blocks a sequence holds, over all beams, when it has taken its last one and not given back what that pushes out.

    It never holds more in its generation phase: what leaves the window may be a block that all beams share, what comes
    is one for each.
    """
    unit = window.tokens_per_block
    shared = (prompt_len - 1 if own_last else prompt_len) // unit
    in_all = ceil_div(prompt_len + max_new_tokens, unit)
    held = min(in_all, window.most_held) if window.slides else in_all
    shared -= max(min(shared, window.sink_blocks + in_all - held) - window.sink_blocks, 0)
    return shared + (held - shared) * beam_width


def blocks_for_first_chunk(prompt_len: int, draft_len: int, max_new_tokens: int, window: AttentionWindow,
                           beam_width: int = 1, shared: int = 0) -> int:
    """Blocks the first context chunk takes: those of the whole prompt, with room for the drafts."""
    tokens = min(prompt_len + draft_len, window.size + max_new_tokens) + window.bubble
    return blocks_of_prompt(tokens, window.tokens_per_block, beam_width) - min(
        shared, tokens // window.tokens_per_block)


def blocks_for_generation_step(kv_length: int, tokens_left: int, draft_len: int, window: AttentionWindow,
                               beam_width: int = 1, two_step_lookahead: bool = False) -> int:
    """Blocks the next generation step takes (the next two with look-ahead), every draft counted as accepted.

    kv_length     tokens in the cache before the step
    tokens_left   prompt_len + max_new_tokens - kv_length
    """
    steps = 2 if two_step_lookahead else 1
    grown = kv_length + min(steps * (draft_len + 1), tokens_left)
    if grown > max(window.size, window.max_seq_len) + window.bubble:
        return 0
    return (ceil_div(grown, window.tokens_per_block) - ceil_div(kv_length, window.tokens_per_block)) * beam_width


def blocks_at_the_end(prompt_len: int, max_new_tokens: int, window: AttentionWindow) -> int:
    """Blocks per beam that are held at most, but for one that a sliding window may need for a moment."""
    tokens, stored = prompt_len + max_new_tokens, window.longest_stored
    blocks = ceil_div(min(tokens, stored) + window.bubble, window.tokens_per_block)
    return blocks + window.sink_blocks if tokens > stored else blocks


def blocks_to_last_token(prompt_len: int, max_new_tokens: int, generated: int, held: int, window: AttentionWindow,
                         beam_width: int = 1, shared: int = 0) -> int:
    """Blocks a sequence may still take until its last token.

    It counts prompt_len + max_new_tokens tokens although the last one is never stored, as the original does. A window
    that slides is handed its new block before it gives the oldest one back: one more while that is still to come.
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
