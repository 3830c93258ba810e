"""The bytes of single tokens, joined, are those of the text, and their positions point into it, for every decoder."""

import asyncio
import json
import random
from collections import Counter

import pytest

tokenizers = pytest.importorskip("tokenizers")

from batch_manager.extras.openai.token_names import TokenNames  # noqa: E402
from batch_manager.extras.token_bytes import SpelledPositions, TokenBytes, TokenPositions  # noqa: E402
from tests.extras import text_streams  # noqa: E402
from tests.extras.text_streams import DECODED_AT_THE_END, OMITTED, TOKENIZERS, text_behind, tokenizer_named  # noqa: E402

KINDS = [name for name in TOKENIZERS if name not in (*DECODED_AT_THE_END, "odd")]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def added(tokenizer, prompt, tokens):
    """Return (bytes, position) of each token."""
    known, places = TokenBytes(tokenizer), []
    positions = TokenPositions(known, prompt, 0)
    for token in tokens:
        content = positions.content(token)
        places.append((content, positions.next(token)))
    return places


@pytest.mark.parametrize("name", KINDS)
def test_joined_bytes_are_the_text_and_positions_point_into_it(name):
    tokenizer, draw, seen = tokenizer_named(name), random.Random(name), Counter()
    for _ in range(400):
        prompt = [] if draw.random() < 0.5 else text_streams.random_tokens(draw, tokenizer)
        tokens = text_streams.random_tokens(draw, tokenizer)
        text = text_behind(tokenizer, prompt, tokens, True)
        if REPLACEMENT in tokenizer.decode([*prompt, *tokens]) or any(
                tokenizer.id_to_token(token) is None for token in tokens):
            continue
        places = added(tokenizer, prompt, tokens)
        if name == "metaspace" and "▁".encode() in b"".join(content for content, _ in places):
            continue      # this decoder turns the mark into a space even where byte tokens spell it
        seen["texts"] += 1
        assert b"".join(content for content, _ in places).decode() == text, (prompt, tokens)
        done = b""
        for token, (content, position) in zip(tokens, places, strict=True):
            assert position == len(done.decode(errors="ignore")), "the character in which the token begins"
            if content and token not in TokenBytes(tokenizer).special:
                beginning = (done + content).decode(errors="ignore")[position:]
                assert text[position:].startswith(beginning)
            seen["special"] += tokenizer.id_to_token(token) in OMITTED
            seen["spaces"] += content.startswith(b" ")
            done += content
    assert seen["texts"] > 150 and seen["special"] > 20 and seen["spaces"] > 20


@pytest.mark.parametrize("name", KINDS)
def test_positions_in_an_encoded_text_are_those_of_the_spelled_tokens(name):
    tokenizer, draw = tokenizers.Tokenizer.from_str(tokenizer_named(name).to_str()), random.Random(name)
    seen = Counter()
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", begin)])
    for _ in range(100):
        text = "".join(draw.choice(text_streams.SEPARATORS) + draw.choice(text_streams.WORDS) for _ in range(6))
        ids, positions = tokenizer.encode(text).ids, SpelledPositions.of(tokenizer, text)
        places = [*map(positions.next, ids), len(text)]
        assert places == sorted(places) and places[0] == places[1] == 0
        for token, place, end in zip(ids[1:], places[1:], places[2:]):
            if token == tokenizer.token_to_id("</s>"):
                assert text[place:end].strip() == "</s>", (text, places)
                seen["special"] += 1
    assert seen["special"] > 5
    transformers = pytest.importorskip("transformers")
    theirs = SpelledPositions.of(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer), text)
    assert [*map(theirs.next, ids), len(text)] == places and SpelledPositions.of(object(), text) is None


@pytest.mark.parametrize(("name", "tokens", "names", "contents"), [
    ("llama", ["▁do", "do", "<0xC3>", "<0xA9>", "<0x0A>", "</s>", "<think>"],
     [" do", "do", "bytes:\\xc3", "bytes:\\xa9", None, "</s>", "<think>"],
     [b" do", b"do", b"\xc3", b"\xa9", b"\n", b"", b"<think>"]),
    ("metaspace", ["▁do", "do", "<0xC3>"], [" do", "do", "bytes:\\xc3"], [b" do", b"do", b"\xc3"]),
    ("gemma", ["▁do", "do", "<0xC3>"], [" do", "do", "bytes:\\xc3"], [b" do", b"do", b"\xc3"]),
    ("word piece", ["a", "##a", "[UNK]", "</s>"], [" a", "a", "[UNK]", "</s>"], [b" a", b"a", b"", b""]),
    ("byte level", ["Ġthe", "Ã", "©", "</s>", "日 本"], [" the", "bytes:\\xc3", "bytes:\\xa9", "</s>", "日 本"],
     [b" the", b"\xc3", b"\xa9", b"", "日 本".encode()]),
    ("no decoder", ["the", "</s>"], [" the", "</s>"], [b" the", b""]),
])
def test_names_and_bytes_of_single_tokens(name, tokens, names, contents):
    tokenizer = tokenizer_named(name)
    ids = [tokenizer.token_to_id(token) for token in tokens]
    pairs = [(ids[n], names[n], contents[n]) for n in range(len(ids)) if ids[n] is not None]
    assert len(pairs) >= 2
    found, positions = TokenNames(tokenizer), TokenPositions(TokenBytes(tokenizer), tokenizer.encode("the cat").ids, 0)
    for token, text, content in pairs:
        assert (found[token] if text is not None else None, positions.content(token)) == (text, content)


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma", "metaspace", "word piece"])
def test_no_two_tokens_share_a_name(name):
    tokenizer = tokenizer_named(name)
    names = TokenNames(tokenizer)
    counts = Counter(names[n] for n in range(tokenizer.get_vocab_size()))
    several = [text for text, count in counts.items() if count > 1]
    # Names of tokens that are the same text in any context, as an added token with the text of another one.
    assert all({tokenizer.id_to_token(n) for n in range(tokenizer.get_vocab_size()) if names[n] == text}
               & {*text_streams.ADDED, *OMITTED} for text in several), several


@pytest.mark.parametrize("name", ["llama", "gemma", "word piece", "byte level"])
def test_the_openai_service_streams_and_tells_the_same_bytes_and_offsets(tmp_path, name):
    pytest.importorskip("jinja2")
    from batch_manager import Parts, TrtGptModelOptionalParams
    from batch_manager.aio import AsyncEngine
    from batch_manager.extras.openai import OpenAIService
    from batch_manager.testing.scripted_backend import ScriptedBackend

    tokenizer = tokenizer_named(name)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("</s>")
    end = tokenizer.token_to_id("</s>")
    said = [*tokenizer.encode("the cat naïve 日本語 <think>a b", add_special_tokens=False).ids, end,
            *tokenizer.encode("the naïve", add_special_tokens=False).ids]

    async def ask():
        backend = ScriptedBackend(vocab_size=tokenizer.get_vocab_size(), max_seq_len=400, num_blocks=100, verify=False,
                                  script=lambda history: said[(len(history) - 1) % len(said)])
        async with await AsyncEngine.start(parts=Parts(backend=backend), takes_all=True,
                                           optional_params=TrtGptModelOptionalParams(max_batch_size=2)) as engine:
            service = OpenAIService(engine, tmp_path)
            for is_chat in (True, False):
                body = {"max_tokens": len(said), "temperature": 0}
                body |= ({"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
                         if is_chat else {"prompt": [end], "logprobs": 2})
                whole = json.loads(await (await service.accept(json.dumps(body).encode(), is_chat)).whole())
                streamed = await service.accept(json.dumps({**body, "stream": True}).encode(), is_chat)
                events = b"".join([event async for event in streamed.events()]).decode().split("\n\n")[:-2]
                yield is_chat, whole["choices"][0], [json.loads(event[6:])["choices"][0] for event in events]

    async def check():
        async for is_chat, choice, chunks in ask():
            told = choice["logprobs"]
            if is_chat:
                text, parts = choice["message"]["content"], [part for chunk in chunks if chunk["logprobs"]
                                                             for part in chunk["logprobs"]["content"]]
                assert parts == told["content"]
                assert bytes(byte for entry in parts for byte in entry["bytes"]).decode() == text
            else:
                text = choice["text"]
                offsets = [each for chunk in chunks if chunk["logprobs"] for each in chunk["logprobs"]["text_offset"]]
                assert offsets == told["text_offset"] and len(told["tokens"]) == len(said)
                for token, offset in zip(told["tokens"], offsets, strict=True):
                    if not token.startswith("bytes:") and token not in OMITTED:
                        assert text[offset:].startswith(token if offset else token.lstrip(" "))
            assert text == tokenizer.decode(said)

    asyncio.run(check())
