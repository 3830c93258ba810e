"""What a drafter answers is used if it is what `Drafter` promises, else counted as a failure; no token changes."""

import json

import numpy as np
import pytest

from batch_manager import SpeculativeConfig
from batch_manager.loop.ngrams import NgramDrafter

PROMPT, COUNT, MOST, RIGHT = [5, 6, 7], 9, 3, object()


class Answering:
    """Answers the first call with what the test wants, and later ones with no drafts."""

    def __init__(self):
        self.answer = self.asked = None

    def propose(self, requests, max_lengths):
        if self.asked is not None:
            return [[]] * len(requests)
        self.asked = max_lengths
        return self.answer


class Iterated(list):
    """A list that never ends."""

    def __iter__(self):
        while True:
            yield 0


@pytest.mark.parametrize(("answer", "says"), [
    (RIGHT, ""), ([()], ""), (([],), ""),
    ([[True]], "type bool; expected ints in 0..999 in place 0"),
    ([[np.int64(1)]], "type int64; expected ints in 0..999"),
    ([[np.True_]], "type bool; expected ints"), ([[0.0]], "type float; expected ints"),
    ([[None]], "type NoneType; expected ints"), ([["1"]], "type str; expected ints"),
    ([[1, -1]], "type int; expected ints in 0..999"), ([[1000]], "type int; expected ints in 0..999"),
    ([[1 << 70]], "type int; expected ints in 0..999"),
    ([[1] * (MOST + 1)], "type list; expected at most 3 drafts in place 0, and it has 4"),
    ([[1] * 5000], "and it has 5,000"), ([Iterated([1])], "Iterated; expected a list of ints in place 0"),
    ([np.array([1, 2])], "type ndarray; expected a list of ints"), (["12"], "type str; expected a list of ints"),
    ([{1}], "type set; expected a list"), ([None], "type NoneType; expected a list"),
    (Iterated([[1]]), "Iterated; expected 1 list"), ([1], "type int; expected a list of ints"),
    (None, "type NoneType; expected 1 list"), ({0: [1]}, "type dict; expected 1 list"),
    ([], "type list; expected 1 list"), ([[1], [1]], "type list; expected 1 list"),
    (np.array([[1, 2]]), "type ndarray; expected 1 list")])
def test_an_answer_that_is_no_list_of_drafts_is_a_failure(make_world, new_request, caplog, answer, says):
    drafter = Answering()
    world = make_world(speculative_config=SpeculativeConfig("custom", MOST), parts={"drafter": drafter})
    expected = world.expected(PROMPT, COUNT)
    drafter.answer = [expected[1:1 + MOST]] if answer is RIGHT else answer
    world.client.pending = [new_request(1, PROMPT, COUNT)]
    world.run()
    assert world.client.final(1).tokens() == PROMPT + expected and drafter.asked == [MOST]
    record = json.loads(world.client.stats[-1])
    assert record["Accepted Draft Tokens"] == record["Draft Tokens"] == (MOST if answer is RIGHT else 0)
    assert record.get("Failed propose Callbacks", 0) == (says != "")
    assert says in caplog.text and (says == "") == (caplog.text == "")


def test_ids_of_embeddings_are_no_drafts(make_world, new_request, monkeypatch):
    """A prompt may repeat ids at and above the vocabulary size. They are no failure."""
    monkeypatch.setattr(NgramDrafter, "propose", lambda drafter, requests, max_lengths: [[1, 1000]] * len(requests))
    world = make_world(speculative_config=SpeculativeConfig())
    world.client.pending = [new_request(1, PROMPT, COUNT)]
    world.run()
    record = json.loads(world.client.stats[-1])
    assert record["Draft Tokens"] == 0 and "Failed propose Callbacks" not in record


class Echo:
    """Drafts what follows in a text that it knows; None: nothing."""

    def __init__(self, window, texts):
        self.window, self.texts = window, texts

    def propose(self, requests, max_lengths):
        assert not any(map(self.window().holds, requests))
        return [(self.texts.get(request.request_id) or [])[request.total_generated_tokens:][:most]
                for request, most in zip(requests, max_lengths)]


@pytest.mark.parametrize(("method", "vocab_size", "texts", "least", "most"), [
    ("ngram", 1000, (), 0.97, 1), ("ngram", 2, (), 0.2, 0.9), ("custom", 1000, (), 0.6, 0.9),
    ("custom", 1000, (1,), 0, 0)])
def test_a_request_runs_ahead_while_it_has_no_drafts(make_world, new_request, method, vocab_size, texts, least, most):
    """In `least` to `most` of the iterations, a step is in flight at the end."""
    known, worlds = {}, []
    parts = {} if method == "ngram" else {"drafter": Echo(lambda: worlds[0].loop.window, known)}
    world = make_world(speculative_config=SpeculativeConfig(method), parts=parts,
                       backend={"is_asynchronous": True, "vocab_size": vocab_size, "verify": True})
    worlds.append(world)
    assert world.loop.window.runs_ahead
    prompts = {i: [i, 0, 1] for i in (1, *texts)} if vocab_size > 2 else {1: [0, 1, 1]}
    expected = {i: world.expected(prompt, 100) for i, prompt in prompts.items()}
    known.update({i: expected[i] for i in texts})
    world.client.pending = [new_request(i, prompt, 100) for i, prompt in prompts.items()]
    ahead = []
    while world.step():
        ahead.append(len(world.loop.window) > 0)
    assert all(world.client.final(i).tokens() == prompt + expected[i] for i, prompt in prompts.items())
    assert least <= sum(ahead) / len(ahead) <= most
    assert (json.loads(world.client.stats[-1])["Draft Tokens"] > 0) == bool(texts or vocab_size == 2)
