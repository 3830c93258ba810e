"""Makes the trace for `batch-manager draw --demo`, with the real scheduler and the real KV cache accounting.

A scripted model takes the place of the real model, so neither weights nor torch are needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...arguments import Callbacks, EngineArguments
from ...build import build_loop
from ...config import Parts, TrtGptModelOptionalParams
from ...errors import ConfigError
from ...names import SchedulerPolicy
from ...requests.inference_request import InferenceRequest
from ...stats.trace import IterationTrace, Trace
from ...testing.scripted_backend import ScriptedBackend
from ..interrupts import interrupts_between_steps

MOST_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """Lengths of a prompt and of its output, and the iteration at whose start the request arrives."""

    prompt_tokens: int
    output_tokens: int
    iteration: int = 0


def parse_requests(text: str) -> list[DemoRequest]:
    """Parse requests of the form `PROMPT+OUTPUT[@ITERATION]`, separated by commas, such as `20+12,8+30@4`."""
    requests = []
    for item in text.split(","):
        lengths, _, iteration = item.strip().partition("@")
        prompt, _, output = lengths.partition("+")
        digits = (prompt, output, iteration or "0")
        if not all(number.isdecimal() and len(number) < 10 for number in digits) or not (
                1 <= int(prompt) <= MOST_TOKENS and 1 <= int(output) <= MOST_TOKENS):
            raise ConfigError(f"{item.strip()!r} is not a request",
                              "expected PROMPT+OUTPUT or PROMPT+OUTPUT@ITERATION, "
                              f"with 1 to {MOST_TOKENS:,} tokens each",
                              "write 20+12@3, for example")
        requests.append(DemoRequest(*map(int, digits)))
    return requests


def run_demo(requests: Sequence[DemoRequest], params: TrtGptModelOptionalParams, policy: SchedulerPolicy,
             num_blocks: int, say: Callable[[str], None] = lambda text: None) -> list[IterationTrace]:
    """Run the requests with a scripted model, and return the trace. Request ids count from 1 in the given order.

    say   called with the error of each refused request

    Raises ConfigError for a configuration that cannot run.
    """
    trace = Trace()
    waiting = sorted(enumerate(requests, 1), key=lambda pair: pair[1].iteration)

    def get(max_num_requests: int) -> list[InferenceRequest]:
        """Return the requests that are due in this iteration.

        While the engine is idle, iterations are not counted, and the next request is due at once.
        """
        items = []
        while waiting and len(items) < max_num_requests:
            request_id, request = waiting[0]
            unanswered = loop.unanswered          # loop.is_empty cannot be used: it is False during a call of get
            is_idle = not (items or unanswered.alive or unanswered.refusals or unanswered.undecided)
            if request.iteration > loop.iteration and not is_idle:
                break
            del waiting[0]
            prompt = [1 + (request_id + i) % 99 for i in range(request.prompt_tokens)]
            items.append(InferenceRequest(
                request_id, {"input_ids": prompt, "request_output_len": request.output_tokens}))
        return items

    def send(request_id: int, tensors: list, final_response: bool, error_message: str) -> None:
        if error_message:
            say(error_message)

    tokens_per_block = params.kv_cache_config.tokens_per_block
    backend = ScriptedBackend(num_blocks=num_blocks, tokens_per_block=tokens_per_block,
                              max_seq_len=num_blocks * tokens_per_block, num_slots=params.max_batch_size)
    loop = build_loop(
        EngineArguments(scheduler_policy=policy, optional_params=params, exclude_input_in_output=True),
        Callbacks(get, send), Parts(backend=backend, trace=trace.append))
    with interrupts_between_steps() as check_interrupt:
        while loop.step(accept_new=True) or waiting:
            check_interrupt()
    return trace.iterations
