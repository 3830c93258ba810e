"""The formulas for numbers of blocks agree with sequences that grow token by token."""

from hypothesis import given
from hypothesis import strategies as st

from batch_manager.kv.block_needs import blocks_of_prompt, blocks_to_last_token
from batch_manager.kv.window import AttentionWindow
from tests.conformance.estimates import blocks_for_first_chunk, blocks_for_generation_step

lengths, block_sizes, beams = st.integers(1, 70), st.sampled_from([1, 2, 3, 8, 16]), st.integers(1, 4)
FAR = 10_000


def endless(tokens_per_block: int) -> AttentionWindow:
    return AttentionWindow(FAR, FAR, tokens_per_block)


def grown(length: int, tokens: int, tokens_per_block: int, beam_width: int) -> int:
    """Return the number of blocks that a sequence of `length` tokens takes while it grows by `tokens` tokens."""
    return sum(beam_width for position in range(length, length + tokens) if position % tokens_per_block == 0)


def test_beams_share_all_but_a_partly_filled_block():
    assert blocks_of_prompt(191, 64, beam_width=8) == 2 + 8
    assert blocks_of_prompt(192, 64, beam_width=8) == 3


@given(prompt_len=lengths, tokens_per_block=block_sizes)
def test_a_prompt_takes_the_blocks_its_tokens_fill(prompt_len, tokens_per_block):
    assert blocks_of_prompt(prompt_len, tokens_per_block) == grown(0, prompt_len, tokens_per_block, 1)


@given(kv_length=lengths, left=st.integers(2, 50), drafts=st.integers(0, 9), tokens_per_block=block_sizes,
       beam_width=beams, lookahead=st.booleans())
def test_a_generation_step_takes_what_its_tokens_take_one_by_one(kv_length, left, drafts, tokens_per_block, beam_width,
                                                                lookahead):
    tokens = min((2 if lookahead else 1) * (drafts + 1), left)
    assert blocks_for_generation_step(
        kv_length, left, drafts, endless(tokens_per_block), beam_width, lookahead) == grown(
        kv_length, tokens, tokens_per_block, beam_width)


def test_a_step_beyond_the_longest_sequence_takes_nothing():
    assert blocks_for_generation_step(16, 9, 0, AttentionWindow(17, 17, 16)) == 1
    assert blocks_for_generation_step(16, 9, 0, AttentionWindow(16, 16, 16)) == 0


@given(prompt_len=lengths, new=lengths, tokens_per_block=block_sizes)
def test_the_need_to_completion_is_enough_and_at_most_one_block_too_much(prompt_len, new, tokens_per_block):
    need = blocks_to_last_token(prompt_len, new, 0, 0, endless(tokens_per_block))
    taken = blocks_of_prompt(prompt_len, tokens_per_block) + grown(prompt_len, new - 1, tokens_per_block, 1)
    assert taken <= need <= taken + 1


@given(prompt_len=lengths, new=lengths, tokens_per_block=block_sizes, generated=st.integers(0, 70))
def test_what_is_held_and_what_is_needed_add_up_at_every_step(prompt_len, new, tokens_per_block, generated):
    held = blocks_of_prompt(prompt_len, tokens_per_block) + grown(
        prompt_len, min(generated, new - 1), tokens_per_block, 1)
    window = endless(tokens_per_block)
    assert held + blocks_to_last_token(prompt_len, new, generated, held, window) == blocks_to_last_token(
        prompt_len, new, 0, 0, window)


def test_beams_count_once_for_what_they_share():
    # 20 prompt tokens: the beams share two blocks. Each has its own third block, and its own blocks for 8 new tokens.
    assert blocks_to_last_token(20, 8, 0, 0, endless(8), beam_width=3) == 2 + 2 * 3
    assert blocks_to_last_token(20, 8, 1, 3, endless(8), beam_width=3) == 3


@given(prompt_len=lengths, drafts=st.integers(0, 9), tokens_per_block=block_sizes)
def test_a_first_chunk_takes_its_whole_prompt_and_room_for_the_drafts(prompt_len, drafts, tokens_per_block):
    assert blocks_for_first_chunk(prompt_len, drafts, 5, endless(tokens_per_block)) == blocks_of_prompt(
        prompt_len + drafts, tokens_per_block)
