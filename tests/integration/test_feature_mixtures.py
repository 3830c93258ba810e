"""C13: 130 requests with random mixtures of features run together. Each gets the results that it gets alone."""

import json

import numpy as np
import pytest

from batch_manager import InferenceRequest, KvCacheConfig, SchedulerPolicy, TrtGptModelType

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
FUSED, SPLIT, V1 = TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1
REQUESTS, VOCAB = 130, 211
MIXED = [
    dict(policy=MAX, max_batch_size=64, pool=24, chunked=True, tokens=64),
    dict(policy=MAX, max_batch_size=64, pool=24, overlap=True),
    dict(policy=GUARANTEED, max_batch_size=32, pool=100, chunked=True, tokens=40, overlap=True),
    dict(policy=MAX, max_batch_size=16, pool=20, model_type=SPLIT),
    dict(policy=GUARANTEED, max_batch_size=32, model_type=V1),
]


def random_tensors(random) -> dict:
    """Return the tensors of a request with random features. Each feature is absent from most requests.

    Many token ids are below 9, so that banned words, stop words and repeated n-grams occur in the outputs.
    """
    def words():
        return [random.integers(0, 9, random.integers(1, 4)).tolist() for _ in range(random.integers(1, 5))]

    def tokens(most):
        return random.integers(0, 9 if random.random() < 0.5 else VOCAB, random.integers(1, most)).tolist()

    features = {
        "temperature": lambda: float(random.choice([0, 0.7, 1.3])),
        "runtime_top_k": lambda: int(random.choice([1, 5, 50])), "runtime_top_p": lambda: float(random.uniform(0.3, 1)),
        "runtime_top_p_decay": lambda: 0.9, "runtime_top_p_min": lambda: 0.2,
        "runtime_top_p_reset_ids": lambda: int(random.integers(VOCAB)), "runtime_min_p": lambda: 0.05,
        "random_seed": lambda: int(random.integers(2**63)), "repetition_penalty": lambda: float(random.uniform(0.7, 2)),
        "presence_penalty": lambda: float(random.normal()), "frequency_penalty": lambda: float(random.normal() / 2),
        "no_repeat_ngram_size": lambda: int(random.integers(1, 5)), "min_length": lambda: int(random.integers(1, 20)),
        "end_id": lambda: int(random.integers(9)), "bad_words_list": words, "stop_words_list": words,
        "embedding_bias": lambda: (4 * (np.arange(VOCAB) < 9) + random.normal(size=VOCAB)).astype(np.float32),
    }
    if random.random() < 0.6:
        features["runtime_top_p"] = lambda: 1.0
    chosen = {name: draw() for name, draw in features.items() if random.random() < 0.35}
    if random.random() < 0.25:
        chosen |= {"beam_width": int(random.integers(2, 5)), "len_penalty": float(random.choice([0, 0.5, 1])),
                   "early_stopping": int(random.integers(3))}
    return {"input_ids": tokens(50), "request_output_len": int(random.integers(1, 25)), "return_log_probs": True,
            **chosen}


def streams(i: int, tensors: dict) -> bool:
    return i % 5 == 0 and "beam_width" not in tensors


@pytest.fixture(scope="module")
def mixture():
    random = np.random.default_rng(11)
    return {i: random_tensors(random) for i in range(REQUESTS)}


@pytest.fixture
def serve(make_manager, new_client, llama_reference):
    """serve(mixture, **options) -> ({id: (tokens, log-probs and finish reasons of all beams)}, number of pauses)"""
    def run(mixture, *, pool=300, chunked=False, tokens=512, overlap=False, **options):
        client = new_client()
        client.pending = [InferenceRequest(i, tensors, is_streaming=streams(i, tensors))
                          for i, tensors in mixture.items()]
        manager = make_manager(
            client, model_path=llama_reference.folder, num_threads=1, enable_chunked_context=chunked, max_beam_width=4,
            max_num_tokens=tokens, enable_trt_overlap=overlap,
            kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=8 * pool), **options)
        client.wait_for_finals(*mixture)
        assert manager.shutdown()
        results = {}
        for i, tensors in mixture.items():
            final = client.final(i)
            assert final.error == "", tensors
            streamed = [response for response in client.responses[i] if response.tokens()]
            start, beams = len(tensors["input_ids"]), range(tensors.get("beam_width", 1))
            new = [client.streamed(i)] if streams(i, tensors) else [final.tokens(beam)[start:] for beam in beams]
            log_probs = [np.concatenate([*(response.tensors["output_log_probs"][0, beam] for response in streamed), []])
                         [:len(new[beam])] for beam in beams]
            results[i] = new, np.concatenate(log_probs), final.tensors["finish_reason"][0].tolist()
        return results, sum(json.loads(record).get("Paused Requests", 0) for record in client.stats)

    return run


@pytest.fixture(scope="module")
def alone():
    """The results of the requests when each runs alone. The first test that needs the results fills the dict."""
    return {}


@pytest.mark.parametrize("options", MIXED, ids=str)
def test_every_request_gets_what_it_gets_alone(serve, mixture, alone, options):
    if not alone:
        alone |= serve(mixture, policy=GUARANTEED, max_batch_size=1)[0]
    if options.get("model_type") is V1:
        mixture = {i: tensors for i, tensors in mixture.items() if "embedding_bias" not in tensors}
    together, pauses = serve(mixture, **options)
    for i in mixture:
        assert together[i][0] == alone[i][0] and together[i][2] == alone[i][2], mixture[i]
        np.testing.assert_allclose(together[i][1], alone[i][1], atol=1e-4, rtol=0)
    assert (pauses >= 20) == (options["policy"] is MAX)


def test_the_mixture_reaches_every_end(mixture, alone, serve):
    if not alone:
        alone |= serve(mixture, policy=GUARANTEED, max_batch_size=1)[0]
    reasons = [reason for _, _, of_beams in alone.values() for reason in of_beams]
    assert min(reasons.count(reason) for reason in (1, 2, 3)) >= 5
