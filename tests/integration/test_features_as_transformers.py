"""Penalties, bans, word lists, biases and end ids give the greedy tokens of transformers, through the callbacks."""

import functools
import random
from pathlib import Path

import numpy as np
import pytest

from batch_manager import KvCacheConfig, SchedulerPolicy, TrtGptModelType
from batch_manager.names import FinishReason

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
processors = pytest.importorskip("transformers.generation.logits_process")

AUSTEN = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
COUNT = 30
SEVERAL = "several"                         # stands for a list of end ids
TAKEN = {                                   # values from the output without the feature, so that the feature changes it
    "end_id": lambda drawn: drawn[8],
    SEVERAL: lambda drawn: [drawn[23], drawn[8], drawn[16]],
    "bad_words_list": lambda drawn: [[drawn[2]], drawn[6:8], drawn[11:14]],
    "stop_words_list": lambda drawn: [drawn[12:14], drawn[20:21], [drawn[3], drawn[5]]],
}
FEATURES = {
    "nothing": {},
    "repetition up": dict(repetition_penalty=1.3),
    "repetition down": dict(repetition_penalty=0.8),
    "presence": dict(presence_penalty=1.5),
    "presence down": dict(presence_penalty=-0.7),
    "frequency": dict(frequency_penalty=0.4),
    "all penalties": dict(repetition_penalty=1.15, presence_penalty=0.4, frequency_penalty=0.2),
    "unigrams": dict(no_repeat_ngram_size=1),
    "bigrams": dict(no_repeat_ngram_size=2),
    "trigrams": dict(no_repeat_ngram_size=3),
    "bias": dict(embedding_bias=1.5),
    "end id": dict(end_id=...),
    "minimum length": dict(end_id=..., min_length=15),
    "several end ids": dict(end_id=SEVERAL),
    "several end ids after a minimum length": dict(end_id=SEVERAL, min_length=15),
    "bad words": dict(bad_words_list=...),
    "stop words": dict(stop_words_list=...),
    "everything": dict(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, no_repeat_ngram_size=3,
                       embedding_bias=0.5, bad_words_list=..., end_id=..., min_length=12, stop_words_list=...),
    "penalties of the output only": dict(repetition_penalty=1.15, presence_penalty=0.4, frequency_penalty=0.2,
                                         prompt_ignore_length=2**31 - 1),
    "penalties without the first tokens": dict(presence_penalty=3.0, frequency_penalty=1.0, prompt_ignore_length=3),
}


class Transformers:
    """Greedy decoding with transformers' own model, cache and processors, one request at a time."""

    def __init__(self, model, folder) -> None:
        self.model, self.folder, self.vocab_size = model, folder, model.config.vocab_size
        self.plain = functools.cache(lambda *prompt: self.generate(prompt, {})[0])         # the output without features

    def scores(self, tensors, tokens, prompt_length, scores):
        """Return the logits `scores` [1, vocab] of the token after `tokens`, changed by the features in `tensors`."""
        ids = torch.tensor([tokens])
        if "embedding_bias" in tensors:
            scores = scores + torch.tensor(tensors["embedding_bias"])
        if "repetition_penalty" in tensors:
            scores = processors.RepetitionPenaltyLogitsProcessor(tensors["repetition_penalty"])(ids, scores)
        ignored = min(tensors.get("prompt_ignore_length", 0), prompt_length)
        counts = torch.bincount(ids[0, ignored:], minlength=self.vocab_size)
        scores = scores - tensors.get("presence_penalty", 0) * (counts > 0)
        scores = scores - tensors.get("frequency_penalty", 0) * counts
        if "no_repeat_ngram_size" in tensors:
            scores = processors.NoRepeatNGramLogitsProcessor(tensors["no_repeat_ngram_size"])(ids, scores)
        if "bad_words_list" in tensors:
            scores = processors.NoBadWordsLogitsProcessor(tensors["bad_words_list"])(ids, scores)
        if "min_length" in tensors:
            scores = processors.MinNewTokensLengthLogitsProcessor(
                prompt_length, tensors["min_length"], tensors["end_id"])(ids, scores)
        return scores

    def generate(self, prompt, tensors):
        """Generate up to COUNT tokens after the prompt, with the features in `tensors`.

        Returns (output, finish reason, log-probs of the output).
        """
        tokens, cache, fed, log_probs = list(prompt), None, list(prompt), []
        while len(tokens) < len(prompt) + COUNT:
            with torch.inference_mode():
                output = self.model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
                scores = self.scores(tensors, tokens, len(prompt), output.logits[:, -1])[0]
            token, cache = int(scores.argmax()), output.past_key_values
            if token in np.atleast_1d(tensors.get("end_id", -1)):
                return tokens[len(prompt):], FinishReason.END_ID, log_probs
            tokens.append(token)
            log_probs.append(float(scores.log_softmax(0)[token]))
            fed = [token]
            if any(tokens[-len(word):] == word for word in tensors.get("stop_words_list", ())):
                return tokens[len(prompt):], FinishReason.STOP_WORDS, log_probs
        return tokens[len(prompt):], FinishReason.LENGTH, log_probs

    def completed(self, prompt, feature):
        """Return the tensors of a feature with values for its placeholders `...` and SEVERAL.

        The values, such as end ids and stop words, are tokens that the model generates without them. They therefore
        change the output.
        """
        tensors = {name: value for name, value in feature.items() if value is not ... and value is not SEVERAL}
        if "embedding_bias" in tensors:
            bias = np.random.default_rng(0).normal(size=self.vocab_size) * tensors["embedding_bias"]
            tensors["embedding_bias"] = bias.astype(np.float32)
        missing = {name: SEVERAL if value is SEVERAL else name for name, value in feature.items()
                   if value is ... or value is SEVERAL}
        alone = {name: value for name, value in tensors.items() if name != "min_length"}
        drawn = (self.generate(prompt, alone)[0] if alone else self.plain(*prompt)) if missing else []
        return tensors | {name: TAKEN[taken](drawn) for name, taken in missing.items()}


@pytest.fixture(scope="module")
def random_model(llama_reference):
    return Transformers(llama_reference.model, llama_reference.folder)


@pytest.fixture(scope="module")
def shipped_model():
    model = transformers.AutoModelForCausalLM.from_pretrained(
        AUSTEN, dtype=torch.float32, attn_implementation="eager").eval()
    return Transformers(model, AUSTEN)


def check(model, features, make_manager, new_client, new_request, seed, prompt_ids, **options):
    draw, cases = random.Random(seed), {}
    prompts = [[draw.randrange(prompt_ids) for _ in range(length)] for length in (1, 5, 17, 40)]
    for i, feature in enumerate(features.values()):
        prompt = draw.choice(prompts)
        cases[i] = prompt, model.completed(prompt, feature)
    client = new_client()
    client.pending = [new_request(i, prompt, COUNT, return_log_probs=True, streaming=i % 4 == 1, **tensors)
                      for i, (prompt, tensors) in cases.items()]
    make_manager(client, model_path=model.folder, num_threads=1, dtype="float32", max_batch_size=32, **options)
    client.wait_for_finals(*cases)
    expected = {i: model.generate(*case) for i, case in cases.items()}
    for i, (name, (prompt, _)) in enumerate(zip(features, cases.values())):
        tokens, reason, log_probs = expected[i]
        final = client.final(i)
        assert final.error == "", name
        got = client.streamed(i) if i % 4 == 1 else final.tokens()[len(prompt):]
        assert (got, final.finish_reason) == (tokens, reason), name
        if i % 4 != 1:
            np.testing.assert_allclose(final.tensors["output_log_probs"][0, 0], log_probs, atol=2e-4, err_msg=name)
    changed = [name for i, name in enumerate(features) if model.plain(*cases[i][0]) != expected[i][0]]
    assert len(changed) >= len(features) - 2, set(features) - set(changed)
    assert {reason for _, reason, _ in expected.values()} >= {FinishReason.END_ID, FinishReason.STOP_WORDS}
    return client


@pytest.mark.parametrize(("model_type", "policy", "tokens_in_pool"), [
    (TrtGptModelType.InflightFusedBatching, SchedulerPolicy.MAX_UTILIZATION, 20 * 16),
    (TrtGptModelType.InflightBatching, SchedulerPolicy.GUARANTEED_NO_EVICT, 4096)])
def test_greedy_tokens_of_every_feature_in_one_batch(
        make_manager, new_client, new_request, random_model, model_type, policy, tokens_in_pool):
    check(random_model, FEATURES, make_manager, new_client, new_request, seed=1, prompt_ids=random_model.vocab_size,
          model_type=model_type, policy=policy, enable_chunked_context=True, max_num_tokens=64,
          kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=tokens_in_pool))


def test_a_static_batch_too(make_manager, new_client, new_request, random_model):
    features = {name: feature for name, feature in FEATURES.items() if "embedding_bias" not in feature}
    check(random_model, features, make_manager, new_client, new_request, seed=2, prompt_ids=random_model.vocab_size,
          model_type=TrtGptModelType.V1, kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=4096))


def test_the_shipped_model_too(make_manager, new_client, new_request, shipped_model):
    check(shipped_model, FEATURES, make_manager, new_client, new_request, seed=3, prompt_ids=shipped_model.vocab_size,
          kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=4096))
