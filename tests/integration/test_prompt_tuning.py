"""Prompt-tuning tokens give the logits that transformers computes from the same embeddings, in any batch."""

import json
import random

import numpy as np
import pytest

from batch_manager import InferenceRequest, KvCacheConfig, SchedulerPolicy, TrtGptModelType

torch = pytest.importorskip("torch")

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
FUSED, SPLIT, V1 = TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1
HIDDEN, VOCAB, COUNT, TOLERANCE = 64, 211, 12, 1e-4
WAYS = {
    "fused": dict(model_type=FUSED, policy=GUARANTEED,
                  kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=512)),
    "split, in chunks, paused": dict(model_type=SPLIT, policy=MAX, enable_chunked_context=True, max_num_tokens=16,
                                     kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=9 * 8)),
    "static": dict(model_type=V1, policy=GUARANTEED, kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=512)),
}


def table_of(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, (1, rows, HIDDEN)).astype(np.float32)


def logits_of(model, token_ids: list[int], table: np.ndarray | None) -> np.ndarray:
    """Return transformers' logits [tokens, vocab] of a sequence. Ids from VOCAB on have the embeddings in `table`."""
    ids = torch.tensor(token_ids)
    with torch.inference_mode():
        embeddings = model.get_input_embeddings()(ids.clamp(max=VOCAB - 1))
        if table is not None:
            embeddings[ids >= VOCAB] = torch.from_numpy(table[0])[ids[ids >= VOCAB] - VOCAB]
        return model(inputs_embeds=embeddings[None]).logits[0].numpy()


def mixture() -> dict[int, tuple[list[int], np.ndarray | None]]:
    """Return {request id: (prompt, table or None)}. A prompt-tuning id has different embeddings in different tables."""
    draw, requests = random.Random(1), {}
    for i, (virtual, length) in enumerate([(5, 12), (0, 9), (1, 1), (20, 7), (3, 25), (0, 17)]):
        tokens = [draw.randrange(VOCAB) for _ in range(length)]
        table = table_of(virtual, i) if virtual else None
        if i == 4:
            tokens[10:10] = [VOCAB + 2, VOCAB, VOCAB + 1, VOCAB + 2]       # in the middle, out of order, twice
        else:
            tokens = [*range(VOCAB, VOCAB + virtual), *tokens][: max(length, virtual)]
        requests[i] = tokens, table
    return requests


def asking(request_id: int, prompt: list[int], table, **options) -> InferenceRequest:
    tensors = {"input_ids": prompt, "request_output_len": COUNT, "return_context_logits": True,
               "return_generation_logits": True}
    if table is not None:
        tensors |= {"prompt_embedding_table": table, "prompt_vocab_size": table.shape[1]}
    return InferenceRequest(request_id, tensors, **options)


@pytest.mark.parametrize("way", WAYS)
def test_virtual_tokens_have_the_embeddings_of_their_requests_table(make_manager, new_client, reference, way):
    requests, client = mixture(), new_client()
    client.pending = [asking(i, prompt, table) for i, (prompt, table) in requests.items()]
    manager = make_manager(client, model_path=reference.folder, num_threads=1, **WAYS[way])
    client.wait_for_finals(*requests)
    assert manager.shutdown()
    assert not manager._loop._resources._prompt_tables, "a table outlived its request"
    for i, (prompt, table) in requests.items():
        assert client.final(i).error == ""
        text, tensors = client.final(i).tokens(), client.final(i).tensors
        assert text[: len(prompt)] == prompt and len(text) == len(prompt) + COUNT
        expected = logits_of(reference.model, text, table)
        np.testing.assert_allclose(tensors["context_logits"][0], expected[: len(prompt)], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(tensors["generation_logits"][0, 0], expected[len(prompt) - 1 : -1], atol=TOLERANCE,
                                   rtol=0)
        assert expected[len(prompt) - 1 : -1].argmax(axis=1).tolist() == text[len(prompt):]
    pauses = sum(json.loads(record).get("Paused Requests", 0) for record in client.stats)
    assert (pauses > 0) == ("paused" in way)


def test_a_table_may_be_given_in_any_float_dtype(make_manager, new_client, llama_reference):
    table, client = table_of(3, 0).astype(np.float16), new_client()
    prompt = [VOCAB, VOCAB + 1, VOCAB + 2, 5]
    given = [table, table.astype(np.float64), torch.from_numpy(table), table.tolist()]
    client.pending = [
        InferenceRequest(i, {"input_ids": prompt, "request_output_len": 5, "prompt_vocab_size": 3,
                             "prompt_embedding_table": value}) for i, value in enumerate(given)]
    make_manager(client, model_path=llama_reference.folder, num_threads=1, **WAYS["fused"])
    client.wait_for_finals(*range(4))
    text = client.final(0).tokens()
    expected = logits_of(llama_reference.model, text, table.astype(np.float32))
    assert text[4:] == expected[3:-1].argmax(axis=1).tolist()
    assert all(client.final(i).tokens() == text for i in range(4))


def test_a_table_of_another_width_is_refused_with_the_models(make_manager, new_client, llama_reference):
    client = new_client()
    client.pending = [asking(1, [VOCAB, 1], table_of(2, 0)[:, :, 1:])]
    make_manager(client, model_path=llama_reference.folder, num_threads=1, **WAYS["fused"])
    client.wait_for_finals(1)
    assert client.final(1).code == "INVALID_REQUEST"
    assert "the number of columns of prompt_embedding_table is 63; it must be 64" in client.final(1).error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_of_the_models_own_embeddings_changes_nothing(make_manager, new_client, llama_reference, dtype):
    """A table of the model's own embeddings gives the logits of the plain prompt bit by bit, also in bfloat16."""
    prompt, client = [7, 100, 3, 7, 55, 200], new_client()
    with torch.inference_mode():
        table = llama_reference.model.get_input_embeddings()(torch.tensor(prompt)).numpy()[None]
    client.pending = [asking(1, prompt, None), asking(2, [7, VOCAB + 1, 3, VOCAB + 3, VOCAB + 4, VOCAB + 5], table)]
    make_manager(client, model_path=llama_reference.folder, num_threads=1, dtype=dtype, max_batch_size=1,
                 **WAYS["fused"])
    client.wait_for_finals(1, 2)
    plain, virtual = client.final(1), client.final(2)
    assert virtual.tokens()[len(prompt):] == plain.tokens()[len(prompt):]
    for name in ("context_logits", "generation_logits"):
        np.testing.assert_array_equal(virtual.tensors[name], plain.tensors[name])


@pytest.mark.parametrize("way", WAYS)
def test_a_mixture_of_everything_gives_each_request_what_it_gets_alone(make_manager, new_client, llama_reference, way):
    """Requests with tables, post-processors, penalties, bans, biases and sampling get the results of a run alone."""
    def favour_even(request_id, logits, token_ids):
        logits[..., len(token_ids[0]) % 2 :: 2] -= 0.5
        return logits

    features = [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, {"bad_words_list": [[5], [7, 8]], "min_length": 4},
        {"presence_penalty": 0.4, "frequency_penalty": 0.2}, {"embedding_bias": np.linspace(-1, 1, VOCAB)},
        {"runtime_min_p": 0.05, "runtime_top_p": 0.95}, {}]

    def requests():
        for i, (prompt, table) in mixture().items():
            request = asking(i, prompt, table, logits_post_processor=favour_even if i % 2 else None)
            knobs = {**features[i], "temperature": 0.8, "runtime_top_k": 40, "random_seed": i, "return_log_probs": True}
            for name, value in knobs.items():
                if not (name == "embedding_bias" and WAYS[way]["model_type"] is V1):
                    setattr(request, name, value)
            yield request

    def served(items, **options):
        client = new_client()
        client.pending = list(items)
        ids = [request.request_id for request in items]
        manager = make_manager(client, model_path=llama_reference.folder, num_threads=1, **options)
        client.wait_for_finals(*ids)
        assert manager.shutdown()
        return {i: client.final(i) for i in ids}

    together = served(list(requests()), **WAYS[way])
    for request in requests():
        i, final = request.request_id, together[request.request_id]
        assert final.error == ""
        alone = served([request], **WAYS["fused"])[i]
        assert final.tokens() == alone.tokens()
        for name in ("context_logits", "generation_logits", "output_log_probs", "cum_log_probs"):
            np.testing.assert_allclose(final.tensors[name], alone.tensors[name], atol=TOLERANCE, rtol=0)
        prompt, table = mixture()[i]
        expected = logits_of(llama_reference.model, final.tokens(), table)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(final.tensors["generation_logits"][0, 0], expected, atol=TOLERANCE, rtol=0)
