"""Penalties, bans, word lists and biases with beams give the beams and scores of transformers, through the callbacks.

Greedy and sampled requests with the same features run in the same engine, and get the tokens that they get alone.
"""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from batch_manager import FinishReason, KvCacheConfig, SchedulerPolicy, TrtGptModelType
from tests.harness.client import Client
from tests.harness.requests import request
from tests.harness.world import make_manager

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
processors = pytest.importorskip("transformers.generation.logits_process")

from batch_manager.runtime.forms.packed.form import PendingCalls  # noqa: E402  it imports torch
from batch_manager.runtime.native_backend import NativeBackend  # noqa: E402  likewise

AUSTEN = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
MAX, SPLIT = SchedulerPolicy.MAX_UTILIZATION, TrtGptModelType.InflightBatching
EARLY_STOPPING = {1: True, 0: False, 2: "never"}
COUNT = 12
TAKEN = {                                   # values from the beams without the feature, so that it changes them
    "end_id": lambda text, prompt: text[3],
    "bad_words_list": lambda text, prompt: [[text[1]], text[4:6], [prompt[-1], text[0]]],
    "stop_words_list": lambda text, prompt: [text[5:7], [text[7]], [prompt[-1], text[0], text[1], text[2]]],
}
FEATURES = {
    "repetition up": dict(repetition_penalty=1.3),
    "repetition down": dict(repetition_penalty=0.8),
    "presence": dict(presence_penalty=1.5),
    "presence down": dict(presence_penalty=-0.7),
    "frequency": dict(frequency_penalty=0.6),
    "unigrams": dict(no_repeat_ngram_size=1),
    "bigrams": dict(no_repeat_ngram_size=2),
    "bias": dict(embedding_bias=1.5),
    "end id": dict(end_id=..., presence_penalty=0.05),
    "minimum length": dict(end_id=..., min_length=7),
    "bad words": dict(bad_words_list=...),
    "stop words": dict(stop_words_list=...),
    "everything": dict(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, no_repeat_ngram_size=3,
                       embedding_bias=0.5, bad_words_list=..., end_id=..., min_length=5, stop_words_list=...),
    "rewards of the output only": dict(presence_penalty=-2.5, frequency_penalty=-1.0, prompt_ignore_length=2**31 - 1),
    "penalties without the first tokens": dict(presence_penalty=3.0, frequency_penalty=1.0, prompt_ignore_length=3),
}


class Feature(processors.LogitsProcessor):
    """A logits processor for transformers with presence and frequency penalties, which transformers lacks."""

    def __init__(self, tensors, vocab_size, prompt_length):
        self.tensors, self.vocab_size = tensors, vocab_size
        self.num_ignored = min(tensors.get("prompt_ignore_length", 0), prompt_length)

    def __call__(self, input_ids, scores):
        counts = torch.stack([torch.bincount(ids[self.num_ignored:], minlength=self.vocab_size) for ids in input_ids])
        return scores - self.tensors.get("presence_penalty", 0) * (counts > 0) \
            - self.tensors.get("frequency_penalty", 0) * counts


class Bias(processors.LogitsProcessor):
    def __init__(self, bias):
        self.bias = torch.from_numpy(bias)

    def __call__(self, input_ids, scores):
        return scores + self.bias


class StopWords(transformers.StoppingCriteria):
    def __init__(self, words):
        self.words = words

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([any(ids[-len(word):] == word for word in self.words) for ids in input_ids.tolist()])


class Beams:
    """Beam search by a transformers model in float32 on the CPU, as the expected result.

    Calling the object with a request returns its beams, best first: [(output, finish reason, score)].
    """

    def __init__(self, model, folder) -> None:
        self.model, self.folder, self.vocab_size = model, folder, model.config.vocab_size
        self._known = {}

    def __call__(self, i, prompt, tensors):
        """Return the beams of a request. `i` is the key of the cached result."""
        if i not in self._known:
            self._known[i] = self._find(prompt, tensors)
        return self._known[i]

    def _find(self, prompt, tensors):
        end_id, width = tensors.get("end_id"), tensors["beam_width"]
        changes = processors.LogitsProcessorList()
        if "embedding_bias" in tensors:
            changes.append(Bias(tensors["embedding_bias"]))
        if "repetition_penalty" in tensors:
            changes.append(processors.RepetitionPenaltyLogitsProcessor(tensors["repetition_penalty"]))
        changes.append(Feature(tensors, self.vocab_size, len(prompt)))
        if "min_length" in tensors:
            changes.append(processors.MinNewTokensLengthLogitsProcessor(len(prompt), tensors["min_length"], end_id))
        if "no_repeat_ngram_size" in tensors:
            changes.append(processors.NoRepeatNGramLogitsProcessor(tensors["no_repeat_ngram_size"]))
        if "bad_words_list" in tensors:
            changes.append(processors.NoBadWordsLogitsProcessor(tensors["bad_words_list"]))
        words = tensors.get("stop_words_list", [])
        with torch.inference_mode():
            found = self.model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=COUNT,
                length_penalty=tensors["len_penalty"], early_stopping=EARLY_STOPPING[tensors["early_stopping"]],
                eos_token_id=end_id, pad_token_id=self.vocab_size, logits_processor=changes,
                stopping_criteria=transformers.StoppingCriteriaList([StopWords(words)] if words else []),
                return_dict_in_generate=True, output_scores=True)
        texts = []
        for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist()):
            tokens = [token for token in sequence if token not in (self.vocab_size, -1)]    # padding
            reason = FinishReason.LENGTH
            if any(tokens[-len(word):] == word for word in words):
                reason = FinishReason.STOP_WORDS
            if tokens[-1] == end_id:
                tokens, reason = tokens[:-1], FinishReason.END_ID
            texts.append((tokens[len(prompt):], reason, score))
        return texts

    def questions(self, prompts, ways):
        """Return a request for each of FEATURES: {number of the feature: (prompt, tensors)}.

        prompts   a prompt for each feature
        ways      (beam width, length penalty, early stopping) of the requests, used cyclically
        """
        asked, unchanged = {}, 0
        for i, (prompt, feature, (width, len_penalty, early_stopping)) in enumerate(zip(
                prompts, FEATURES.values(), itertools.cycle(ways))):
            tensors = dict(beam_width=width, len_penalty=len_penalty, early_stopping=early_stopping)
            plain = [text for text, *_ in self._find(prompt, tensors)]
            for name, value in feature.items():
                if name == "embedding_bias":
                    value = (np.random.default_rng(0).normal(size=self.vocab_size) * value).astype(np.float32)
                tensors[name] = TAKEN[name](plain[0], prompt) if value is ... else value
            asked[i] = prompt, tensors
            unchanged += [text for text, *_ in self(i, prompt, tensors)] == plain
        assert unchanged <= 2
        return asked


WAYS = [(2, 0.0, 1), (3, 1.0, 0), (4, 2.0, 2), (4, 0.5, 1), (2, 1.0, 2), (3, 0.0, 0), (2, 0.0, 0)]


@pytest.fixture(scope="module")
def llama(llama_reference):
    return Beams(llama_reference.model, llama_reference.folder)


@pytest.fixture(scope="module")
def llama_questions(llama):
    draw = random.Random(3)
    return llama.questions([[draw.randrange(211) for _ in range(draw.choice([1, 5, 17, 30]))] for _ in FEATURES], WAYS)


@pytest.fixture(scope="module")
def others(llama, llama_questions):
    """Return (requests without beams, the client that got the answer to each of them alone)."""
    asked, client = without_beams(llama_questions), Client()
    serve(make_manager, client, request, llama, asked, max_batch_size=1)
    return asked, client


@pytest.fixture(scope="module")
def austen():
    return Beams(transformers.AutoModelForCausalLM.from_pretrained(
        AUSTEN, dtype=torch.float32, attn_implementation="eager").eval(), AUSTEN)


def without_beams(asked):
    """Return the requests `asked` without beams: {1000 + number: (prompt, tensors)}. Every second one is sampled."""
    others = {}
    for i, (prompt, tensors) in asked.items():
        tensors = {name: value for name, value in tensors.items()
                   if name not in ("beam_width", "len_penalty", "early_stopping")}
        if i % 2:
            tensors |= dict(runtime_top_p=1.0, temperature=0.8, random_seed=i)
        others[1000 + i] = prompt, tensors
    return others


def serve(make_manager, client, new_request, model, asked, **options):
    client.pending = [new_request(i, prompt, COUNT, return_log_probs=True, **tensors)
                      for i, (prompt, tensors) in asked.items()]
    options = {"max_batch_size": 32, "dtype": "float32",
               "kv_cache_config": KvCacheConfig(tokens_per_block=8, max_tokens=8 * 1000)} | options
    manager = make_manager(client, model_path=model.folder, num_threads=1, max_beam_width=4, **options)
    client.wait_for_finals(*asked)
    assert manager.shutdown()
    assert all(client.final(i).error == "" for i in asked)


def assert_beams(client, model, asked):
    """Compare all beams and their scores with transformers."""
    for i, (prompt, tensors) in asked.items():
        final, expected = client.final(i), model(i, prompt, tensors)
        reasons = final.tensors["finish_reason"][0].tolist()
        assert [(final.tokens(beam)[len(prompt):], reason) for beam, reason in enumerate(reasons)] == [
            text[:2] for text in expected], list(FEATURES)[i]
        lengths = [len(text) + (reason == FinishReason.END_ID) for text, reason, _ in expected]
        scores = final.tensors["cum_log_probs"][0] / np.array(lengths, float) ** tensors["len_penalty"]
        np.testing.assert_allclose(scores, [score for *_, score in expected], atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [
    {},
    {"policy": MAX, "enable_chunked_context": True, "max_num_tokens": 48,
     "kv_cache_config": KvCacheConfig(tokens_per_block=8, max_tokens=8 * 24)},
    {"model_type": SPLIT, "enable_trt_overlap": True},
], ids=["roomy", "chunked and paused", "overlapped"])
def test_every_feature_beside_greedy_and_sampled_requests_with_it(
        make_manager, new_client, new_request, llama, llama_questions, others, options):
    (others, alone), client = others, new_client()
    mixed = [*llama_questions.items(), *others.items()]
    random.Random(1).shuffle(mixed)
    serve(make_manager, client, new_request, llama, dict(mixed), **options)
    assert_beams(client, llama, llama_questions)
    for i in others:
        assert client.final(i).tokens() == alone.final(i).tokens()
        assert client.final(i).finish_reason == alone.final(i).finish_reason
    reasons = {reason for i in llama_questions for _, reason, _ in llama(i, *llama_questions[i])}
    assert reasons == {FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH}
    if "max_num_tokens" in options:
        assert sum(json.loads(record)["Paused Requests"] for record in client.stats) > 0


def test_the_shipped_model_too(make_manager, new_client, new_request, austen):
    draw, client = random.Random(2), new_client()
    asked = austen.questions([[draw.randrange(20, 4000) for _ in range(draw.choice([3, 9, 20]))] for _ in FEATURES],
                             WAYS[3:] + WAYS[:3])
    serve(make_manager, client, new_request, austen, asked)
    assert_beams(client, austen, asked)
    assert {reason for i in asked for _, reason, _ in austen(i, *asked[i])} >= {
        FinishReason.END_ID, FinishReason.STOP_WORDS}


@pytest.mark.parametrize("where", ["start", "finish"])
def test_a_step_that_raised_is_run_again_in_parts(
        make_manager, new_client, new_request, llama, llama_questions, monkeypatch, where):
    """If `start` or `finish` of a step raises after the step's work was done, its parts run again, with right beams.

    The beams depend only on the state before the step.
    """
    where_from = NativeBackend if where == "start" else PendingCalls
    original, again = getattr(where_from, where), itertools.cycle([True, False])

    def then_raise(self, *batch):
        result = original(self, *batch)
        (batch,) = batch or (self._batch,)
        if batch.num_sequences > 1 and next(again):
            raise RuntimeError("planted")
        return result

    monkeypatch.setattr(where_from, where, then_raise)
    client = new_client()
    serve(make_manager, client, new_request, llama, llama_questions)
    assert_beams(client, llama, llama_questions)
