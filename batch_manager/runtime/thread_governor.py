"""On how many threads a compiled step computes: on fewer while other programs take their turns on the processor.

A step waits for the slowest of its threads. Where the system lets a thread wait, because another program has its core,
the whole step waits with it, and fewer threads are faster. That shows in the processor time of a step, which is then
less than its time on the clock times its threads. Fewer are tried when it shows, and more from time to time, each in
turn with the number in force, and the faster one is kept.

Numbers of rows between two powers of two have one decision. Results do not depend on it.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..contained_log import log

STEPS_LOOKED_AT = 8                # of one decision, before anything is tried
PAIRS_OF_A_TRIAL = 4               # a step on the number in force and one on the other
WORTH_A_CHANGE = 0.95              # of the time of the number in force
NOT_WORTH_A_TRIAL = 1.5            # of that: a trial ends with the first pair
LOST_SHARE = 0.1                   # of the processor time that the threads could have had
FIRST_INTERVAL_S, LONGEST_INTERVAL_S = 1.0, 30.0       # between trials; doubled by each that changed nothing


@dataclass(slots=True)
class _Decision:
    """For steps of about one size.

    threads   in force
    trial     the other number of threads, while it is tried
    """

    threads: int
    next_trial_s: float
    interval_s: float = FIRST_INTERVAL_S
    lost_shares: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_LOOKED_AT))
    trial: int | None = None
    times_s: list[float] = field(default_factory=list)


class ThreadGovernor:
    """Decides on the threads of each step, from the times of those before.

    most        threads there may be; at least 1
    monotonic   returns seconds
    """

    def __init__(self, most: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.most, self.newest = most, most
        self._monotonic = monotonic
        self._decisions: dict[int, _Decision] = {}

    def threads_for(self, rows: int) -> int:
        """Threads for a step of so many rows. What it takes is to be reported, before the next call."""
        if self.most == 1:
            return 1
        decision = self._decision(rows)
        in_force = decision.trial is None or len(decision.times_s) % 2 == 0
        self.newest = decision.threads if in_force else decision.trial
        return self.newest

    def report(self, rows: int, seconds: float, processor_seconds: float) -> None:
        """What the step took on the clock, and its threads of the processor, all together."""
        if self.most == 1:
            return
        decision = self._decision(rows)
        if decision.trial is not None:
            decision.times_s.append(seconds)
            self._judge(rows, decision)
            return
        decision.lost_shares.append(1 - processor_seconds / (max(seconds, 1e-9) * decision.threads))
        if len(decision.lost_shares) == STEPS_LOOKED_AT and self._monotonic() >= decision.next_trial_s:
            decision.trial = self._other(decision)

    def _decision(self, rows: int) -> _Decision:
        size = rows.bit_length()
        if size not in self._decisions:
            self._decisions[size] = _Decision(self.most, self._monotonic())
        return self._decisions[size]

    def _other(self, decision: _Decision) -> int | None:
        """The number to try; None: there is no reason to."""
        if decision.threads > 1 and statistics.median(decision.lost_shares) > LOST_SHARE:
            return decision.threads // 2
        return min(2 * decision.threads, self.most) if decision.threads < self.most else None

    def _judge(self, rows: int, decision: _Decision) -> None:
        in_force, other = decision.times_s[::2], decision.times_s[1::2]
        if not other or len(in_force) > len(other):
            return
        is_hopeless = min(other) > NOT_WORTH_A_TRIAL * max(in_force)
        if len(other) < PAIRS_OF_A_TRIAL and not is_hopeless:
            return
        ratio = statistics.median(other) / statistics.median(in_force)
        if not is_hopeless and ratio < WORTH_A_CHANGE:
            log.info("steps of about %s tokens compute on %s threads, which take %.2f of the time of %s", f"{rows:,}",
                     decision.trial, ratio, decision.threads)
            decision.threads, decision.interval_s = decision.trial, FIRST_INTERVAL_S
        else:
            decision.interval_s = min(2 * decision.interval_s, LONGEST_INTERVAL_S)
        decision.next_trial_s = self._monotonic() + decision.interval_s
        decision.trial = None
        decision.times_s.clear()
        decision.lost_shares.clear()
