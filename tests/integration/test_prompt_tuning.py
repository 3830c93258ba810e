"""Prompt-tuning tokens give the logits that transformers computes from the same embeddings, in any batch."""

import json
import random

import numpy as np
import pytest

from batch_manager import InferenceRequest, KvCacheConfig, SchedulerPolicy, TrtGptModelType

torch = pytest.importorskip("torch")

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
FUSED, SPLIT = TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching
HIDDEN, VOCAB, COUNT, TOLERANCE = 64, 211, 12, 1e-4
WAYS = {
    "fused": dict(model_type=FUSED, policy=GUARANTEED,
                  kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=512)),
    "split, in chunks, paused": dict(model_type=SPLIT, policy=MAX, enable_chunked_context=True, max_num_tokens=16,
                                     kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=9 * 8)),
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


def test_virtual_tokens_have_the_embeddings_of_their_requests_table(make_manager, new_client, reference):
    requests, client = mixture(), new_client()
    client.pending = [asking(i, prompt, table) for i, (prompt, table) in requests.items()]
    manager = make_manager(client, model_path=reference.folder, num_threads=1, **WAYS["split, in chunks, paused"])
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
    assert sum(json.loads(record).get("Paused Requests", 0) for record in client.stats) > 0


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
