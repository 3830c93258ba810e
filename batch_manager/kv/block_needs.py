"""Computes from lengths alone how many blocks a sequence needs: exactly, and once as TensorRT-LLM estimates it.

    beam_width   beams of the sequence; blocks that the beams do not share count once per beam
"""

from .window import AttentionWindow


def ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)


def blocks_of_prompt(prompt_len: int, tokens_per_block: int, beam_width: int = 1, *, own_last: bool = False) -> int:
    """Number of blocks that a sequence takes when it starts. Beams share all but a partly filled last block.

    own_last   beams do not share the last block, even if it is full; true with block reuse
    """
    if own_last:
        return ceil_div(prompt_len, tokens_per_block) - 1 + beam_width
    shared, rest = divmod(prompt_len, tokens_per_block)
    return shared + (beam_width if rest else 0)


def most_blocks(prompt_len: int, max_new_tokens: int, window: AttentionWindow, beam_width: int = 1, *,
                own_last: bool = False) -> int:
    """The largest number of blocks that a sequence holds at a time, over all beams.

    The first generation step takes its blocks before any block leaves the window. With drafts, both this step and the
    last chunk before it can add as many as max_draft_len.
    """
    unit = window.tokens_per_block
    start = blocks_of_prompt(prompt_len, unit, beam_width, own_last=own_last)
    after_first_step = prompt_len + min(1 + 2 * window.max_draft_len, max_new_tokens)
    first_step = start + (ceil_div(after_first_step, unit) - ceil_div(prompt_len, unit)) * beam_width
    return max(first_step, blocks_with_last_one(prompt_len, max_new_tokens, window, beam_width, own_last=own_last))


def blocks_with_last_one(prompt_len: int, max_new_tokens: int, window: AttentionWindow, beam_width: int = 1, *,
                         own_last: bool = False) -> int:
    """Number of blocks, over all beams, of a sequence that has just taken its last block.

    At this time, the sequence still holds the block that leaves the window. After the first generation step, a
    sequence never holds more blocks than at this time. When a sequence grows by one block, each beam takes a new
    block of its own, while all beams may share the block that leaves the window.
    """
    unit = window.tokens_per_block
    shared = (prompt_len - 1 if own_last else prompt_len) // unit
    in_all = ceil_div(prompt_len + max_new_tokens, unit)
    held = min(in_all, window.most_held) if window.slides else in_all
    shared -= max(min(shared, window.sink_blocks + in_all - held) - window.sink_blocks, 0)
    return shared + (held - shared) * beam_width


def blocks_to_last_token(prompt_len: int, max_new_tokens: int, generated: int, held: int, window: AttentionWindow,
                         beam_width: int = 1, shared: int = 0, longest_stored: int | None = None) -> int:
    """Number of blocks that a request, with all its beams, may still take until its last token.

    Counts prompt_len + max_new_tokens tokens, as TensorRT-LLM does, although the last token is never stored. Counts one
    more block for a sliding window, because a sequence takes its new block before it releases the oldest one.

    generated   number of output tokens so far
    held        number of blocks that each beam holds; 0 before the first chunk
    shared      number of full blocks of the prompt that running sequences hold. If `held` is 0, these blocks are not
                counted; otherwise the number has no effect
    longest_stored   largest number of tokens of a sequence that count as stored, not rounded to blocks; None: those of
                the window

    Source: TensorRT-LLM's getRemainingBlocksToCompletion.
    """
    unit, tokens = window.tokens_per_block, prompt_len + max_new_tokens
    stored = window.size if longest_stored is None else longest_stored
    context = (min(prompt_len, stored) + window.bubble) // unit
    total = ceil_div(min(tokens, stored) + window.bubble, unit)     # of each beam, at the end
    if tokens > stored:
        total += window.sink_blocks
    shared = min(shared, context) if not held else 0

    extra = 0
    if tokens > window.size:
        last = ceil_div(tokens, unit)
        extra = int(last > ceil_div(prompt_len + generated, unit) and last > total)
    if held < context - shared:
        return context - shared - held + (total - context + extra) * beam_width
    return max(total - shared - held + extra, 0) * beam_width
