"""Logits post-processors: their arguments, the number of calls, and which requests their faults end."""

import json

import numpy as np
import pytest

from batch_manager import ConfigError, InferenceRequest, Parts, SchedulerPolicy, TrtGptModelType

PROMPTS = {i: [20 + i] * (1 + 3 * i) for i in range(5)}
TIGHT = {"num_blocks": 9, "tokens_per_block": 4, "vocab_size": 100}
WAYS = {
    "fused": dict(),
    "split, in chunks": dict(model_type=TrtGptModelType.InflightBatching, enable_chunked_context=True,
                             max_num_tokens=8, backend={"tokens_per_block": 4, "vocab_size": 100}),
    "static": dict(model_type=TrtGptModelType.V1),
    "overlapped": dict(enable_trt_overlap=True, max_batch_size=3, max_num_sequences=5),
    "paused": dict(backend=TIGHT),
    "paused, overlapped, in chunks": dict(backend=TIGHT, enable_trt_overlap=True, max_batch_size=3, max_num_sequences=5,
                                          enable_chunked_context=True, max_num_tokens=8),
}


def asking(request_id, prompt, count, processor, **options):
    return InferenceRequest(request_id, {"input_ids": prompt, "request_output_len": count},
                            logits_post_processor=processor, **options)


class Recorder:
    """A logits post-processor that makes (number of tokens so far) % 50 the likeliest token and records its calls."""

    def __init__(self):
        self.calls = {}

    def __call__(self, request_id, logits, token_ids):
        (tokens,) = token_ids
        self.calls.setdefault(request_id, []).append(tokens)
        logits[0, 0, :] = -1.0
        logits[0, 0, len(tokens) % 50] = 1.0
        return logits

    def batched(self, request_ids, logits, token_ids):
        for request_id, one, tokens in zip(request_ids, logits, token_ids, strict=True):
            self(request_id, one, tokens)


@pytest.mark.parametrize("batched", [False, True], ids=["each", "batched"])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_called_once_for_each_token_with_all_tokens_before_it(make_world, way, batched):
    recorder = Recorder()
    options = {"policy": SchedulerPolicy.MAX_UTILIZATION, **WAYS[way]}
    world = make_world(parts={"logits_post_processor_batched": recorder.batched}, **options)
    world.client.pending = [asking(i, prompt, 8, "batched" if batched else recorder, is_streaming=i % 2 == 1)
                            for i, prompt in PROMPTS.items()]
    world.run()
    for i, prompt in PROMPTS.items():
        text = [*prompt, *((len(prompt) + n) % 50 for n in range(8))]
        streams = i % 2 == 1
        assert (world.client.streamed(i) if streams else world.client.final(i).tokens()) == (
            text[len(prompt):] if streams else text)
        assert recorder.calls[i] == [text[: len(prompt) + n] for n in range(8)]
    pauses = sum(json.loads(record).get("Paused Requests", 0) for record in world.client.stats)
    assert (pauses > 0) == ("paused" in way)


def test_only_token_42(make_world):
    def force(request_id, logits, token_ids):
        logits[:] = float("-inf")
        logits[..., 42] = 0
        return logits

    world = make_world()
    world.client.pending = [asking(1, [1, 2, 3], 5, force), asking(2, [1, 2, 3], 5, None)]
    world.run()
    assert world.client.final(1).tokens() == [1, 2, 3] + [42] * 5
    assert world.client.final(2).tokens() == [1, 2, 3, *world.expected([1, 2, 3], 5)]


def fails_at_the_third_token(error):
    def function(request_id, logits, token_ids):
        if len(token_ids[0]) == len(PROMPTS[request_id]) + 2:
            if isinstance(error, BaseException):
                raise error
            return error(logits)
        return logits

    return function


FAULTS = {
    "raises": (RuntimeError("token 21"), "MODEL_ERROR", "raised RuntimeError"),
    "runs out of memory": (MemoryError(), "MODEL_ERROR", "raised MemoryError"),
    "exits": (SystemExit(), "MODEL_ERROR", "raised SystemExit"),
    "returns None": (lambda logits: None, "MODEL_ERROR", "returned None"),
    "returns False": (lambda logits: False, "MODEL_ERROR", "returned a value of type bool"),
    "drops the batch": (lambda logits: logits[0], "MODEL_ERROR", "of shape [1, 1000]"),
    "another dtype": (lambda logits: logits.half(), "MODEL_ERROR", "torch.float16"),
    "NaN": (lambda logits: logits * float("nan"), "NON_FINITE_LOGITS", "post-processor"),
    "forbids everything": (lambda logits: logits.fill_(float("-inf")), "NON_FINITE_LOGITS", "post-processor"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_ends_its_own_request_and_changes_nothing_for_the_others(make_world, case):
    fault, code, says = FAULTS[case]
    world = make_world()
    world.client.pending = [asking(i, prompt, 6, fails_at_the_third_token(fault) if i == 2 else lambda i, x, t: x)
                            for i, prompt in PROMPTS.items()]
    world.run()
    for i, prompt in PROMPTS.items():
        final = world.client.final(i)
        if i == 2:
            assert final.code == code and says in final.error and not final.tensors and "21" not in final.error
        else:
            assert final.tokens() == prompt + world.expected(prompt, 6)


@pytest.mark.parametrize("case", ["raises", "exits"])
def test_a_batched_one_that_raises_over_one_request_loses_that_one_only(make_world, case):
    fault, code, says = FAULTS[case]
    calls = []

    def batched(request_ids, logits, token_ids):
        calls.append(request_ids)
        for request_id, tokens in zip(request_ids, token_ids):
            fails_at_the_third_token(fault)(request_id, None, tokens) if request_id == 2 else None

    world = make_world(parts={"logits_post_processor_batched": batched})
    world.client.pending = [asking(i, prompt, 6, "batched" if i < 4 else None) for i, prompt in PROMPTS.items()]
    world.run()
    for i, prompt in PROMPTS.items():
        final = world.client.final(i)
        if i == 2:
            assert final.code == code and says in final.error
        else:
            assert final.tokens() == prompt + world.expected(prompt, 6)
    assert calls[0] == [0, 1, 2, 3] and [2] in calls


def test_a_step_that_runs_again_calls_it_again_with_the_same_tokens(make_world):
    failing = iter([False, False, True])

    def fail_once(batch):
        if next(failing, False):
            raise RuntimeError

    recorder = Recorder()
    world = make_world(backend={"on_finish": fail_once})
    world.client.pending = [asking(i, PROMPTS[i], 4, recorder) for i in (0, 1)]
    world.run()
    for i in (0, 1):
        seen = [len(tokens) - len(PROMPTS[i]) for tokens in recorder.calls[i]]
        assert seen == [0, 1, 2, 2, 3]
        assert world.client.final(i).tokens()[len(PROMPTS[i]):] == [(len(PROMPTS[i]) + n) % 50 for n in range(4)]


def test_the_end_id_it_chooses_ends_the_request(make_world):
    def end_after_two(request_id, logits, token_ids):
        logits[..., 77 if len(token_ids[0]) == 5 else 3] = 5.0
        return logits

    world = make_world()
    request = asking(1, [1, 2, 3], 10, end_after_two)
    request.end_id = 77
    world.client.pending = [request]
    world.run()
    assert world.client.final(1).tokens() == [1, 2, 3, 3, 3] and world.client.final(1).finish_reason == 1


def test_a_request_without_one_in_a_slot_that_had_one_is_left_alone(make_world):
    recorder = Recorder()
    world = make_world(max_batch_size=1)
    world.client.pending = [asking(1, [1, 2], 3, recorder), asking(2, [1, 2], 3, None)]
    world.run()
    assert list(recorder.calls) == [1]
    assert world.client.final(2).tokens() == [1, 2, *world.expected([1, 2], 3)]


def test_it_is_forgotten_with_its_request(make_world):
    import gc
    import weakref

    recorder = Recorder()
    gone = weakref.ref(recorder)
    world = make_world()
    world.client.pending = [asking(1, [1, 2], 3, recorder)]
    world.run()
    del recorder
    gc.collect()
    assert gone() is None


def test_the_batched_one_is_a_callable():
    with pytest.raises(ConfigError, match="logits_post_processor_batched is of type str"):
        Parts(logits_post_processor_batched="batched")
    assert Parts(logits_post_processor_batched=np.copyto).logits_post_processor_batched is np.copyto
