"""On small models, responses have the logits and log-probs of transformers, in any batch and configuration."""

import json
import random

import numpy as np
import pytest

from batch_manager import InferenceRequest, KvCacheConfig, SchedulerPolicy, TrtGptModelType

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
FUSED, SPLIT, V1 = TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1
ASK = {"return_log_probs": True, "return_context_logits": True, "return_generation_logits": True}
SAMPLED = {"temperature": 0.7, "runtime_top_k": 20, "runtime_top_p": 0.9}
TOLERANCE = 1e-4

ROOM = KvCacheConfig(tokens_per_block=16, max_tokens=64 * 16)
TIGHT = KvCacheConfig(tokens_per_block=8, max_tokens=9 * 8)           # room for two of the requests
WAYS = {
    "fused": dict(model_type=FUSED, policy=GUARANTEED, kv_cache_config=ROOM),
    "split, in chunks": dict(model_type=SPLIT, policy=GUARANTEED, kv_cache_config=ROOM, enable_chunked_context=True,
                             max_num_tokens=32),
    "static": dict(model_type=V1, policy=GUARANTEED, kv_cache_config=ROOM),
    "overlapped": dict(model_type=FUSED, policy=GUARANTEED, kv_cache_config=ROOM, enable_trt_overlap=True,
                       max_batch_size=4),
    "paused": dict(model_type=FUSED, policy=MAX, kv_cache_config=TIGHT),
    "paused, split, in chunks": dict(model_type=SPLIT, policy=MAX, kv_cache_config=TIGHT, enable_chunked_context=True,
                                     max_num_tokens=16),
    "paused, overlapped, in chunks": dict(model_type=FUSED, policy=MAX, kv_cache_config=TIGHT, max_batch_size=4,
                                          enable_chunked_context=True, max_num_tokens=24, enable_trt_overlap=True),
}


def joined(responses, name: str) -> np.ndarray:
    """Concatenate a tensor with an entry for each token, such as "output_ids", of all responses to a request."""
    return np.concatenate([response.tensors[name] for response in responses], axis=2)


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    logits = logits.astype(np.float64) / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def check(reference, prompt, responses, *, streaming: bool, excluded: bool, count: int, temperature: float) -> None:
    """Assert that the logits, log-probs and tokens in the responses to a request are those of transformers.

    excluded   whether the responses leave the prompt out
    count      number of generated tokens
    """
    final = responses[-1]
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    generated = joined(responses, "output_ids")[0, 0].tolist()
    if not (streaming or excluded):
        assert generated[: len(prompt)] == prompt
        generated = generated[len(prompt):]
    assert len(generated) == count
    expected = reference.logits([*prompt, *generated])
    drawn_from = expected[len(prompt) - 1 : -1]
    log_probs = log_softmax(drawn_from, temperature)[np.arange(count), generated]

    contexts = [response.tensors["context_logits"] for response in responses]
    assert [context.shape for context in contexts[1:]] == [(1, 1, 1)] * (len(responses) - 1)
    np.testing.assert_allclose(contexts[0], expected[None, : len(prompt)], atol=TOLERANCE, rtol=0)
    for response in responses:
        new = response.tensors["output_ids"].shape[2] if streaming else count
        assert response.tensors["generation_logits"].shape == (1, 1, new, reference.vocab_size)
        assert response.tensors["output_log_probs"].shape == (1, 1, new)
    np.testing.assert_allclose(joined(responses, "generation_logits")[0, 0], drawn_from, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(joined(responses, "output_log_probs")[0, 0], log_probs, atol=TOLERANCE, rtol=0)
    assert abs(final.tensors["cum_log_probs"][0, 0] - log_probs.sum()) < TOLERANCE * count
    told = 0
    for response in responses:
        told += response.tensors["output_log_probs"].shape[2]
        assert abs(response.tensors["cum_log_probs"][0, 0] - log_probs[:told].sum()) < TOLERANCE * told


@pytest.mark.parametrize("excluded", [False, True], ids=["with input", "without input"])
@pytest.mark.parametrize("way", WAYS)
def test_what_comes_back_is_what_transformers_computes(make_manager, new_client, new_request, llama_reference, way,
                                                       excluded):
    draw, client = random.Random(7), new_client()
    prompts = {i: [draw.randrange(llama_reference.vocab_size) for _ in range(length)]
               for i, length in enumerate([5, 17, 1, 8, 24, 9])}
    knobs = {i: SAMPLED if i % 3 == 2 else {} for i in prompts}
    client.pending = [new_request(i, prompt, 20, streaming=i % 2 == 1, random_seed=i, **ASK, **knobs[i])
                      for i, prompt in prompts.items()]
    manager = make_manager(client, model_path=llama_reference.folder, num_threads=1, **WAYS[way],
                           manager_options={"exclude_input_in_output": excluded})
    client.wait_for_finals(*prompts)
    assert manager.shutdown()
    static = WAYS[way]["model_type"] is V1
    for i, prompt in prompts.items():
        assert client.final(i).error == ""
        streaming = i % 2 == 1
        check(llama_reference, prompt, client.responses[i], count=20, streaming=streaming and not static,
              excluded=excluded or (streaming and static), temperature=knobs[i].get("temperature", 1.0))
    pauses = sum(json.loads(record).get("Paused Requests", 0) for record in client.stats)
    assert (pauses >= 3) == ("paused" in way)


def test_what_one_request_gets_back_does_not_depend_on_who_else_asks(make_manager, new_client, new_request,
                                                                     llama_reference):
    prompts = {1: [3, 1, 4, 1, 5], 2: [9, 2, 6], 3: [5, 3, 5, 8, 9, 7, 9]}
    asked = {1: {"return_log_probs": True}, 2: {"return_generation_logits": True}, 3: {}}

    def served(*ids):
        client = new_client()
        client.pending = [new_request(i, prompts[i], 6, **asked[i]) for i in ids]
        make_manager(client, model_path=llama_reference.folder, num_threads=1, kv_cache_config=ROOM)
        client.wait_for_finals(*ids)
        return {i: client.final(i).tensors for i in ids}

    together = served(1, 2, 3)
    for i in prompts:
        alone = served(i)[i]
        for name, tensor in together[i].items():
            assert tensor.shape == alone[name].shape
            np.testing.assert_allclose(tensor, alone[name], atol=TOLERANCE, rtol=0)
    for i, name in ((1, "generation_logits"), (2, "output_log_probs"), (3, "output_log_probs")):
        assert not together[i][name].any()


@pytest.mark.parametrize("way", ["fused", "static", "paused, overlapped, in chunks"])
def test_logits_are_the_models_own_and_log_probs_are_of_what_was_drawn_from(make_manager, new_client, llama_reference,
                                                                            way):
    """Returned logits are the model's, and log-probs are those of the distribution that tokens are sampled from.

    A post-processor halves the logits of some requests and bans a third of the tokens. Other requests have none.
    """
    vocab = llama_reference.vocab_size

    def change(request_id, logits, token_ids):
        logits *= 0.5
        logits[..., (len(token_ids[0]) % 3)::3] = float("-inf")
        return logits

    draw, client = random.Random(8), new_client()
    prompts = {i: [draw.randrange(vocab) for _ in range(length)] for i, length in enumerate([5, 17, 1, 8, 24, 9])}
    client.pending = [
        InferenceRequest(i, {"input_ids": prompt, "request_output_len": 15, **ASK},
                         logits_post_processor=change if i % 2 else None) for i, prompt in prompts.items()]
    manager = make_manager(client, model_path=llama_reference.folder, num_threads=1, **WAYS[way])
    client.wait_for_finals(*prompts)
    assert manager.shutdown()
    for i, prompt in prompts.items():
        text, tensors = client.final(i).tokens(), client.final(i).tensors
        logits = llama_reference.logits(text)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(tensors["generation_logits"][0, 0], logits, atol=TOLERANCE, rtol=0)
        changed = logits.copy()
        if i % 2:
            changed *= 0.5
            for row in range(15):
                changed[row, (len(prompt) + row) % 3 :: 3] = -np.inf
        assert changed.argmax(axis=1).tolist() == text[len(prompt):]
        log_probs = log_softmax(changed)[np.arange(15), text[len(prompt):]]
        np.testing.assert_allclose(tensors["output_log_probs"][0, 0], log_probs, atol=TOLERANCE, rtol=0)


def test_a_sequence_whose_cache_is_not_finite_ends_although_its_post_processor_hides_it(make_manager, new_client,
                                                                                        llama_reference, tmp_path):
    from safetensors.numpy import load_file, save_file

    (tmp_path / "config.json").write_bytes((llama_reference.folder / "config.json").read_bytes())
    weights = {name: array.copy() for name, array in load_file(llama_reference.folder / "model.safetensors").items()}
    weights["model.embed_tokens.weight"][7] = np.nan
    save_file(weights, tmp_path / "model.safetensors")

    def only(token):
        def function(request_id, logits, token_ids):
            logits[:] = float("-inf")
            logits[..., token if len(token_ids[0]) < 5 else 9] = 0.0
            return logits
        return function

    client = new_client()
    client.pending = [InferenceRequest(i, {"input_ids": [1, 2, 3], "request_output_len": 6},
                                       logits_post_processor=only(token)) for i, token in ((1, 7), (2, 8))]
    make_manager(client, model_path=tmp_path, num_threads=1, kv_cache_config=ROOM)
    client.wait_for_finals(1, 2)
    assert client.final(1).code == "NON_FINITE_LOGITS" and "the model computed" in client.final(1).error
    assert client.final(2).tokens() == [1, 2, 3, 8, 8, 9, 9, 9, 9]
