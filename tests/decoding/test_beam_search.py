"""Beam search on given log-probs finds the hypotheses of transformers, and those of its definition in plain Python.

With enough beams, it finds the best of all possible outputs.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from batch_manager.decoding.beam_search import BeamSearch, BeamSearches
from batch_manager.decoding.beam_stop_words import BeamStopWords
from batch_manager.handover import END_ID, LENGTH, STOP_WORDS, GenerationWork, SlotSetup
from batch_manager.sampling_config import SamplingConfig

EARLY_STOPPING = {1: True, 0: False, 2: "never"}


def candidates(search, rows):
    """Return the search's best candidates as the operation `beam_topk` does: log-probs, parent beams and tokens.

    rows   [beams, vocab] float32 log-probs of the next tokens
    """
    found, diversity = [], search.sampling.beam_search_diversity_rate
    for beam, row in enumerate(rows):
        if search.cum_log_probs[beam] > -np.inf:
            ranks = np.argsort(-row, kind="stable")
            found += [(np.float32(search.cum_log_probs[beam] + row[token]) - diversity * rank, beam, token)
                      for rank, token in enumerate(ranks.tolist()) if row[token] > -np.inf]
    found = sorted(found, key=lambda candidate: -candidate[0])[:search.num_candidates]
    found += [(None, 0, 0)] * (search.num_candidates - len(found))
    log_probs = [-np.inf if score is None else rows[beam][token] for score, beam, token in found]
    return (np.array(log_probs, np.float32), np.array([beam for _, beam, _ in found], np.int32),
            np.array([token for *_, token in found], np.int32))


def beams(width, max_new_tokens, len_penalty=0.0, early_stopping=1, diversity_rate=0.0):
    """Return the setup of a request with `width` beams."""
    sampling = SamplingConfig(beam_width=width, len_penalty=len_penalty, early_stopping=early_stopping,
                              beam_search_diversity_rate=diversity_rate)
    return SlotSetup(sampling, max_new_tokens=max_new_tokens)


def run(setup, end_id, follows, stop_words=(), prompt=(0,)):
    """Run the search of a request to its end. Return its hypotheses and the outputs of all steps.

    end_id    an end id, a list of end ids, or -1 for none
    follows   returns the log-probs [beams, vocab] of the next token, given each beam's output so far
    """
    end_ids = [end_id] if isinstance(end_id, int) else end_id
    search, texts, outputs = BeamSearch.of(
        replace(setup, end_id=end_ids[0], more_end_ids=tuple(end_ids[1:]), stop_words=stop_words).continuing(prompt)
    ), [()], []
    while not outputs or outputs[-1].hypotheses is None:
        before = search.cum_log_probs
        search, output = search.advance(*candidates(search, follows(texts)))
        assert search.cum_log_probs.tolist() == (before[output.parents] + output.log_probs).tolist()
        texts = [(*texts[parent], token) for parent, token in zip(output.parents.tolist(), output.tokens.tolist())]
        assert search.last_tokens.tolist() == [text[-1] for text in texts]
        assert search.outputs is None if not stop_words else [tuple(text) for text in search.outputs.tolist()] == texts
        outputs.append(output)
        assert len(outputs) <= setup.max_new_tokens
    return outputs[-1].hypotheses, outputs


def worth(hypothesis, setup):
    length = len(hypothesis.tokens) + (hypothesis.finish == END_ID)
    return hypothesis.cum_log_prob / length**setup.sampling.len_penalty


@pytest.fixture(scope="module")
def tiny_model():
    """Return a transformers model with a vocabulary of eleven tokens and peaked distributions."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2, n_positions=64,
                                     initializer_range=0.6, bos_token_id=None, eos_token_id=None)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def follows_in(tiny_model):
    """follows_in(prompt) returns a function `follows` for `run`, which runs `tiny_model` without a KV cache."""
    import torch

    known = {}

    def of_prompt(prompt):
        def follows(texts):
            missing = [text for text in dict.fromkeys(texts) if (prompt, text) not in known]
            if missing:
                with torch.inference_mode():
                    logits = tiny_model(torch.tensor([[*prompt, *text] for text in missing])).logits[:, -1]
                known.update({(prompt, text): row.numpy()
                              for text, row in zip(missing, logits.float().log_softmax(-1), strict=True)})
            return np.stack([known[prompt, text] for text in texts])

        return follows

    return of_prompt


@pytest.mark.parametrize("early_stopping", list(EARLY_STOPPING))
@pytest.mark.parametrize("len_penalty", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_the_beams_of_transformers_all_of_them_in_order(tiny_model, follows_in, width, len_penalty, early_stopping):
    import torch

    finishes = set()
    for prompt, end_id, count in [((1, 2, 3), 6, 14), ((5,), 4, 9), ((7, 1), 2, 12), ((9, 9), 4, 1), ((4, 8), None, 6),
                                  ((1, 2, 3), [6, 1, 9], 14), ((7, 1), [2, 4, 6, 8, 0, 3, 5, 7], 9)]:
        with torch.inference_mode():
            expected = tiny_model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width,
                num_return_sequences=width, do_sample=False, max_new_tokens=count, length_penalty=len_penalty,
                early_stopping=EARLY_STOPPING[early_stopping], eos_token_id=end_id,
                pad_token_id=end_id[0] if isinstance(end_id, list) else end_id or 0,
                return_dict_in_generate=True, output_scores=True)
        setup = beams(width, count, len_penalty, early_stopping)
        hypotheses, _ = run(setup, -1 if end_id is None else end_id, follows_in(prompt))

        texts = [sequence[len(prompt):] for sequence in expected.sequences.tolist()]
        if end_id is not None:
            ends = {end_id} if isinstance(end_id, int) else set(end_id)
            texts = [list(itertools.takewhile(lambda token, ends=ends: token not in ends, text)) for text in texts]
        assert [hypothesis.tokens.tolist() for hypothesis in hypotheses] == texts
        np.testing.assert_allclose([worth(hypothesis, setup) for hypothesis in hypotheses],
                                   expected.sequences_scores.numpy(), atol=1e-5, rtol=0)
        finishes.update(hypothesis.finish for hypothesis in hypotheses)
    assert finishes == {END_ID, LENGTH}


@pytest.mark.parametrize("len_penalty", [0.0, 1.0, 3.0])
def test_with_beams_enough_nothing_better_exists(len_penalty):
    """With more beams than outputs of up to four tokens from a vocabulary of three, the best output is found."""
    random = np.random.default_rng(1)
    table = {}

    def follows(texts):
        for text in texts:
            if text not in table:
                logits = random.normal(size=3) * 2
                table[text] = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        return np.stack([table[text] for text in texts])

    setup = beams(40, 4, len_penalty, early_stopping=2)
    hypotheses, _ = run(setup, 2, follows)
    scores = {}
    for length in range(1, 5):
        for text in itertools.product(range(3), repeat=length):
            if 2 not in text[:-1] and (text[-1] == 2 or length == 4):
                follows([text[:i] for i in range(length)])
                scores[text] = sum(table[text[:i]][text[i]] for i in range(length)) / length**len_penalty
    best = max(scores, key=scores.get)
    found = tuple(hypotheses[0].tokens.tolist()) + (2,) * (hypotheses[0].finish == END_ID)
    assert found == best
    assert worth(hypotheses[0], setup) == pytest.approx(scores[best], abs=1e-5)
    assert len(hypotheses) == len(scores)        # fewer than beams: no more sequences exist


def by_the_book(setup, end_id, follows, stop_words, prompt):
    """Search by the definition of beam search, with lists and floats. The arguments are those of `run`.

    Returns the hypotheses, best first: [(output without the end id, finish, score)].
    """
    live, finished = [((), 0.0)], []

    def ends(text):
        if text[-1] == end_id:
            return END_ID
        whole = (*prompt, *text)
        return STOP_WORDS if any(whole[-len(word):] == word for word in stop_words) else None

    width, len_penalty = setup.sampling.beam_width, setup.sampling.len_penalty
    ways = len({word[-1] for word in stop_words} | {end_id} - {-1})
    for length in range(1, setup.max_new_tokens + 1):
        rows = follows([text for text, _ in live])
        found = sorted(((*text, token), total + float(log_prob)) for (text, total), row in zip(live, rows)
                       for token, log_prob in enumerate(row))
        found = sorted(found, key=lambda one: -one[1])[:max(2, 1 + ways) * width]
        for text, total in found[:width]:
            finish = ends(text) or (LENGTH if length == setup.max_new_tokens else None)
            if finish is not None:
                finished.append((text[:-1] if finish == END_ID else text, finish, total / length**len_penalty))
        finished = sorted(finished, key=lambda one: -one[2])[:width]
        live = [one for one in found if ends(one[0]) is None][:width]
        if not live or (len(finished) == width and (
                setup.sampling.early_stopping == 1 or live[0][1] / length**len_penalty <= finished[-1][2])):
            break
    return finished


def random_table(seed, vocab_size):
    random, table = np.random.default_rng(seed), {}

    def follows(texts):
        for text in texts:
            if text not in table:
                table[text] = np.log(random.dirichlet(np.ones(vocab_size))).astype(np.float32)
        return np.stack([table[text] for text in texts])

    return follows


@pytest.mark.parametrize("early_stopping", [0, 1])
@pytest.mark.parametrize("stop_words", [
    ((3,),), ((3,), (4,), (5,), (0, 1)), ((1, 2), (6, 0), (2, 5, 2)), ((9, 6, 1), (4, 4))], ids=str)
def test_texts_that_end_in_a_stop_word_are_finished_with_it(stop_words, early_stopping):
    """A search with stop words has the hypotheses of `by_the_book`. A stop word may begin in the prompt (9, 6).

    In the cases with several stop words of one token, beams that end can make up most of a step's candidates.
    """
    finishes = []
    for seed, width in itertools.product(range(12), (2, 3, 4)):
        setup, follows = beams(width, 7, 1.0, early_stopping), random_table(seed, 7)
        hypotheses, _ = run(setup, 2, follows, stop_words, prompt=(9, 6))
        expected = by_the_book(setup, 2, follows, stop_words, (9, 6))
        assert [(tuple(one.tokens.tolist()), one.finish) for one in hypotheses] == [one[:2] for one in expected]
        np.testing.assert_allclose([worth(one, setup) for one in hypotheses], [one[2] for one in expected], atol=1e-5)
        assert all(len(one.log_probs) == len(one.rows) == len(one.tokens) for one in hypotheses)
        finishes += [one.finish for one in hypotheses]
    assert STOP_WORDS in finishes and END_ID in finishes


def test_single_stop_words_are_more_end_ids_of_transformers(tiny_model, follows_in):
    import torch

    stopped = 0
    for prompt, ids, width in [((1, 2, 3), [6, 4, 9], 3), ((5,), [4, 0], 2), ((7, 1), [2, 3, 8, 5], 4)]:
        with torch.inference_mode():
            expected = tiny_model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width,
                num_return_sequences=width, do_sample=False, max_new_tokens=9, length_penalty=1.0, early_stopping=False,
                eos_token_id=ids, pad_token_id=11, return_dict_in_generate=True, output_scores=True)
        setup = beams(width, 9, 1.0, early_stopping=0)
        hypotheses, _ = run(setup, -1, follows_in(prompt), tuple((token,) for token in ids))
        assert [hypothesis.tokens.tolist() for hypothesis in hypotheses] == [
            [token for token in sequence[len(prompt):] if token != 11] for sequence in expected.sequences.tolist()]
        np.testing.assert_allclose([worth(hypothesis, setup) for hypothesis in hypotheses],
                                   expected.sequences_scores.numpy(), atol=1e-5, rtol=0)
        stopped += sum(hypothesis.finish == STOP_WORDS for hypothesis in hypotheses)
    assert stopped > 3


def test_thirty_stop_words_with_thirty_two_beams_are_more_end_ids_of_transformers_too():
    """A search of 32 beams with 30 stop words of one token agrees with transformers, where they are additional end ids.

    The stop words are the likeliest tokens, so that more than half of the best 2 * 32 continuations have ended.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64,
                                     initializer_range=0.6, bos_token_id=None, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    width, many_ended = 32, 0
    for prompt in [(40, 41), (33,), (1, 2)]:
        with torch.inference_mode():
            likely = model(torch.tensor([prompt])).logits[0].softmax(-1).mean(0).topk(31).indices.tolist()
            expected = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width,
                num_return_sequences=width, do_sample=False, max_new_tokens=6, length_penalty=2.0, early_stopping=False,
                eos_token_id=likely, pad_token_id=64, return_dict_in_generate=True, output_scores=True)

        def follows(texts, prompt=prompt):
            with torch.inference_mode():
                return model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1].log_softmax(-1).numpy()

        *words, end_id = likely
        setup = beams(width, 6, 2.0, early_stopping=0)
        search, texts = BeamSearch.of(replace(setup, end_id=end_id, stop_words=tuple(
            (token,) for token in words))), [()]
        for _ in range(2):
            best = candidates(search, follows(texts))
            many_ended += int(np.isin(best[2][:2 * width], likely).sum() > width)
            search, output = search.advance(*best)
            texts = [(*texts[parent], token) for parent, token in zip(output.parents.tolist(), output.tokens.tolist())]

        hypotheses, _ = run(setup, end_id, follows, tuple((token,) for token in words))
        assert [hypothesis.tokens.tolist() + [end_id] * (hypothesis.finish == END_ID) for hypothesis in hypotheses] == [
            [token for token in sequence[len(prompt):] if token != 64] for sequence in expected.sequences.tolist()]
        np.testing.assert_allclose([worth(hypothesis, setup) for hypothesis in hypotheses],
                                   expected.sequences_scores.numpy(), atol=1e-5, rtol=0)
    assert many_ended > 1


def test_as_many_candidates_as_there_are_ways_to_end():
    def of(width, words, end_id=-1):
        setup = SlotSetup(SamplingConfig(beam_width=width), end_id=end_id, max_new_tokens=5, stop_words=words)
        return BeamSearch.of(setup.continuing([1])).num_candidates

    assert of(4, ()) == of(4, (), 3) == of(4, ((3,),), 3) == of(4, ((1, 3), (3,))) == 8
    assert of(4, ((5,), (6, 7)), 3) == 16 and of(2, tuple((token,) for token in range(100))) == 202
    assert of(40, ((5,), (6,), (7,))) == 160 and of(32, tuple((token,) for token in range(30)), 99) == 32 * 32


def test_a_word_longer_than_the_text_and_the_prompt_is_not_there():
    words = BeamStopWords([(1, 2, 3)], np.array([2], np.int32))
    texts = np.empty((1, 0), np.int32)
    assert not words.ended(texts, np.array([0]), np.array([3])).any()
    texts = np.array([[1, 2], [2, 2]], np.int32)
    assert words.ended(texts, np.array([0, 1, 0]), np.array([3, 3, 2])).tolist() == [True, False, False]


def constant(*probabilities):
    row = np.log(np.array(probabilities, np.float64)).astype(np.float32)
    return lambda texts: np.tile(row, (len(texts), 1))


def test_the_end_id_is_in_the_sum_and_the_length_but_not_in_the_text():
    (best, _), outputs = run(beams(2, 5, 1.0), 1, constant(0.2, 0.7, 0.1))
    assert best.tokens.tolist() == [] and best.finish == END_ID
    assert best.cum_log_prob == pytest.approx(np.log(0.7)) and len(best.log_probs) == len(best.rows) == 0
    assert len(outputs) == 2                     # the second sequence ends in the second step


@pytest.mark.parametrize(("early_stopping", "steps"), [(1, 2), (0, 3), (7, 6), (-1, 6)])
def test_when_the_search_is_over(early_stopping, steps):
    """A search of two beams has two hypotheses after two steps; `early_stopping` decides in which step it ends.

    After the third step, the live beams score less than both hypotheses at their current length, but could still score
    more if they got long.
    """
    likely = {0: 0.5, 1: 0.5, 2: 0.04}                       # of token 0, by position; 0.9 afterwards
    end = {0: 0.3, 1: 0.3, 2: 0.01}

    def follows(texts):
        rows = []
        for text in texts:
            token, ending = likely.get(len(text), 0.9), end.get(len(text), 0.001)
            rows.append([token, ending] + [(1 - token - ending) / 23] * 23)
        return np.log(rows).astype(np.float32)

    _, outputs = run(beams(2, 6, 1.0, early_stopping), 1, follows)
    assert len(outputs) == steps


def test_diversity_makes_beams_leave_different_parents():
    random = np.random.default_rng(5)

    def follows(texts):
        return np.stack([np.log(random.dirichlet(np.ones(50))).astype(np.float32) for _ in texts])

    _, outputs = run(beams(4, 8, diversity_rate=1000.0), -1, follows)
    assert outputs[0].parents.tolist() == [0] * 4
    assert all(sorted(output.parents.tolist()) == [0, 1, 2, 3] for output in outputs[1:-1])
    _, outputs = run(beams(4, 8), -1, follows)
    assert any(sorted(output.parents.tolist()) != [0, 1, 2, 3] for output in outputs[1:-1])


def test_what_is_kept_of_a_penalised_candidate_is_its_log_probability():
    hypotheses, outputs = run(beams(2, 3, diversity_rate=0.5), -1, constant(0.6, 0.4))
    for hypothesis in hypotheses:
        chosen = np.log([(0.6, 0.4)[token] for token in hypothesis.tokens])
        np.testing.assert_allclose(hypothesis.log_probs, chosen, atol=1e-6)
        assert hypothesis.cum_log_prob == pytest.approx(chosen.sum(), abs=1e-6)
    assert outputs[0].log_probs.tolist() == pytest.approx(np.log([0.6, 0.4]).tolist())


def test_fewer_texts_than_beams():
    def follows(texts):                          # only one sequence is possible: 0 0 0 ...
        return np.where(np.arange(5) == 0, np.float32(0), np.float32(-np.inf))[None].repeat(len(texts), 0)

    hypotheses, outputs = run(beams(3, 4), 4, follows)
    assert [hypothesis.tokens.tolist() for hypothesis in hypotheses] == [[0, 0, 0, 0]]
    for output in outputs:
        assert output.log_probs.tolist() == [0, -np.inf, -np.inf]
        assert output.tokens.tolist() == [0, 0, 0] and (output.parents < 3).all()
    assert outputs[0].parents.tolist() == [0, 0, 0]


def test_a_search_ends_where_nothing_can_follow():
    only_the_end = np.array([-np.inf, 0], np.float32)
    hypotheses, outputs = run(beams(2, 9), 1, lambda texts: np.tile(only_the_end, (len(texts), 1)))
    assert len(outputs) == 1 and [hypothesis.tokens.tolist() for hypothesis in hypotheses] == [[]]


def test_a_length_penalty_that_overflows_makes_all_texts_equal():
    hypotheses, _ = run(beams(2, 3, 1e30), -1, constant(0.6, 0.4))
    assert len(hypotheses) == 2 and all(len(hypothesis.tokens) == 3 for hypothesis in hypotheses)


def test_rows_say_which_beam_each_token_was_sampled_from():
    random = np.random.default_rng(7)

    def follows(texts):
        return np.stack([np.log(random.dirichlet(np.ones(6))).astype(np.float32) for _ in texts])

    seen = []

    def recorded(texts):
        seen.append((list(texts), follows(texts)))
        return seen[-1][1]

    hypotheses, _ = run(beams(3, 7), 5, recorded)
    for hypothesis in hypotheses:
        text = tuple(hypothesis.tokens.tolist())
        for step, (token, row, log_prob) in enumerate(zip(text, hypothesis.rows, hypothesis.log_probs)):
            texts, rows = seen[step]
            assert texts[row] == text[:step] and rows[row, token] == log_prob
        assert hypothesis.finish in (END_ID, LENGTH)


def test_a_step_that_is_run_again_starts_from_the_same_search():
    searches, setup = BeamSearches(), SlotSetup(SamplingConfig(beam_width=2), max_new_tokens=9)
    searches.set_up(3, setup)
    assert 3 in searches and 2 not in searches
    first = searches.at(3, 10)
    second, _ = first.advance(*candidates(first, constant(0.5, 0.3, 0.2)([()])))
    searches.keep(3, 10, second)
    assert searches.at(3, 10) is first and searches.at(3, 11) is second
    fed = searches.input_tokens(GenerationWork(np.array([3], np.int32), np.array([10], np.int32), 2))
    assert fed.tolist() == [0, 1]
    third, _ = second.advance(*candidates(second, constant(0.5, 0.3, 0.2)([(), ()])))
    searches.keep(3, 11, third)
    assert searches.at(3, 10) is first and searches.at(3, 11) is second and searches.at(3, 12) is third
    searches.set_up(3, setup)
    assert len(searches.at(3, 10).cum_log_probs) == 1
    searches.set_up(3, SlotSetup())
    assert 3 not in searches


@pytest.mark.parametrize("size", [1e38, -1e38])
@pytest.mark.filterwarnings("error")
def test_sums_of_huge_log_probabilities_stay_finite(size):
    search = BeamSearch.of(beams(2, 6))
    for step in range(6):
        live = len(search.cum_log_probs)
        search, output = search.advance(np.full(4, size, np.float32), np.arange(4, dtype=np.int32) % live,
                                        np.arange(4, dtype=np.int32))
        expected = np.clip(size * (step + 1), -3.4028235e38, 3.4028235e38)
        assert search.cum_log_probs.tolist() == pytest.approx([expected] * 2)
    assert [one.cum_log_prob for one in output.hypotheses] == pytest.approx([np.sign(size) * 3.4028235e38] * 2)
