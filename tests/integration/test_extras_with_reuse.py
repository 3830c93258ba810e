"""With block reuse, requests with prompt embedding tables or logits post-processors get the right tokens.

Blocks of prompt-tuning tokens are reused only by requests with the same table.
"""

import json

import numpy as np
import pytest

from batch_manager import InferenceRequest, KvCacheConfig, SchedulerPolicy

torch = pytest.importorskip("torch")

VOCAB, HIDDEN = 211, 64
REUSE = dict(kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=512, enable_block_reuse=True), num_threads=1,
             policy=SchedulerPolicy.GUARANTEED_NO_EVICT)


def table_of(seed):
    return np.random.default_rng(seed).normal(0, 0.3, (1, 20, HIDDEN)).astype(np.float32)


def greedy(model, prompt, table, count):
    """Return the prompt and the `count` tokens that transformers generates greedily after it.

    Ids from VOCAB on are prompt-tuning tokens, whose embeddings are rows of `table`.
    """
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.tensor(tokens)
            embeddings = model.get_input_embeddings()(ids.clamp(max=VOCAB - 1))
            embeddings[ids >= VOCAB] = torch.from_numpy(table[0])[ids[ids >= VOCAB] - VOCAB]
            tokens.append(int(model(inputs_embeds=embeddings[None]).logits[0, -1].argmax()))
    return tokens


def reused(client):
    return json.loads(client.stats[-1])["Reused KV cache blocks"]


def serve_one_after_the_other(make_manager, client, folder, requests, **options):
    manager = make_manager(client, model_path=folder, **REUSE, **options)
    for request in requests:
        client.pending.append(request)
        manager.notify()
        client.wait_for_finals(request.request_id)
    assert manager.shutdown()


def test_virtual_tokens_share_blocks_with_those_of_the_same_table_only(make_manager, new_client, llama_reference):
    prompt, client = [*range(VOCAB, VOCAB + 20), 5, 6, 7], new_client()
    tables = {1: table_of(0), 2: table_of(1), 3: table_of(0), 4: table_of(2)}
    requests = [InferenceRequest(i, {"input_ids": prompt, "request_output_len": 6, "prompt_vocab_size": 20,
                                     "prompt_embedding_table": table}) for i, table in tables.items()]
    seen = []
    client.on_send = lambda request_id, response: seen.append(reused(client) if client.stats else 0)
    serve_one_after_the_other(make_manager, client, llama_reference.folder, requests)
    for i, table in tables.items():
        assert client.final(i).tokens() == greedy(llama_reference.model, prompt, table, 6)
    # Two full blocks, and the third one up to the prompt's last token.
    assert seen == [0, 0, 3, 3], "only the third request has a table that was there before"


def test_a_function_sees_all_tokens_of_a_prompt_whose_beginning_was_not_computed(make_manager, new_client,
                                                                                 llama_reference):
    prompt, client, calls = list(range(30)), new_client(), {1: [], 2: []}

    def note(request_id, logits, token_ids):
        calls[request_id].append(token_ids)
        return logits

    requests = [InferenceRequest(i, {"input_ids": prompt, "request_output_len": 4}, logits_post_processor=note)
                for i in (1, 2)]
    serve_one_after_the_other(make_manager, client, llama_reference.folder, requests)
    text = client.final(1).tokens()
    assert reused(client) == 4 and client.final(2).tokens() == text
    assert calls[1] == calls[2] == [[text[: 30 + n]] for n in range(4)]


def test_samples_of_one_prompt_compute_it_once(make_manager, new_client, llama_reference):
    prompt, client = list(range(100, 140)), new_client()
    client.pending = [InferenceRequest(i, {"input_ids": prompt, "request_output_len": 6, "temperature": 0.9,
                                           "runtime_top_p": 0.95, "random_seed": i}) for i in range(4)]
    manager = make_manager(client, model_path=llama_reference.folder, **REUSE)
    client.wait_for_finals(*range(4))
    assert manager.shutdown()
    records = [json.loads(record) for record in client.stats]
    # The prompt has five full blocks. Each request computes the last token, and with it the last block.
    assert sum(record["Total Context Tokens"] for record in records) == 40 + 3 * (40 - 4 * 8)
    assert len({tuple(client.final(i).tokens()) for i in range(4)}) == 4
