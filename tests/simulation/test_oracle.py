"""The oracle agrees with the scripted backend's oracle, with an enumeration of all outputs and with manual cases."""

from itertools import product
from random import Random

import pytest

from batch_manager.testing.scripted_tokens import expected_candidates, expected_samples
from tests.simulation.history import Handed, Sent, judge, scripted_oracle
from tests.simulation.oracle import END_ID, LENGTH, STOP_WORDS, forbidden

PROMPT = [1, 2, 3]


def model(vocab_size=50, **options):
    return {"vocab_size": vocab_size, "key": 3, "window": None, "sink": 0, "max_seq_len": 40, **options}


def asks(prompt=PROMPT, max_new_tokens=9, **options):
    return Handed(1.0, 1, prompt=list(prompt), max_new_tokens=max_new_tokens, **options)


@pytest.mark.parametrize("seed", range(20))
def test_two_who_wrote_the_model_down_agree(seed):
    rng = Random(seed)
    options = {"vocab_size": rng.choice([2, 7, 300]), "key": rng.getrandbits(64),
               "window": rng.choice([None, 4, 9]), "sink": rng.choice([0, 2])}
    prompt = rng.choices(range(options["vocab_size"]), k=rng.randint(1, 15))
    end_id, random_seed = rng.choice([-1, 0, 1]), rng.choice([None, 0, 5])
    text = scripted_oracle(options).text(asks(prompt, 25, end_id=end_id, seed=random_seed), 25, 25)
    assert list(zip(text.tokens, text.log_probs)) == expected_samples(
        prompt, 25, end_id=end_id, random_seed=random_seed, **options)
    assert text.reason == (LENGTH if len(text.tokens) == 25 else END_ID)


@pytest.mark.parametrize("seed", range(6))
def test_a_search_wide_enough_finds_the_best_of_all_texts(seed):
    vocab, length = 3, 3
    options = model(vocab, key=seed)
    worth = {}
    for text in product(range(vocab), repeat=length):
        probs = [dict(expected_candidates([*PROMPT, *text[:i]], vocab, vocab_size=vocab, key=seed))[text[i]]
                 for i in range(length)]
        worth[text] = sum(probs)
    found = scripted_oracle(options).beams(asks(max_new_tokens=length, beam_width=vocab**length), length)
    assert [tuple(text.tokens) for text in found] == sorted(worth, key=lambda text: -worth[text])
    assert [text.sum for text in found] == sorted(worth.values(), reverse=True)


def test_what_may_not_follow():
    assert forbidden(asks(end_id=7, min_length=2), [*PROMPT, 5], 7)
    assert not forbidden(asks(end_id=7, min_length=2), [*PROMPT, 5, 5], 7)
    assert forbidden(asks(bad_words=[[2, 3, 4], [9]]), PROMPT, 4) and forbidden(asks(bad_words=[[9]]), [1], 9)
    assert not forbidden(asks(bad_words=[[2, 3, 4]]), [3], 4)
    repeats = asks(no_repeat_ngram_size=2)
    assert forbidden(repeats, [1, 2, 3, 1], 2) and not forbidden(repeats, [1, 2, 3, 1], 3)
    assert forbidden(asks(no_repeat_ngram_size=1), [1, 2], 1) and not forbidden(asks(no_repeat_ngram_size=3), [1], 1)


def test_a_stop_word_ends_a_text_with_its_last_token_wherever_it_began():
    oracle = scripted_oracle(model())
    first, second, third = oracle.text(asks(), 9, 3).tokens
    for word, length in (([first, second], 2), ([2, 3, first], 1), ([third], 3)):
        text = oracle.text(asks(stop_words=[[49, 49, 49, 49], word]), 9, 9)
        assert (text.reason, text.tokens) == (STOP_WORDS, [first, second, third][:length])


def beams_of(item: Handed, options: dict) -> list[list]:
    """Return the beams that the oracle expects, in the form of `history.Sent.beams`."""
    return [[PROMPT + text.tokens, text.reason, text.sum, text.log_probs]
            for text in scripted_oracle(options).beams(item, item.max_new_tokens)]


def anomalies(item: Handed, beams: list[list], options: dict) -> list[str]:
    return judge(options, [item, Sent(2.0, 1, True, "", beams[0][0], beams[0][1], beams=beams)])


def test_a_history_with_wrong_beams_is_flagged():
    options, item = model(7), asks(beam_width=3, end_id=2, len_penalty=1.0, early_stopping=0, log_probs=True)
    good = beams_of(item, options)
    assert len({len(tokens) for tokens, *_ in good}) > 1 and anomalies(item, good, options) == []
    other_sum, other_reason, other_token = [[list(beam) for beam in good] for _ in range(3)]
    other_sum[1][2] += 1 / 4096
    other_reason[2][1] = STOP_WORDS
    other_token[2][0] = [*other_token[2][0][:-1], (other_token[2][0][-1] + 1) % 7]
    for bad in (good[::-1], good[:2], other_sum, other_reason, other_token,
                [[tokens[1:], *rest] for tokens, *rest in good]):
        assert {anomaly[:2] for anomaly in anomalies(item, bad, options)} == {"I8"}, bad


def test_a_search_that_is_cut_short_shows_its_live_texts_and_none_that_is_over_can_be():
    options, item = model(7), asks(beam_width=2, log_probs=True)
    live = [[PROMPT + text.tokens, 5, text.sum, text.log_probs]
            for text in scripted_oracle(options).live_beams(item, 9, 4)]
    assert [anomaly[:2] for anomaly in anomalies(item, live, options)] == ["I7"]        # no poll had stopped it
    assert [anomaly[:2] for anomaly in anomalies(item, live[::-1], options)] == ["I8", "I7"]
    assert scripted_oracle(options).live_beams(item, 9, 9) is None
