"""T9: the random tests catch each reintroduced bug."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.contract.test_process_level import FINALS, PREAMBLE
from tests.harness.small_process import in_a_small_process
from tests.simulation.features import available
from tests.simulation.swarm import Swarm, draw
from tests.simulation.world import SimulatedWorld

from .beam_bugs import BEAM_BUGS
from .bugs import BUGS, THREAD_BUGS, Bug
from .interruption_bugs import INTERRUPTION_BUGS, sweep_with

SEEDS = range(80)
ITERATIONS = 100
RATE = 0.1
SECONDS_TO_LEAVE = 3.0


def swarms(bug: Bug) -> Iterator[Swarm]:
    """Yield the random configuration of each of SEEDS, limited to configurations that the bug affects."""
    for seed in (*SEEDS[bug.first_seed:], *SEEDS[:bug.first_seed]):
        swarm = draw(seed, available(), ITERATIONS)
        fixed = {"max_queued_requests": 20, "max_queued_tokens": 4_000_000, "max_bytes_in_flight": 1 << 32,
                 "max_admissions": 4096, "reuse": False, "window": None, "sinks": 0, "host_blocks": 0,
                 "has_poll": True, "max_beam_width": 1, "ranks": 1, "late_ranks": None, "faults": bug.faults,
                 "rank_callbacks": False, "drafts": 0, "draft_model": False, "stored_blocks": 0, "transfers": None,
                 "fault_rate": RATE, "endings": ((ITERATIONS, "drain"),)}
        traffic = {"beams": 0.0, "words": 0.0, **bug.traffic}
        yield replace(swarm, **{**fixed, **bug.world}, traffic=replace(swarm.traffic, **traffic))


@pytest.mark.parametrize("bug", [*BUGS, *BEAM_BUGS], ids=lambda bug: f"{bug.failure} {bug.name}")
def test_a_planted_bug_is_caught(bug, monkeypatch):
    if bug.needs is not None and bug.needs not in available():
        pytest.skip(f"the engine has no {bug.needs} yet, in which {bug.failure} could be planted: {bug.name}")
    with monkeypatch.context() as patch:
        bug.plant(patch)
        caught = next((swarm for swarm in swarms(bug) if (found := SimulatedWorld(swarm).run().violations)), None)
    assert "AttributeError" not in str(found), "the plant does not fit the product any more"
    assert caught is not None, f"{len(SEEDS)} seeds saw nothing"
    assert SimulatedWorld(caught).run().violations == [], "the same world is clean without the bug"


@pytest.mark.parametrize("name", INTERRUPTION_BUGS)
def test_a_planted_bug_of_how_items_move_is_caught(name):
    assert in_a_small_process(sweep_with, name)


@pytest.mark.parametrize("plant", THREAD_BUGS.values(), ids=THREAD_BUGS.keys())
def test_a_planted_bug_of_the_thread_is_caught(plant):
    script = textwrap.dedent(plant) + textwrap.dedent(PREAMBLE) + "os.write(1, b'leaving\\n')\n"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line == "leaving\n":
                break
        else:
            pytest.fail("the script did not come to its end")
        try:
            process.wait(SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()                                       # it hangs
        else:
            assert set(process.stdout.read().splitlines()) != FINALS
