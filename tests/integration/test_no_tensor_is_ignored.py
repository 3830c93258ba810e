"""Each documented tensor changes the response, or is refused by name."""

import numpy as np
import pytest

from batch_manager import ContextPhaseParams, KvCacheConfig
from batch_manager.requests.inference_request import TENSORS

VOCAB, HIDDEN = 211, 64
DRAWN = ...                                         # replaced by a value from the base request's output
SAMPLED = dict(runtime_top_p=1.0, temperature=1.5)
LOG_PROBS = dict(return_log_probs=True)
BEAMS = dict(input_ids=[116, 121, 167], beam_width=3, end_id=DRAWN, return_log_probs=True)

# tensor -> (other tensors of the request, a value that is not neutral)
CRAFTED = {
    "input_ids": ({}, [1, 2, 3, 4]),
    "request_output_len": ({}, 7),
    "end_id": ({}, DRAWN),
    "beam_width": ({}, 2),
    "pad_id": (BEAMS, 5),
    "temperature": (dict(runtime_top_p=1.0), 3.0),
    "runtime_top_k": (SAMPLED, 2),
    "runtime_top_p": ({}, 0.99),
    "runtime_top_p_decay": (SAMPLED, 0.5),
    "runtime_top_p_min": (SAMPLED | dict(runtime_top_p=0.05), 0.95),
    "runtime_top_p_reset_ids": (SAMPLED | dict(runtime_top_p_decay=0.1), DRAWN),
    "runtime_min_p": (SAMPLED, 0.5),
    "len_penalty": (BEAMS, 5.0),
    "early_stopping": (BEAMS | dict(len_penalty=2.0, request_output_len=24), 0),
    "beam_search_diversity_rate": (BEAMS, 2.0),
    "repetition_penalty": (LOG_PROBS, 2.0),
    "presence_penalty": (LOG_PROBS, 2.0),
    "frequency_penalty": (LOG_PROBS, 2.0),
    "prompt_ignore_length": (LOG_PROBS | dict(presence_penalty=2.0), 100),
    "no_repeat_ngram_size": (LOG_PROBS, 1),
    "min_length": (dict(end_id=DRAWN), 10),
    "random_seed": (SAMPLED, 77),
    "bad_words_list": ({}, DRAWN),
    "stop_words_list": ({}, DRAWN),
    "embedding_bias": ({}, np.linspace(0, 5, VOCAB, dtype=np.float32)),
    "prompt_embedding_table": (dict(prompt_vocab_size=2, input_ids=[3, VOCAB, VOCAB + 1]),
                               np.ones((2, HIDDEN), np.float32)),
    "prompt_vocab_size": (dict(prompt_embedding_table=np.ones((2, HIDDEN), np.float32)), 2),
    "lora_task_id": ({}, 1),
    "lora_weights": (dict(lora_config=[[0, 0, 4]]), np.ones((1, 8 * HIDDEN), np.float32)),
    "lora_config": (dict(lora_weights=np.ones((1, 8 * HIDDEN), np.float32)), [[0, 0, 4]]),
    "draft_input_ids": ({}, [1, 2]),
    "draft_logits": (dict(draft_input_ids=[1, 2]), np.zeros((2, VOCAB), np.float32)),
    "context_phase_params": ({}, ContextPhaseParams("127.0.0.1", 1, bytes(16), 0).to_array()),
    "return_log_probs": ({}, True),
    "return_top_log_probs": ({}, 3),
    "raw_log_probs": (LOG_PROBS | dict(temperature=3.0), True),
    "return_context_logits": ({}, True),
    "return_generation_logits": ({}, True),
    "return_perf_metrics": ({}, True),
    "streaming": ({}, True),
}
NO_EFFECT = {"input_lengths": "obsolete: accepted and not looked at",
             "input_token_extra_ids": "keeps prompts apart in the cache, which changes no output: see test_reuse.py"}
# Tensor -> a tensor that it needs. If the needed tensor is refused, the error may name the needed one.
COMPANION = {"prompt_vocab_size": "prompt_embedding_table", "prompt_embedding_table": "prompt_vocab_size",
             "lora_config": "lora_weights", "lora_weights": "lora_config", "draft_logits": "draft_input_ids",
             **dict.fromkeys(["len_penalty", "early_stopping", "beam_search_diversity_rate", "pad_id"], "beam_width")}
TAKEN = {"end_id": lambda drawn: drawn[1], "runtime_top_p_reset_ids": lambda drawn: drawn[2],
         "bad_words_list": lambda drawn: [drawn[3:5]], "stop_words_list": lambda drawn: [drawn[3:5]]}


@pytest.fixture
def serve(make_manager, new_client, new_request, llama_reference):
    def run(requests):
        client = new_client()
        client.pending = [new_request(i, **({"prompt": tensors.pop("input_ids", [5, 9, 5]),
                                             "new_tokens": tensors.pop("request_output_len", 12)} | tensors))
                          for i, tensors in enumerate(map(dict, requests))]
        manager = make_manager(client, model_path=llama_reference.folder, max_beam_width=3, num_threads=1,
                               kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=8192), max_batch_size=64)
        client.wait_for_finals(*range(len(requests)))
        assert manager.shutdown()
        return [client.responses[i] for i in range(len(requests))]

    return run


def same(first, second):
    return len(first) == len(second) and all(
        one.tensors.keys() == other.tensors.keys() and all(
            np.array_equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
        for one, other in zip(first, second))


def test_every_documented_tensor_counts_or_is_refused_by_name(serve):
    assert {*CRAFTED, *NO_EFFECT} == set(TENSORS)
    plain = [{name: value for name, value in others.items() if value is not DRAWN and name != "beam_width"}
             for others, _ in CRAFTED.values()]
    drawn = [[] if responses[-1].error else responses[-1].tokens()[3:] for responses in serve(plain)]
    bases, changed = [], []
    for (name, (others, value)), tokens in zip(CRAFTED.items(), drawn):
        base = {other: TAKEN[other](tokens) if given is DRAWN else given for other, given in others.items()}
        bases.append(base)
        changed.append(base | {name: TAKEN[name](tokens) if value is DRAWN else value})
    without, with_it = serve(bases), serve(changed)
    ignored = []
    for name, before, after in zip(CRAFTED, without, with_it):
        text = after[-1].error
        if text:
            is_clear = "this version cannot do that yet" in text or "this engine has no cache for adapters" in text \
                or "max_draft_tokens of this engine is 0" in text \
                or "a generation_only request has this tensor, and no other request" in text
            refused = is_clear and (name in text or COMPANION.get(name, "-") in text)
            assert refused, f"{name}: {text}"
        elif same(before, after):
            ignored.append(name)
    assert ignored == []
