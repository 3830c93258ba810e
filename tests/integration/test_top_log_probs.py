"""The tensors of `return_top_log_probs` and `raw_log_probs` agree with transformers' logits, evaluated in float64."""

import json
import random

import numpy as np
import pytest

from .test_returned_tensors import ROOM, V1, WAYS, joined, log_softmax

COUNT = 16
KNOBS = [
    {},
    {"temperature": 0.7, "runtime_top_k": 20, "runtime_top_p": 0.9},
    {"temperature": 0.6, "runtime_top_p": 0.95, "repetition_penalty": 1.4, "embedding_bias": ...},
    {"temperature": 0.0, "no_repeat_ngram_size": 1},
]


def changed(logits: np.ndarray, text: list[int], prompt_length: int, knobs: dict) -> np.ndarray:
    """Apply the bias, repetition penalty and n-gram ban of a request to logits [n, vocab], in plain NumPy.

    text            prompt and output of the request
    prompt_length   number of tokens of the prompt; row i has the logits of output token i
    knobs           the tensors of the request with these features
    """
    logits = logits.astype(np.float64) + knobs.get("embedding_bias", 0)
    for row, length in enumerate(range(prompt_length, prompt_length + len(logits))):
        seen = sorted(set(text[:length]))
        penalty = knobs.get("repetition_penalty", 1.0)
        logits[row, seen] = np.where(logits[row, seen] < 0, logits[row, seen] * penalty, logits[row, seen] / penalty)
        if "no_repeat_ngram_size" in knobs:
            logits[row, seen] = -np.inf
    return logits


def check(tensors: dict, generated: list[int], distribution: np.ndarray, count: int, *, has_log_probs: bool) -> None:
    """Assert that the top log-probs and the output log-probs of a final response are those of `distribution`.

    distribution    [n, vocab] expected log-probs of all tokens
    count           number of top log-probs for each token
    has_log_probs   whether the request asked for return_log_probs; otherwise, output log-probs are 0
    """
    ids, log_probs = tensors["top_log_prob_ids"], tensors["top_log_probs"]
    assert ids.dtype == np.int32 and log_probs.dtype == np.float32
    assert ids.shape == log_probs.shape == (1, 1, len(generated), count)
    ids, log_probs = ids[0, 0], log_probs[0, 0]
    rows = np.arange(len(generated))
    best = -np.sort(-distribution, axis=1)[:, :count]
    np.testing.assert_allclose(log_probs, best, atol=2e-4, rtol=0)
    np.testing.assert_allclose(log_probs, distribution[rows[:, None], ids], atol=2e-4, rtol=0)
    assert (np.diff(log_probs) <= 0).all() and all(len(set(row)) == count for row in ids.tolist())
    sampled = tensors["output_log_probs"][0, 0]
    if not has_log_probs:
        assert not sampled.any()
        return
    np.testing.assert_allclose(sampled, distribution[rows, generated], atol=2e-4, rtol=0)
    where, rank = np.nonzero(ids == np.array(generated)[:, None])
    assert len(where) and (log_probs[where, rank] == sampled[where]).all()       # the same bits


@pytest.mark.parametrize("way", WAYS)
def test_the_likeliest_tokens_are_those_of_transformers(make_manager, new_client, new_request, llama_reference, way):
    draw, client, vocab = random.Random(11), new_client(), llama_reference.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(length)] for length in [5, 17, 1, 8, 24, 9, 3, 12]]
    static, asked = WAYS[way]["model_type"] is V1, []
    for i in range(len(prompts)):
        knobs = dict(KNOBS[i % len(KNOBS)])
        if "embedding_bias" in knobs:
            bias = np.random.default_rng(i).normal(size=vocab).astype(np.float32)
            knobs.update({} if static else {"embedding_bias": bias})
            knobs = {name: value for name, value in knobs.items() if value is not ...}
        asked.append({**knobs, "return_top_log_probs": 1 + 5 * (i % 4), "raw_log_probs": i >= 4,
                      "return_log_probs": i % 3 != 0})
    client.pending = [new_request(i, prompt, COUNT, streaming=i % 2 == 1, random_seed=i, **asked[i])
                      for i, prompt in enumerate(prompts)]
    client.pending.append(new_request(99, [1, 2, 3], COUNT, return_log_probs=True))      # a row without top log-probs
    manager = make_manager(client, model_path=llama_reference.folder, num_threads=1, **WAYS[way])
    client.wait_for_finals(99, *range(len(prompts)))
    assert manager.shutdown()
    assert "top_log_probs" not in client.final(99).tensors and client.final(99).tensors["output_log_probs"].all()
    for i, prompt in enumerate(prompts):
        assert client.final(i).error == ""
        pieces = client.responses[i]
        tensors = {name: joined(pieces, name) for name in
                   ("output_ids", "output_log_probs", "top_log_prob_ids", "top_log_probs")}
        generated = tensors["output_ids"][0, 0].tolist()[-COUNT:]
        text = prompt + generated
        logits = llama_reference.logits(text)[len(prompt) - 1 : -1]
        if asked[i]["raw_log_probs"]:
            distribution = log_softmax(logits)
        else:
            distribution = log_softmax(changed(logits, text, len(prompt), asked[i]), asked[i].get("temperature") or 1.0)
        check(tensors, generated, distribution, asked[i]["return_top_log_probs"],
              has_log_probs=asked[i]["return_log_probs"])
    pauses = sum(json.loads(record).get("Paused Requests", 0) for record in client.stats)
    assert (pauses >= 3) == ("paused" in way)


def test_an_end_id_is_left_out_and_fewer_tokens_than_asked_for_leave_infinities(
        make_manager, new_client, new_request, llama_reference):
    vocab, client = llama_reference.vocab_size, new_client()
    bias = np.full(vocab, -1e30, np.float32)
    bias[[7, 9]] = 0, 40
    banned = [[token] for token in range(vocab) if token not in (7, 9)]
    client.pending = [
        new_request(1, [3, 4], 6, end_id=9, min_length=2, embedding_bias=bias, return_top_log_probs=4,
                    bad_words_list=banned, streaming=True),
        new_request(2, [3, 4], 6, end_id=9, embedding_bias=bias, return_top_log_probs=4)]
    make_manager(client, model_path=llama_reference.folder, num_threads=1, kv_cache_config=ROOM)
    client.wait_for_finals(1, 2)
    pieces = [response.tensors for response in client.responses[1]]
    assert [piece["output_ids"].ravel().tolist() for piece in pieces] == [[7], [7], []]
    for piece in pieces[:2]:
        assert piece["top_log_prob_ids"].ravel().tolist() == [7, 0, 0, 0]
        assert piece["top_log_probs"].ravel().tolist() == [0.0] + [-np.inf] * 3
    nothing = client.final(2).tensors
    assert nothing["output_ids"].ravel().tolist() == [3, 4]
    assert pieces[2]["top_log_probs"].shape == nothing["top_log_prob_ids"].shape == (1, 1, 0, 4)


def test_of_equal_logits_the_lowest_ids_come_first(make_manager, new_client, new_request, llama_reference):
    """Of tokens with equal logits, the lowest ids come first, and greedy sampling takes the first of them."""
    client, vocab = new_client(), llama_reference.vocab_size
    bias = np.zeros(vocab, np.float32)
    bias[[150, 20, 77]] = 3e38                            # so large that the logits themselves are rounded away
    client.pending = [new_request(1, [3, 4], 2, embedding_bias=bias, return_top_log_probs=3, return_log_probs=True)]
    make_manager(client, model_path=llama_reference.folder, num_threads=1, kv_cache_config=ROOM)
    client.wait_for_finals(1)
    tensors = client.final(1).tensors
    assert tensors["output_ids"].ravel().tolist() == [3, 4, 20, 20]
    assert tensors["top_log_prob_ids"].reshape(2, 3).tolist() == [[20, 77, 150]] * 2
    np.testing.assert_allclose(tensors["top_log_probs"], np.log(1 / 3), atol=1e-5)


@pytest.mark.parametrize("name", ["return_top_log_probs", "raw_log_probs"])
def test_with_beams_either_is_refused_by_name(make_manager, new_client, new_request, llama_reference, name):
    client = new_client()
    client.pending = [new_request(1, [3, 4], 2, beam_width=2, **{name: 1}), new_request(2, [3, 4], 2, **{name: 0},
                                                                                         beam_width=2)]
    make_manager(client, model_path=llama_reference.folder, num_threads=1, kv_cache_config=ROOM, max_beam_width=2)
    client.wait_for_finals(1, 2)
    assert client.final(1).code == "INVALID_REQUEST" and name in client.final(1).error
    assert client.final(2).error == ""
