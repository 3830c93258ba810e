"""Simulated engines take times from the cost model, and requests go to the right replicas.

A leap computes many iterations at once. Leaps change no result."""

from dataclasses import replace

import numpy as np
import pytest

from batch_manager import ConfigError
from batch_manager.stats.trace import Trace
from batch_manager.tools.bench.load import Load
from batch_manager.tools.bench.metrics import Bounds
from batch_manager.tools.datasets.records import Record
from batch_manager.tools.simulate.cost_model import CostModel
from batch_manager.tools.simulate.engine_settings import EngineSettings
from batch_manager.tools.simulate.figures import point_fields, stamps_of
from batch_manager.tools.simulate.fleet import simulate
from batch_manager.tools.simulate.traffic import Traffic
from tests.tools.simulated import lengths, random_run, records

PLAIN = CostModel({"constant": 0.010, "generation_requests": 0.001}, {"constant": 0.020, "context_tokens": 0.0001},
                  {"constant": 0.002})
ENGINE = EngineSettings(num_blocks=100, max_seq_len=512, tokens_per_block=16, max_batch_size=4, max_num_tokens=256)


def figures(run):
    return {name: value for name, value in point_fields(run, Load(), "online", Bounds(), 0.0).items()
            if name != "simulated_in_s"}


def test_times_are_those_of_the_cost_model():
    run = simulate(lengths([0.0, 1.0], [100, 50], [4, 1]), ENGINE, PLAIN)
    first, steps = 0.002 + 0.020 + 0.010, 3 * (0.002 + 0.010 + 0.001)
    stamps = stamps_of(run)
    assert stamps.first_s == pytest.approx([first, 1.0 + 0.002 + 0.020 + 0.005])
    assert stamps.last_s == pytest.approx([first + steps, 1.027])
    assert run.wall_s == pytest.approx(1.027) and stamps.tokens.tolist() == [4, 1]
    assert run.replicas[0].backend.busy_s == pytest.approx(0.030 + 3 * 0.011 + 0.025)


def test_a_device_that_is_asynchronous_hides_the_host():
    cost = replace(PLAIN, host_s={"constant": 0.008}, is_asynchronous=True)
    wall_s = simulate(lengths([0.0], [100], [100]), ENGINE, cost).wall_s
    assert wall_s == pytest.approx(0.008 + 0.030 + 99 * 0.011, rel=0.02)
    assert simulate(lengths([0.0], [100], [100]), ENGINE, replace(cost, is_asynchronous=False)).wall_s > wall_s + 0.7


@pytest.mark.parametrize("seed, count, is_asynchronous", [
    *((seed, 40, False) for seed in (1, 4, 5, 8, 9, 10, 12, 13, 14, 15, 16, 21, 22, 30)),
    (100, 80, False),   # a request that is refused at once, in a closed loop, when another replica begins an iteration
    (190, 40, True),    # a leap right after the step that is the first one without a paused request
    *((seed, 40, True) for seed in (202, 203, 204, 205, 206, 207, 210, 226))])
def test_leaps_change_no_record(seed, count, is_asynchronous):
    with_leaps, one_by_one = (random_run(seed, count, leaps, is_asynchronous=is_asynchronous)
                              for leaps in (True, False))
    assert records(with_leaps) == records(one_by_one)
    assert figures(with_leaps) == figures(one_by_one)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_leaps_are_taken(is_asynchronous):
    run = simulate(lengths([0.0, 0.5], [100, 100], [200, 200]), ENGINE, replace(PLAIN, is_asynchronous=is_asynchronous))
    (replica,) = run.replicas       # on an asynchronous device, the last iteration only reads a step
    assert replica.iterations > 200 and replica.backend.steps == replica.iterations - is_asynchronous
    assert replica._lean.planned < 20


def test_every_request_is_answered_and_what_cannot_fit_is_refused():
    run = simulate(lengths([0.0, 0.0, 0.1], [100, 900, 30], [10, 10, 10]), ENGINE, PLAIN)
    found = figures(run)
    assert (found["failed"], found["failures"][0]["id"], found["output_tokens"]) == (1, 1, 20)
    assert "max_seq_len - 1 = 511" in found["failures"][0]["error"]


def test_settings_that_a_manager_refuses_are_refused():
    with pytest.raises(ConfigError, match="max_num_tokens is 8"):
        simulate(lengths([0.0], [10], [10]), replace(ENGINE, max_num_tokens=8), PLAIN)


def test_a_trace_of_a_simulation_has_every_iteration():
    trace = Trace()
    run = simulate(lengths([0.0, 0.05], [100, 50], [20, 20]), ENGINE, PLAIN, trace=trace.append)
    assert len(trace.iterations) == run.replicas[0].backend.steps
    ran = [sum(len(each) for each in (row.context, row.generation)) for row in trace.iterations]
    assert min(ran) >= 1 and max(ran) == 2
    assert trace.iterations[-1].started_at_s == pytest.approx(run.wall_s - 0.013)


def test_prompts_that_begin_alike_share_blocks():
    records = [Record(n, n, n * 1.0, 1024, 4, (7, 8 + n % 2)) for n in range(4)]
    settings = replace(ENGINE, max_seq_len=2048, num_blocks=300, max_num_tokens=2048, enable_block_reuse=True)
    run = simulate(Traffic.of_records(records), settings, PLAIN)
    assert run.replicas[0].reused_tokens == pytest.approx(512 + 2 * 1024, abs=64)
    assert simulate(Traffic.of_records(records), replace(settings, enable_block_reuse=False),
                    PLAIN).replicas[0].reused_tokens == 0


def test_a_closed_loop_keeps_so_many_requests_under_way():
    run = simulate(lengths([0.0] * 6, [50] * 6, [10] * 6), ENGINE, PLAIN, concurrency=2)
    stamps = stamps_of(run)
    assert (stamps.arrival_s[:2] == 0).all()
    for index in range(2, 6):
        under_way = (stamps.arrival_s < stamps.arrival_s[index]) & (stamps.last_s > stamps.arrival_s[index])
        assert under_way.sum() <= 1 and stamps.arrival_s[index] in stamps.last_s[:index]


def test_routing():
    def served(routing, traffic, count=3):
        return simulate(traffic, replace(ENGINE, max_seq_len=4096, num_blocks=1000, max_num_tokens=4096), PLAIN,
                        num_replicas=count, routing=routing).log_book.replica.tolist()

    assert served("round-robin", lengths([0.0] * 7, [10] * 7, [5] * 7)) == [0, 1, 2, 0, 1, 2, 0]
    long_first = lengths([0.0, 0.001, 0.002, 0.5, 0.6], [10] * 5, [400, 5, 5, 5, 5])
    assert served("least-loaded", long_first) == [0, 1, 2, 1, 2]
    prefixes = [(1, 2), (3, 4), (5, 6), (3, 9), (1, 2, 7), (5, 6), (9, 9)]
    talks = Traffic.of_records([Record(n, n, float(n), 512 * len(ids), 5, ids) for n, ids in enumerate(prefixes)])
    found = served("longest-prefix", talks)
    assert found[4] == found[0] and found[5] == found[2] and len(set(found[:3])) == 3


def test_longest_prefix_gives_way_to_an_imbalance():
    count = 120
    talks = Traffic.of_records([Record(n, n, n * 1e-4, 1024, 200, (1, 2)) for n in range(count)])
    served = simulate(talks, replace(ENGINE, max_seq_len=4096, num_blocks=1000, max_num_tokens=4096), PLAIN,
                      num_replicas=2, routing="longest-prefix").log_book.replica
    assert 30 <= np.bincount(served).min() <= count // 2
