"""Makes random requests, cuts them at a random token and resumes them on another engine, for tests and the campaign."""

import random

from batch_manager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
    resume,
)
from batch_manager.responses.tensors import TOP_TENSORS

VOCAB, LONGEST = 4096, 24


def drawn_tensors(draw: random.Random) -> dict:
    """Return the tensors of a random request. Its random sampling options are such that it can be resumed."""
    def maybe(**options):
        return {name: make() for name, make in options.items() if draw.random() < 0.35}

    def word():
        return [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 3))]

    tensors = {"input_ids": [draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 4, 17, 60]))],
               "request_output_len": draw.randrange(2, LONGEST), "random_seed": draw.getrandbits(40)}
    tensors |= maybe(
        temperature=lambda: draw.uniform(0.3, 2), runtime_top_k=lambda: draw.randrange(1, 50),
        runtime_min_p=lambda: draw.uniform(0, 0.2), repetition_penalty=lambda: draw.uniform(0.7, 1.5),
        presence_penalty=lambda: draw.uniform(-1, 2), frequency_penalty=lambda: draw.uniform(-0.5, 1),
        prompt_ignore_length=lambda: draw.choice([1, 3, 1000]), no_repeat_ngram_size=lambda: draw.randrange(1, 4),
        min_length=lambda: draw.randrange(1, 20), bad_words_list=lambda: [word() for _ in range(3)],
        stop_words_list=lambda: [word() for _ in range(4)], return_log_probs=lambda: True,
        embedding_bias=lambda: [draw.gauss(0, 1) for _ in range(VOCAB)],
        end_id=lambda: draw.sample(range(VOCAB), draw.randrange(1, 8)),
        input_token_extra_ids=lambda: [draw.randrange(3) for _ in tensors["input_ids"]])
    if "end_id" in tensors:                # likely end ids, so that min_length has an effect
        bias = tensors["embedding_bias"] = list(tensors.get("embedding_bias", [0.0] * VOCAB))
        for end_id in tensors["end_id"]:
            bias[end_id] += 8.0
    if draw.random() < 0.6:
        tensors["runtime_top_p"] = draw.uniform(0.3, 1)
        tensors |= maybe(runtime_top_p_decay=lambda: draw.uniform(0.5, 1),
                         runtime_top_p_min=lambda: draw.uniform(0.1, 1))
    more = random.Random(draw.getrandbits(32))           # drawn last, so that no other value of a seed changes
    tensors |= {"return_top_log_probs": more.randrange(1, 21)} if more.random() < 0.35 else {}
    return tensors | ({"raw_log_probs": True} if more.random() < 0.35 else {})


def outcomes(model, requests: list[InferenceRequest], **params) -> dict:
    """Run all requests on one engine.

    Returns {id: (generated tokens, finish reason, log-probs, error)}. The log-probs of a request are those of its
    generated tokens, and those of the likeliest tokens at each position.
    """
    waiting, found, last = list(requests), {}, 10**9
    waiting.append(InferenceRequest(last))

    def get(_):
        taken, waiting[:] = waiting[:], []
        return taken

    def send(request_id, tensors, final, error):
        named = {tensor.name: tensor.array for tensor in tensors}
        found[request_id] = ([], None, [], error) if error else (
            named["output_ids"][0, 0].tolist(), int(named["finish_reason"][0, 0]),
            list(zip(named["output_log_probs"][0, 0].tolist(),
                     *(named[name][0, 0].tolist() for name in TOP_TENSORS if name in named), strict=True)), "")

    params = {"max_batch_size": 8, "num_threads": 1, "deterministic": True, "dtype": "float32", **params}
    manager = GptManager(model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, get,
                         send, None, None, TrtGptModelOptionalParams(**params), last, exclude_input_in_output=True)
    assert manager.wait_until_terminate(600)
    return found


def cut(requests: list[InferenceRequest], whole: dict, draw: random.Random) -> dict:
    """Cut the output of each request that has at least two output tokens at a random token.

    Returns {id: (request that resumes after the cut, tokens before the cut)}.

    whole   the outcomes of the uncut requests
    """
    resumed = {}
    for request in requests:
        tokens = whole[request.request_id][0]
        if len(tokens) >= 2:
            before = tokens[:draw.randrange(1, len(tokens))]
            resumed[request.request_id] = resume(request, before), before
    return resumed


def differences(whole: dict, resumed: dict, after: dict) -> list[int]:
    """Return the ids of resumed requests whose outcome differs from the uncut request's outcome after the cut.

    whole, after   the outcomes of the uncut and of the resumed requests
    """
    return [request_id for request_id, (_, before) in resumed.items() if after[request_id] != (
        whole[request_id][0][len(before):], whole[request_id][1], whole[request_id][2][len(before):], "")]


def small_engine() -> dict:
    """Return options of an engine whose schedule differs from the default: small batches, chunks and block reuse."""
    return {"max_batch_size": 3, "enable_chunked_context": True, "max_num_tokens": 32,
            "kv_cache_config": KvCacheConfig(tokens_per_block=16, enable_block_reuse=True, max_tokens=4096)}
