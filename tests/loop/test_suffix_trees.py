"""SpeculativeConfig("suffix"): the trees have the texts of their requests, and drafts change no token.

A stand-in has the methods of arctic-inference that the drafter calls, and fails where the library does.
"""

import json
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest

from batch_manager import ConfigError, SchedulerPolicy, SpeculativeConfig
from batch_manager.loop.ngrams import MOST_INDEXED
from batch_manager.loop.suffix_trees import SuffixDrafter

CONFIG = SpeculativeConfig("suffix", 5, suffix_decoding_max_tree_depth=12, suffix_decoding_min_token_prob=0.3)


class Trees:
    """In place of SuffixDecodingCache. `largest` is the most tokens of a call."""

    def __init__(self, max_tree_depth, max_cached_requests):
        assert max_cached_requests == 0, "no text becomes drafts of another request"
        self.depth, self.texts, self.largest, self.num_calls, self.num_started = max_tree_depth, {}, 0, 0, 0

    def start_request(self, request, tokens):
        if request in self.texts:
            raise ValueError("is already active")
        self.texts[request] = [*tokens]
        self.num_started += 1

    def add_active_response(self, request, tokens):
        self.texts[request] += tokens
        self.largest = max(self.largest, len(tokens))

    def stop_request(self, request):
        del self.texts[request]

    def speculate(self, request, context, most, *, max_spec_factor, min_token_prob):
        text = self.texts[request]
        assert 0 < len(context) <= self.depth and request.tokens[0][:len(text)] == text
        self.num_calls += 1
        for length in range(len(context), 0, -1):
            path, found = tuple(context[-length:]), []
            while len(found) < min(most, max_spec_factor * length):
                after = Counter(text[place + len(path)] for place in range(len(text) - len(path))
                                if tuple(text[place : place + len(path)]) == path).most_common(1)
                if not after or after[0][1] < min_token_prob:
                    break
                found.append(after[0][0])
                path = (*path, after[0][0])
            if found:
                return SimpleNamespace(token_ids=found)
        return SimpleNamespace(token_ids=[])


@pytest.fixture
def library(monkeypatch):
    """The made trees."""
    made = []
    module = ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = lambda *args, **options: made.append(Trees(*args, **options)) or made[-1]
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    return made


@pytest.mark.parametrize("options", [
    {}, {"backend": {"is_asynchronous": True}}, {"enable_trt_overlap": True},
    {"policy": SchedulerPolicy.MAX_UTILIZATION, "enable_chunked_context": True, "max_num_tokens": 16,
     "backend": {"num_blocks": 9, "tokens_per_block": 8}}],
    ids=["plain", "run-ahead", "overlap", "chunks and pauses"])
def test_no_token_changes(make_world, new_request, library, options):
    backend = {"vocab_size": 3, "verify": True, **options.get("backend", {})}
    world = make_world(**{**options, "speculative_config": CONFIG, "backend": backend})
    prompts = {i: [i % 3, 0, 1, i // 3] for i in range(6)}
    expected = {i: world.expected(prompt, 40) for i, prompt in prompts.items()}
    world.client.pending = [new_request(i, prompt, 40) for i, prompt in prompts.items()]
    world.run()
    assert all(world.client.final(i).tokens() == prompt + expected[i] for i, prompt in prompts.items())
    record, (trees,) = json.loads(world.client.stats[-1]), library
    assert trees.num_calls > 20 and 0 < record["Accepted Draft Tokens"] < record["Draft Tokens"]
    assert trees.texts == {} and (trees.num_started > 6) == ("policy" in options), "a paused request starts anew"


def test_a_long_prompt_is_read_in_parts(library):
    drafter = SuffixDrafter(12, 1.0, 0.1)
    long, short = (SimpleNamespace(tokens=[list(range(count))]) for count in (2 * MOST_INDEXED + 5, 7))
    requests = {name: type("Request", (), {"tokens": request.tokens})() for name, request in
                (("long", long), ("short", short))}
    for _ in range(4):
        drafter.propose([*requests.values()], [3, 3])
    (trees,) = library
    assert trees.largest == MOST_INDEXED
    assert [trees.texts[request] for request in requests.values()] == [long.tokens[0], short.tokens[0]]


def test_a_failure_of_the_library_costs_drafts_alone(make_world, new_request, library, monkeypatch, caplog):
    def speculate(*args, **options):
        raise RuntimeError("a node is missing")
    monkeypatch.setattr(Trees, "speculate", speculate)
    world = make_world(speculative_config=CONFIG)
    world.client.pending = [new_request(1, [5, 6, 5], 12)]
    expected = world.expected([5, 6, 5], 12)
    world.run()
    assert world.client.final(1).tokens() == [5, 6, 5, *expected] and "a node is missing" in caplog.text
    assert json.loads(world.client.stats[-1])["Failed propose Callbacks"] > 0


def test_without_the_library_the_engine_says_what_to_install(make_world, monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    with pytest.raises(ConfigError, match=r"arctic-inference is not installed; .* pip install \"batch-manager\[suffix"):
        make_world(speculative_config=CONFIG)
