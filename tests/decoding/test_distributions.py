"""Sampled tokens have the distribution that the logits processors and warpers of transformers compute in float64.

A chi-square test compares the distributions.
"""

import numpy as np
import pytest
import torch

from batch_manager.decoding.decoder import GptDecoder
from batch_manager.decoding.slots import SlotState
from batch_manager.handover import SlotSetup
from batch_manager.sampling_config import PARAMETERS, SamplingConfig

VOCAB, SLOTS, ROUNDS = 40, 2_000, 10                               # 20,000 samples per setting
TOKENS = [3, 8, 3, 1, 20, 3, 8]
BIAS = np.linspace(-1, 1, VOCAB).astype(np.float32)

SETTINGS = {
    "all": dict(top_p=1.0),
    "temperature": dict(top_p=1.0, temperature=1.7),
    "top-k": dict(top_k=7),
    "top-p": dict(top_p=0.8),
    "top-k and top-p": dict(top_k=12, top_p=0.7, temperature=1.5),
    "min-p": dict(top_p=1.0, min_p=0.1),
    "min-p with top-k": dict(top_k=20, min_p=0.06),
    "min-p with top-p": dict(top_p=0.9, min_p=0.05, temperature=2.0),
    "min-p with both": dict(top_k=15, top_p=0.95, min_p=0.04, temperature=1.3),
    "repetition": dict(top_p=1.0, repetition_penalty=1.8),
    "presence and frequency": dict(top_k=25, presence_penalty=0.6, frequency_penalty=-0.4),
    "bans": dict(top_p=0.95, no_repeat_ngram_size=2, bad_words=((5,), (3, 8, 0)), min_length=9, end_id=2),
    "bias": dict(top_p=0.9, embedding_bias=BIAS, temperature=0.8),
    "a decayed top-p": dict(top_p=0.9, top_p_decay=0.8, top_p_min=0.5),
    "everything": dict(temperature=1.4, top_k=20, top_p=0.95, min_p=0.01, top_p_decay=0.98, repetition_penalty=1.3,
                       presence_penalty=0.2, frequency_penalty=0.1, no_repeat_ngram_size=3, bad_words=((8, 6),),
                       embedding_bias=BIAS, min_length=5, end_id=7),
}


def setup_of(**values):
    """Return a SlotSetup. `values` are parameters of SamplingConfig and fields of SlotSetup."""
    sampling = {name: values.pop(name) for name in PARAMETERS if name in values}
    return SlotSetup(SamplingConfig(**sampling), **values)


def exact(knobs, logits, prompt_length):
    """Return the probabilities [VOCAB] of the token after TOKENS, by transformers in float64.

    knobs           the arguments of `setup_of`
    prompt_length   number of TOKENS that are the prompt; the others are output
    """
    known = pytest.importorskip("transformers.generation.logits_process")
    setup, ids, scores = setup_of(**knobs), torch.tensor([TOKENS]), logits[None].double()
    if setup.embedding_bias is not None:
        scores = scores + torch.from_numpy(setup.embedding_bias)
    if setup.sampling.repetition_penalty != 1:
        scores = known.RepetitionPenaltyLogitsProcessor(setup.sampling.repetition_penalty)(ids, scores)
    counts = torch.tensor([TOKENS.count(token) for token in range(VOCAB)])
    scores = scores - setup.sampling.presence_penalty * (counts > 0) - setup.sampling.frequency_penalty * counts
    if setup.sampling.no_repeat_ngram_size:
        scores = known.NoRepeatNGramLogitsProcessor(setup.sampling.no_repeat_ngram_size)(ids, scores)
    if setup.bad_words:
        scores = known.NoBadWordsLogitsProcessor([list(word) for word in setup.bad_words])(ids, scores)
    if setup.sampling.min_length:
        scores = known.MinNewTokensLengthLogitsProcessor(prompt_length, setup.sampling.min_length, setup.end_id)(
            ids, scores)
    scores = known.TemperatureLogitsWarper(setup.sampling.temperature)(ids, scores)
    if setup.sampling.top_k:
        scores = known.TopKLogitsWarper(setup.sampling.top_k)(ids, scores)
    top_p = setup.sampling.top_p
    for _ in TOKENS[prompt_length:]:
        top_p = max(top_p * setup.sampling.top_p_decay, setup.sampling.top_p_min) if setup.sampling.top_p else 0
    if 0 < top_p < 1:
        scores = known.TopPLogitsWarper(top_p)(ids, scores)
    if setup.sampling.min_p:
        scores = known.MinPLogitsWarper(setup.sampling.min_p)(ids, scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_tokens_have_the_exact_distribution(rows_of, name):
    knobs, prompt_length = SETTINGS[name], 4
    logits = 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    history = np.array(TOKENS, np.int32)
    decoder = GptDecoder(SlotState(SLOTS, torch.device("cpu")))
    rows = rows_of(range(SLOTS), [len(TOKENS)] * SLOTS)
    counts = np.zeros(VOCAB)
    setup = setup_of(**knobs, prompt_length=prompt_length, history=history)
    decoder.set_up((slot, setup) for slot in range(SLOTS))
    for seeds in np.random.default_rng(len(name)).integers(2**63, size=(ROUNDS, SLOTS)):
        decoder.state.host["random_seed"][:SLOTS] = seeds              # a column that a CPU reads as it is
        counts += np.bincount(decoder.sample(logits.repeat(SLOTS, 1), rows).tokens.numpy(), minlength=VOCAB)

    expected = exact(knobs, logits, prompt_length) * SLOTS * ROUNDS
    assert counts[expected == 0].sum() == 0 and (name in ("all", "temperature", "repetition")) == (expected > 0).all()
    often = expected >= 5                                          # the rare ones share one cell
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    statistic, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    assert freedom > 1
    as_large_by_chance = torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2))
    assert as_large_by_chance > 0.001
