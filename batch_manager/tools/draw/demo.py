"""The demonstration: the real scheduler and KV cache accounting over a scripted model. No weights, no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...build import build_loop
from ...config import Parts, TrtGptModelOptionalParams
from ...names import SchedulerPolicy, TrtGptModelType
from ...requests.inference_request import InferenceRequest
from ...stats.trace import IterationTrace, Trace
from ...testing.scripted_backend import ScriptedBackend


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """A prompt of so many tokens that asks for so many more, handed over at the start of an iteration."""

    prompt_tokens: int
    output_tokens: int
    iteration: int = 0


def parse_requests(text: str) -> list[DemoRequest]:
    """`PROMPT+OUTPUT[@ITERATION]`, separated by commas: `20+12,8+30@4`."""
    requests = []
    for item in text.split(","):
        lengths, _, iteration = item.strip().partition("@")
        prompt, _, output = lengths.partition("+")
        digits = (prompt, output, iteration or "0")
        if not all(number.isdecimal() for number in digits) or 0 in (int(prompt), int(output)):
            raise ValueError(f"{item.strip()!r} is no request; write PROMPT+OUTPUT or PROMPT+OUTPUT@ITERATION, "
                             "as in 20+12@3")
        requests.append(DemoRequest(*map(int, digits)))
    return requests


def run_demo(requests: Sequence[DemoRequest], params: TrtGptModelOptionalParams, policy: SchedulerPolicy,
             num_blocks: int, say: Callable[[str], None] = lambda text: None) -> list[IterationTrace]:
    """Run requests, numbered from 1, to their end over a scripted model, and return what every iteration did.

    say   hears about requests that were refused
    Raises ConfigError for a configuration that cannot run.
    """
    trace = Trace()
    waiting = sorted(enumerate(requests, 1), key=lambda pair: pair[1].iteration)

    def get(max_num_requests: int) -> list[InferenceRequest]:
        """The requests that are due. When nothing is alive iterations do not count, so the next one is due at once."""
        items = []
        while waiting and len(items) < max_num_requests:
            request_id, request = waiting[0]
            idle = not items and loop.is_empty
            if request.iteration > loop.iteration and not idle:
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
        model_path=None, model_type=TrtGptModelType.InflightFusedBatching, max_beam_width=1, scheduler_policy=policy,
        get_inference_requests_cb=get, send_response_cb=send, poll_stop_signal_cb=None,
        return_batch_manager_stats_cb=None, optional_params=params, terminate_req_id=None,
        exclude_input_in_output=True, parts=Parts(backend=backend, trace=trace.append))
    while loop.step(accept_new=True) or waiting:
        pass
    return trace.iterations
