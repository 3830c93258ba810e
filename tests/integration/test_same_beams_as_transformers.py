"""The engine gives all beams of transformers in order, with their scores, through the callbacks, in any batch."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from batch_manager import FinishReason, KvCacheConfig, SchedulerPolicy, TrtGptModelType
from tests.integration.families import FAMILIES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from batch_manager.runtime.forms.packed.form import PendingCalls  # noqa: E402  it imports torch
from batch_manager.runtime.native_backend import NativeBackend  # noqa: E402  likewise

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
FUSED, SPLIT, V1 = TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1
EARLY_STOPPING = {1: True, 0: False, 2: "never"}
WAYS = list(itertools.product((0.0, 0.5, 1.0, 2.0), EARLY_STOPPING))
AUSTEN = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"


class Beams:
    """Beam search by a transformers model in float32 on the CPU, as the expected result.

    Calling the object with a request returns its beams, best first: [(output without the end id, score)].
    """

    def __init__(self, model, folder) -> None:
        self.model, self.folder = model, folder
        self._known = {}

    def __call__(self, prompt, count, width, end_id, len_penalty, early_stopping):
        key = tuple(prompt), count, width, end_id, len_penalty, early_stopping
        if key not in self._known:
            with torch.inference_mode():
                found = self.model.generate(
                    torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=count,
                    length_penalty=len_penalty, early_stopping=EARLY_STOPPING[early_stopping], eos_token_id=end_id,
                    pad_token_id=end_id, return_dict_in_generate=True, output_scores=True)
            texts = [sequence[len(prompt):] for sequence in found.sequences.tolist()]
            self._known[key] = [(text[:text.index(end_id)] if end_id in text else text, score)
                                for text, score in zip(texts, found.sequences_scores.tolist())]
        return self._known[key]


@pytest.fixture(scope="module")
def random_model(reference):
    return Beams(reference.model, reference.folder)


@pytest.fixture(scope="module")
def austen():
    return Beams(transformers.AutoModelForCausalLM.from_pretrained(
        AUSTEN, dtype=torch.float32, attn_implementation="eager").eval(), AUSTEN)


def run(make_manager, client, new_request, model, asked, **options):
    """Send all requests at once and compare every beam with transformers. Return the statistics."""
    client.pending = [
        new_request(i, prompt, count, beam_width=width, end_id=end_id, len_penalty=len_penalty,
                    early_stopping=early_stopping, return_log_probs=True)
        for i, (prompt, count, width, end_id, len_penalty, early_stopping) in asked.items()]
    manager = make_manager(client, model_path=model.folder, num_threads=1, dtype="float32", max_beam_width=8, **options)
    client.wait_for_finals(*asked)
    assert manager.shutdown()
    for i, (prompt, *rest) in asked.items():
        final = client.final(i)
        assert final.error == ""
        expected = model(prompt, *rest)
        width, len_penalty = rest[1], rest[3]
        assert [final.tokens(beam)[len(prompt):] for beam in range(width)] == [text for text, _ in expected], asked[i]
        lengths = [len(text) + (finish == FinishReason.END_ID)
                   for (text, _), finish in zip(expected, final.tensors["finish_reason"][0].tolist())]
        scores = final.tensors["cum_log_probs"][0] / np.array(lengths, float)**len_penalty
        np.testing.assert_allclose(scores, [score for _, score in expected], atol=1e-4, rtol=0)
    return [json.loads(record) for record in client.stats]


def test_every_width_penalty_and_way_to_stop(make_manager, new_client, new_request, reference, random_model):
    """The beams are right if requests with different widths, length penalties and ways to stop run together.

    Each model family gets four of the combinations, which all families together get twice.
    """
    draw, number = random.Random(reference.family), FAMILIES.index(reference.family)
    client, asked = new_client(), {}
    for i, width in enumerate((2, 3, 4, 8)):
        len_penalty, early_stopping = WAYS[(number + 3 * i) % len(WAYS)]
        prompt = [draw.randrange(211) for _ in range(draw.randrange(1, 40))]
        end_id = max(text for text, _ in random_model(prompt, 6, 3, 0, 0.0, 2))[-1]    # a likely token
        asked[i] = prompt, 14, width, end_id, len_penalty, early_stopping
    run(make_manager, client, new_request, random_model, asked, max_batch_size=16,
        kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=16 * 8 * 60))
    reasons = [reason for i in asked for reason in client.final(i).tensors["finish_reason"][0].tolist()]
    assert {FinishReason.END_ID, FinishReason.LENGTH} == set(reasons)


@pytest.mark.parametrize(("policy", "options", "max_tokens"), [
    (MAX, {}, 40 * 16),
    (MAX, {"model_type": SPLIT, "enable_chunked_context": True, "max_num_tokens": 48}, 40 * 16),
    (MAX, {"enable_trt_overlap": True}, 60 * 16),
    (GUARANTEED, {"enable_chunked_context": True, "max_num_tokens": 32}, 60 * 16),
    (GUARANTEED, {"model_type": V1}, 100 * 16),
], ids=["paused", "chunked and paused", "overlapped", "guaranteed and chunked", "static"])
def test_sentences_of_the_shipped_model(make_manager, new_client, new_request, austen, policy, options, max_tokens):
    draw = random.Random(2)
    words = [[int(token) for token in line] for line in (
        [draw.randrange(20, 4000) for _ in range(length)] for length in (3, 17, 32, 40, 9, 64, 5, 21))]
    common = draw.sample(range(2, 400), 3)
    asked = {i: (prompt, 18, width, end_id, len_penalty, early_stopping) for i, (prompt, width, end_id, len_penalty,
             early_stopping) in enumerate(zip(words, (4, 2, 4, 8, 3, 2, 4, 8), [1, *common, 1, *common],
                                              (0.0, 1.0, 2.0, 1.0, 0.5, 0.0, 1.0, 2.0), (1, 0, 2, 0, 1, 2, 2, 1)))}
    records = run(make_manager, new_client(), new_request, austen, asked, policy=policy, max_batch_size=8,
                  kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=max_tokens), **options)
    if max_tokens == 40 * 16:
        assert sum(record["Paused Requests"] for record in records) > 0


def questions(vocab_size, widths, seed=3):
    draw = random.Random(seed)
    return {i: ([draw.randrange(vocab_size) for _ in range(draw.randrange(1, 30))], 12, width,
                draw.randrange(vocab_size), 1.0, 0) for i, width in enumerate(widths)}


@pytest.fixture(scope="module")
def llama(llama_reference):
    return Beams(llama_reference.model, llama_reference.folder)


@pytest.mark.parametrize("where", ["start", "finish"])
def test_a_step_that_raised_is_run_again_in_parts(make_manager, new_client, new_request, llama, monkeypatch, where):
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
    records = run(make_manager, new_client(), new_request, llama, questions(211, [3, 3, 2, 3, 4]), max_batch_size=8,
                  kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=2000))
    assert records[-1]["Failed Steps"] > 5


def test_returned_logits_are_those_each_token_was_drawn_from(
        make_manager, new_client, new_request, llama, llama_reference):
    asked = questions(211, [3, 1, 4, 2])
    client = new_client()
    client.pending = [
        new_request(i, prompt, count, beam_width=width, end_id=end_id, len_penalty=len_penalty, early_stopping=early,
                    return_context_logits=True, return_generation_logits=True, return_log_probs=True)
        for i, (prompt, count, width, end_id, len_penalty, early) in asked.items()]
    make_manager(client, model_path=llama.folder, num_threads=1, max_beam_width=4, policy=MAX,
                 kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=18 * 8))
    client.wait_for_finals(*asked)
    for i, (prompt, *_) in asked.items():
        final = client.final(i)
        np.testing.assert_allclose(final.tensors["context_logits"][0], llama_reference.logits(prompt), atol=1e-4,
                                   rtol=0)
        for beam in range(asked[i][2]):
            everything = final.tokens(beam)
            count = len(everything) - len(prompt)
            expected = llama_reference.logits(everything)[len(prompt) - 1:-1]
            logits, log_probs = (final.tensors[name][0, beam, :count] for name in (
                "generation_logits", "output_log_probs"))
            np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
            of_all = torch.from_numpy(expected).log_softmax(1).numpy()
            np.testing.assert_allclose(log_probs, of_all[range(count), everything[len(prompt):]], atol=1e-4, rtol=0)


def test_no_beam_ends_before_the_minimum_length_and_a_bias_counts_for_all_of_them(
        make_manager, new_client, new_request, llama):
    prompt, width = questions(211, [4])[0][0], 4
    end_id = llama(prompt, 5, 3, 0, 0.0, 2)[0][0][2]                           # a likely token
    bias = np.zeros(211, np.float32)
    bias[100:] = -100
    client = new_client()
    options = {"beam_width": width, "end_id": end_id, "return_log_probs": True}
    client.pending = [new_request(0, prompt, 12, **options), new_request(1, prompt, 12, min_length=6, **options),
                      new_request(2, prompt, 12, embedding_bias=bias, **options)]
    make_manager(client, model_path=llama.folder, num_threads=1, max_beam_width=4,
                 kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=2000))
    client.wait_for_finals(0, 1, 2)
    texts = [[client.final(i).tokens(beam)[len(prompt):] for beam in range(width)] for i in range(3)]
    assert min(map(len, texts[0])) < 6 <= min(map(len, texts[1])) and end_id not in texts[1][0][:6]
    assert all(token < 100 for text in texts[2] for token in text)


def test_a_logits_post_processor_sees_every_beam(make_manager, new_client, new_request, llama):
    asked, seen = questions(211, [3, 1, 3]), []

    def only_even(request_id, logits, token_ids):
        prompt, count, width, *_ = asked[request_id]
        assert logits.shape == (1, len(token_ids), 211) and len(token_ids) == (1 if token_ids[0] == prompt else width)
        seen.append(len(token_ids))
        logits[:, :, 1::2] = -torch.inf
        return logits

    client = new_client()
    client.pending = [new_request(i, prompt, count, beam_width=width)
                      for i, (prompt, count, width, *_) in asked.items()]
    for item in client.pending:
        item.logits_post_processor = only_even
    make_manager(client, model_path=llama.folder, num_threads=1, max_beam_width=3,
                 kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=2000))
    client.wait_for_finals(*asked)
    assert set(seen) == {1, 3}
    for i, (prompt, count, width, *_) in asked.items():
        texts = [client.final(i).tokens(beam)[len(prompt):] for beam in range(width)]
        assert [len(text) for text in texts] == [count] * width and len({tuple(text) for text in texts}) == width
        assert all(token % 2 == 0 for text in texts for token in text), client.final(i).error


def test_thirty_two_beams_with_thirty_stop_words(make_manager, new_client, new_request, austen):
    """32 beams with 30 stop words are right. transformers gets the stop words as end ids.

    A step considers (1 + 30 stop words + 1 end id) * 32 continuations.
    """
    draw, client, width, asked, expected = random.Random(4), new_client(), 32, [], {}
    for i in range(3):
        prompt = [draw.randrange(20, 4000) for _ in range(6)]
        with torch.inference_mode():
            likely = austen.model(torch.tensor([prompt])).logits[0, -3:].softmax(-1).mean(0).topk(31).indices.tolist()
            found = austen.model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width,
                num_return_sequences=width, do_sample=False, max_new_tokens=6, length_penalty=2.0, early_stopping=False,
                eos_token_id=likely, pad_token_id=0, return_dict_in_generate=True, output_scores=True)
        *words, end_id = likely
        lengths = [int((row >= 0).sum()) for row in found.beam_indices]
        texts = [row[len(prompt):len(prompt) + length] for row, length in zip(found.sequences.tolist(), lengths)]
        expected[i] = [prompt + (text[:-1] if text[-1] == end_id else text) for text in texts]
        asked.append(new_request(i, prompt, 6, beam_width=width, len_penalty=2.0, early_stopping=0, end_id=end_id,
                                 stop_words_list=[[word] for word in words]))
    client.pending = asked
    manager = make_manager(client, model_path=austen.folder, num_threads=1, dtype="float32", max_beam_width=width)
    client.wait_for_finals(*expected)
    assert manager.shutdown()
    for i, texts in expected.items():
        assert [client.final(i).tokens(beam) for beam in range(width)] == texts
