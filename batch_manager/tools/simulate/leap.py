"""Leaps: many iterations that only add one token to each sequence, computed at once."""

from dataclasses import dataclass

import numpy as np

from ...loop.generation_loop import GenerationLoop
from ...requests.llm_request import LlmRequest
from .backend import TOKEN, SimulatedBackend
from .step_shape import StepShape

LONGEST = 4096      # iterations
SHORTEST = 2


@dataclass(frozen=True, slots=True)
class Leap:
    """The next iterations of a loop, precomputed for the case that no request arrives during them.

    requests   requests that generate in every step
    shape      shape of every step, with `cached_tokens` 0, because this number differs between the steps
    ends_s     [k] end of each iteration; the first iteration begins at begin_s
    step_s     [k] seconds of each step
    cached_tokens   [k] cached tokens of each step
    """

    requests: list[LlmRequest]
    shape: StepShape
    begin_s: float
    ends_s: np.ndarray
    step_s: np.ndarray
    cached_tokens: np.ndarray

    @property
    def end_s(self) -> float:
        return float(self.ends_s[-1])

    def begun_before(self, now: float) -> int:
        """Return how many of the iterations begin before `now`."""
        if self.begin_s >= now:
            return 0
        return min(int(np.searchsorted(self.ends_s, now)) + 1, len(self.ends_s))


def possible_leap(loop: GenerationLoop, backend: SimulatedBackend) -> Leap | None:
    """Return a leap: the next iterations, computed at once. None of them ends a request or may lack blocks.

    Returns None if the leap would have fewer than two iterations (SHORTEST), an active request does not generate in
    every step, or a request is queued. Also returns None if steps are not in lockstep. In lockstep, each step is
    read before the next one is launched. The iterations of a leap are the same as if the loop ran them one by one.
    """
    requests = loop.active.in_order
    if loop.limits.window_depth > 1 or loop.window or not requests or len(requests) > loop.limits.max_batch_size:
        return None
    count = LONGEST
    for request in requests:
        left = request.final_length - request.num_tokens
        if not request.is_generating or left <= SHORTEST:
            return None
        count = min(count, left - 1)
    if len(requests) > loop.limits.max_num_tokens or len(loop.intake):
        return None
    slots, free = loop.kv.sequences.slots_of(requests), len(loop.kv.pool.free)
    while count >= SHORTEST and loop.kv.sequences.sum_of_new_blocks(slots, count) > free:
        count //= 2
    if count < SHORTEST:
        return None
    rows, shape = len(requests), backend.generation_shape(slots)
    first = int(loop.kv.sequences.kv_lengths[slots].sum()) + rows
    cached = first + rows * np.arange(count)
    begin_s = backend.clock.now
    step_s, host_s = backend.generation_seconds(shape, cached)
    return Leap(list(requests), shape, begin_s, begin_s + np.cumsum(step_s + host_s), step_s, cached)


def carry_out(leap: Leap, count: int, loop: GenerationLoop, backend: SimulatedBackend) -> None:
    """Advance the engine by the first `count` precomputed iterations of `leap`.

    Mutates requests, blocks, backend and clock.
    """
    if not count:
        return
    loop.kv.claim_tokens(leap.requests, count)
    tokens = [TOKEN] * count
    for request in leap.requests:
        request.add_tokens(tokens)
    backend.leap(np.array([request.request_id for request in leap.requests]), leap.shape,
                 leap.ends_s[:count], leap.step_s[:count], leap.cached_tokens[:count])
