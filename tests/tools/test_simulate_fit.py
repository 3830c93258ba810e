"""A fit recovers a cost model and reports its error, and its file can be read back."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from batch_manager.stats.trace import Trace
from batch_manager.tools.bench.errors import InputError
from batch_manager.tools.simulate.cost_fit import fit_cost
from batch_manager.tools.simulate.cost_model import CostModel
from batch_manager.tools.simulate.engine_settings import EngineSettings
from batch_manager.tools.simulate.fleet import simulate
from batch_manager.tools.simulate.least_squares import nonnegative_least_squares
from batch_manager.tools.simulate.measured_steps import measured_steps
from batch_manager.tools.simulate.step_shape import StepShape, shapes_of_trace
from batch_manager.tools.simulate.step_times import StepTimes
from tests.tools.simulated import COST, lengths

ENGINE = EngineSettings(num_blocks=120, max_seq_len=700, tokens_per_block=16, max_batch_size=12, max_num_tokens=200)


def trace_of(cost, count=60, seed=1, **changes):
    random, trace = np.random.default_rng(seed), Trace()
    traffic = lengths(np.cumsum(random.exponential(0.05, count)), random.integers(1, 300, count),
                      random.integers(1, 120, count))
    run = simulate(traffic, replace(ENGINE, **changes), cost, trace=trace.append, seed=seed)
    return trace.iterations, run


def test_a_fit_finds_the_cost_again():
    exact = replace(COST, host_s={}, generation_spread=(), mixed_spread=())
    found = fit_cost([trace_of(exact)[0]])
    assert found.error.median < 1e-3 and not found.is_asynchronous and found.about["num_blocks"] == 120
    for shape in (StepShape(generation_requests=3, cached_tokens=900),
                  StepShape(generation_requests=11, cached_tokens=20), StepShape(2, 150, 9000, 5, 600)):
        assert found.step_seconds(shape) == pytest.approx(exact.step_seconds(shape), rel=0.01)
    assert StepTimes(found).host_s(StepShape(generation_requests=5)) < 5e-6


def test_steps_that_scatter_are_fitted_in_the_mean():
    iterations, run = trace_of(replace(COST, host_s={}), 150)
    found = fit_cost([iterations])
    predicted = sum(found.step_seconds(shape) for _, shape in shapes_of_trace(iterations))
    assert predicted == pytest.approx(run.replicas[0].backend.busy_s, rel=0.01)
    assert found.generation_spread[0] == pytest.approx(0.9, abs=0.03)
    assert np.mean(found.mixed_spread) == pytest.approx(1.0, abs=0.01)
    assert 0.02 < found.error.median < 0.1


def test_a_few_interruptions_do_not_shape_the_fit():
    exact = replace(COST, host_s={}, generation_spread=(), mixed_spread=())
    iterations, _ = trace_of(exact)
    for number in range(20, 400, 37):
        phases = dict(iterations[number].phases_us)
        iterations[number] = replace(iterations[number], phases_us={**phases, "start": 900_000})
    found = fit_cost([iterations])
    assert found.about["interrupted_share"] > 0
    assert found.step_seconds(StepShape(generation_requests=8, cached_tokens=800)) == pytest.approx(
        exact.step_seconds(StepShape(generation_requests=8, cached_tokens=800)), rel=0.02)


def test_shapes_of_a_trace_are_those_of_the_batches(monkeypatch):
    from batch_manager.tools.simulate import backend

    seen = []
    shape_of_batch = backend.shape_of_batch
    monkeypatch.setattr(backend, "shape_of_batch", lambda *given: seen.append(shape_of_batch(*given)) or seen[-1])
    from batch_manager import SchedulerPolicy

    iterations, run = trace_of(COST, policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=60, enable_block_reuse=True)
    assert any(row.paused for row in iterations) and run.replicas[0].recomputed_tokens
    assert [shape for _, shape in shapes_of_trace(iterations)] == seen


def test_steps_of_an_engine_that_plans_ahead_are_timed_between_reads():
    exact = replace(COST, host_s={"constant": 1e-3}, generation_spread=(), mixed_spread=(), is_asynchronous=True)
    iterations, _ = trace_of(exact, 80)
    steps, is_asynchronous = measured_steps(iterations)
    assert is_asynchronous
    timed = [step for step in steps if step.step_s is not None]
    assert len(timed) > len(steps) / 2
    found = fit_cost([iterations])
    for shape in (StepShape(generation_requests=3, cached_tokens=300), StepShape(1, 100, 5000, 4, 500)):
        assert found.step_seconds(shape) == pytest.approx(exact.step_seconds(shape), rel=0.03)
    with pytest.raises(InputError, match="launches a step before it reads the results of the last one"):
        fit_cost([iterations, trace_of(COST)[0]])


def test_too_few_steps_are_refused():
    with pytest.raises(InputError, match="the traces have 0 timed steps"):
        fit_cost([[]])


def test_nonnegative_least_squares_is_the_best_of_all_active_sets():
    random = np.random.default_rng(0)
    for _ in range(60):
        columns, targets = random.normal(size=(12, 4)), random.normal(size=12)
        found = nonnegative_least_squares(columns, targets)
        best = min(_error_of_active_set(columns, targets, active)
                   for size in range(5) for active in itertools.combinations(range(4), size))
        assert (found >= 0).all() and ((columns @ found - targets) ** 2).sum() == pytest.approx(best, rel=1e-9)


def _error_of_active_set(columns, targets, active):
    x = np.zeros(columns.shape[1])
    if active:
        x[list(active)] = np.linalg.lstsq(columns[:, active], targets, rcond=None)[0]
    return np.inf if (x < 0).any() else ((columns @ x - targets) ** 2).sum()


def test_a_cost_model_comes_back_from_its_file(tmp_path):
    found = fit_cost([trace_of(COST)[0]], {"variant": "x"})
    found.write(tmp_path / "cost.json")
    assert CostModel.read(tmp_path / "cost.json") == found


ERROR = {"steps": 9, "median": 0.1, "p90": 0.2, "total": -0.1}


@pytest.mark.parametrize("change, told", [
    ({"format": "other"}, "is not a cost model"),
    ({"format_version": 2}, "format_version 2; this program reads version 1"),
    ({"generation_s": {"constant": -1}}, "constant is -1.0, not 0 to"),
    ({"mixed_s": {"size": 1}}, "unknown term 'size'"),
    ({"genration_s": {"constant": 1}}, "has the field 'genration_s', which nothing reads; expected about, "),
    ({"host_s": None}, "is damaged"),
    ({"is_asynchronous": 1}, "neither true nor false"),
    ({"mixed_spread": [-1]}, "mixed_spread has the factor -1, outside 0"), ({"most": {"x": 1}}, "the amounts are"),
    ({"error": {"a": 1}}, "is damaged"),
    ({"error": ERROR | {"total": "x"}}, "error.total is 'x', not a number of at most 1e[+]06"),
    ({"error": ERROR | {"p90": float("nan")}}, "error.p90 is nan, not a number"),
    ({"error": ERROR | {"steps": None}}, "error.steps is None, not an integer of at least 0"),
    ({"about": {"tokens_per_block": "x"}}, "about.tokens_per_block is 'x', not an integer"),
    ({"about": {"num_blocks": []}}, "about.num_blocks is of type list, not an integer"), ({"about": 1}, "is damaged"),
    ({"most": {"cached_tokens": float("inf")}}, "most.cached_tokens is inf, not an integer of at least 0"),
    ({"host_s": {"constant": 10**400}}, "is damaged: OverflowError: int too large")])
def test_a_damaged_file_is_refused(tmp_path, change, told):
    path = tmp_path / "cost.json"
    COST.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=told):
        CostModel.read(path)
    for text, reason in (("{", "cannot be read: Expecting"), ("[" * 100_000, "cannot be read: it has too many nested")):
        path.write_text(text)
        with pytest.raises(InputError, match=reason):
            CostModel.read(path)
