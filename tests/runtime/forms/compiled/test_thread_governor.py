"""The ThreadGovernor chooses the thread count of compiled steps by their measured times.

It uses fewer threads while other programs use some of the cores.
"""

import logging

import pytest

from batch_manager.runtime.forms.compiled.thread_governor import PAIRS_OF_A_TRIAL, ThreadGovernor


class Machine:
    """Simulates a machine on which other programs use `busy` of the cores. A step takes 20 ms on one thread.

    log   thread count of each step
    """

    def __init__(self, cores, *, busy=0):
        self.cores, self.busy, self.now_s, self.log = cores, busy, 0.0, []
        self.governor = ThreadGovernor(cores, lambda: self.now_s)

    def step(self, rows=8):
        threads = self.governor.threads_for(rows)
        free = self.cores - self.busy
        # A thread on a shared core runs less than half of the time, and the others wait for it at each operation.
        share = 0.4 if threads > free else 1.0
        seconds = 0.02 / threads / share
        self.now_s += seconds
        waiting = 1.0 if threads <= free else (free + share * (threads - free)) / threads
        self.governor.report(rows, seconds, seconds * threads * waiting)
        self.log.append(threads)
        return threads

    def run(self, seconds, rows=8):
        end_s, first = self.now_s + seconds, len(self.log)
        while self.now_s < end_s:
            self.step(rows)
        return self.log[first:]


@pytest.mark.parametrize("cores", [1, 2, 3, 16])
def test_a_quiet_machine_has_all_threads_and_no_trials(cores):
    assert set(Machine(cores).run(200)) == {cores}


def test_a_neighbour_is_given_its_core_and_the_core_is_taken_again(caplog):
    machine = Machine(4)
    machine.run(5)
    machine.busy = 2
    with caplog.at_level(logging.INFO, "batch_manager"):
        machine.run(3)
    assert machine.run(3).count(4) <= 2 * PAIRS_OF_A_TRIAL          # four threads are tried now and then
    assert "steps of about 8 tokens now run on at most 2 threads, which took 0.80 of the time on 4" in caplog.text
    machine.busy = 0
    machine.run(31)
    assert machine.step() == 4


def test_what_is_hopeless_is_tried_once_and_less_and_less_often():
    """If one thread takes twice as long as two, the governor's trials of one thread become rarer, up to 30 s apart.

    The governor tries one thread at all, because the two threads spend time waiting.
    """
    now_s, tried_at = [0.0], []
    governor = ThreadGovernor(2, lambda: now_s[0])
    while now_s[0] < 100:
        threads = governor.threads_for(1)
        now_s[0] += 0.02 / threads
        governor.report(1, 0.02 / threads, 0.5 * 0.02)
        if threads == 1:
            tried_at.append(now_s[0])
    gaps = [later - earlier for earlier, later in zip(tried_at, tried_at[1:])]
    assert gaps[0] == pytest.approx(2, rel=0.2) and gaps[1] == pytest.approx(4, rel=0.2)
    assert max(gaps) == pytest.approx(30, rel=0.1) and len(tried_at) <= 9


def test_sizes_are_decided_apart():
    machine = Machine(2)
    machine.run(2, rows=512)
    machine.busy = 1
    machine.run(3, rows=8)
    assert machine.governor.threads_for(512) == 2
    assert machine.governor.threads_for(9) == machine.governor.threads_for(15) == machine.governor.threads_for(8)


def test_a_trial_takes_turns_with_the_number_in_force():
    machine = Machine(2, busy=1)
    log = machine.run(1)
    start = log.index(1)
    assert log[:start] == [2] * start and start >= 8
    assert log[start - 1 : start - 1 + 2 * PAIRS_OF_A_TRIAL] == [2, 1] * PAIRS_OF_A_TRIAL
