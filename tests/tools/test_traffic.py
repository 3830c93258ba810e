"""Arrivals that are written as a trace or a workload are read back unchanged, and generated traces are valid."""

import hashlib
import json
from collections import Counter
from statistics import fmean, median, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_manager.tools.datasets import DatasetError, read_arrivals, read_workload
from batch_manager.tools.datasets.synthetic import ChatShape, TraceShape, sample_arrivals, sample_conversations
from batch_manager.tools.datasets.writing import TRACE_LINES, dataset_text, write_file
from batch_manager.tools.traffic import PREFIX_TOKENS, Arrival
from batch_manager.tools.workload import main


@st.composite
def arrivals_in_order(draw, with_ids=True):
    """Generate arrivals at whole milliseconds, the first at 0. Either every block has an id, or no block has one."""
    now, arrivals = 0, []
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(st.integers(1, 3 * PREFIX_TOKENS))
        blocks = -(-tokens // PREFIX_TOKENS)
        ids = tuple(draw(st.lists(st.integers(0, 9), min_size=blocks, max_size=blocks))) if with_ids else ()
        arrivals.append(Arrival(now / 1000, tokens, draw(st.integers(1, 10**6)), ids))
        now += draw(st.one_of(st.just(0), st.integers(0, 10**9)))
    return arrivals


@settings(max_examples=40, deadline=None)
@given(arrivals_in_order())
def test_a_mooncake_trace_is_read_as_it_was_written(tmp_path_factory, arrivals):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_file(path, TRACE_LINES["mooncake"](arrivals))
    assert list(read_arrivals(path)) == arrivals


@settings(max_examples=40, deadline=None)
@given(arrivals_in_order(with_ids=False), st.sampled_from(["azure", "csv"]))
def test_a_trace_in_csv_is_read_as_it_was_written(tmp_path_factory, arrivals, form):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    write_file(path, TRACE_LINES[form](arrivals))
    assert list(read_arrivals(path)) == arrivals


@settings(max_examples=15, deadline=None)
@given(arrivals_in_order())
def test_a_workload_of_a_trace_and_a_dataset_of_that_workload_have_its_arrivals(tmp_path_factory, arrivals):
    folder = tmp_path_factory.mktemp("trace")
    write_file(folder / "trace", TRACE_LINES["mooncake"](arrivals))
    workload = read_workload(folder / "trace", vocab_size=30000)
    write_file(folder / "workload", [json.dumps(workload)])
    write_file(folder / "dataset", [dataset_text(workload, "trace")])
    for name in ("workload", "dataset"):
        again = list(read_arrivals(folder / name))
        assert [one.arrival_s for one in again] == pytest.approx([one.arrival_s for one in arrivals])
        assert [(one.input_tokens, one.output_tokens) for one in again] == [
            (one.input_tokens, one.output_tokens) for one in arrivals]
        for i, one in enumerate(arrivals):    # prefixes that are equal in the trace are equal in the tokens
            for j, other in enumerate(arrivals[:i]):
                for block in range(min(one.input_tokens, other.input_tokens) // PREFIX_TOKENS):
                    alike = one.prefix_ids[:block + 1] == other.prefix_ids[:block + 1]
                    assert (again[i].prefix_ids[block] == again[j].prefix_ids[block]) == alike


@pytest.mark.parametrize("name, digest", [
    ("sample:azure", "7f8c048c66933322015d43bfff1995bdb9a03ba28c16f8b7a3c912acb643634a"),
    ("sample:mooncake", "b67011150503aa9d2075c1175c20db1039a1bc18996bb6839ee0898b6ba97b3f")])
def test_a_sample_has_the_bytes_that_figures_rest_on_and_its_command_writes_them(name, digest, tmp_path, capsys):
    made = tmp_path / "made"
    assert main(["sample-trace", "--as", name.partition(":")[2], "--out", str(made)]) == 0
    assert hashlib.sha256(made.read_bytes()).hexdigest() == digest
    assert list(read_arrivals(name)) == list(read_arrivals(made)) and len(list(read_arrivals(name))) == 1000
    capsys.readouterr()


def test_made_up_requests_come_at_their_rate_in_bursts_with_long_tails():
    arrivals = list(sample_arrivals(4000, 5, TraceShape(request_rate=10.0, burstiness=3.0)))
    gaps = [after.arrival_s - before.arrival_s for before, after in zip(arrivals, arrivals[1:])]
    assert 0.08 < fmean(gaps) < 0.12 and 2.5 < pstdev(gaps) / fmean(gaps) < 3.5 and min(gaps) >= 0
    inputs = sorted(one.input_tokens for one in arrivals)
    assert 800 < median(inputs) < 1000 and fmean(inputs) > 1.3 * median(inputs) and inputs[0] >= 1
    assert arrivals == list(sample_arrivals(4000, 5, TraceShape(request_rate=10.0, burstiness=3.0)))
    assert arrivals != list(sample_arrivals(4000, 6, TraceShape(request_rate=10.0, burstiness=3.0)))


def test_made_up_conversations_share_their_beginnings():
    chat = ChatShape(longest=4000, system_tokens=(1200, 2048))
    arrivals = list(sample_conversations(600, 1, TraceShape(), chat))
    before: dict[int, int] = {}
    for one in arrivals:
        assert len(one.prefix_ids) == -(-one.input_tokens // PREFIX_TOKENS) and one.input_tokens <= 4000
        assert len(set(one.prefix_ids)) == len(one.prefix_ids)
        for above, block in zip((-1, *one.prefix_ids), one.prefix_ids):    # an id identifies all blocks up to its block
            assert before.setdefault(block, above) == above
    firsts = Counter(one.prefix_ids[0] for one in arrivals)
    assert len(firsts) == 2 and max(firsts.values()) > 300
    known: set[int] = set()
    seen = 0
    for one in arrivals:
        seen += len(known.intersection(one.prefix_ids))
        known.update(one.prefix_ids)
    assert 0.4 < seen / sum(len(one.prefix_ids) for one in arrivals) < 0.95


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    path = tmp_path / "trace"
    path.write_text("mine")

    def lines():
        yield "half"
        raise DatasetError("", "a", "b", "c")

    with pytest.raises(DatasetError):
        write_file(path, lines())
    assert path.read_text() == "mine" and [one.name for one in tmp_path.iterdir()] == ["trace"]
    with pytest.raises(DatasetError, match="the file cannot be written: .*; expected a writable path"):
        write_file(tmp_path / "none" / "trace", ["a"])
