import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from batch_manager.runtime.forms.fixed.shapes import Shape
from batch_manager.runtime.forms.form import CONTEXTS, NoForm
from batch_manager.runtime.forms.graph.form import capture

CPU = torch.device("cpu")
SHAPES = [Shape(rows, is_split, samples) for rows in (1, 2, 4) for samples in (False, True)
          for is_split in (False, True)] + [Shape(8, is_split, True, 64, 32) for is_split in (False, True)]


class Graph:
    """A stand-in for CapturedGraph. Replaying it calls the captured function again.

    fails_at   shape whose capture raises; None: all captures succeed
    """

    made, fails_at = [], None

    def __init__(self, device, memory_of=None):
        self.memory_of = memory_of
        Graph.made.append(self)

    def capture(self, function):
        if self.fails_at is not None and function.args[0] == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        self.function = function

    def replay(self):
        events.append("replayed")
        self.function()


events = []


def captured(fails_at=None):
    """Capture graphs of all SHAPES. Return the form.

    `events` then lists the shapes that were prepared and the shapes that were launched, in order.
    """
    events.clear()
    Graph.made.clear()
    parts = SimpleNamespace(device=CPU, num_slots=3, adapters=None, attention=SimpleNamespace(dispatch="triton"))
    inputs = SimpleNamespace(may_split=lambda rows, tokens: True, send=lambda shape: None,
                             write_padding=lambda shape: events.append(("prepared", shape)))
    launches = SimpleNamespace(launch=lambda shape: events.append(shape))
    with mock.patch.object(Graph, "fails_at", fails_at):
        return capture(parts, inputs, launches, {(8, 64)}, Graph)


def test_shapes_are_captured_largest_first_after_a_run_in_memory_of_the_first(caplog):
    caplog.set_level(logging.INFO, "batch_manager")
    form = captured()
    in_order = sorted(SHAPES, key=lambda shape: (shape.num_tokens, shape), reverse=True)
    assert in_order[0] == Shape(8, True, True, 64, 32) and len(in_order) == 14
    assert events == [event for shape in in_order for event in (("prepared", shape), shape, "replayed", shape)]
    first, *others = Graph.made
    assert first.memory_of is None and all(graph.memory_of is first for graph in others)
    assert "captured 14 graphs of steps of up to 8 generating sequences and 64 context tokens in " in caplog.text
    assert " 0 bytes" in caplog.text
    assert form.figures() == {"Captured Graphs": 14} and form.serves & CONTEXTS
    events.clear()
    form._replays[Shape(2, True, False)]()
    assert events == ["replayed", Shape(2, True, False)]
    events.clear()
    form.with_launches(events.append)._replays[Shape(2, True, False)]()
    assert events == [Shape(2, True, False)]
    form.close()
    assert form.figures() == {"Captured Graphs": 0}


def test_a_capture_that_fails_leaves_no_form_and_says_why():
    with pytest.raises(NoForm) as raised:
        captured(fails_at=Shape(2, False, False))
    assert str(raised.value) == (
        "capturing Shape(rows=2, is_split=False, samples=False, context_tokens=0, contexts=0, adapts=False) raised "
        "RuntimeError: operation not permitted when stream is capturing") and raised.value.is_wrong
