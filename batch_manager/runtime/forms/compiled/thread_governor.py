"""Chooses the number of threads of a compiled step: fewer while other programs use the processor.

A step waits for its slowest thread. If another program occupies the core of one thread, the whole step waits, and fewer
threads are faster. In this case the processor time of a step is less than its wall-clock time multiplied by its number
of threads: processor time is lost. From time to time, the governor starts a trial: with half the threads if processor
time is lost, otherwise with twice as many. A trial alternates between the current number and the tried number, and the
governor keeps the faster of the two.

Row counts between two powers of two share a decision. Results do not depend on the number of threads.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ....contained_log import log
from ....errors import counted

STEPS_LOOKED_AT = 8                # steps observed before a trial
PAIRS_OF_A_TRIAL = 4               # a pair: a step with the current number of threads and a step with the other
WORTH_A_CHANGE = 0.95              # change if the other number takes less than this share of the current time
NOT_WORTH_A_TRIAL = 1.5            # stop a trial if the fastest step with the other number takes this many
                                   # times as long as the slowest step with the current number
LOST_SHARE = 0.1                   # lost share of the available processor time above which fewer threads are tried
FIRST_INTERVAL_S, LONGEST_INTERVAL_S = 1.0, 30.0       # between trials; doubled after a trial without change


@dataclass(slots=True)
class _Decision:
    """The number of threads for steps of about the same size.

    threads   current number
    trial     the tried number during a trial; None: there is no trial
    """

    threads: int
    next_trial_s: float
    interval_s: float = FIRST_INTERVAL_S
    lost_shares: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_LOOKED_AT))
    trial: int | None = None
    times_s: list[float] = field(default_factory=list)


class ThreadGovernor:
    """Chooses the threads of each step from the times of earlier steps.

    most        largest number of threads; at least 1
    newest      number of threads chosen for the newest step
    monotonic   clock, in seconds
    """

    def __init__(self, most: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.most, self.newest = most, most
        self._monotonic = monotonic
        self._decisions: dict[int, _Decision] = {}

    def threads_for(self, rows: int) -> int:
        """Return the number of threads for a step of `rows` rows.

        Call `report` with the times of this step before the next call.
        """
        if self.most == 1:
            return 1
        decision = self._decision(rows)
        is_current = decision.trial is None or len(decision.times_s) % 2 == 0
        self.newest = decision.threads if is_current else decision.trial
        return self.newest

    def report(self, rows: int, seconds: float, processor_seconds: float) -> None:
        """Report the wall-clock time of a step of `rows` rows, and the processor time of all its threads."""
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
        """Return the number of threads to try next, or None if there is no number to try."""
        if decision.threads > 1 and statistics.median(decision.lost_shares) > LOST_SHARE:
            return decision.threads // 2
        return min(2 * decision.threads, self.most) if decision.threads < self.most else None

    def _judge(self, rows: int, decision: _Decision) -> None:
        current, other = decision.times_s[::2], decision.times_s[1::2]
        if not other or len(current) > len(other):
            return
        is_hopeless = min(other) > NOT_WORTH_A_TRIAL * max(current)
        if len(other) < PAIRS_OF_A_TRIAL and not is_hopeless:
            return
        ratio = statistics.median(other) / statistics.median(current)
        if not is_hopeless and ratio < WORTH_A_CHANGE:
            log.info("steps of about %s now run on at most %s, which took %.2f of the time on %s",
                     counted(rows, "token"), counted(decision.trial, "thread"), ratio, decision.threads)
            decision.threads, decision.interval_s = decision.trial, FIRST_INTERVAL_S
        else:
            decision.interval_s = min(2 * decision.interval_s, LONGEST_INTERVAL_S)
        decision.next_trial_s = self._monotonic() + decision.interval_s
        decision.trial = None
        decision.times_s.clear()
        decision.lost_shares.clear()
