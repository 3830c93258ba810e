"""The test by ratios of a client's drafts: counts of a step's tokens, compared with their exact joint distribution."""

import itertools

import numpy as np
import pytest
import torch

from batch_manager.decoding import acceptance
from batch_manager.triton_kernels.reference.sample_token import sample_token

V, SEEDS, POSITION = 8, 50_000, 10
NEAR, FAR, EQUAL, DISJOINT = "near", "far", "equal", "disjoint"
CASES = {"near, filtered": (NEAR, 0.8, 6, 0.9, 0.02), "far": (FAR, 1.3, 0, 1.0, 0.0),
         "equal": (EQUAL, 0.7, 0, 0.95, 0.0), "disjoint": (DISJOINT, 1.0, 4, 0.0, 0.0)}


def tables(kind):
    """Return (target, draft): logits [V + 1, V] of the next token, by the token before it; row V is for the first."""
    draw = np.random.default_rng(3)
    target = draw.normal(0, 1.2, (V + 1, V))
    draft = {NEAR: target + draw.normal(0, 0.5, target.shape), FAR: draw.normal(0, 2, target.shape), EQUAL: target,
             DISJOINT: -target}[kind]
    return target.astype(np.float32), draft.astype(np.float32)


def kept(logits, temperature, top_k, top_p, min_p):
    """Return the probabilities that the three filters leave of each row, one row at a time."""
    rows = []
    for row in logits.astype(np.float64):
        p = np.exp((row - row.max()) / temperature)
        p /= p.sum()
        order = np.argsort(-p)
        of_k = order[:top_k or V]
        mass = np.cumsum(p[of_k]) / p[of_k].sum()
        of_p = of_k[:np.searchsorted(mass, top_p) + 1] if 0 < top_p < 1 else of_k
        rows.append(np.array([p[i] * (i in of_p and p[i] >= min_p * p.max()) for i in range(V)]))
        rows[-1] /= rows[-1].sum()
    return np.array(rows)


def step(kind, temperature, top_k, top_p, min_p):
    """Run a step with two drafts for each seed. Return the count of each result, and its probability."""
    target, draft = tables(kind)
    parameters = (temperature, top_k, top_p, min_p)
    p, q = kept(target, *parameters), kept(draft, *parameters)
    draw, seeds = np.random.default_rng(5), torch.arange(SEEDS, dtype=torch.int64) * 7919
    of_row = {"temperature": torch.full((SEEDS,), temperature), "min_p": torch.full((SEEDS,), min_p), "seed": seeds,
              "top_k": torch.full((SEEDS,), top_k, dtype=torch.int32), "top_p": torch.full((SEEDS,), top_p)}
    before, new = np.full(SEEDS, V), [[] for _ in range(SEEDS)]
    goes_on = np.ones(SEEDS, bool)
    for place in range(3):
        logits = torch.from_numpy(target[before])
        position = torch.full((SEEDS,), POSITION + place, dtype=torch.int32)
        if place < 2:
            drafts = (draw.random((SEEDS, 1)) > np.cumsum(q[before], 1)[:, :-1]).sum(1)
            tokens = acceptance.decided_by_ratio(
                logits, torch.from_numpy(draft[before]), torch.from_numpy(drafts), torch.zeros_like(seeds),
                position=position, **of_row).numpy()
        else:
            tokens, drafts = sample_token(logits, position=position, **of_row)[0].numpy(), None
        for i in np.flatnonzero(goes_on):
            new[i].append(int(tokens[i]))
        if drafts is not None:
            goes_on &= tokens == drafts
            before = drafts
    expected = {}
    rest, both = np.maximum(p - q, 0), np.minimum(p, q)
    for x in range(V):
        expected[x,] = rest[V, x]
        for y, z in itertools.product(range(V), repeat=2):
            expected[x, y] = both[V, x] * rest[x, y]
            expected[x, y, z] = both[V, x] * both[x, y] * p[y, z]
    counts = dict.fromkeys(expected, 0)
    for tokens in new:
        counts[tuple(tokens)] += 1
    return counts, expected


def p_value(counts, expected):
    assert sum(expected.values()) == pytest.approx(1)
    few = [key for key, share in expected.items() if share * SEEDS < 8]
    assert sum(counts[key] for key in few if not expected[key]) <= 2                  # rounding at the edge of a filter
    rows = [(counts[key], expected[key] * SEEDS) for key in expected if key not in few]
    rows.append((sum(counts[key] for key in few), sum(expected[key] for key in few) * SEEDS))
    found, ideal = torch.tensor([row for row in rows if row[1] > 0], dtype=torch.float64).T
    half = ((found - ideal) ** 2 / ideal).sum() / 2
    return float(torch.special.gammaincc(torch.tensor((len(found) - 1) / 2, dtype=torch.float64), half))


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_of_a_step_have_the_distribution_without_drafts(name):
    assert p_value(*step(*CASES[name])) > 1e-3


def test_mutant_a_random_number_for_two_purposes(monkeypatch):
    monkeypatch.setattr(acceptance, "ACCEPTANCE", acceptance.REST_TOKENS)
    assert p_value(*step(*CASES["near, filtered"])) < 1e-9
