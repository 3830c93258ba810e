"""The bits of a batch have words, and the first form without an obstacle runs the step."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from batch_manager.decoding import slots
from batch_manager.handover import ContextWork, GenerationWork, ScheduledBatch
from batch_manager.runtime.forms import form as forms
from batch_manager.runtime.forms.form import CONTEXTS, ORDER, ROWS, WORDS, Forms, words_of

FEATURES = [value for name, value in vars(slots).items() if name.isupper() and isinstance(value, int) and value >> 31]
ALL_FEATURES = sum(FEATURES)
OF_A_BATCH = [value for name, value in vars(forms).items() if name.isupper() and isinstance(value, int)
              and value.bit_count() == 1 and value >= CONTEXTS]


class Form:
    """A form that serves `serves`, with at most `rows` generation rows, and starts nothing."""

    dispatch, threads = "torch", None

    def __init__(self, name, serves, rows=8):
        self.name, self.serves, self._rows = name, serves, rows

    def misfit(self, batch):
        return ROWS if len(batch.generation) > self._rows else 0

    def start(self, batch, traits):
        return SimpleNamespace(traits=traits)

    def figures(self):
        return {}


def engine(*made):
    state = SimpleNamespace(features=np.zeros(8, np.int64))
    return Forms(made, SimpleNamespace(slots=state, threads=lambda own: nullcontext), {}), state


def rows(count):
    return ScheduledBatch(0, generation=GenerationWork(np.arange(count, dtype=np.int32), np.ones(count, np.int32)))


def test_each_bit_has_one_word_and_each_word_a_bit():
    assert len(FEATURES) == 13 and len(OF_A_BATCH) == 11
    assert sorted(WORDS) == sorted([*FEATURES, *OF_A_BATCH])
    assert len(set(WORDS.values())) == len(WORDS) and sum(WORDS) == sum(FEATURES) + sum(OF_A_BATCH)


def test_a_bit_without_a_word_is_called_by_its_number():
    assert words_of(slots.BEAMS | 1 << 45 | 1) == ["stages", "beams", "bit 45"]


def test_the_first_form_without_an_obstacle_runs_the_step():
    forms, state = engine(Form("fused", slots.SAMPLES, 2), Form("fixed", slots.SAMPLES), Form("packed", ALL_FEATURES))
    state.features[2] = slots.SAMPLES
    assert forms.start(rows(2)).choice == ("fused", [])
    assert forms.start(rows(3)).choice == ("fixed", [("fused", ROWS)])
    state.features[1] = 1 << 5 | slots.BEAMS
    choice = forms.start(rows(3)).choice
    assert choice.form == "packed" and choice.obstacles == {"fused": "stages", "fixed": "stages"}
    assert forms.figures() == {"Fused Steps": 1, "Fixed Steps": 1, "Packed Steps": 1}


def test_context_logits_count_in_contexts_alone():
    forms, state = engine(Form("packed", ALL_FEATURES | CONTEXTS))
    state.features[:] = slots.CONTEXT_LOGITS
    assert forms.start(rows(2)).traits == 0
    context = ContextWork(1, np.zeros(1, np.int32), 0, True)
    assert forms.start(ScheduledBatch(0, context=(context,))).traits == CONTEXTS | slots.CONTEXT_LOGITS


def test_a_bit_that_no_form_has_heard_of_is_refused_by_every_form():
    forms, state = engine(Form("compiled", ALL_FEATURES), Form("packed", ALL_FEATURES))
    state.features[0] = 1 << 44
    with pytest.raises(NotImplementedError, match=r"\(compiled: bit 44; packed: bit 44\)"):
        forms.start(rows(1))


def test_forms_are_tried_in_one_order():
    with pytest.raises(AssertionError):
        engine(Form("packed", 0), Form("fixed", 0))
    assert ORDER == ("graph", "fused", "fixed", "compiled", "packed", "padded")
