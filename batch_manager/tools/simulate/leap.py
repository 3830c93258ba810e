"""Steps in flight, and leaps: many iterations of one plan, computed at once."""

from dataclasses import dataclass

import numpy as np

from ...requests.llm_request import LlmRequest
from .step_shape import StepShape, pairs

LONGEST = 4096      # iterations
RAMP = np.arange(LONGEST + 1)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and not read yet.

    contexts     requests whose contexts it computes
    ends         for each of them, the position after the tokens that the step computes
    generating   requests that generate
    done_at_s    when the step ends
    """

    contexts: list[LlmRequest]
    ends: list[int]
    generating: list[LlmRequest]
    done_at_s: float

    @property
    def requests(self) -> list[LlmRequest]:
        return self.contexts + self.generating


@dataclass(frozen=True, slots=True)
class Leap:
    """The next iterations of a loop, computed for the case that no request enters during them.

    generating   requests that generate in every step
    context      request whose context the steps compute, in chunks of `sizes` tokens; None: no context
    sizes        [k] tokens of its chunk in each step
    finishes     the last iteration ends at least one request
    shape        the shapes of all steps: each amount is a number, or an array with an entry per step
    times_s      [k + 1] see `times_of`
    step_s       [k] seconds of each step
    """

    generating: list[LlmRequest]
    context: LlmRequest | None
    sizes: np.ndarray
    finishes: bool
    shape: StepShape
    times_s: np.ndarray
    step_s: np.ndarray

    def __len__(self) -> int:
        return len(self.step_s)

    @property
    def next_s(self) -> float:
        """When the leap must be carried out: its end; if it ends a request, the begin of its last iteration.

        The figures of a replica then change at the same time as without leaps.
        """
        return float(self.times_s[-2 if self.finishes else -1])

    def begun_before(self, now: float) -> int:
        """Return how many of the iterations begin before `now`."""
        return min(int(np.searchsorted(self.times_s, now)), len(self))


def times_of(step_s: np.ndarray, host_s: float, now: float, done_at_s: float | None) -> np.ndarray:
    """Return [k + 1]: the begin of the first iteration, then the end of each; each begins when the one before ends.

    The terms are added one after the other, as a clock adds them.

    step_s      [k] seconds of each step
    host_s      seconds of the host's part of each iteration
    now         begin of the first iteration
    done_at_s   when a step in flight ends, which the first iteration reads after it has launched its own; each later
                one reads that of the one before. None: each iteration reads its own step
    """
    if done_at_s is not None:
        parts = np.concatenate([[max(now + host_s, done_at_s)], np.maximum(step_s[:-1], host_s)])
        return np.concatenate([[now], np.cumsum(parts)])
    parts = np.empty(2 * len(step_s) + 1)
    parts[0], parts[1::2], parts[2::2] = now, host_s, step_s
    return np.cumsum(parts)[::2]


def chunk_sizes(remaining: int, bound: int, unit: int, count: int) -> np.ndarray:
    """Return [count], the sizes of the next chunks of a context, each of which gets at most `bound` tokens.

    remaining   tokens of the context
    unit        each chunk but the last is a multiple of it
    """
    size = bound // unit * unit
    left = remaining - size * RAMP[:count]
    return np.where(left > bound, size, left)


def context_amounts(start: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (context tokens [k], context attention [k]) of chunks of `sizes` tokens, the first at position `start`."""
    return sizes, pairs(start + sizes.cumsum() - sizes, sizes)
