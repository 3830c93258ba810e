"""The times that `trace` and `draw` give are those of the callbacks, for 50 random requests in six settings."""

import pytest

from batch_manager import Trace
from batch_manager.tools.request_spans import CONTEXT, PAUSED, lives
from tests.harness.clock import VirtualClock
from tests.harness.world import make_loop
from tests.tools.recomputation import (
    SETTINGS,
    STEP_S,
    TOKEN_S,
    MeasuringClient,
    backend_options,
    comparisons,
    engine_options,
)

IDLE_S = 0.005


@pytest.mark.parametrize("name", SETTINGS)
def test_every_sum_is_that_of_the_callbacks(name):
    setting, clock, trace = SETTINGS[name], VirtualClock(), Trace()

    def wait(seconds):
        clock.now += seconds

    client = MeasuringClient(setting, list(SETTINGS).index(name), lambda: clock.now, wait)
    loop = make_loop(client, clock=clock, backend=backend_options(setting), parts={"trace": trace.append},
                     as_arrays=True, **engine_options(setting))
    start = loop.backend.start

    def start_slowly(batch, *others):
        tokens = sum(len(work.token_ids) for work in batch.context) + len(batch.generation)
        wait(STEP_S + TOKEN_S * tokens)
        return start(batch, *others)

    loop.backend.start = start_slowly
    while not client.is_done:
        if not loop.step(accept_new=True):
            wait(IDLE_S)
    found = list(comparisons(trace.iterations, client))
    assert len(found) > 500
    # The clock is exact, and `why` prints milliseconds from one second on.
    wrong = [each for each in found if not each.is_right
             or abs(each.told_s - each.expected_s) > (1e-2 if each.what.startswith("why") else 1e-4)]
    assert not wrong, wrong[:5]
    spans = [span for life in lives(trace.iterations) for span in life.spans]
    has = {"pauses": any(span.kind == PAUSED for span in spans),
           "chunks": any(span.kind == CONTEXT and span.iterations > 1 for span in spans)}
    assert has.get(name, True)
