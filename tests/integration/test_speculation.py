"""Drafts of the engine change no token: the tokens and log-probs are those of the same engine without drafts."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from batch_manager import (
    ConfigError,
    InferenceRequest,
    KvCacheConfig,
    SchedulerPolicy,
    SpeculativeConfig,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.handover import LogitsPostProcessor, SlotSetup
from batch_manager.loop.draft_model import DraftModel
from batch_manager.loop.drafting import _Draft, is_verified, share_of_a_draft
from batch_manager.loop.ngrams import Ngrams
from batch_manager.sampling_config import SamplingConfig
from batch_manager.tools.bench.__main__ import main as bench_main
from batch_manager.tools.serve import main as serve_main
from tests.deterministic.differential import make_checkpoint
from tests.harness.client import Client, StaggeredClient
from tests.harness.drafters import KnowingDrafter
from tests.harness.world import make_loop
from tests.models.conftest import make_reference
from tests.models.test_same_logits_as_transformers import NO_TOKENS

SHIPPED, VOCAB = Path(__file__).parents[2] / "examples" / "models" / "austen-4m", 1000
DRAWN = random.Random(4)
PHRASE = [DRAWN.randrange(VOCAB) for _ in range(9)]
PROMPTS = {i: PHRASE * (1 + i % 3) + [DRAWN.randrange(VOCAB) for _ in range(i % 4)] + PHRASE[:1 + i % 5]
           for i in range(10)}
SAMPLED = {"temperature": 0.6, "runtime_top_k": 20, "runtime_top_p": 0.9}
ENGINES = {
    "compiled": {},
    "overlap": {"enable_trt_overlap": True, "max_batch_size": 3, "max_num_sequences": 8},
    "split, chunks, pauses, reuse": {
        "model_type": TrtGptModelType.InflightBatching, "policy": SchedulerPolicy.MAX_UTILIZATION,
        "enable_chunked_context": True, "max_num_tokens": 24, "cpu_compile": False,
        "kv_cache_config": KvCacheConfig(tokens_per_block=8, max_tokens=19 * 8, enable_block_reuse=True)},
    "window, run-ahead": {"run_ahead": True, "kv_cache_config": KvCacheConfig(tokens_per_block=8, max_tokens=800,
                                                                              max_attention_window=24)},
    "deterministic": {"deterministic": True},
    "experts": {}, "experts, deterministic, steps in torch": {"deterministic": True, "cpu_compile": False},
}


def serve(make_manager, new_request, speculative_config=None, drafts=(), count=16, **engine):
    """Run all prompts in one engine. Returns (tokens, log-probs) by id, and the last record.

    drafts   id -> draft tokens of the client
    count    number of new tokens of request 0; each has one more than the one before
    """
    items = [new_request(i, prompt, count + i, return_log_probs=True, streaming=i % 2 == 0,
                         end_id=PHRASE[3] if i == 7 else None, **(SAMPLED | {"random_seed": i} if i % 3 else {}),
                         **({"repetition_penalty": 1.3} if i == 5 else {}),
                         **({"draft_input_ids": drafts[i]} if i in drafts else {}))
             for i, prompt in PROMPTS.items()]
    client = StaggeredClient(items, random.Random(1), [0, 0, 1, 2])
    manager = make_manager(client, num_threads=1, speculative_config=speculative_config,
                           **{"model_path": SHIPPED, **engine})
    client.wait_for_finals(*PROMPTS)
    assert manager.shutdown()
    found = {}
    for i in PROMPTS:
        assert client.final(i).error == ""
        tokens = client.streamed(i) if i % 2 == 0 else client.final(i).tokens()[len(PROMPTS[i]):]
        found[i] = tokens, np.concatenate([response.tensors["output_log_probs"].ravel()
                                           for response in client.responses[i] if len(response.tensors)])
    return found, json.loads(client.stats[-1])


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """The shipped model without its last layer, which often draws the same token."""
    folder, config = tmp_path_factory.mktemp("shallow"), json.loads((SHIPPED / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    last = f"layers.{config['num_hidden_layers']}."
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor for name, tensor in load_file(SHIPPED / "model.safetensors").items() if last not in name},
              folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ENGINES)
def test_drafts_change_no_token_and_no_log_prob(make_manager, new_request, shallow, monkeypatch, tmp_path, name):
    engine, has_experts = ENGINES[name], name.startswith("experts")
    if has_experts:
        make_reference("Qwen2Moe", **NO_TOKENS, vocab_size=VOCAB, num_experts=6, num_experts_per_tok=2,
                       moe_intermediate_size=48, shared_expert_intermediate_size=32).save_pretrained(tmp_path)
        engine = {**engine, "model_path": tmp_path, "count": 24}               # it seldom repeats what it wrote
    expected, record = serve(make_manager, new_request, **engine)
    assert "Draft Tokens" not in record
    every = (None, 1.0, 0.6, 0.0, "model") if name == "compiled" else (None, 0.7, "model")
    for right in every[:2] if has_experts or "run_ahead" in engine else every:
        options, config = engine, SpeculativeConfig(num_speculative_tokens=5)
        if right == "model":
            config = SpeculativeConfig("draft_model", 5, model=SHIPPED if name == "deterministic" else shallow,
                                       quantization="int4" if name == "deterministic" else None)
            monkeypatch.setattr(DraftModel, "seconds_per_draft", property(lambda model: 0, lambda model, value: None),
                                raising=False)                     # it always pays
        elif right is not None:
            texts = {i: tokens for i, (tokens, _) in expected.items()}
            drafter = KnowingDrafter(texts, VOCAB, right, odd=0.2 if right == 0.6 else 0)
            options, config = options | {"parts": {"drafter": drafter}}, replace(config, method="custom")
            options |= {"drafts": {i: [*tokens[:i % 6], (tokens[i % 6] + 1) % VOCAB, 7][:5]
                                   for i, tokens in texts.items() if i % 4}}
        found, record = serve(make_manager, new_request, config, **options)
        for i, (tokens, log_probs) in expected.items():
            assert found[i][0] == tokens, (i, right)
            if "deterministic" in name:
                assert np.array_equal(found[i][1], log_probs)
            else:
                np.testing.assert_allclose(found[i][1], log_probs, atol=2e-4)
        drafts, accepted = record["Draft Tokens"], record["Accepted Draft Tokens"]
        assert record["Draft Steps"] > 2 * (not has_experts) and drafts >= record["Draft Steps"]
        if right == "model":
            assert 0.2 * drafts < accepted < drafts and "Failed propose Callbacks" not in record
        elif right is not None:
            of_clients = sum(i % 6 for i in PROMPTS if i % 4) if "drafts" in options else 0
            if right == 0:
                assert accepted == of_clients
            else:
                assert accepted > 0.9 * drafts if right == 1 else 0 < accepted < drafts


@pytest.mark.parametrize("cpu_compile", [None, False])
def test_nan_of_a_rejected_draft_reaches_no_later_token(make_manager, new_client, new_request, tmp_path, cpu_compile):
    """The embedding of one token is NaN. It follows a wrong draft, and later steps would read what it left."""
    folder = make_checkpoint("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    poison, prompt, found = 7, [3, 4, 5], []
    weights["model.embed_tokens.weight"][poison] = np.nan
    save_file(weights, folder / "model.safetensors")

    class Poisoner:
        def propose(self, requests, max_lengths):
            return [[(found[0][len(request.tokens[0]) - len(prompt)] + 1) % 211, poison, poison][:most]
                    for request, most in zip(requests, max_lengths)]

    for drafting in ({}, {"speculative_config": SpeculativeConfig("custom", 3), "parts": {"drafter": Poisoner()}}):
        client = new_client()
        client.pending = [new_request(1, prompt, 20, draft_input_ids=[poison, poison] if drafting else [])]
        manager = make_manager(client, model_path=folder, cpu_compile=cpu_compile, num_threads=1, dtype="float32",
                               kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=64), **drafting)
        client.wait_for_finals(1)
        assert manager.shutdown() and client.final(1).error == ""
        found.append(client.final(1).tokens()[len(prompt):])
    assert found[0] == found[1] and poison not in found[0]
    assert json.loads(client.stats[-1])["Draft Tokens"] > 3


# What decides a token besides the logits of its row, or is returned with it.
FEATURES = {
    "repetition": {"repetition_penalty": 1.6}, "presence": {"presence_penalty": 0.9, "prompt_ignore_length": 3},
    "frequency": {"frequency_penalty": 0.7}, "bias": {"embedding_bias": np.linspace(-2, 2, 4096, dtype=np.float32)},
    "ngrams": {"no_repeat_ngram_size": 2}, "bad words": {"bad_words_list": [[PHRASE[4]], PHRASE[5:7]]},
    "stop words": {"stop_words_list": [PHRASE[6:8], [PHRASE[2]]]}, "min length": {"min_length": 9, "end_id": PHRASE[0]},
    "top-p decay": {"runtime_top_p": 0.95, "runtime_top_p_decay": 0.8, "runtime_top_p_min": 0.3, "random_seed": 5,
                    "runtime_top_p_reset_ids": PHRASE[1]},
    "logits": {"return_generation_logits": True, "return_context_logits": True},
    "top": {"return_top_log_probs": 4}, "raw": {"raw_log_probs": True},
}
FEATURES |= {"all": {name: value for feature in FEATURES.values() for name, value in feature.items()},
             "penalties and stop words": FEATURES["frequency"] | FEATURES["stop words"] | SAMPLED}
RETURNED = ("output_log_probs", "context_logits", "generation_logits", "top_log_probs", "top_log_prob_ids")


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["compiled", "deterministic"])
def test_drafts_of_requests_with_each_feature_change_nothing(make_manager, new_client, new_request, options):
    """Each request repeats a phrase. Its drafts are right, wrong or both; penalties and bans forbid some of them."""
    found, texts = {}, {}
    for right in (None, 0.7):
        client = new_client()
        client.pending = [new_request(i, 2 * PHRASE + PHRASE[:i % 5], 16, return_log_probs=True, **feature)
                          for i, feature in enumerate(FEATURES.values(), 1)]
        for request in client.pending if right else ():
            text = texts[request.request_id]
            request.input_tensors["draft_input_ids"] = [*text[:2], (text[2] + 1) % VOCAB, *text[3:5]]
        drafting = {} if right is None else {
            "speculative_config": SpeculativeConfig("custom", 5),
            "parts": {"drafter": KnowingDrafter(texts, VOCAB, right)}}
        manager = make_manager(client, model_path=SHIPPED, num_threads=1, dtype="float32", **drafting, **options)
        client.wait_for_finals(*range(1, len(FEATURES) + 1))
        assert manager.shutdown()
        for i, name in enumerate(FEATURES, 1):
            final = client.final(i)
            assert final.error == "", (name, final.error)
            tokens = final.tokens()[2 * len(PHRASE) + i % 5:]
            returned = [final.tensors[tensor] for tensor in RETURNED if tensor in final.tensors]
            if right is None:
                found[name], texts[i] = (tokens, returned), tokens
                continue
            assert tokens == found[name][0], (name, right)
            for value, expected in zip(returned, found[name][1], strict=True):
                if options:
                    assert np.array_equal(value, expected), name
                else:
                    np.testing.assert_allclose(value, expected, atol=2e-3, err_msg=name)
    assert json.loads(client.stats[-1])["Accepted Draft Tokens"] > 20


GRAMMARS = {"regex": r' "[A-Z][a-z]+( [a-z]{2,9}){3,8}[.!?]" said (Emma|Miss Bates)\.',
            "json_schema": {"type": "object", "additionalProperties": False, "required": ["name", "age"],
                            "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{3,9}$"},
                                           "age": {"type": "integer", "minimum": 16, "maximum": 90}}},
            "lark": 'start: "so" " much"+ (" to" | " of") " do"*'}


class OddDigits:
    """A post-processor that depends on the text: after an even token, odd ones. It fails after one that is drafted."""

    def __init__(self, poison):
        self.poison = poison

    def __call__(self, request_id, logits, token_ids):
        if token_ids[0][-1] == self.poison:
            raise ValueError("planted")
        if token_ids[0][-1] % 2 == 0:
            logits[..., ::2] = -np.inf
        logits[..., self.poison] = -np.inf
        return logits

    def allowed_drafts(self, request_id, token_ids, drafts):
        return len(drafts)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["compiled", "deterministic"])
def test_drafts_of_requests_with_a_grammar_change_nothing(make_manager, new_client, options):
    """Each kind of grammar, for all requests of a step or for one; drafts that it forbids, that go beyond its end, and
    that make a function fail."""
    pytest.importorskip("llguidance")
    pytest.importorskip("tokenizers")
    from batch_manager.extras.guided_decoding import GuidedDecoding

    def request(i, processor, **tensors):
        return InferenceRequest(i, {"input_ids": PHRASE, "request_output_len": 20, "return_log_probs": True, **tensors},
                                logits_post_processor=processor)

    end, poison, vocab, found = 1, 77, 4096, []
    for right in (None, 0.75, "forbidden"):
        guided, client = GuidedDecoding(SHIPPED / "tokenizer.json", vocab_size=vocab, end_id=end), new_client()
        kinds = [getattr(guided, kind)(grammar) for kind, grammar in GRAMMARS.items()]
        client.pending = [request(13, OddDigits(poison)), request(14, None)]
        for i in range(1, 13):
            grammar, sampled = kinds[i % 3], {} if i % 2 else {"temperature": 0.9, "random_seed": i}
            if i > 6:
                guided.constrain(i, grammar)
            client.pending.append(request(i, "batched" if i > 6 else guided.processor(grammar), request_output_len=40,
                                          end_id=end, min_length=i % 4, **sampled))
        drafting, parts = {}, {"logits_post_processor_batched": guided}
        if right is not None:
            drafter = KnowingDrafter({i: [*tokens, end, end] for i, (tokens, _) in enumerate(found, 1)}, vocab, right)
            if right == "forbidden":
                drafter.guesses = lambda tokens: [token if place % 3 == 0 else poison
                                                  for place, token in enumerate(tokens)]
            parts["drafter"], drafting = drafter, {"speculative_config": SpeculativeConfig("custom", 5)}
        manager = make_manager(client, model_path=SHIPPED, num_threads=1, dtype="float32", parts=parts, **drafting,
                               **options)
        client.wait_for_finals(*range(1, 15))
        assert manager.shutdown()
        finals = [client.final(i) for i in range(1, 15)]
        assert [final.error for final in finals] == [""] * 14
        outputs = [(final.tokens()[len(PHRASE):], final.tensors["output_log_probs"].ravel()) for final in finals]
        if right is None:
            found = outputs
            continue
        for i, ((tokens, log_probs), (expected, expected_log_probs)) in enumerate(zip(outputs, found), 1):
            assert tokens == expected, (i, right)
            np.testing.assert_allclose(log_probs, expected_log_probs, atol=0 if options else 2e-4, rtol=0)
        assert {*range(1, 14)} <= drafter.asked
        record = json.loads(client.stats[-1])
        assert record["Accepted Draft Tokens"] > 20 and record["Draft Tokens"] > record["Accepted Draft Tokens"]


def test_drafts_with_the_logits_they_were_drawn_from(make_manager, new_client, new_request):
    """Drafts from the model's own distribution are accepted; impossible ones never; greedy requests match tokens."""
    client, sampled = new_client(), SAMPLED | {"random_seed": 3, "repetition_penalty": 1.2}
    of_first = {"return_log_probs": True, "return_generation_logits": True}
    client.pending = [new_request(1, PHRASE, 8, **sampled, **of_first), new_request(2, PHRASE, 8, **of_first)]
    manager = make_manager(client, model_path=SHIPPED, num_threads=1, dtype="float32", max_draft_tokens=4)
    client.wait_for_finals(1, 2)
    tokens, logits = ([one(client.final(i)) for i in (1, 2)] for one in (
        lambda final: final.tokens()[len(PHRASE):], lambda final: final.tensors["generation_logits"][0, 0]))
    unlikely = int(logits[0][0].argmin())
    q = logits[0][:4].copy()
    for row in range(4):                                 # the client's drafts know the penalty of the text before them
        seen = sorted({*PHRASE, *tokens[0][:row]})
        q[row, seen] = np.where(q[row, seen] > 0, q[row, seen] / 1.2, q[row, seen] * 1.2)
    impossible = q.copy()
    impossible[0, unlikely] += 1000
    drafts = {3: (sampled, tokens[0], q), 4: (sampled, [unlikely, *tokens[0]], impossible),
              5: ({}, tokens[1], np.zeros_like(q))}
    client.pending = [new_request(i, PHRASE, 8, streaming=True, return_log_probs=True, draft_input_ids=guessed[:4],
                                  draft_logits=of_draft, **knobs) for i, (knobs, guessed, of_draft) in drafts.items()]
    client.wait_for_finals(*drafts)
    assert manager.shutdown() and not any(client.final(i).error for i in drafts)
    first = {i: client.responses[i][0] for i in drafts}
    assert [len(first[i].tokens()) for i in drafts] == [5, 1, 5]
    assert first[3].tokens()[:4] == tokens[0][:4] and client.streamed(5) == tokens[1]
    assert first[4].tokens() != [unlikely]
    for i, of in ((3, 1), (5, 2)):
        np.testing.assert_allclose(first[i].tensors["output_log_probs"].ravel()[:4],
                                   client.final(of).tensors["output_log_probs"].ravel()[:4], atol=2e-3)


def test_ngrams_propose_what_followed_the_newest_longest_match():
    """Compared with a search from the end."""
    draw = random.Random(1)
    for _ in range(200):
        tokens, ngrams = [draw.randrange(3)], Ngrams(2, 4)
        for _ in range(40):
            tokens += [draw.randrange(3) for _ in range(draw.randint(1, 3))]
            ngrams.read(tokens, len(tokens))
            expected = next(((tokens[end:] * 5)[:5] for n in (4, 3, 2) for end in range(len(tokens) - 1, n - 1, -1)
                             if n < len(tokens) and tokens[end - n:end] == tokens[-n:]), ())
            assert list(ngrams.propose(tokens, 5)) == list(expected)


def test_drafts_are_proposed_where_they_pay():
    """More drafts for a request whose drafts are accepted, fewer in a large step; then one every 16 tokens."""
    draft = _Draft()
    draft.accepted, draft.tried = 6.0, 6.0
    of_rows = {rows: share_of_a_draft(rows, 0.08) for rows in (1, 8, 32)}
    counts = [draft.most(share, 100, 64) for share in of_rows.values()]
    assert 64 > counts[0] > counts[1] > counts[2] >= draft.most(of_rows[1], 100, 1) == 1
    assert counts[0] > draft.most(share_of_a_draft(1, 0.08, 0.3), 100, 64) > draft.most(
        share_of_a_draft(1, 0.08, 0.6), 100, 64) and draft.rests_until == 0
    draft.accepted = 1.0
    assert draft.most(of_rows[1], 100, 64) >= 1 and draft.rests_until == 0
    assert draft.most(of_rows[32], 100, 64) == 1 and draft.rests_until == 116
    assert share_of_a_draft(9, 0) == 0 and share_of_a_draft(9, 1) == 1 and draft.most(0, 1, 64) == 64


def test_as_many_drafts_pay_as_bring_the_most_tokens_in_a_time():
    """Compared with the best of all numbers of drafts."""
    draw, draft = random.Random(5), _Draft()
    for _ in range(300):
        draft.tried = draw.uniform(0, 8)
        draft.accepted, rows, cost = draw.uniform(0, draft.tried), draw.randint(1, 9), draw.uniform(0, 0.5)
        rate, row = (1 + draft.accepted) / (2 + draft.tried), draw.uniform(0, 0.5)
        share = cost + row * rows / (1 - row + row * rows)
        speeds = [sum(rate**place for place in range(count + 1)) / (1 + share * count) for count in range(65)]
        expected = max(1, int(np.argmax(speeds))) if share < 1 else 0
        assert draft.most(share_of_a_draft(rows, row, cost), 1, 64) == expected


@pytest.mark.parametrize(("options", "says"), [
    ({"method": "eagle"}, "SpeculativeConfig.method is 'eagle'; expected one of 'ngram', 'suffix', 'custom', 'draft_"),
    ({"method": "draft_model"}, "SpeculativeConfig.method is 'draft_model' with no model; 'draft_model' is the method"),
    ({"model": "a"}, "SpeculativeConfig.method is 'ngram' with a model; 'draft_model' is the method of a"),
    ({"method": "draft_model", "model": ""}, "SpeculativeConfig.model is ''; expected the path of a model"),
    ({"method": "draft_model", "model": 5}, "SpeculativeConfig.model is 5; expected the path of a model"),
    ({"method": "draft_model", "model": "a", "quantization": "fp8"}, "SpeculativeConfig.quantization is 'fp8' with"),
    ({"quantization": "int8"}, "SpeculativeConfig.quantization is 'int8' with method 'ngram'; expected one of int8"),
    ({"num_speculative_tokens": 0}, "SpeculativeConfig.num_speculative_tokens is 0"),
    ({"num_speculative_tokens": 65}, "SpeculativeConfig.num_speculative_tokens is 65"),
    ({"prompt_lookup_max": 17}, "SpeculativeConfig.prompt_lookup_max is 17"),
    ({"prompt_lookup_min": 5}, "SpeculativeConfig.prompt_lookup_min is 5"),
    ({"prompt_lookup_min": True}, "SpeculativeConfig.prompt_lookup_min is True")])
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        SpeculativeConfig(**options)


@pytest.mark.parametrize(("given", "says"), [
    ("", "cannot be read as JSON"), ("[]", "is JSON of type list; expected a JSON object"),
    ("{}", "has no method; expected one of 'ngram', 'suffix'"),
    ('{"method": "medusa", "method": "ngram"}', "the name 'method' occurs twice in one object"),
    ('{"method": "draft_model"}', "'draft_model' with no model"),
    ('{"method": "ngram", "draft_tensor_parallel_size": 2}', "speculative_config has 'draft_tensor_parallel_size'"),
    ('{"method": "medusa"}', "SpeculativeConfig.method is 'medusa'"), ('{"method": []}', "method is"),
    ('{"method": "ngram", "num_speculative_tokens": "5"}', "num_speculative_tokens is"),
    ('{"method": "custom"}', "'custom' with no Parts.drafter")])
def test_wrong_json_of_the_programs_is_refused(given, says, capsys):
    for main, argv in ((serve_main, ["model"]), (bench_main, ["--model", "model", "--workload", "file"])):
        if "custom" in given:                        # only the engine knows its parts
            continue
        with pytest.raises(SystemExit, match="2"):
            main([*argv, "--speculative-config", given])
        assert says in capsys.readouterr().err
    with pytest.raises(ConfigError, match=says):
        make_loop(Client(), speculative_config=SpeculativeConfig.of(given))


@pytest.mark.parametrize("given", [None, 5, b'{"method": "ngram"}', SpeculativeConfig()])
def test_what_is_no_mapping_and_no_json_is_refused(given):
    with pytest.raises(ConfigError, match=f"speculative_config is of type {type(given).__name__}; expected a mapping"):
        SpeculativeConfig.of(given)


def test_the_keys_are_those_of_vllm():
    config = SpeculativeConfig.of('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}')
    assert config == SpeculativeConfig("ngram", 5, 3, 2)
    assert TrtGptModelOptionalParams(speculative_config={"method": "ngram", "num_speculative_tokens": 5,
                                                         "prompt_lookup_max": 3}).speculative_config == config


@pytest.mark.parametrize(("options", "says"), [
    ({"speculative_config": SpeculativeConfig("custom")}, "SpeculativeConfig.method is 'custom' with no Parts.drafter"),
    ({"parts": {"drafter": KnowingDrafter({}, 9)}}, "SpeculativeConfig.method is 'ngram' with Parts.drafter"),
    ({"parts": {"drafter": KnowingDrafter({}, 9)}, "speculative_config": None}, "Parts.drafter is set without spec"),
    ({"model_type": TrtGptModelType.V1}, "speculative_config is set with TrtGptModelType.V1"),
    ({"run_ahead": True, "speculative_config": SpeculativeConfig("draft_model", model=SHIPPED)},
     "run_ahead is True; a draft model drafts"),
    ({"max_num_tokens": 8, "speculative_config": SpeculativeConfig(num_speculative_tokens=8)},
     "num_speculative_tokens is 8 and max_num_tokens is 8")])
def test_engines_that_cannot_draft_say_so(make_world, options, says):
    with pytest.raises(ConfigError, match=says):
        make_world(**{"speculative_config": SpeculativeConfig()} | options)


def test_sequences_that_a_step_cannot_verify_get_no_drafts():
    for setup in (SlotSetup(SamplingConfig(temperature=0.5, top_k=3, random_seed=1)), SlotSetup(stop_words=((1,),)),
                  SlotSetup(SamplingConfig(frequency_penalty=1.0)), SlotSetup(top_log_probs=1)):
        assert is_verified(setup), setup
    processor = LogitsPostProcessor(1, print, list)
    assert is_verified(SlotSetup(logits_post_processor=replace(processor, allowed_drafts=len)))
    for setup in (SlotSetup(SamplingConfig(beam_width=2)), SlotSetup(logits_post_processor=processor)):
        assert not is_verified(setup), setup
