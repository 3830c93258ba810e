"""Hands over a block of requests to one engine in one iteration, beside companions that must not be affected.

These rules are checked:

- Every item is refused or run as the oracle says, with exactly one final response.
- A request that runs gets the tokens for its content at the handover, even if another thread changes it later.
- The loop raises no exception.
- The engine reads an item in at most SECONDS_FOR_ONE.
- Reading an item takes at most twice the memory that a request may have, plus BYTES_FOR_SMALL_THINGS.
- Each companion, a valid request that is already running, gets the responses that it gets alone, bit by bit.
"""

import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace as changed
from functools import lru_cache
from typing import Any

import numpy as np

from batch_manager import InferenceRequest, InvalidRequestError
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.harness.client import Client
from tests.harness.world import World, build_world

from .answers import Outcome, check_items
from .draws import draw
from .engines import Engine, engine_of
from .items import NOBODY, Draw
from .oracle import Verdict, judge

BLOCK = 400                         # requests in a block
SECONDS_FOR_ONE = 0.1               # most CPU seconds to read one item
BYTES_FOR_SMALL_THINGS = 1 << 16    # allowed in addition to twice `max_request_bytes`
MOST_ITERATIONS = 20_000
MOST_VIRTUAL_IDS = 1 << 20
COMPANIONS = {
    10**15: {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "request_output_len": 24, "streaming": True,
             "return_log_probs": True},
    10**15 + 1: {"input_ids": [9, 8, 7], "request_output_len": 30, "temperature": 0.5, "runtime_top_k": 7,
                 "random_seed": 3, "return_log_probs": True},
    10**15 + 2: {"input_ids": [5, 5, 5, 5], "request_output_len": 12, "beam_width": 3, "return_log_probs": True},
}


class TakesEmbeddings(ScriptedBackend):
    """A ScriptedBackend that runs prompt-tuning tokens like other tokens.

    It does not check that prompt-tuning tokens are within the request's table, because admission does.
    """

    def _check(self, batch: Any, step: Any) -> None:
        info = self.info
        self.info = changed(info, vocab_size=info.vocab_size + MOST_VIRTUAL_IDS)
        try:
            super()._check(batch, step)
        finally:
            self.info = info


class BlockClient(Client):
    """A client that returns `handed_over` from one call of the get callback, and keeps the responses.

    sent   request id -> [(tensors to compare, whether the response is final, error)]
    """

    has_poll = has_stats = False

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, list[tuple[dict[str, np.ndarray], bool, str]]] = defaultdict(list)
        self.handed_over: Any = ()

    def items(self, max_num_requests: int) -> Any:
        items, self.handed_over = self.handed_over, ()
        return items

    def received(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        wanted = None if request_id in COMPANIONS else ("output_ids", "finish_reason")
        self.sent[request_id].append(({named.name: named.tensor.numpy() for named in tensors
                                       if wanted is None or named.name in wanted}, final, error))


def world_of(engine: Engine) -> World:
    """Return a World that runs this engine without a thread, with a BlockClient."""
    backend = TakesEmbeddings(vocab_size=engine.vocab_size, max_seq_len=engine.max_seq_len,
                              num_blocks=engine.num_blocks, tokens_per_block=engine.tokens_per_block, num_slots=64,
                              window=engine.window)
    backend.info = changed(backend.info, hidden_size=engine.hidden_size)
    return build_world(
        client=BlockClient(), backend=backend, policy=engine.policy, model_type=engine.model_type,
        max_beam_width=engine.max_beam_width, exclude_input=engine.exclude_input,
        parts={"logits_post_processor_batched": (lambda *_: None) if engine.has_batched_processor else None},
        **engine.options())


def companions(engine: Engine) -> list[InferenceRequest]:
    found = [InferenceRequest(request_id, {name: list(value) if isinstance(value, list) else value
                                           for name, value in tensors.items()})
             for request_id, tensors in COMPANIONS.items() if tensors.get("beam_width", 1) <= engine.max_beam_width]
    return found[:1] if engine.max_num_tokens < 36 and not engine.enable_chunked_context else found


def heard(responses: list) -> dict[str, Any]:
    """Return the output of a request that is compared: its errors, and its tensors, concatenated over `responses`."""
    pieces: dict[str, Any] = {"errors": [error for _, _, error in responses if error]}
    for name in ("output_ids", "output_log_probs"):
        pieces[name] = np.concatenate([tensors[name] for tensors, _, _ in responses if tensors], -1).tobytes() \
            if any(tensors for tensors, _, _ in responses) else b""
    last = responses[-1][0] if responses else {}
    return pieces | {name: last[name].tobytes() for name in ("cum_log_probs", "finish_reason") if name in last}


@lru_cache(maxsize=64)
def alone(engine: Engine) -> dict[int, dict[str, Any]]:
    """Run each companion alone. Returns request id -> output, as `heard` returns it."""
    told = {}
    for position, companion in enumerate(companions(engine)):
        world = world_of(engine)
        world.client.handed_over = [companions(engine)[position]]
        world.run(MOST_ITERATIONS)
        told[companion.request_id] = heard(world.client.sent[companion.request_id])
    return told


def run_block(block: int, only: int | None = None) -> Outcome:
    """Run all requests of a block, or only the one numbered `only`, beside the engine's companions. Check all rules."""
    engine = engine_of(block)
    numbers = range(block * BLOCK, (block + 1) * BLOCK) if only is None else [only]
    world, outcome = world_of(engine), Outcome()
    draws = [draw(number, engine) for number in numbers]
    verdicts = [judge(drawn, engine, world.clock.now) for drawn in draws]
    outcome.requests = len(draws)

    world.client.handed_over = companions(engine)
    world.loop.step(accept_new=True)
    built = [(drawn, verdict) for drawn, verdict in zip(draws, verdicts) if _was_built(drawn, verdict, outcome)]
    world.client.handed_over = [drawn.item for drawn, _ in built]
    watch, read_next = _watch(built, engine, outcome), world.loop.callbacks.fetched.read_next
    world.loop.callbacks.fetched.read_next = lambda: (next(watch, None), read_next())[1]
    try:
        world.loop.step(accept_new=True)
        thread = threading.Thread(target=lambda: [drawn.rewrite() for drawn, _ in built if drawn.is_rewritten])
        thread.start()
        thread.join(60)
        world.run(MOST_ITERATIONS)
    except BaseException as error:
        outcome.wrong.append((None, f"the loop raised {type(error).__name__}: {error}"))
        return outcome
    check_items(engine, built, world.client.sent, alone(engine).keys(), world.backend.expected, outcome)
    outcome.nobody, nobody = world.loop.intake.unaddressable, sum(drawn.kind is NOBODY for drawn, _ in built)
    if outcome.nobody != nobody:
        outcome.wrong.append((None, f"{outcome.nobody} items without an id were counted, there were {nobody}"))
    if only is None:                     # garbage collection may slow down one reading of an item, but not four
        outcome.wrong += [(number, "takes too long to read") for number in outcome.slow
                          if all(run_block(block, number).slow for _ in range(3))]
    for request_id, expected in alone(engine).items():
        if heard(world.client.sent[request_id]) != expected:
            outcome.wrong.append((None, f"companion {request_id} was told something else than alone"))
    return outcome


def _was_built(drawn: Draw, verdict: Verdict, outcome: Outcome) -> bool:
    error = drawn.build_error
    if verdict.must_not_build != (error is not None):
        outcome.wrong.append((drawn.number, f"building it: {error!r}, expected {verdict.must_not_build}"))
    if error is not None:
        outcome.not_built += 1
        if not isinstance(error, InvalidRequestError) or not str(error).isprintable() or len(str(error)) > 2000:
            outcome.wrong.append((drawn.number, "the error that building it raised is not fit to be read"))
    return drawn.item is not None or drawn.kind is NOBODY


def _watch(built: list[tuple[Draw, Verdict]], engine: Engine, outcome: Outcome) -> Iterator[None]:
    """Record in `outcome` how much time and memory the engine takes for each item, from one `next` to the one after."""
    if engine.measures_memory:
        tracemalloc.start()
    try:
        for drawn, _ in built:
            if engine.measures_memory:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
            started = time.thread_time()
            yield
            seconds = time.thread_time() - started
            outcome.slowest = max(outcome.slowest, seconds)
            if seconds > SECONDS_FOR_ONE and not engine.measures_memory:
                outcome.slow.append(drawn.number)
            if engine.measures_memory:
                taken = tracemalloc.get_traced_memory()[1] - before
                outcome.largest = max(outcome.largest, taken / engine.max_request_bytes)
                if taken > 2 * engine.max_request_bytes + BYTES_FOR_SMALL_THINGS:
                    outcome.wrong.append((drawn.number, f"took {taken:,} bytes to read"))
    finally:
        tracemalloc.stop()
