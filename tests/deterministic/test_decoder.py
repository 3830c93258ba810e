"""In deterministic mode, a row's sampled token and log-probabilities have the same bits alone and in a batch.

The tests use two threads.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from batch_manager.decoding.decoder import GptDecoder
from batch_manager.decoding.logits_stage import LogitsStage
from batch_manager.decoding.slots import SamplingRows, SlotState
from batch_manager.handover import SlotSetup
from batch_manager.sampling_config import SamplingConfig
from batch_manager.triton_kernels.cpu.native.library import load_library

VOCAB, ROWS = 40_000, 32             # large enough that torch splits the sum of one row, but not of 32, among threads
SETUPS = [SlotSetup(SamplingConfig(temperature=0.7, top_p=0.9, random_seed=1), return_log_probs=True),
          SlotSetup(SamplingConfig(temperature=1.3, top_p=1.0, random_seed=2), return_log_probs=True),
          SlotSetup(SamplingConfig(top_k=50, random_seed=3), return_log_probs=True),
          SlotSetup(return_log_probs=True),
          SlotSetup(SamplingConfig(top_p=0.8, random_seed=4)),
          SlotSetup(SamplingConfig(temperature=0.7, top_p=0.9, random_seed=5), return_log_probs=True, top_log_probs=3),
          SlotSetup(SamplingConfig(temperature=0.7, random_seed=6), return_log_probs=True, raw_log_probs=True),
          SlotSetup(SamplingConfig(repetition_penalty=1.5), top_log_probs=20, raw_log_probs=True, history=np.arange(5)),
          ] * 4
STAGED = [SlotSetup(sampling, return_log_probs=True, prompt_length=3, history=np.array([5, 6, 7, 5, 6], np.int32),
                    embedding_bias=np.sin(np.arange(VOCAB, dtype=np.float32)), bad_words=((9,), (6, 4)), end_id=2)
          for sampling in (SamplingConfig(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.1),
                           SamplingConfig(temperature=0.7, top_p=0.9, top_p_decay=0.9, top_p_min=0.3, random_seed=7,
                                          repetition_penalty=0.9, no_repeat_ngram_size=2, min_length=20))]
TOP = [row for row, setup in enumerate(SETUPS) if setup.top_log_probs]
ASKED = [row for row, setup in enumerate(SETUPS) if setup.return_log_probs]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Sharpen(LogitsStage):
    """A stage of a user, for requests with an id, whose bits depend on the number of rows."""

    def is_active(self, setup):
        return setup.request_id > 0

    def apply(self, logits, rows, active):
        logits.add_(logits.softmax(1).sum() * len(logits))


def together_and_alone(deterministic, native=None, setups=SETUPS):
    decoder = GptDecoder(SlotState(ROWS, torch.device("cpu")), [Sharpen()], deterministic, native)
    decoder.set_up(enumerate(setups))
    logits = 3 * torch.randn((ROWS, VOCAB), generator=torch.Generator().manual_seed(0))

    def sample(slots):
        slots = np.array(slots, np.int32)
        positions = slots + 10
        rows = SamplingRows(slots, positions, torch.from_numpy(slots).long(), torch.from_numpy(positions).long())
        return decoder.sample(logits[slots].clone(), rows)

    return sample(range(ROWS)), [sample([slot]) for slot in range(ROWS)]


def reports(step):
    """Return (slot, ids, log-probs) of each report of the likeliest tokens."""
    found = {} if step.top is None else step.top.by_slot(
        {name: tensor.numpy() for name, tensor in step.tensors().items()})
    return [(slot, top.ids.tolist(), top.log_probs.tolist()) for slot, top in found.items()]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_rows_are_sampled_as_if_each_were_the_step(two_threads, is_compiled):
    together, alone = together_and_alone(deterministic=True, native=load_library() if is_compiled else None)
    assert together.tokens.tolist() == [int(sampled.tokens) for sampled in alone]
    assert together.finite.all() and together.finish.shape == (ROWS,)
    assert torch.equal(together.log_probs[ASKED], torch.cat([alone[row].log_probs for row in ASKED]))
    assert together.log_probs[4] == 0 and alone[4].log_probs is None
    assert [slot for slot, *_ in reports(together)] == TOP
    assert reports(together) == [report for step in alone for report in reports(step)]


def test_compiled_code_samples_rows_at_once_as_if_each_were_the_step(two_threads, monkeypatch):
    """So it needs no option, and rows of a step take no calls of their own, with stages and reports or without."""
    monkeypatch.setattr(GptDecoder, "_sample_one_by_one", None)
    setups = [STAGED[row // 4 % 2] if row % 4 == 0 else setup for row, setup in enumerate(SETUPS)]
    for deterministic in (False, True):
        together, alone = together_and_alone(deterministic, load_library(), setups)
        assert together.tokens.tolist() == [int(sampled.tokens) for sampled in alone]
        asked = [row for row, setup in enumerate(setups) if setup.return_log_probs]
        assert torch.equal(together.log_probs[asked], torch.cat([alone[row].log_probs for row in asked]))
        assert together.emptied.tolist() == [False] * ROWS
        assert not deterministic or reports(together) == [report for step in alone for report in reports(step)]


def test_only_the_rows_that_torch_computes_take_calls_of_their_own(two_threads, monkeypatch):
    calls, sample = [], GptDecoder._stage_and_sample
    monkeypatch.setattr(GptDecoder, "_stage_and_sample",
                        lambda self, logits, *more: calls.append(len(logits)) or sample(self, logits, *more))
    setups = [*[SETUPS[0]] * 5, replace(SETUPS[7], request_id=1), *[SETUPS[2]] * 24, replace(SETUPS[5], request_id=2),
              SETUPS[6]]
    together, alone = together_and_alone(True, load_library(), setups)
    assert calls == [5, 1, 24, 1, 1, *[1] * ROWS]
    assert together.tokens.tolist() == [int(sampled.tokens) for sampled in alone]
    assert torch.equal(together.log_probs, torch.cat([
        torch.zeros(1) if sampled.log_probs is None else sampled.log_probs for sampled in alone]))


def test_without_it_the_sums_of_several_rows_are_taken_otherwise(two_threads):
    together, alone = together_and_alone(deterministic=False)
    assert not torch.equal(together.log_probs[ASKED], torch.cat([alone[row].log_probs for row in ASKED]))


def test_nobody_asks_for_log_probs(two_threads):
    decoder = GptDecoder(SlotState(2, torch.device("cpu")), deterministic=True)
    decoder.set_up(enumerate([SlotSetup(SamplingConfig(top_k=3, random_seed=1)), SlotSetup()]))
    slots = np.arange(2, dtype=np.int32)
    rows = SamplingRows(slots, slots, torch.from_numpy(slots).long(), torch.from_numpy(slots).long())
    assert decoder.sample(torch.randn(2, 30), rows).log_probs is None
