from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_manager.triton_kernels.cpu.native.library import load_library
from batch_manager.triton_kernels.cpu.sample_token import argmax, chosen_log_probs, gumbel, sample
from batch_manager.triton_kernels.cpu.sample_token import philox as philox_on_a_cpu
from batch_manager.triton_kernels.cpu.sample_token import sample_token as sample_token_on_a_cpu
from batch_manager.triton_kernels.reference import philox
from batch_manager.triton_kernels.reference.sample_token import sample_token

from .draws import KNOBS as DRAWN
from .draws import VOCAB, arrays, exact_distribution, row_of_logits, standard_deviations

KNOBS = [(1.0, 0, 1.0), (0.7, 5, 0.0), (1.3, 50, 0.9), (1.0, 0, 0.9), (2.5, 0, 0.3), (0.1, 0, 0.5), (1.0, 70, 1.0),
         (1.0, 300, 0.5), (1.0, 10**6, 0.999), (0.9, 2, 0.0), (100.0, 0, 0.95), (1.0, 0, 2.0)]


def random_logits(rows, vocab, spread, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.fixture(params=[False, True], ids=["torch", "compiled"])
def native(request):
    return load_library() if request.param else None


def oracle(logits, knobs, min_p=None):
    return sample_token(logits, *map(torch.from_numpy, knobs), min_p=None if min_p is None else torch.from_numpy(min_p))


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 257, 3000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_every_way_of_drawing_agrees_with_the_oracle(vocab, spread, native):
    rows = 4 * len(KNOBS)
    logits = random_logits(rows, vocab, spread)
    knobs = arrays(KNOBS * 4, range(rows), range(7, rows + 7))
    tokens, log_probs, finite = oracle(logits, knobs)
    assert finite.all()
    assert sample(logits, *knobs, None, native).tolist() == tokens.tolist()
    torch.testing.assert_close(chosen_log_probs(logits, tokens, torch.from_numpy(knobs[0]), native), log_probs,
                               rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 63, 257, 3000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_min_p_beside_every_way_of_drawing_agrees_with_the_oracle(vocab, spread, native):
    rows = 8 * len(KNOBS)
    logits = random_logits(rows, vocab, spread)
    knobs = arrays(KNOBS * 8, range(rows), range(7, rows + 7))
    min_p = np.repeat(np.array([0, 1e-30, 0.003, 0.02, 0.1, 0.5, 0.97, 1], np.float32), len(KNOBS))
    tokens = oracle(logits, knobs, min_p)[0].tolist()
    assert sample(logits, *knobs, min_p, native).tolist() == tokens
    alone = [int(sample(logits[i:i + 1], *(column[i:i + 1] for column in (*knobs, min_p)), native))
             for i in range(rows)]
    assert alone == tokens


@pytest.mark.parametrize("vocab", [7, 200, 2500])
def test_ties_at_a_boundary_are_kept_as_the_oracle_keeps_them(vocab):
    rows = 10 * len(KNOBS)
    logits = random_logits(rows, vocab, 1.5).round()
    knobs = arrays(KNOBS * 10, range(rows), [3] * rows)
    assert sample(logits, *knobs).tolist() == oracle(logits, knobs)[0].tolist()


def test_forbidden_tokens_are_never_drawn(native):
    rows = 4 * len(KNOBS)
    logits = random_logits(rows, 500, 2.0)
    logits[:, 3:] = logits[:, 3:].masked_fill(torch.rand(rows, 497) < 0.99, -torch.inf)
    knobs = arrays(KNOBS * 4, range(rows), [3] * rows)
    tokens = sample(logits, *knobs, None, native)
    assert tokens.tolist() == oracle(logits, knobs)[0].tolist()
    assert logits.gather(1, tokens[:, None]).isfinite().all()


def test_fewer_allowed_tokens_than_top_k_keeps_need_no_sorting(monkeypatch):
    """The operation does not sort the vocabulary of a row if a grammar allows fewer tokens than top-k keeps."""
    logits = torch.full((4, 3000), -torch.inf)
    logits[:, [7, 900, 2999]] = random_logits(4, 3, 2.0)
    knobs = arrays([(0.8, 40, 0.9), (1.0, 3, 0.0), (1.2, 50, 1.0), (0.7, 2, 0.5)], range(4), [3] * 4)
    expected = oracle(logits, knobs)[0].tolist()
    monkeypatch.setattr("batch_manager.triton_kernels.cpu.sample_token._by_sorting", None)
    assert sample(logits, *knobs).tolist() == expected


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_small_row_agrees_with_the_oracle(data):
    vocab = data.draw(st.integers(1, 130))
    values = data.draw(st.lists(st.sampled_from([-9.0, -1.5, -1.0, 0.0, 0.25, 0.5, 3.0]), min_size=vocab,
                                max_size=vocab))
    knob = (data.draw(st.sampled_from([0.05, 0.5, 1.0, 4.0])), data.draw(st.integers(0, 140)),
            data.draw(st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0])))
    if knob[1] == 1 or (knob[1] == 0 and knob[2] == 0):
        return                                                     # greedy: not a draw
    rows = 8
    knobs = arrays([knob] * rows, range(rows), range(rows))
    logits = torch.tensor([values] * rows)
    assert sample(logits, *knobs).tolist() == oracle(logits, knobs)[0].tolist()


@pytest.mark.parametrize("knob", DRAWN)
def test_the_drawn_tokens_have_the_exact_distribution(knob):
    """As campaign T23 with 200,000 seeds."""
    row, counts, draws = row_of_logits(), np.zeros(VOCAB), 10_000
    for start in range(0, draws, 5000):
        seeds = np.arange(start, start + 5000)
        tokens = sample(row.expand(5000, -1).contiguous(), *arrays([knob] * 5000, seeds * 7919, seeds % 50))
        counts += np.bincount(tokens.numpy(), minlength=VOCAB)
    assert standard_deviations(counts, exact_distribution(row, *knob) * draws) < 5


def test_close_distributions_give_the_same_token_with_the_same_seed():
    """Without shared random numbers, two draws are equal with the sum of p * q, which is 0.19 here."""
    rows = 2000
    row, draws = row_of_logits(2000), arrays([(0.5, 0, 1.0)] * rows, range(rows), range(rows))
    other = row + 0.1 * random_logits(1, 2000, 1.0)[0]
    p, q = (exact_distribution(logits, 0.5, 0, 1.0) for logits in (row, other))
    distance = 0.5 * np.abs(p - q).sum()
    same = (sample(row.expand(rows, -1), *draws) == sample(other.expand(rows, -1), *draws)).double().mean()
    assert (p * q).sum() < 0.2 and same > (1 - distance) / (1 + distance)


def test_a_sample_does_not_depend_on_the_other_rows(native):
    rows = len(KNOBS)
    logits = random_logits(rows, 1000, 2.0)
    knobs = arrays(KNOBS, range(rows), range(rows))
    together = sample(logits, *knobs, None, native).tolist()
    alone = [int(sample(logits[i:i + 1], *(column[i:i + 1] for column in knobs), None, native)) for i in range(rows)]
    order = np.random.default_rng(0).permutation(rows)
    shuffled = sample(logits[order], *(column[order] for column in knobs), None, native).tolist()
    assert together == alone and [together[i] for i in order] == shuffled


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_random_numbers_are_those_of_the_kernels(monkeypatch, is_compiled):
    if is_compiled:
        load_library()
    else:
        monkeypatch.setattr("batch_manager.triton_kernels.cpu.sample_token.loaded_library", lambda: None)
    random = np.random.default_rng(0)
    seeds = np.concatenate([[0, -1, 2**63 - 1, -2**63], random.integers(-2**63, 2**63, 500)])
    positions = np.concatenate([[0, 0, 2**31 - 1, 1], random.integers(0, 2**31, 500)]).astype(np.int32)
    purposes, quarters = np.array([1, 2, 2], np.uint32), np.array([0, 9, 2**20])
    words = philox_on_a_cpu(seeds, positions, purposes, quarters)
    assert (words == philox_on_a_cpu(seeds, positions, purposes, np.tile(quarters, (504, 1)))).all()
    for number, place in product(range(4), range(3)):
        u = philox.uniform(torch.from_numpy(seeds), torch.from_numpy(positions), int(purposes[place]),
                           torch.full((504,), 4 * int(quarters[place]) + number)).double()
        torch.testing.assert_close(torch.from_numpy(gumbel(words[:, number, place])).double(), -(-u.log()).log(),
                                   rtol=3e-7, atol=3e-7)


def test_seed_and_position_both_matter():
    logits = random_logits(1, 5000, 1.0).expand(64, -1).contiguous()
    knob = [(1.0, 0, 1.0)] * 64
    by_seed = sample(logits, *arrays(knob, range(64), [9] * 64))
    by_position = sample(logits, *arrays(knob, [9] * 64, range(64)))
    assert len(set(by_seed.tolist())) > 48 and len(set(by_position.tolist())) > 48


@pytest.mark.parametrize("vocab", [1, 5, 64, 100, 6400])
def test_greedy_takes_the_lowest_id_among_equals(vocab):
    logits = random_logits(50, vocab, 1.0).round()
    tokens, maxima = argmax(logits)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert maxima.tolist() == [max(row) for row in logits.tolist()]


@pytest.mark.parametrize("vocab", [3, 64, 1000])
def test_a_row_without_a_finite_maximum_is_recognised(vocab):
    logits = random_logits(5, vocab, 1.0)
    logits[1, vocab - 1] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4, 0] = -torch.inf
    assert argmax(logits)[1].isfinite().tolist() == [True, False, False, False, True]


def test_the_whole_operation_is_the_oracles():
    """The CPU form agrees with the oracle on greedy rows, on rows that are not finite, and on requested log-probs."""
    greedy = [(0.0, 9, 0.5), (1.0, 1, 0.9), (2.0, 0, 0.0), (1.0, 5, 0.0), (0.0, 0, 0.0)]
    knobs = arrays([*KNOBS, *greedy], range(17), range(17))
    logits = random_logits(17, 300, 2.0)
    logits[15, 7], logits[16] = torch.nan, -torch.inf
    wants = torch.arange(17) % 3 != 0
    tokens, log_probs, finite = oracle(logits, knobs)
    got = sample_token_on_a_cpu(logits, *map(torch.from_numpy, knobs), wants_log_prob=wants)
    assert got[0].tolist() == tokens.tolist() and got[2].tolist() == finite.tolist() == [True] * 15 + [False] * 2
    torch.testing.assert_close(got[1][wants], log_probs[wants], rtol=1e-5, atol=1e-5, equal_nan=True)

    into = torch.empty(17, dtype=torch.int32), torch.empty(17), torch.empty(17, dtype=torch.bool)
    again = sample_token_on_a_cpu(logits, *map(torch.from_numpy, knobs), *into)
    assert [a is b for a, b in zip(again, into)] == [True] * 3 and into[0].tolist() == tokens.tolist()
    torch.testing.assert_close(into[1], log_probs, rtol=1e-5, atol=1e-5, equal_nan=True)
