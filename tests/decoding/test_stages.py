"""Stages change logits and end sequences as transformers does, whatever other rows are in the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_manager.decoding.decoder import GptDecoder
from batch_manager.decoding.history import TokenHistory
from batch_manager.decoding.logits_rows import LogitsRows
from batch_manager.decoding.slots import STAGES, SlotState
from batch_manager.decoding.word_lists import SMALLEST_HEAP, WordLists
from batch_manager.handover import END_ID, NOT_FINISHED, STOP_WORDS, SlotSetup
from batch_manager.sampling_config import SamplingConfig
from batch_manager.triton_kernels.cpu.ban_ngrams import repeating_tokens

VOCAB = 60
CPU = torch.device("cpu")


def random_logits(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def random_setup(random, prompt_length):
    """Return a setup with a random mixture of features, each of which is off half of the time."""
    def maybe(value, neutral):
        return value() if random.random() < 0.5 else neutral

    def words():
        return tuple(tuple(random.integers(0, 6, random.integers(1, 4)).tolist()) for _ in range(random.integers(1, 6)))

    sampling = SamplingConfig(
        repetition_penalty=maybe(lambda: float(random.uniform(0.3, 3)), 1.0),
        presence_penalty=maybe(lambda: float(random.normal()), 0.0),
        frequency_penalty=maybe(lambda: float(random.normal()), 0.0),
        prompt_ignore_length=maybe(lambda: int(random.integers(30)), 0),
        no_repeat_ngram_size=maybe(lambda: int(random.integers(1, 5)), 0),
        min_length=maybe(lambda: int(random.integers(1, 30)), 0))
    return SlotSetup(
        sampling, end_id=maybe(lambda: int(random.integers(VOCAB)), -1),
        bad_words=maybe(words, ()), stop_words=maybe(words, ()),
        embedding_bias=maybe(lambda: random.normal(size=VOCAB).astype(np.float32), None),
        return_log_probs=maybe(lambda: True, False), prompt_length=prompt_length)


def as_transformers_would(setup, tokens, logits):
    """Return the logits [VOCAB] of the token after `tokens`, changed by the logits processors of transformers.

    Presence and frequency penalties, which transformers lacks, follow their definition.
    """
    processors = pytest.importorskip("transformers.generation.logits_process")
    ids, scores = torch.tensor([tokens]), logits[None].clone()
    if setup.embedding_bias is not None:
        scores += torch.from_numpy(setup.embedding_bias)
    if setup.sampling.repetition_penalty != 1:
        scores = processors.RepetitionPenaltyLogitsProcessor(setup.sampling.repetition_penalty)(ids, scores)
    counted = tokens[min(setup.sampling.prompt_ignore_length, setup.prompt_length):]
    counts = torch.tensor([counted.count(token) for token in range(VOCAB)])
    scores = scores - setup.sampling.presence_penalty * (counts > 0) - setup.sampling.frequency_penalty * counts
    if setup.sampling.no_repeat_ngram_size:
        scores = processors.NoRepeatNGramLogitsProcessor(setup.sampling.no_repeat_ngram_size)(ids, scores)
    if setup.bad_words:
        scores = processors.NoBadWordsLogitsProcessor([list(word) for word in setup.bad_words])(ids, scores)
    if setup.sampling.min_length and setup.end_id >= 0:
        scores = processors.MinNewTokensLengthLogitsProcessor(
            setup.prompt_length, setup.sampling.min_length, setup.end_id)(ids, scores)
    return scores[0]


@pytest.mark.parametrize("seed", range(8))
def test_a_mixed_batch_equals_transformers(decoder_with, rows_of, seed):
    random = np.random.default_rng(seed)
    histories = [random.integers(0, 8 if random.random() < 0.7 else VOCAB, random.integers(1, 40)).tolist()
                 for _ in range(40)]
    setups = [random_setup(random, int(random.integers(1, len(tokens) + 1))).continuing(tokens) for tokens in histories]
    logits = random_logits(40, seed)
    expected = torch.stack([as_transformers_would(*row) for row in zip(setups, histories, logits)])
    order = random.permutation(40)
    changed = logits[order].clone()
    sampled = decoder_with(*setups).sample(changed, rows_of(order, [len(histories[slot]) for slot in order]))
    torch.testing.assert_close(changed, expected[order], rtol=1e-6, atol=1e-5)
    alive = sampled.finite.numpy()
    assert sampled.tokens[alive].tolist() == expected[order][alive].argmax(1).tolist() and alive.sum() > 35
    asked = [row for row, slot in enumerate(order) if setups[slot].return_log_probs and alive[row]]
    torch.testing.assert_close(
        sampled.log_probs[asked],
        expected[order][asked].log_softmax(1).gather(1, sampled.tokens[asked, None].long())[:, 0])


@settings(deadline=None, max_examples=200)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=20), size=st.integers(1, 8))
def test_repeating_tokens_by_definition(tokens, size):
    last = tokens[len(tokens) - size + 1:]
    expected = {tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tokens[i:i + size - 1] == last}
    assert set(repeating_tokens(np.array(tokens, np.int32), size).tolist()) == expected


def test_a_bad_word_may_begin_in_the_prompt_and_one_token_is_banned_always(decoder_with, rows_of):
    setups = [SlotSetup(bad_words=((1, 2, 9),), prompt_length=2).continuing([1, 2]),
              SlotSetup(bad_words=((1, 2, 9), (5,)), prompt_length=3).continuing([1, 2, 3]),
              SlotSetup(bad_words=((0,),))]
    logits = torch.zeros(3, VOCAB)
    decoder_with(*setups).sample(logits, rows_of([0, 1, 2], [2, 3, 7]))
    assert logits.isneginf().nonzero().tolist() == [[0, 9], [1, 5], [2, 0]]


def test_the_end_id_is_banned_until_enough_was_generated_whatever_was_paused(decoder_with, rows_of):
    sampling = SamplingConfig(min_length=3)
    decoder = decoder_with(SlotSetup(sampling, end_id=4, prompt_length=10), SlotSetup(sampling))
    for position, banned in ((10, True), (11, True), (12, True), (13, False), (14, False)):
        logits = torch.zeros(2, VOCAB)
        decoder.sample(logits, rows_of([0, 1], [position, position]))
        assert logits.isneginf().sum() == banned and logits[0, 4].isneginf() == banned


def test_all_end_ids_are_banned_until_enough_was_generated(decoder_with, rows_of):
    sampling = SamplingConfig(min_length=3)
    decoder = decoder_with(SlotSetup(sampling, end_id=4, more_end_ids=(1, 6), prompt_length=10),
                           SlotSetup(sampling, end_id=5, prompt_length=11), SlotSetup(end_id=2, more_end_ids=(3,)))
    for position, banned in ((12, [[0, 1], [0, 4], [0, 6], [1, 5]]), (13, [[1, 5]]), (14, [])):
        logits = torch.zeros(3, VOCAB)
        decoder.sample(logits, rows_of([0, 1, 2], [position] * 3))
        assert logits.isneginf().nonzero().tolist() == banned
    decoder.set_up([(0, SlotSetup(sampling, end_id=4, prompt_length=10))])
    logits = torch.zeros(1, VOCAB)
    decoder.sample(logits, rows_of([0], [10]))
    assert logits.isneginf().nonzero().tolist() == [[0, 4]]


def logits_for(tokens):
    """Return logits from which exactly these tokens are sampled."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


def test_stop_words_end_a_sequence_with_their_last_token(decoder_with, rows_of):
    words = ((7,), (1, 2), (3, 4, 5))
    histories = [[9], [1], [3, 4], [4, 4], [3, 4], [1, 2], [9]]
    setups = [SlotSetup(stop_words=words, prompt_length=1, end_id=8).continuing(tokens) for tokens in histories]
    decoder = decoder_with(*setups, SlotSetup(stop_words=((7,),)), SlotSetup())
    positions = [len(tokens) for tokens in histories]
    sampled = decoder.sample(logits_for([7, 2, 5, 5, 2, 3, 8, 7, 7]), rows_of(range(9), [*positions, 1, 1]))
    assert sampled.finish.tolist() == [STOP_WORDS, STOP_WORDS, STOP_WORDS, NOT_FINISHED, NOT_FINISHED, NOT_FINISHED,
                                       END_ID, STOP_WORDS, NOT_FINISHED]


def test_a_stop_word_may_begin_in_the_prompt_but_not_end_there(decoder_with, rows_of):
    decoder = decoder_with(SlotSetup(stop_words=((1, 2),), prompt_length=2).continuing([1, 2]),
                           SlotSetup(stop_words=((2, 3),), prompt_length=2).continuing([1, 2]))
    assert decoder.sample(logits_for([3, 3]), rows_of([0, 1], [2, 2])).finish.tolist() == [NOT_FINISHED, STOP_WORDS]


def test_an_end_id_that_ends_a_stop_word_is_an_end_id(decoder_with, rows_of):
    decoder = decoder_with(SlotSetup(stop_words=((1, 2),), end_id=2, prompt_length=1).continuing([1]))
    assert decoder.sample(logits_for([2]), rows_of([0], [1])).finish.tolist() == [END_ID]


def test_logits_that_are_returned_are_the_models_own(decoder_with, rows_of):
    logits = random_logits(2)
    setup = SlotSetup(embedding_bias=np.ones(VOCAB, np.float32), bad_words=((3,),), return_generation_logits=True)
    sampled = decoder_with(setup, setup).sample(logits.clone(), rows_of([1, 0], [1, 1]))
    assert torch.equal(sampled.logits, logits)


def test_a_row_whose_tokens_are_all_banned_is_flagged_and_the_others_go_on(decoder_with, rows_of):
    setups = [SlotSetup(bad_words=tuple((token,) for token in range(VOCAB))), SlotSetup()]
    sampled = decoder_with(*setups).sample(random_logits(2), rows_of([0, 1], [1, 1]))
    assert sampled.finite.tolist() == [False, True]


@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
@pytest.mark.parametrize("setup", [
    SlotSetup(bad_words=((7,),)), SlotSetup(SamplingConfig(min_length=5), end_id=7),
    SlotSetup(SamplingConfig(min_length=5), end_id=2, more_end_ids=(7,)),
    SlotSetup(SamplingConfig(no_repeat_ngram_size=1)), SlotSetup(SamplingConfig(no_repeat_ngram_size=1, top_p=0.9))])
def test_a_ban_does_not_hide_that_a_row_is_not_finite(decoder_with, rows_of, setup, fault):
    logits = random_logits(2)
    logits[1, 7] = fault
    decoder = decoder_with(*[replace(setup, prompt_length=1).continuing([7])] * 2)
    assert decoder.sample(logits, rows_of([0, 1], [1, 1])).finite.tolist() == [True, False]
    assert logits[0, 7].isneginf() and logits[1, 7].isnan()


def test_virtual_tokens_of_a_prompt_table_have_no_logit(decoder_with, rows_of):
    tokens = [VOCAB + 3, 5, VOCAB + 3, 6, VOCAB + 3]
    logits = torch.ones(1, VOCAB)
    sampling = SamplingConfig(repetition_penalty=2.0, frequency_penalty=0.25, no_repeat_ngram_size=2)
    setup = SlotSetup(sampling, prompt_length=5)
    decoder_with(setup.continuing(tokens)).sample(logits, rows_of([0], [5]))
    assert logits.isneginf().nonzero().tolist() == [[0, 5], [0, 6]] and (logits == 1).sum() == VOCAB - 2


def test_extreme_penalties_leave_numbers(decoder_with, rows_of):
    for sampling in (SamplingConfig(repetition_penalty=1e-45), SamplingConfig(repetition_penalty=3e38),
                     SamplingConfig(presence_penalty=-3.4e38, frequency_penalty=-3.4e38),
                     SamplingConfig(frequency_penalty=3.4e38)):
        logits = torch.tensor([[3.0, -3.0, 0.0, 1.0]])
        sampled = decoder_with(SlotSetup(sampling).continuing([0, 0, 1, 2, 1])).sample(logits, rows_of([0], [5]))
        assert logits.isfinite().all() and sampled.finite.all()


class Writer:
    """Samples `count` tokens for some of its members. A member is an index into `setups` and `prompts`.

    The logits of a member at a position are the same in every run.
    """

    def __init__(self, setups, prompts, rows_of, count):
        self.setups, self.prompts, self.rows_of, self.count = setups, prompts, rows_of, count
        self.logits = random_logits(len(setups) * 100, seed=9).view(len(setups), 100, VOCAB)

    def run(self, decoder, members, slots, resume_every=0, twice=False):
        """Sample `count` tokens for each of `members`. Return member -> (prompt and output, log-probs of the output).

        slots          slot of each member at the start
        resume_every   number of tokens after which the members are set up again in other slots; 0: never
        twice          run each step twice, as after a failure
        """
        tokens = {member: list(self.prompts[member]) for member in members}
        log_probs = {member: [] for member in members}
        for step in range(self.count):
            if step == 0 or (resume_every and step % resume_every == 0):
                slots = slots if step == 0 else slots[1:] + slots[:1]
                decoder.set_up((slot, self.setups[member].continuing(tokens[member]))
                               for slot, member in zip(slots, members))
            rows = self.rows_of(slots, [len(tokens[member]) for member in members])
            for _ in range(1 + twice):
                logits = torch.stack([self.logits[member, len(tokens[member])] for member in members])
                sampled = decoder.sample(logits, rows)
                decoder.keep(sampled)
            assert sampled.finite.all()
            for row, member in enumerate(members):
                tokens[member].append(int(sampled.tokens[row]))
                log_probs[member].append(float(sampled.log_probs[row]))
        return {member: (tokens[member], log_probs[member]) for member in members}


def test_tokens_are_the_same_alone_batched_resumed_in_another_slot_and_in_steps_that_run_twice(way, rows_of):
    random = np.random.default_rng(1)
    count, members = 20, list(range(24))
    prompts = [random.integers(0, VOCAB, random.integers(1, 30)).tolist() for _ in members]
    setups = []
    for prompt in prompts:
        setup = random_setup(random, len(prompt))
        sampling = {"random_seed": int(random.integers(2**63))}
        if random.random() < 0.7:
            sampling |= {"temperature": 1.5, "top_p": 0.95, "min_p": float(random.choice([0, 0.02])),
                         "top_p_decay": float(random.choice([1, 0.8])), "top_p_min": 0.2,
                         "top_p_reset_ids": int(random.integers(VOCAB)), "top_k": int(random.choice([0, 20]))}
        setups.append(replace(setup, sampling=replace(setup.sampling, **sampling), return_log_probs=True))
    writer = Writer(setups, prompts, rows_of, count)

    alone = {}
    for member in members:
        alone |= writer.run(GptDecoder(SlotState(1, CPU)), [member], [0])
    shuffled = random.permutation(24).tolist()
    for options in ({}, {"twice": True}, {"resume_every": 1}, {"resume_every": 3, "twice": True}):
        together = writer.run(GptDecoder(SlotState(4, CPU)), members, shuffled, **options)
        for member in members:
            assert together[member] == alone[member], options


def test_what_a_slot_had_before_is_gone(decoder_with, rows_of):
    random = np.random.default_rng(5)
    tokens = [1, 2, 3, 1, 2]
    decoder = decoder_with(*(random_setup(random, 2).continuing(tokens) for _ in range(20)))
    decoder.set_up((slot, SlotSetup()) for slot in range(20))
    logits = random_logits(20)
    changed = logits.clone()
    sampled = decoder.sample(changed, rows_of(range(20), [5] * 20))
    assert torch.equal(changed, logits) and not sampled.finish.any()


def test_without_features_nothing_is_kept_and_no_stage_is_run(decoder_with, rows_of):
    decoder = decoder_with(SlotSetup(SamplingConfig(top_p=0.5), end_id=3), SlotSetup())
    rows = rows_of([0, 1], [5, 6])
    decoder.keep(decoder.sample(random_logits(2), rows))
    assert decoder.history.tokens.numel() == 0
    assert not LogitsRows(rows, decoder.state, decoder.history).features & STAGES


def test_a_history_grows_with_its_sequences_and_their_number(decoder_with, rows_of):
    decoder = decoder_with(SlotSetup(SamplingConfig(no_repeat_ngram_size=1)).continuing([0]), num_slots=1)
    for position in range(1, 50):
        if position == 20:
            decoder.set_up([(9, SlotSetup(SamplingConfig(no_repeat_ngram_size=1)).continuing([0]))])
        rows = rows_of([0], [position])
        sampled = decoder.sample(torch.arange(VOCAB, 0, -1.0)[None], rows)
        assert sampled.tokens.tolist() == [position]
        decoder.keep(sampled)
    sampled = decoder.sample(torch.arange(VOCAB, 0, -1.0).repeat(2, 1), rows_of([9, 0], [1, 50]))
    assert sampled.tokens.tolist() == [1, 50]


def test_word_lists_on_the_heap_survive_its_moves(rows_of):
    random, state = np.random.default_rng(2), SlotState(2, CPU)
    lists, kept = WordLists("words", state), {}
    for turn in range(300):
        slot = int(random.integers(30))
        kept[slot] = [random.integers(0, 99, random.integers(1, 20)).tolist() for _ in range(random.integers(0, 9))]
        state.set_up(slot, SlotSetup())
        lists.put(slot, kept[slot])
        if turn % 10 == 0:
            slots = sorted(kept)
            rows = LogitsRows(rows_of(slots, [0] * len(slots)), state, TokenHistory(state))
            heap, starts, counts = lists.lists_of(rows)
            assert lists.longest_list(rows) == max(len(kept[slot]) for slot in slots)
            for slot, start, count in zip(slots, starts.tolist(), counts.tolist()):
                numbers = heap[start:].tolist()
                ends, tokens = numbers[:count], numbers[count:]
                assert [tokens[begin:end] for begin, end in zip([0, *ends], ends)] == kept[slot]
    assert SMALLEST_HEAP < len(lists._heap) < 10_000
