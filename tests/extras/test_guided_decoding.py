"""With guided decoding, outputs of the shipped model match the schema or pattern of their request, in any batch."""

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from batch_manager import (
    ConfigError,
    InferenceRequest,
    InvalidRequestError,
    SchedulerPolicy,
)

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")
tokenizers = pytest.importorskip("tokenizers")

from batch_manager.extras.guided_decoding import GuidedDecoding, forbid  # noqa: E402  it imports torch
from batch_manager.triton_kernels.reference.token_bitmask import token_bitmask  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
VOCAB, END = 4096, 1
SENTENCE = r' "[A-Z][a-z]+( [a-z]{2,9}){3,8}[.!?]" said (Emma|Miss Bates)\.'
SCHEMA = {"type": "object", "additionalProperties": False, "required": ["name", "age"],
          "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{3,9}$"},
                         "age": {"type": "integer", "minimum": 16, "maximum": 90}}}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture
def guided():
    return GuidedDecoding(MODEL / "tokenizer.json", vocab_size=VOCAB, end_id=END)


def asking(tokenizer, request_id, processor="batched", **tensors):
    return InferenceRequest(request_id, {
        "input_ids": tokenizer.encode("Emma smiled.").ids, "request_output_len": 80, "end_id": END, "temperature": 0.9,
        "runtime_top_k": 50, "random_seed": request_id, **tensors}, logits_post_processor=processor)


def serve(make_manager, client, guided, **options):
    manager = make_manager(client, model_path=MODEL, num_threads=1, policy=SchedulerPolicy.MAX_UTILIZATION,
                           manager_options={"exclude_input_in_output": True},
                           parts={"logits_post_processor_batched": guided}, **options)
    client.wait_for_finals(*[request.request_id for request in client.sent])
    assert manager.shutdown()


@pytest.fixture
def client(new_client):
    client = new_client()
    client.sent = []
    return client


def test_texts_match_and_those_of_others_stay_what_they_are(make_manager, client, new_client, guided, tokenizer):
    sentence, schema = guided.regex(SENTENCE), guided.json_schema(SCHEMA)
    for i in range(6):
        guided.constrain(i, sentence if i % 2 else schema)
    client.sent = client.pending = [*(asking(tokenizer, i) for i in range(6)),
                                    *(asking(tokenizer, i, None, request_output_len=20) for i in (6, 7))]
    client.sent = list(client.pending)
    serve(make_manager, client, guided)
    for i in range(6):
        final = client.final(i)
        text = tokenizer.decode(final.tokens())
        assert final.error == "" and final.finish_reason == 1, text
        if i % 2:
            assert re.fullmatch(SENTENCE, text), text
        else:
            person = json.loads(text)
            assert list(person) == ["name", "age"] and 16 <= person["age"] <= 90
            assert re.fullmatch("[A-Z][a-z]{3,9}", person["name"])

    alone = new_client()
    alone.sent = alone.pending = [asking(tokenizer, i, None, request_output_len=20) for i in (6, 7)]
    alone.sent = list(alone.pending)
    serve(make_manager, alone, None)
    assert [client.final(i).tokens() for i in (6, 7)] == [alone.final(i).tokens() for i in (6, 7)]


@pytest.mark.parametrize("from_file", [True, False])
def test_a_grammar_that_forces_the_text_forces_it(make_manager, client, guided, tokenizer, from_file):
    if not from_file:
        guided = GuidedDecoding(tokenizer, vocab_size=VOCAB, end_id=END)
    guided.constrain(1, guided.lark('start: "so" " much"+'))
    client.pending = [asking(tokenizer, 1, request_output_len=12, temperature=0.0)]
    client.sent = list(client.pending)
    serve(make_manager, client, guided)
    text = tokenizer.decode(client.final(1).tokens())
    assert ("so" + 20 * " much").startswith(text) and len(text) > 10


def test_a_request_without_a_grammar_is_told_so_and_costs_the_others_nothing(make_manager, client, guided, tokenizer):
    grammar = guided.regex("(yes|no)")
    for i in (1, 3):
        guided.constrain(i, grammar)
    client.pending = [asking(tokenizer, i) for i in (1, 2, 3)]
    client.sent = list(client.pending)
    serve(make_manager, client, guided)
    assert client.final(2).code == "INVALID_REQUEST" and "request 2 has no grammar" in client.final(2).error
    assert {tokenizer.decode(client.final(i).tokens()) for i in (1, 3)} <= {"yes", "no"}


def allowed(guided, request_id, tokens, vocab_size=VOCAB):
    logits = torch.zeros(1, 1, 1, vocab_size)
    guided([request_id], logits, [[tokens]])
    return set(torch.nonzero(logits[0, 0, 0] == 0)[:, 0].tolist())


def test_what_is_allowed_depends_on_the_tokens_and_not_on_the_calls(guided, tokenizer):
    prompt, text = [5, 6, 7], tokenizer.encode("no, never", add_special_tokens=False).ids
    guided.constrain(1, guided.regex("no, never"))
    seen = [allowed(guided, 1, prompt + text[:n]) for n in range(len(text) + 1)]
    assert all(token in options for token, options in zip(text, seen)) and seen[-1] == {END}
    for n in (len(text), 0, 1, 1, len(text)):
        assert allowed(guided, 1, prompt + text[:n]) == seen[n]


def test_a_token_that_does_not_match_ends_the_request(guided):
    guided.constrain(1, guided.regex("yes"))
    allowed(guided, 1, [5])
    with pytest.raises(InvalidRequestError, match="do not match"):
        allowed(guided, 1, [5, 6])


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_masks_on_the_host_mean_what_the_kernel_means(vocab):
    random = np.random.default_rng(vocab)
    masks = random.integers(-(2**31), 2**31, (3, -(-vocab // 32)), np.int32)
    logits = torch.from_numpy(random.normal(size=(3, vocab)).astype(np.float32))
    expected = logits.clone()
    token_bitmask(expected, torch.from_numpy(masks))
    forbid(logits, masks)
    assert torch.equal(logits, expected)


def test_beams_are_refused(guided):
    guided.constrain(1, guided.regex("yes"))
    with pytest.raises(InvalidRequestError, match="2 beams"):
        guided([1], torch.zeros(1, 1, 2, VOCAB), [[[5], [5]]])


def test_requests_are_forgotten_when_they_are_released(guided):
    guided.constrain(1, guided.regex("yes"))
    guided.constrain(2, guided.regex("no"))
    guided.release(1)
    guided.release(3)
    assert guided.num_requests == 1


@pytest.mark.parametrize("make", [lambda g: g.regex("("), lambda g: g.json_schema("{"), lambda g: g.lark("start: x"),
                                  lambda g: g.json_schema({"type": "nonsense"})])
def test_what_does_not_compile_is_refused_at_once(guided, make):
    with pytest.raises(InvalidRequestError, match="does not compile"):
        make(guided)


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma", "metaspace"])
def test_allowed_tokens_are_those_whose_bytes_match_for_every_decoder(name):
    """llguidance's own reading of tokenizer.json is the reference where it knows the decoder."""
    import llguidance

    from batch_manager.extras.token_bytes import TokenBytes
    from tests.extras.text_streams import tokenizer_named

    tokenizer, pattern, draw = tokenizer_named(name), r" (the cat|The naïve 日本語) [a-z' ]{2,9}\.", random.Random(name)
    if name == "byte level":        # llguidance and the library differ in added tokens that are letters of bytes
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str().replace("été", "ETE"))
    size, end, known = tokenizer.get_vocab_size(), tokenizer.token_to_id("</s>"), TokenBytes(tokenizer)
    guided, theirs, texts = GuidedDecoding(tokenizer, vocab_size=size, end_id=end), None, set()
    for number in range(12):
        guided.constrain(number, guided.regex(pattern))
        if name in ("byte level", "llama", "gemma"):
            own = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=end)
            theirs = llguidance.LLMatcher(own, llguidance.LLMatcher.grammar_from_regex(pattern), log_level=0)
        tokens, text = [end], b""
        while (choices := allowed(guided, number, tokens, size)) != {end}:
            if theirs is not None:
                mask = np.frombuffer(theirs.compute_bitmask(), np.uint8)
                assert choices == set(np.flatnonzero(np.unpackbits(mask, bitorder="little", count=size)).tolist())
            tokens.append(draw.choice(sorted(choices - {end})))
            text += known[tokens[-1]]
            assert theirs is None or theirs.consume_tokens(tokens[-1:])
        assert re.fullmatch(pattern, text.decode()) and not known.special.keys() & set(tokens[1:])
        texts.add(text)
    assert len(texts) > 6


def test_a_token_that_is_too_long_for_the_library_is_never_allowed(tokenizer):
    added = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    added.add_tokens(["x" * 1024, "x" * 1025])
    size = added.get_vocab_size()
    process = (guided := GuidedDecoding(added, vocab_size=size, end_id=1)).processor(guided.regex("x*"))
    assert process(0, torch.zeros(size), [[5]])[-2:].tolist() == [0, -torch.inf]


def test_without_the_library_or_the_tokenizer_the_error_says_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        GuidedDecoding(tmp_path / "tokenizer.json", vocab_size=VOCAB, end_id=END)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r'pip install "batch-manager\[guided\]"'):
        GuidedDecoding(MODEL / "tokenizer.json", vocab_size=VOCAB, end_id=END)
