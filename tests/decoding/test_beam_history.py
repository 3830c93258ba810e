"""Stages see the sequence of each beam, whatever its row in the batch. Beams whose next tokens are all banned end."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from batch_manager.decoding.logits_stage import LogitsStage
from batch_manager.decoding.slots import SamplingRows
from batch_manager.handover import LENGTH, SlotSetup
from batch_manager.sampling_config import SamplingConfig

CPU, VOCAB = torch.device("cpu"), 12


def upload(arrays):
    return [torch.from_numpy(array) for array in arrays]


class Recorder(LogitsStage):
    """A stage that runs after all others and records the logits of the beams."""

    def is_active(self, setup):
        return True

    def apply(self, logits, rows, active):
        if rows.beams is not None:
            self.seen = {slot: logits[torch.from_numpy(rows.slots == slot)] for slot in set(rows.slots.tolist())}


class Engine:
    """Runs steps of a decoder for all requests that have not ended. Request i is in slot i.

    texts   output of each beam of each request
    ended   slot -> hypotheses; None if the search failed
    """

    def __init__(self, decoder_with, setups, prompts):
        self.setups = [setup.continuing(prompt) for setup, prompt in zip(setups, prompts)]
        self.prompts, self.recorder = prompts, Recorder()
        self.decoder = decoder_with(*self.setups, own_stages=[self.recorder])
        self.texts = [[()] for _ in setups]                # of each sequence's beams
        self.ended = {}

    def step(self, logits_of, times=1):
        """Run one step. Return the beams' logits after all stages, and the outputs of beam search, each by slot.

        logits_of   returns the logits [vocab] of the token after a sequence
        times       how often the step runs; after a failure, a step runs again
        """
        going = [slot for slot in range(len(self.setups)) if slot not in self.ended]
        owners = np.array([slot for slot in going for _ in self.texts[slot]], np.int32)
        positions = np.array([len(self.prompts[slot]) + len(self.texts[slot][0]) for slot in owners], np.int32)
        rows = SamplingRows(owners, positions, *(torch.from_numpy(array).long() for array in (owners, positions)))
        for _ in range(times):                             # more than one: the step runs again
            logits = torch.stack([logits_of((*self.prompts[slot], *text))
                                  for slot in going for text in self.texts[slot]])
            sampled = self.decoder.sample(logits, rows)
            arrays = {name: tensor.numpy() for name, tensor in sampled.beams.tensors.items()}
            failed = sampled.beams.exhausted_slots(arrays)
            outputs = sampled.beams.finish(arrays, failed)
            self.decoder.keep(sampled)
        for slot, token in zip(sampled.rows.slots.tolist(), sampled.tokens.tolist()):
            self.texts[slot] = [(*self.texts[slot][0], token)]
        for slot, output in outputs.items():
            self.texts[slot] = [(*self.texts[slot][parent], token)
                                for parent, token in zip(output.parents.tolist(), output.tokens.tolist())]
        self.ended |= {slot: output.hypotheses for slot, output in outputs.items() if output.hypotheses is not None}
        self.ended |= dict.fromkeys(failed)
        return self.recorder.seen, outputs


def strange_logits(text):
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(text) % 2**31))


@pytest.mark.parametrize("times", [1, 2])
def test_each_beam_has_the_bans_and_penalties_of_its_own_text(decoder_with, times):
    """The n-gram ban and the presence penalty of a beam apply to the tokens of its sequence, prompt included.

    With no_repeat_ngram_size=1, all tokens of the sequence are banned. The presence penalty counts each token once.
    """
    setups = [SlotSetup(SamplingConfig(no_repeat_ngram_size=1, beam_width=3), max_new_tokens=6),
              SlotSetup(SamplingConfig(no_repeat_ngram_size=1, temperature=0)),
              SlotSetup(SamplingConfig(presence_penalty=3.0, beam_width=2), max_new_tokens=6),
              SlotSetup(SamplingConfig(beam_width=4), max_new_tokens=6),
              SlotSetup(SamplingConfig(no_repeat_ngram_size=1, beam_width=4, temperature=0.5), max_new_tokens=6)]
    prompts = [[1], [2, 3], [4, 5, 6], [7], [8, 9]]
    engine, reordered = Engine(decoder_with, setups, prompts), False
    for _ in range(5):
        before = {slot: list(texts) for slot, texts in enumerate(engine.texts)}
        seen, outputs = engine.step(strange_logits, times)
        reordered |= any(output.parents.tolist() != list(range(len(output.parents))) for output in outputs.values())
        assert all(len(texts[0]) == len(before[0][0]) + 1 for texts in engine.texts)
        for slot in (0, 4):
            for text, row in zip(before[slot], seen[slot], strict=True):
                assert set(row.isneginf().nonzero()[:, 0].tolist()) == {*prompts[slot], *text}
        for slot in (0, 1, 4):
            assert all(len({*prompts[slot], *text}) == len(prompts[slot]) + len(text) for text in engine.texts[slot])
        for text, row in zip(before[2], seen[2], strict=True):
            expected = strange_logits((*prompts[2], *text)).log_softmax(0)
            expected[list({*prompts[2], *text})] -= 3
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)
    assert reordered


def test_who_has_no_beams_keeps_their_history_when_somebody_with_beams_comes(decoder_with):
    def history_of(slot, length):
        rows = SamplingRows(np.array([slot], np.int32), np.array([length], np.int32), torch.tensor([slot]),
                            torch.tensor([length]))
        history = engine.decoder.history
        return history.tokens[history.device_rows_of(rows)[0], :length].tolist()

    engine = Engine(decoder_with, [SlotSetup(SamplingConfig(no_repeat_ngram_size=2))] * 3, [[1, 2], [3], [4, 5, 6]])
    tokens, rows = engine.decoder.history.tokens, len(engine.decoder.history.tokens)
    for width in (2, 4, 3):
        setup = SlotSetup(SamplingConfig(no_repeat_ngram_size=2, beam_width=width), max_new_tokens=5).continuing([7, 8])
        engine.decoder.set_up([(1, setup)])
        assert history_of(0, 2) == [1, 2] and history_of(2, 3) == [4, 5, 6] and history_of(1, 2) == [7, 8]
    assert rows <= 4 and tokens is not engine.decoder.history.tokens


def test_beams_that_want_no_history_cost_none(decoder_with):
    decoder = decoder_with(SlotSetup(SamplingConfig(beam_width=4, min_length=2), max_new_tokens=9, bad_words=((3,),),
                                     embedding_bias=np.ones(VOCAB, np.float32), stop_words=((1, 2),), end_id=1
                                     ).continuing([1, 2]))
    assert len(decoder.history.tokens) == 0


@pytest.mark.parametrize("setup, is_changed, needs_history", [
    (SlotSetup(), False, False), (SlotSetup(SamplingConfig(repetition_penalty=1.5)), True, True),
    (SlotSetup(SamplingConfig(presence_penalty=0.5)), True, True),
    (SlotSetup(SamplingConfig(frequency_penalty=0.5)), True, True),
    (SlotSetup(SamplingConfig(no_repeat_ngram_size=2)), True, True),
    (SlotSetup(bad_words=((1,),)), True, False), (SlotSetup(bad_words=((1,), (2, 3))), True, True),
    (SlotSetup(embedding_bias=np.ones(VOCAB, np.float32)), True, False),
    (SlotSetup(SamplingConfig(min_length=2)), False, False),                       # there is no end id
    (SlotSetup(SamplingConfig(min_length=2), end_id=1), True, False),
    (SlotSetup(SamplingConfig(top_p=0.9, top_p_decay=0.5)), False, False),
    (SlotSetup(stop_words=((1, 2),)), False, False)])
def test_what_changes_the_log_probabilities_of_beams_and_looks_at_their_tokens(
        decoder_with, setup, is_changed, needs_history):
    sampling = replace(setup.sampling, beam_width=2)
    decoder = decoder_with(replace(setup, sampling=sampling, max_new_tokens=3).continuing([1, 2]))
    search = decoder.searches.at(0, 2)
    assert (search.is_changed, search.needs_history) == (is_changed, needs_history)


def test_a_beam_that_may_not_go_on_leaves_the_others_alone(decoder_with):
    """Of three beams, two end because all of their possible next tokens are banned. The third continues.

    The beams' outputs are 1, 2 and 3.
    """
    table = {1: {1: 0.0}, 2: {2: 0.0}, 3: {4: 0.0, 5: -1.0}, 0: {1: 0.0, 2: -0.1, 3: -2.0}}

    def logits_of(text):
        logits = torch.full((VOCAB,), -torch.inf)
        for token, value in table.get(text[-1], {6: 0.0, 7: -0.5}).items():
            logits[token] = value
        return logits

    setup = SlotSetup(SamplingConfig(no_repeat_ngram_size=1, beam_width=3), max_new_tokens=4)
    engine = Engine(decoder_with, [setup], [[0]])
    engine.step(logits_of)
    assert engine.texts[0] == [(1,), (2,), (3,)]
    _, outputs = engine.step(logits_of)
    assert engine.texts[0][:2] == [(3, 4), (3, 5)] and outputs[0].log_probs.tolist()[2] == -np.inf
    for _ in range(2):
        engine.step(logits_of)
    texts = [tuple(text.tokens.tolist()) for text in engine.ended[0]]
    assert texts[0][:2] in [(3, 4), (3, 5)] and all(text.finish == LENGTH for text in engine.ended[0])


def test_a_search_in_which_nothing_may_go_on_fails_unless_a_text_is_finished(decoder_with):
    """A search in which no beam can continue ends with its hypotheses. It fails if it has none.

    Only token 3 and the end id are possible, and no_repeat_ngram_size bans token 3 in the second step. In the second of
    two searches, min_length bans the end id too.
    """
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[3, 4]] = torch.tensor([0.0, -1.0])
    setups = [SlotSetup(SamplingConfig(no_repeat_ngram_size=1, beam_width=2, min_length=min_length), max_new_tokens=5,
                        end_id=end_id)
              for end_id, min_length in ((4, 0), (4, 5))]
    engine = Engine(decoder_with, setups, [[0], [0]])
    engine.step(lambda text: logits.clone())
    engine.step(lambda text: logits.clone())
    assert engine.ended[1] is None                                     # it failed, as a row without a possible token
    assert sorted(tuple(text.tokens.tolist()) for text in engine.ended[0]) == [(), (3,)]
