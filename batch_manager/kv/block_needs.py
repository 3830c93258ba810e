"""How many blocks a sequence needs: arithmetic on lengths alone.

    tokens_per_block    tokens one block holds
    beam_width          blocks that beams do not share are counted once per beam
    held                blocks per beam the sequence holds already

Source: TensorRT-LLM's getNeededBlocksOneStep and getRemainingBlocksToCompletion.
"""


def ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)


def blocks_of_prompt(prompt_len: int, tokens_per_block: int, beam_width: int = 1) -> int:
    """Blocks taken when a sequence starts: beams share all but a last, partly filled one."""
    shared, rest = divmod(prompt_len, tokens_per_block)
    return shared + (beam_width if rest else 0)


def blocks_for_first_chunk(prompt_len: int, draft_len: int, max_new_tokens: int, max_seq_len: int,
                           tokens_per_block: int, beam_width: int = 1) -> int:
    """Blocks the first context chunk takes: those of the whole prompt, with room for the drafts."""
    tokens = min(prompt_len + draft_len, max_seq_len + max_new_tokens)
    return blocks_of_prompt(tokens, tokens_per_block, beam_width)


def blocks_for_generation_step(kv_length: int, tokens_left: int, draft_len: int, max_seq_len: int,
                               tokens_per_block: int, beam_width: int = 1, two_step_lookahead: bool = False) -> int:
    """Blocks the next generation step takes (the next two with look-ahead), every draft counted as accepted.

    kv_length     tokens in the cache before the step
    tokens_left   prompt_len + max_new_tokens - kv_length
    """
    steps = 2 if two_step_lookahead else 1
    grown = kv_length + min(steps * (draft_len + 1), tokens_left)
    if grown > max_seq_len:
        return 0
    return (ceil_div(grown, tokens_per_block) - ceil_div(kv_length, tokens_per_block)) * beam_width


def blocks_to_last_token(prompt_len: int, max_new_tokens: int, held: int, tokens_per_block: int,
                         beam_width: int = 1) -> int:
    """Blocks a sequence may still take until its last token.

    It counts prompt_len + max_new_tokens tokens although the last one is never stored, as the original does.
    """
    context = prompt_len // tokens_per_block
    total = ceil_div(prompt_len + max_new_tokens, tokens_per_block)
    if held < context:
        return context - held + (total - context) * beam_width
    return (total - held) * beam_width
