"""The iterations of the production loop, reduced to what decides the times of a simulation."""

import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from ...config import TrtGptModelOptionalParams
from ...contained_log import RateLimitedLog
from ...errors import RequestError, counted
from ...loop.advance import add_a_token_to_each
from ...loop.generation_loop import GenerationLoop
from ...requests.inference_request import InferenceRequest
from ...requests.llm_request import CONTEXT, LAST_TOKEN, LlmRequest
from ...scheduling.capacity import GuaranteedNoEvictScheduler, MaxUtilizationScheduler
from ...scheduling.chunking import chunk_after_reuse, first_come_first_served
from ...scheduling.micro_batch import TokenBudgetScheduler
from ...scheduling.simple import SimpleScheduler
from .backend import TOKEN, SimulatedBackend
from .leap import LONGEST, RAMP, Flight, Leap, chunk_sizes, context_amounts, times_of
from .log_book import LogBook
from .step_shape import StepShape, pairs
from .token_times import TokenTimes
from .traffic import PromptMaker, Traffic

SHORTEST = 2        # iterations of a leap
NO_STEP_IN_FLIGHT: frozenset[int] = frozenset()
NO_SIZES = np.empty(0, np.int64)
OTHER_BYTES = 16    # of the tensors of a request besides its prompt


class LeanLoop:
    """Runs the engine of a GenerationLoop: its admission, scheduler, KV cache manager and active requests.

    It gives the records of the GenerationLoop, whose place it takes, with less work. An iteration leaves out what has
    no effect in a simulation: statistics, responses, batches for a device, and checks of plans and outputs. Iterations
    that have the same plan are not planned one by one, but computed as a leap.

    A step is launched before the last one is read if the loop runs ahead; steps/window.py says which requests both may
    have. Without end ids, failures and sliding windows, these rules need only lengths.

    waiting      (index in the traffic, arrival in seconds) of requests that were not fetched yet; fetching removes them
    answer       called with (index, error or "") at the end of each request

    iterations   number of iterations, those of leaps included
    planned      number of iterations that were planned by the scheduler
    recomputed_tokens   number of tokens that were computed again after a pause
    """

    def __init__(self, loop: GenerationLoop, backend: SimulatedBackend, traffic: Traffic, log_book: LogBook,
                 waiting: deque[tuple[int, float]], answer: Callable[[int, str], None]) -> None:
        assert isinstance(loop.scheduler, SimpleScheduler)
        self._active, self._kv, self._scheduler, self._limits = loop.active, loop.kv, loop.scheduler, loop.limits
        self._capacity, self._micro_batch = loop.scheduler.capacity_scheduler, loop.scheduler.micro_batch_scheduler
        self._admission, self._most_fetched = loop.intake.admission, loop.intake.max_admissions_per_iteration
        self._clock, self._backend = backend.clock, backend
        self._traffic, self._log_book, self._waiting, self._answer = traffic, log_book, waiting, answer
        self._fetched: deque[tuple[int, float]] = deque()
        self._has_tokens = self._kv.enable_block_reuse or not isinstance(traffic.prompt, PromptMaker)
        self._warnings = RateLimitedLog(backend.clock.monotonic)
        self._token_times = TokenTimes(log_book)
        self._flights: deque[Flight] = deque()          # steps that were launched and not read, oldest first
        self.iterations = self.planned = self.recomputed_tokens = 0

    @staticmethod
    def fits(loop: GenerationLoop, traffic: Traffic) -> bool:
        """Whether the loop has the production schedulers and one micro-batch, and never lacks bytes for requests."""
        most = int(traffic.input_tokens.max(initial=0)) * 4 + OTHER_BYTES
        most_alive = min(loop.limits.max_num_sequences, len(traffic))
        return (loop.limits.num_micro_batches == 1 and type(loop.scheduler) is SimpleScheduler
                and type(loop.scheduler.capacity_scheduler) in (GuaranteedNoEvictScheduler, MaxUtilizationScheduler)
                and type(loop.scheduler.micro_batch_scheduler) is TokenBudgetScheduler
                and most * most_alive <= TrtGptModelOptionalParams().max_bytes_in_flight)

    @property
    def has_room(self) -> bool:
        """Whether one more request may become active."""
        return len(self._active) < self._limits.max_num_sequences

    # One iteration.

    def iterate(self) -> None:
        """Run one iteration. There must be an active or a waiting request."""
        refused = self._fetch()
        ended = self._run_step() if self._active.in_order else []
        self.iterations += 1
        self.planned += 1
        for index, error in refused:
            self._answer(index, error)
        for request in ended:
            self._end(request)

    def _fetch(self) -> list[tuple[int, str]]:
        """Let requests become active while there is room. Returns (index, error) of the refused ones."""
        fetched, waiting = self._fetched, self._waiting
        if not fetched:
            room = self._limits.max_num_sequences - len(self._active)
            fetched.extend([waiting.popleft() for _ in range(min(room, len(waiting)))])
        refused = []
        for _ in range(min(len(fetched), self._most_fetched)):
            index, arrived_at_s = fetched.popleft()
            try:
                self._active.add(self._admitted(index, arrived_at_s))
            except RequestError as error:
                refused.append((index, error.response_text()))
        return refused

    def _admitted(self, index: int, arrived_at_s: float) -> LlmRequest:
        """Return the request that admission makes. Raises RequestError."""
        output_len = int(self._traffic.output_tokens[index])
        if not self._has_tokens:
            prompt = [TOKEN] * int(self._traffic.input_tokens[index])
            if (request := self._admission.bare_request(index, prompt, output_len)) is not None:
                return request
        admitted = self._admission.admit(inference_request(self._traffic, index, arrived_at_s))
        for warning in admitted.warnings:
            self._warnings.log(logging.WARNING, "%s", warning)
        return admitted.request

    def _run_step(self) -> list[LlmRequest]:
        """Plan and launch a step, and read the oldest one if it is its turn. Returns the requests that ended."""
        flights, is_launched = self._flights, self._launch()
        if len(flights) < self._limits.window_depth and (
                not flights or is_launched and len(self._blocked_ids()) < len(self._active.in_order)):
            return []
        return self._read(flights.popleft())

    def _blocked_ids(self) -> frozenset[int]:
        """Return the ids of the requests that cannot run before a step in flight is read."""
        if not self._flights:
            return NO_STEP_IN_FLIGHT
        return frozenset([request.request_id for flight in self._flights for request in flight.requests
                          if request.state is LAST_TOKEN])

    def _launch(self) -> bool:
        """Plan and launch a step. Returns whether one was launched."""
        active, kv, flights = self._active.in_order, self._kv, self._flights
        kv.inflight_request_ids = blocked = self._blocked_ids()
        plan = self._scheduler.schedule_request(list(active), blocked)
        contexts, generating = plan.context_requests, plan.generation_requests
        if not (contexts or generating or flights):
            raise RuntimeError(f"none of {counted(len(active), 'active request')} is scheduled")
        if flights and any(request in flight.requests for request in plan.paused_requests for flight in flights):
            return False        # the step is read first
        for request in plan.paused_requests:
            num_computed = kv.kv_length(request) if request.is_generating else request.context_position
            kv.release(request)
            request.pause(self._limits.max_seq_len, num_computed)
        if not (contexts or generating):
            return False
        first_chunks = [request for request in contexts if request.is_first_context_chunk]
        cached_tokens = shared_tokens = 0
        if first_chunks or generating:
            claim = kv.claim(first_chunks, generating)
            cached_tokens = int(claim.kv_lengths.sum()) + len(generating)
            shared_tokens = self._backend.shared_tokens(claim.slots)
        context_tokens = context_attention = 0
        for request, size in zip(contexts, plan.sizes, strict=True):
            start, size = self._launch_chunk(request, size)
            context_tokens += size
            context_attention += pairs(start, size)
        done_at_s = self._backend.launch(StepShape(len(contexts), context_tokens, context_attention, len(generating),
                                                   cached_tokens, shared_tokens))
        flights.append(Flight(contexts, [request.context_position for request in contexts], generating, done_at_s))
        return True

    def _read(self, flight: Flight) -> list[LlmRequest]:
        """Read a step. Returns the requests that it ends."""
        contexts, generating = flight.contexts, flight.generating
        self._clock.now = now = max(self._clock.now, flight.done_at_s)
        for request, end in zip(contexts, flight.ends, strict=True):
            request.read_context(end)
        if self._kv.enable_block_reuse:
            for request in contexts:
                self._kv.publish_context(request, request.context_read)
        if len(contexts) + len(generating) < len(self._active.in_order):
            self._token_times.leave_out(self._active.in_order, generating)
        done = [request for request in contexts if request.context_read == request.prompt_len]
        self._token_times.note(done, generating, now)
        return add_a_token_to_each(done + generating, [TOKEN] * (len(done) + len(generating)))

    def _launch_chunk(self, request: LlmRequest, size: int) -> tuple[int, int]:
        """Launch a chunk that was planned with `size` tokens. Returns (position of its first token, its tokens)."""
        if request.is_first_context_chunk:
            found = self._kv.reused_tokens(request)
            size = chunk_after_reuse(size, found, request.prompt_len, self._kv.tokens_per_block)
            request.skip_context(found)
            self._backend.note_start(request.seq_slot, request.request_id, found)
        start = request.context_position
        if request.num_pauses:
            self.recomputed_tokens += request.num_recomputed(start, size)
        request.advance_context(size)
        return start, size

    def _end(self, request: LlmRequest) -> None:
        request.finish()
        self._kv.release(request, request.num_tokens)
        self._active.remove(request)
        self._log_book.end(request.request_id, request.total_generated_tokens, self._clock.now)
        self._answer(request.request_id, "")

    # Leaps.

    def possible_leap(self) -> Leap | None:
        """Return the next iterations as a leap, or None if there are fewer than SHORTEST that surely have one plan.

        In each iteration of a leap, the same requests generate, and at most one request computes a chunk of its
        context. All other active requests are contexts that stay left out: contexts without blocks that do not get
        any before a request ends, or contexts for which a chunk of the first one leaves too few tokens. Both
        schedulers make this plan again and again, because a step changes nothing that they look at but lengths:

        - GUARANTEED_NO_EVICT compares free blocks minus reserved ones. A block that a running request takes was
          reserved, so the difference does not change.
        - MAX_UTILIZATION compares free blocks minus those of the next step. The difference does not grow. All blocks
          that the leap takes are free, so no request is paused.

        With a step in flight, only generation is leapt over, and the leap ends before a request has its last token in
        flight. Then each iteration launches a step and reads the one before, which has the same requests.
        """
        limits, requests = self._limits, self._active.in_order
        if not requests or self._fetched or self._waiting and self.has_room:
            return None
        flight = self._flights[0] if self._flights else None
        if limits.window_depth > 1 and (flight is None or flight.contexts):
            return None
        generating: list[LlmRequest] = []
        started: list[LlmRequest] = []      # contexts with blocks
        unstarted: list[LlmRequest] = []    # contexts without blocks
        count = LONGEST
        for request in requests:
            if request.state is CONTEXT and not request.context_position:
                unstarted.append(request)
                continue
            if unstarted:
                return None
            if request.state is CONTEXT:
                started.append(request)
            else:
                generating.append(request)
                left = request.final_length - len(request.tokens[0])
                if left < count:
                    count = left
        running = len(generating) + len(started)
        if (running > limits.max_batch_size or len(generating) > limits.max_num_tokens
                or self._kv.enable_block_reuse and len(generating) < len(requests)):
            return None
        if flight is not None:
            if started or set(generating) != set(flight.generating):
                return None
            self._kv.inflight_request_ids = NO_STEP_IN_FLIGHT
            count -= 1
        left = count if flight is None else 0
        are_left_out = not unstarted or running == limits.max_batch_size or self._lacks_blocks(unstarted[0], generating)
        context, sizes = None, NO_SIZES
        if started:
            context = started[0]
            sizes = self._sizes(context, started[1:] + unstarted, limits.max_num_tokens - len(generating),
                                len(started) == 1 and are_left_out)
            count = min(count, len(sizes))
        elif not are_left_out or not generating:
            return None
        return self._leap(generating, context, sizes, count, left)

    def _lacks_blocks(self, context: LlmRequest, generating: list[LlmRequest]) -> bool:
        """Whether the scheduler starts neither `context`, the first one without blocks, nor later ones."""
        ledger = self._kv.start_scheduling()
        if isinstance(self._capacity, GuaranteedNoEvictScheduler):
            ledger.spend(ledger.blocks_to_completion_of_started())
            return not ledger.fits(ledger.blocks_to_completion(context))
        ledger.spend(ledger.blocks_for_next_step_of_generating(generating))
        return not ledger.fits(ledger.blocks_for_next_step(context))

    def _sizes(self, context: LlmRequest, others: list[LlmRequest], bound: int, is_alone: bool) -> np.ndarray:
        """Return the sizes of the next chunks of the first context that has blocks.

        others     contexts after it, which must get no chunk
        bound      tokens that the generating requests leave
        is_alone   the step of its last chunk has no other context
        """
        chunking, unit = self._micro_batch.chunking, self._kv.tokens_per_block
        size = bound // unit * unit
        if (size <= 0 or chunking is None or chunking.divide is not first_come_first_served
                or chunking.max_context_length is not None):
            return NO_SIZES
        cut = max(-(-(context.remaining_context - bound) // size), 0)
        if cut and any(other.remaining_context <= bound - size for other in others):
            return NO_SIZES     # a whole prompt fits beside the chunk
        return chunk_sizes(context.remaining_context, bound, unit, min(cut + is_alone, LONGEST))

    def _leap(self, generating: list[LlmRequest], context: LlmRequest | None, sizes: np.ndarray, count: int,
              left: int) -> Leap | None:
        """Return a leap of at most `count` iterations, or None if the free blocks suffice for too few of them.

        left   number of iterations until the first of the generating requests ends; 0: none ends
        """
        sequences, number = self._kv.sequences, len(generating)
        cached_tokens: int | np.ndarray = 0
        shared_tokens = 0
        if generating:
            slots, free = sequences.slots_of(generating), len(self._kv.pool.free)
            while count >= SHORTEST and sequences.sum_of_new_blocks(slots, count) > free:
                count //= 2
            cached_tokens = int(sequences.kv_lengths[slots].sum()) + number * RAMP[1:count + 1]
            shared_tokens = self._backend.shared_tokens(slots)
        if count < SHORTEST:
            return None
        finishes = number > 0 and count == left
        context_tokens: int | np.ndarray = 0
        context_attention: int | np.ndarray = 0
        if context is not None:
            sizes = sizes[:count]
            context_tokens, context_attention = context_amounts(context.context_position, sizes)
            if context.final_length - context.num_tokens == 1 and int(sizes.sum()) == context.remaining_context:
                finishes = True
        shape = StepShape(int(context is not None), context_tokens, context_attention, number, cached_tokens,
                          shared_tokens)
        step_s, host_s = self._backend.seconds(shape, count)
        times_s = times_of(step_s, host_s, self._clock.now, self._flights[0].done_at_s if self._flights else None)
        return Leap(generating, context, sizes, finishes, shape, times_s, step_s)

    def carry_out(self, leap: Leap, count: int) -> None:
        """Advance the engine by the first `count` iterations of `leap`, which must begin now."""
        if not count:
            return
        generating, context, times_s = leap.generating, leap.context, leap.times_s
        now, tokens, ended = float(times_s[count]), [TOKEN] * count, []
        done: list[LlmRequest] = []
        if context is not None:
            self._launch_chunk(context, int(leap.sizes[:count].sum()))
            context.read_context(context.context_position)
            if not context.remaining_context:
                done.append(context)
        if generating:
            self._kv.claim_tokens(generating, count)
            if self._flights and len(generating) < len(self._active.in_order):
                # The step in flight may be the first one without the others.
                self._token_times.leave_out(self._active.in_order, generating)
            self._token_times.note([], generating, float(times_s[1]))
            self._token_times.note_steps(times_s[1:count + 1], len(generating))
        if done:
            self._token_times.note(done, [], now)
            ended = add_a_token_to_each(done, [TOKEN])
        ended += [request for request in generating if request.add_tokens(tokens)]
        self._backend.note_leap(leap.shape, leap.step_s[:count])
        if self._flights:
            self._flights[0] = Flight([], [], generating, self._backend.run_until(now + float(leap.step_s[count - 1])))
        self._clock.now = now
        self.iterations += count
        for request in ended:
            self._end(request)


def inference_request(traffic: Traffic, index: int, arrived_at_s: float) -> InferenceRequest:
    """Return the request with this index in the traffic, as a get callback returns it."""
    return InferenceRequest(index, {
        "input_ids": traffic.prompt(index), "request_output_len": int(traffic.output_tokens[index]), "end_id": -1},
        arrival_time=arrived_at_s)
