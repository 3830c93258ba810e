import numpy as np
import pytest
import torch

from batch_manager.decoding.history import TokenHistory
from batch_manager.decoding.logits_rows import LogitsRows
from batch_manager.decoding.slots import SlotState
from batch_manager.decoding.top_p_decay import TopPDecay, top_p_after
from batch_manager.handover import SlotSetup
from batch_manager.sampling_config import SamplingConfig

CPU = torch.device("cpu")
SETUPS = [SlotSetup(SamplingConfig(top_p=0.9, top_p_decay=0.7, top_p_min=0.2, top_p_reset_ids=3), prompt_length=2),
          SlotSetup(SamplingConfig(top_p=1.0, top_p_decay=0.9, top_p_min=1e-6), prompt_length=1),
          SlotSetup(SamplingConfig(top_p=0.3, top_p_decay=1.0, top_p_min=0.5, top_p_reset_ids=2), prompt_length=2),
          SlotSetup(SamplingConfig(top_p=0.6), prompt_length=3)]


def by_definition(setup, generated):
    """Return the float32 top_p with which each token of `generated` was sampled, by the definition of top-p decay."""
    top_p, trace = np.float32(setup.sampling.top_p), []
    for token in generated:
        trace.append(float(top_p))
        top_p = max(top_p * np.float32(setup.sampling.top_p_decay), np.float32(setup.sampling.top_p_min))
        if token == setup.sampling.top_p_reset_ids:
            top_p = np.float32(setup.sampling.top_p)
    return trace


def trace(rows_of, generated, resume_every=0, twice=False):
    """Run the TopPDecay stage for the four SETUPS in one batch. Return each sequence's top_p at each of its tokens.

    generated      the outputs of the four sequences
    resume_every   number of steps after which the sequences are set up again; 0: never
    twice          run each step twice, as after a failure
    """
    state = SlotState(1, CPU)
    state.add_columns(TopPDecay.reads)
    decay = TopPDecay(state)
    found = [[] for _ in SETUPS]
    for step in range(len(generated[0])):
        if step == 0 or (resume_every and step % resume_every == 0):
            for slot, setup in enumerate(SETUPS):
                setup = setup.continuing([3] * setup.prompt_length + generated[slot][:step])
                state.set_up(slot, setup)
                decay.set_up(slot, setup)
        rows = rows_of(range(4), [setup.prompt_length + step for setup in SETUPS])
        for _ in range(1 + twice):
            of = LogitsRows(rows, state, TokenHistory(state))
            decay.apply(None, of, np.array([True, True, True, False]))
            top_p = of.column("top_p")
            decay.keep(LogitsRows(rows, state, TokenHistory(state)),
                       torch.tensor([tokens[step] for tokens in generated]))
        for row, value in enumerate(top_p.tolist()):
            found[row].append(value)
    return found


@pytest.mark.parametrize("options", [{}, {"twice": True}, {"resume_every": 1}, {"resume_every": 4, "twice": True}])
def test_top_p_is_what_the_generated_tokens_make_of_it(rows_of, options):
    random = np.random.default_rng(0)
    generated = [random.integers(0, 9, 60).tolist() for _ in SETUPS]
    expected = [by_definition(setup, tokens) for setup, tokens in zip(SETUPS[:3], generated)]
    assert trace(rows_of, generated, **options) == [*expected, [float(np.float32(0.6))] * 60]
    assert min(expected[0]) == float(np.float32(0.2)) and set(expected[2]) == {float(np.float32(p)) for p in (0.3, 0.5)}


def test_a_reset_id_in_the_prompt_resets_nothing():
    generated = np.array([1, 1], np.int32)
    assert top_p_after(generated, 0.8, 0.5, 0.1, 1) == np.float32(0.8)
    assert top_p_after(generated, 0.8, 0.5, 0.1, 7) == np.float32(0.2)
    assert top_p_after(generated[:0], 0.8, 0.5, 0.1, 1) == np.float32(0.8)


def test_a_million_tokens_cost_no_more_than_it_takes_to_reach_the_floor():
    assert top_p_after(np.ones(10**6, np.int32), 0.9, 0.99, 0.1, 5) == np.float32(0.1)


def test_which_sequences_have_a_top_p_that_changes():
    decay = TopPDecay(SlotState(1, CPU))
    assert not any(decay.is_active(SlotSetup(config)) for config in (
        SamplingConfig(), SamplingConfig(top_p=0.5), SamplingConfig(top_k=4, top_p_decay=0.5),
        SamplingConfig(top_p=0.5, top_p_min=0.4), SamplingConfig(top_p=0.5, top_p_decay=0.5, beam_width=2)))
    assert all(decay.is_active(SlotSetup(config)) for config in (
        SamplingConfig(top_p=0.5, top_p_decay=0.5), SamplingConfig(top_p=0.5, top_p_min=0.6)))
