"""C12, C13: a prompt computed in one engine and continued in another has the tokens and log-probs of one engine."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from batch_manager import KvCacheConfig, KvTransferConfig, PeftCacheConfig  # noqa: E402
from tests.harness.client import Client  # noqa: E402
from tests.harness.requests import request  # noqa: E402
from tests.harness.world import make_manager  # noqa: E402

SIZE, COUNT, VOCAB = 16, 8, 211
DRAW = np.random.default_rng(1)
SEEDED = {"random_seed": 7, "temperature": 0.9}
ADAPTER = {"lora_task_id": 3, "lora_weights": DRAW.normal(0, 0.1, (2, 4 * 256)).astype(np.float32),
           "lora_config": np.array([[4, 0, 4], [5, 1, 4]], np.int32)}
# Tensors of requests, each of which changes tokens, or what is returned.
REQUESTS = [
    {}, {**SEEDED, "runtime_top_k": 20}, {**SEEDED, "runtime_top_p": 0.8, "runtime_min_p": 0.01},
    {**SEEDED, "runtime_top_p": 0.9, "runtime_top_p_decay": 0.8, "runtime_top_p_reset_ids": 5},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "prompt_ignore_length": 20},
    {"no_repeat_ngram_size": 2}, {"bad_words_list": [[3], [17, 4]], "min_length": 3, "end_id": 9},
    {"stop_words_list": [[11]], "embedding_bias": DRAW.normal(0, 2, VOCAB).astype(np.float32)},
    {"return_top_log_probs": 3, "raw_log_probs": True, **SEEDED}, {"return_generation_logits": True},
    {"beam_width": 2, "len_penalty": 0.5}, {"cache_salt": "a"}, {"input_token_extra_ids": None, **SEEDED},
    {"prompt_embedding_table": DRAW.normal(0, 0.3, (4, 64)).astype(np.float32), "prompt_vocab_size": 4}, ADAPTER,
]
LENGTHS = [50 + 7 * number for number in range(len(REQUESTS))]
LENGTHS[5:8] = 10, 64, 65                                           # no full block; the last block is full; one more
PROMPTS = [DRAW.integers(12, VOCAB, length).tolist() for length in LENGTHS]
FORMS = {"compiled": {}, "deterministic": {"deterministic": True, "cpu_compile": False},
         "chunks": {"cpu_compile": False, "enable_chunked_context": True, "max_num_tokens": 48}}


def requests(kind="context_and_generation", params=None):
    made = []
    for number, (prompt, tensors) in enumerate(zip(PROMPTS, REQUESTS, strict=True)):
        tensors = dict(tensors)
        if "input_token_extra_ids" in tensors:
            tensors["input_token_extra_ids"] = list(range(len(prompt)))
        if "prompt_vocab_size" in tensors:
            prompt = [VOCAB + prompt[0] % 4, *prompt[1:]]
        if params is not None:
            tensors["context_phase_params"] = params[number]
        made.append(request(number, prompt, COUNT, return_log_probs=True, request_type=kind, **tensors))
    return made


class Engine:
    def __init__(self, folder, role=None, **options):
        self.client = Client()
        self.manager = make_manager(
            self.client, model_path=folder, max_batch_size=6, max_beam_width=2, flush_stats_when_idle=True,
            peft_cache_config=PeftCacheConfig(max_adapter_size=4), kv_cache_config=KvCacheConfig(
                enable_block_reuse=True, tokens_per_block=SIZE, max_tokens=4096, host_cache_size=16 << 20),
            kv_transfer_config=None if role is None else KvTransferConfig(role=role, load_timeout_s=60), **options)

    def answer(self, asked):
        self.client.pending += asked
        self.manager.notify()
        for each in asked:
            self.client.wait_for_finals(each.request_id)
        finals = [self.client.final(each.request_id) for each in asked]
        assert not [final.error for final in finals if final.error]
        return finals

    def end(self):
        assert self.manager.shutdown(timeout=60)
        return json.loads(self.client.stats[-1])


@pytest.mark.parametrize("reference, form", [
    ("llama", "compiled"), ("llama", "deterministic"), ("llama", "chunks"), ("gemma3", "deterministic"),
    ("gpt-neox", "compiled")], indirect=["reference"])
def test_two_engines_answer_as_one(reference, form):
    options = FORMS[form]
    alone = Engine(reference.folder, **options)
    wanted = alone.answer(requests())
    alone.end()
    prefill, decode = Engine(reference.folder, "producer", **options), Engine(reference.folder, "consumer", **options)
    try:
        contexts = prefill.answer(requests("context_only"))
        params = [final.tensors["context_phase_params"] for final in contexts]
        found = decode.answer(requests("generation_only", params))
    finally:
        figures, of_prefill = decode.end(), prefill.end()
    for number, (one, other, context) in enumerate(zip(wanted, found, contexts)):
        assert other.tokens() == one.tokens(), REQUESTS[number]
        beams = REQUESTS[number].get("beam_width", 1)
        if beams == 1 and len(one.tokens()) > len(PROMPTS[number]):
            assert context.tokens() == one.tokens()[:len(PROMPTS[number]) + 1]
        for name, tensor in one.tensors.items():
            if form == "deterministic":
                assert np.array(other.tensors[name]).tobytes() == np.array(tensor).tobytes(), name
            np.testing.assert_allclose(np.array(other.tensors[name]), np.array(tensor), atol=3e-4, err_msg=name)
    assert figures["KV Transfer Fallbacks"] == 0 and figures["Generation Only Requests"] == len(REQUESTS)
    assert of_prefill["Context Only Requests"] == len(REQUESTS)
    assert figures["KV Transfer Bytes"] > 0
