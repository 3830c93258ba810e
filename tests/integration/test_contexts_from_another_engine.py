"""C12, C13: a prompt computed in one engine and continued in another has the tokens and log-probs of one engine.

tests/campaigns/two_engines.py draws families, forms and requests, also with the engines in two processes.
"""

import functools
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from batch_manager import KvCacheConfig, KvTransferConfig, PeftCacheConfig, SpeculativeConfig  # noqa: E402
from tests.harness.adapters import random_content, tensors_of  # noqa: E402
from tests.harness.client import Client  # noqa: E402
from tests.harness.requests import request  # noqa: E402
from tests.harness.world import make_manager  # noqa: E402
from tests.integration.families import FAMILIES  # noqa: E402
from tests.matrix.world import END_OF_A_GRAMMAR, VOCAB  # noqa: E402

SIZE, COUNT, VOCABULARY, HIDDEN_SIZE = 16, 9, VOCAB["llama"], 64
DRAW = np.random.default_rng(1)
SEEDED = {"random_seed": 7, "temperature": 0.9}
# Tensors of requests, each of which changes tokens, or what is returned. Values of None depend on prompt and model.
REQUESTS = [
    {}, {**SEEDED, "runtime_top_k": 20}, {**SEEDED, "runtime_top_p": 0.8, "runtime_min_p": 0.01},
    {**SEEDED, "runtime_top_p": 0.9, "runtime_top_p_decay": 0.8, "runtime_top_p_reset_ids": 5},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "prompt_ignore_length": 20},
    {"no_repeat_ngram_size": 2}, {"bad_words_list": [[3], [17, 4]], "min_length": 3, "end_id": 9},
    {"stop_words_list": [[11]], "embedding_bias": DRAW.normal(0, 2, VOCABULARY).astype(np.float32)},
    {"return_top_log_probs": 3, "raw_log_probs": True, **SEEDED}, {"return_generation_logits": True},
    {"beam_width": 2, "len_penalty": 0.5}, {"cache_salt": "a"}, {"input_token_extra_ids": None, **SEEDED},
    {"prompt_embedding_table": DRAW.normal(0, 0.3, (4, HIDDEN_SIZE)).astype(np.float32), "prompt_vocab_size": 4},
    {"lora_task_id": 3, "lora_weights": None}, {"pattern": "[0-9]([A-Z][0-9]){2,4}!", "end_id": END_OF_A_GRAMMAR},
    {"pattern": "(yes|no)[a-z]{2,8}!", "end_id": END_OF_A_GRAMMAR, **SEEDED},
    {"embedding_bias": 50 * np.eye(1, VOCABULARY, 20, dtype=np.float32)[0]},      # one token again and again: drafts
]
LENGTHS = [50 + 7 * number for number in range(len(REQUESTS))]
LENGTHS[5:8] = 10, 64, 65                                           # no full block; the last block is full; one more
PHRASE = DRAW.integers(12, VOCABULARY, 9).tolist()                  # prompts repeat it, so that the engine drafts
PROMPTS = [[*DRAW.integers(12, VOCABULARY, length).tolist(), *PHRASE, *PHRASE][-length:] for length in LENGTHS]
CHUNKS = {"enable_chunked_context": True, "max_num_tokens": 48}
DRAFTS = {"speculative_config": SpeculativeConfig(num_speculative_tokens=5)}
EXACT, IN_TORCH = {"deterministic": True}, {"cpu_compile": False}
# Options of all three engines, and further ones of the first and of the second of the two.
FORMS = {
    "compiled": ({}, {}, {}), "drafts": ({}, DRAFTS, DRAFTS), "chunks": (IN_TORCH, CHUNKS, {}),
    "exact": (EXACT, CHUNKS, DRAFTS), "exact in torch": ({**EXACT, **IN_TORCH}, CHUNKS, DRAFTS)}
# Families that differ in what a block holds, or in which blocks a layer reads; the campaign has all.
KINDS_OF_BLOCKS = ("llama-yarn-bias", "mistral-window", "gpt2", "gemma2", "phi3", "smollm3", "gptj", "opt", "bloom",
                   "falcon", "mixtral-window", "qwen2-moe")
ASKED = list(zip(PROMPTS, REQUESTS, strict=True))
SETS = [("llama", form, ASKED) for form in FORMS]                   # other families get half of them, and the last
SETS += [(family, ("exact", "exact in torch")[number % 2], [*ASKED[number // 2 % 2:-1:2], ASKED[-1]])
         for number, family in enumerate(FAMILIES[1:]) if family in KINDS_OF_BLOCKS]


@functools.cache
def guided():
    pytest.importorskip("llguidance")
    pytest.importorskip("tokenizers")
    from batch_manager.extras.guided_decoding import GuidedDecoding
    from tests.matrix.engines import letters_tokenizer

    return GuidedDecoding(letters_tokenizer(), vocab_size=VOCABULARY, end_id=END_OF_A_GRAMMAR)


class Engine:
    def __init__(self, folder, role=None, kv=None, max_batch_size=9, **options):
        self.client = Client()
        self.manager = make_manager(
            self.client, model_path=folder, max_batch_size=max_batch_size, max_beam_width=2, num_threads=1,
            flush_stats_when_idle=True, peft_cache_config=PeftCacheConfig(max_adapter_size=4), **options,
            kv_cache_config=KvCacheConfig(**{"enable_block_reuse": True, "tokens_per_block": SIZE, "max_tokens": 4096,
                                             "host_cache_size": 16 << 20, **(kv or {})}),
            kv_transfer_config=None if role is None else KvTransferConfig(role=role, load_timeout_s=60))

    def requests(self, asked, kind="context_and_generation", contexts=()):
        """Return a request for each (prompt, tensors) of `asked`, with what their `contexts` hand over, if any."""
        made = []
        for number, (prompt, tensors) in enumerate(asked):
            tensors = dict(tensors)
            pattern = tensors.pop("pattern", "")
            if "input_token_extra_ids" in tensors:
                tensors["input_token_extra_ids"] = list(range(len(prompt)))
            if "prompt_vocab_size" in tensors:
                prompt = [VOCABULARY + prompt[0] % 4, *prompt[1:]]
            if "lora_weights" in tensors:
                modules = self.manager._loop.backend.info.adapter_modules
                tensors |= tensors_of(random_content(modules, tensors["lora_task_id"]).parts)
            if contexts:
                tensors["context_phase_params"] = contexts[number].tensors["context_phase_params"]
            made.append(request(number, prompt, COUNT, return_log_probs=True, request_type=kind, **tensors))
            if pattern:
                made[-1].logits_post_processor = guided().processor(guided().regex(pattern))
        return made

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


def differences(wanted, found, *, is_exact):
    """Yield (number, name of a tensor) for each tensor of responses that differs."""
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        for name, tensor in one.tensors.items():
            first, second = np.array(tensor), np.array(other.tensors[name])
            is_equal = first.tobytes() == second.tobytes() if is_exact or first.dtype.kind != "f" else (
                first.shape == second.shape and np.allclose(first, second, atol=3e-4))
            if not is_equal:
                yield number, name


@pytest.mark.parametrize("reference, form, asked", SETS, indirect=["reference"],
                         ids=[f"{family}-{form}" for family, form, _ in SETS])
def test_two_engines_answer_as_one(reference, form, asked):
    options, of_first, of_second = FORMS[form]
    alone = Engine(reference.folder, **options)
    wanted = alone.answer(alone.requests(asked))
    alone.end()
    prefill = Engine(reference.folder, "producer", **options, **of_first)
    decode = Engine(reference.folder, "consumer", **options, **of_second)
    try:
        contexts = prefill.answer(prefill.requests(asked, "context_only"))
        found = decode.answer(decode.requests(asked, "generation_only", contexts))
    finally:
        figures, of_prefill = decode.end(), prefill.end()
    assert not list(differences(wanted, found, is_exact="deterministic" in options))
    for (prompt, tensors), one, context in zip(asked, wanted, contexts, strict=True):
        assert "beam_width" in tensors or context.tokens() == one.tokens()[:len(prompt) + 1]
    assert figures["KV Transfer Fallbacks"] == 0 and figures["KV Transfer Bytes"] > 0
    assert figures["Generation Only Requests"] == of_prefill["Context Only Requests"] == len(asked)
    assert not of_second or figures["Accepted Draft Tokens"] > 0
