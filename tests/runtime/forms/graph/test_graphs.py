import logging

import pytest
import torch

from batch_manager.config import TrtGptModelOptionalParams
from batch_manager.errors import ConfigError
from batch_manager.runtime import packing
from batch_manager.runtime.forms.fixed.shapes import Shape
from batch_manager.runtime.forms.graph import form as graphs
from batch_manager.runtime.forms.graph.form import Graphs, obstacle_to_graphs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPES = [Shape(rows, is_split, False) for rows in (1, 2, 8) for is_split in (False, True)]
SHAPES.append(Shape(4, True, True, 64, 32))


class Graph:
    """A stand-in for CapturedGraph. Replaying it calls the captured function again.

    fails_at   shape whose capture raises; None: all captures succeed
    """

    def __init__(self, device, memory_of=None):
        self.memory_of = memory_of

    def capture(self, function):
        if self.fails_at is not None and function.args[0] == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        self.function = function

    def replay(self):
        events.append("replayed")
        self.function()


@pytest.fixture
def made(monkeypatch):
    """made(fails_at=None) captures graphs of all SHAPES. It returns (why there are none, or "", the Graphs).

    `events` then lists the shapes that were prepared and the shapes that were run, in order.
    """
    def make(fails_at=None):
        events.clear()
        monkeypatch.setattr(Graph, "fails_at", fails_at, raising=False)
        monkeypatch.setattr(graphs, "CapturedGraph", Graph)
        made = Graphs(CPU, lambda shape: events.append(shape))
        return made.capture(SHAPES, lambda shape: events.append(("prepared", shape))), made
    return make


events = []


def test_shapes_are_captured_largest_first_after_a_run_in_memory_of_the_first(made, caplog):
    caplog.set_level(logging.INFO, "batch_manager")
    obstacle, captured = made()
    in_order = [SHAPES[-1], *sorted(SHAPES[:-1], reverse=True)]                 # 68 rows, 8, ...
    assert obstacle == "" and events == [
        event for shape in in_order for event in (("prepared", shape), shape, "replayed", shape)]
    first, *others = (captured._graphs[shape] for shape in in_order)
    assert first.memory_of is None and all(graph.memory_of is first for graph in others)
    assert "captured 7 graphs of steps of up to 8 generating sequences and 64 context tokens in " in caplog.text
    assert " 0 bytes" in caplog.text
    events.clear()
    captured.run(Shape(2, True, False))
    captured.run(Shape(9, False, False))                             # no graph is large enough
    assert events == ["replayed", Shape(2, True, False), Shape(9, False, False)]


def test_the_backend_reports_the_number_of_its_graphs(made):
    from types import SimpleNamespace

    from batch_manager.runtime.native_backend import NativeBackend

    _, captured = made()
    for found, expected in ((captured, {"Captured Graphs": len(SHAPES)}), (None, {})):
        backend = SimpleNamespace(_plain_steps=SimpleNamespace(graphs=found), _device=GPU, _runner=object())
        assert NativeBackend.figures(backend) == expected


def test_a_capture_that_fails_leaves_no_graph_and_says_why(made):
    obstacle, captured = made(fails_at=Shape(2, False, False))
    assert obstacle == (
        "capturing Shape(rows=2, is_split=False, samples=False, context_tokens=0, contexts=0) raised RuntimeError: "
        "operation not permitted when stream is capturing")
    events.clear()
    captured.run(Shape(8, False, False))
    assert events == [Shape(8, False, False)]


@pytest.mark.parametrize("changes, device, has_triton, own_attention, layout, obstacle", [
    ({}, GPU, True, False, packing.packed, None),
    ({}, GPU, True, False, packing.split, None),
    ({}, CPU, True, False, packing.packed, "the device is cpu"),
    ({}, GPU, False, False, packing.packed, "triton is not installed"),
    ({}, GPU, True, True, packing.packed, "Parts.attention is set"),
    ({}, GPU, True, False, packing.padded, "TrtGptModelType.V1 pads"),
    ({"deterministic": True}, GPU, True, False, packing.packed, "deterministic is set"),
])
def test_what_has_no_graphs_is_refused_by_name_where_they_are_asked_for(
        monkeypatch, changes, device, has_triton, own_attention, layout, obstacle):
    monkeypatch.setattr(graphs, "use_triton", lambda _: has_triton)

    def asked(cuda_graphs):
        params = TrtGptModelOptionalParams(cuda_graphs=cuda_graphs, **changes)
        return obstacle_to_graphs(params, device, layout, own_attention)

    assert asked(None).startswith(obstacle or "") and asked(False) == "cuda_graphs is False"
    if obstacle is None:
        assert asked(None) == asked(True) == ""
    else:
        with pytest.raises(ConfigError, match=f"cuda_graphs is True, but {obstacle}"):
            asked(True)
