"""The schedulers make the expected schedules, which are written as tables.

A table has a row for each iteration and a column for each request. C5: five context tokens were computed; G: a token
was generated; P: the request was paused.
"""

from batch_manager.names import ContextChunkingPolicy, SchedulerPolicy

FCFS = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS
NO_EVICT = SchedulerPolicy.GUARANTEED_NO_EVICT
PICTURE_OF_THE_SEED = [(5, 2), (5, 4), (5, 4), (5, 4), (5, 4)]         # request 0 stops at its second token


def test_the_scheduler_picture_of_the_seed_under_both_policies(timeline):
    # max_batch_size 4, max_num_tokens 12
    for policy in SchedulerPolicy:
        assert timeline(PICTURE_OF_THE_SEED, policy=policy) == """\
C5 C5 .  .  .
G  G  C5 C5 .
.  G  G  G  C5
.  G  G  G  G
.  .  G  G  G
.  .  .  .  G"""


def test_the_chunked_picture_of_the_seed_starts_the_third_request_at_once(timeline):
    assert timeline(PICTURE_OF_THE_SEED, chunking=FCFS) == """\
C5 C5 C2 .  .
G  G  C3 C5 .
.  G  G  G  C5
.  G  G  G  G
.  .  G  G  G
.  .  .  .  G"""


def test_first_come_first_served_finishes_one_prompt_after_the_other(timeline):
    assert timeline([(12, 2), (4, 2), (4, 2)], chunking=FCFS, max_num_tokens=8) == """\
C8 .  .
C4 C4 .
G  G  C4
.  .  G"""


def test_equal_progress_advances_all_prompts_together(timeline):
    assert timeline([(12, 2), (4, 2), (4, 2)], chunking=EQUAL_PROGRESS, max_num_tokens=8) == """\
C4 C2 C2
C4 C2 C2
C4 G  G
G  .  ."""


def test_a_short_prompt_uses_the_tail_a_long_one_cannot(timeline):
    # After request 0's chunk one token is left: no whole block for request 1, but all of request 2.
    assert timeline([(10, 1), (4, 1), (1, 1)], chunking=FCFS, max_num_tokens=11) == """\
C10 .   C1
.   C4  ."""


def test_without_chunking_nobody_overtakes_a_prompt_that_does_not_fit(timeline):
    assert timeline([(8, 2), (8, 2), (1, 2)], max_num_tokens=12) == """\
C8 .  .
G  C8 C1
.  G  G"""


def test_guaranteed_no_evict_starts_a_request_only_when_it_can_finish(timeline):
    # 6 blocks of 2; each request needs 5 to its last token.
    assert timeline([(4, 6), (4, 6)], num_blocks=6, policy=NO_EVICT) == """\
C4 .
G  .
G  .
G  .
G  .
G  .
.  C4
.  G
.  G
.  G
.  G
.  G"""


def test_max_utilization_starts_both_pauses_the_younger_and_computes_it_again(timeline):
    # The same pool. The paused request comes back with the three tokens it had generated in its context.
    assert timeline([(4, 6), (4, 6)], num_blocks=6) == """\
C4 C4
G  G
G  G
G  P
G  .
G  .
.  C7
.  G
.  G"""


def test_the_youngest_are_paused_first_and_come_back_in_order(timeline):
    assert timeline([(4, 4), (18, 2), (2, 2)], num_blocks=12, max_num_tokens=100) == """\
C4  C18 C2
G   P   P
G   .   .
G   .   .
.   C19 C3"""


def test_no_evict_lets_nobody_overtake_a_large_request(timeline):
    # Request 2 would fit beside request 0 at once; request 1 stands before it.
    assert timeline([(4, 4), (18, 2), (2, 2)], num_blocks=12, max_num_tokens=100, policy=NO_EVICT) == """\
C4  .   .
G   .   .
G   .   .
G   .   .
.   C18 C2
.   G   G"""


def test_a_more_important_request_goes_to_the_front_and_others_make_room(timeline):
    assert timeline([(6, 4), (4, 4), (4, 4, 2, 0.9)], num_blocks=6) == """\
C6 C4 .
G  P  .
G  .  C4
P  .  G
.  .  G
.  .  G
C9 .  .
.  C5 .
.  G  .
.  G  ."""


def test_a_request_between_chunks_is_paused_as_well(timeline):
    # Request 1's whole prompt is claimed with its first chunk; request 0 needs one of its blocks while it computes.
    assert timeline([(6, 8), (12, 1)], chunking=FCFS, num_blocks=10, max_num_tokens=8, tokens_per_block=2) == """\
C6 C2
G  C6
G  C4
G  .
G  .
G  .
G  .
G  ."""
    assert timeline([(6, 8), (12, 1)], chunking=FCFS, num_blocks=9, max_num_tokens=8, tokens_per_block=2) == """\
C6 C2
G  P
G  .
G  .
G  .
G  .
G  .
G  .
.  C8
.  C4"""


def test_a_paused_context_that_outgrew_the_step_goes_on_in_whole_blocks(timeline):
    # Chunking is off, a step holds 7 tokens, request 1 comes back with 8.
    assert timeline([(6, 8), (6, 8)], num_blocks=8, max_num_tokens=7) == """\
C6 .
G  C6
G  G
G  P
G  .
G  .
G  .
G  .
.  C6
.  C2
.  G
.  G
.  G
.  G
.  G"""


def test_under_no_evict_a_half_computed_prompt_finishes_behind_a_more_important_one_that_cannot_start(timeline):
    # Request 0 holds 8 of 10 blocks between its chunks. Request 1 is more important, needs 6 and has to wait for them;
    # if request 0 waited too, neither would ever run.
    assert timeline([(16, 2), (10, 2, 1, 0.9)], policy=NO_EVICT, chunking=FCFS, num_blocks=10,
                    max_num_tokens=6) == """\
C6 .
C6 .
C4 .
G  .
.  C6
.  C4
.  G"""


def test_a_batch_never_holds_more_than_max_batch_size(timeline):
    assert timeline([(1, 2)] * 5, max_batch_size=2) == """\
C1 C1 .  .  .
G  G  .  .  .
.  .  C1 C1 .
.  .  G  G  .
.  .  .  .  C1
.  .  .  .  G"""
