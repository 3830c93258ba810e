"""OpenAIService reads or refuses request bodies, and forms its answers, as the OpenAI API does.

It runs on a scripted model, without sockets.
"""

import asyncio
import ctypes
import gc
import inspect
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from batch_manager import ErrorCode, Parts, TrtGptModelOptionalParams
from batch_manager.aio import AsyncEngine, RequestFailed
from batch_manager.testing.scripted_backend import ScriptedBackend

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from batch_manager.extras.chat_template import folder_template  # noqa: E402
from batch_manager.extras.openai import OpenAIError, OpenAIService  # noqa: E402
from batch_manager.extras.openai.errors import FIELDS  # noqa: E402
from batch_manager.extras.openai.fields import read_body  # noqa: E402
from batch_manager.extras.openai.json_object import parsed_json  # noqa: E402
from batch_manager.extras.sampling import Sampling  # noqa: E402
from batch_manager.extras.text import _fast_kind  # noqa: E402
from batch_manager.extras.token_bytes import TokenBytes, TokenPositions  # noqa: E402
from batch_manager.extras.tool_calls.parser import _machine  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
TOKENIZER = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TEXT = "We walked to the village — and then home again. "
HASHED = object()    # for a backend without a script: each prompt and seed has a text of its own
TOKENS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids


def run(test, script=None, folder=MODEL, **backend):
    """Run test(service) on a new event loop, with an OpenAIService of a scripted model.

    script   script of the model; None: the model repeats TEXT after a prompt of one token
    folder   folder of the tokenizer
    """
    async def inside():
        says = None if script is HASHED else script or (lambda history: TOKENS[(len(history) - 1) % len(TOKENS)])
        options = {"vocab_size": 4096, "max_seq_len": 4000, "num_blocks": 2000, "verify": False, **backend}
        scripted = ScriptedBackend(script=says, **options)
        params = TrtGptModelOptionalParams(max_batch_size=4, max_queued_requests=4)
        async with await AsyncEngine.start(parts=Parts(backend=scripted), optional_params=params,
                                           takes_all=True) as engine:
            await asyncio.wait_for(test(OpenAIService(engine, folder, ["austen"])), 60)
    asyncio.run(inside())


async def whole(service, is_chat=False, **body):
    answer = await service.accept(json.dumps(body).encode(), is_chat)
    return json.loads(await answer.whole())


async def events(service, is_chat=False, **body):
    answer = await service.accept(json.dumps({**body, "stream": True}).encode(), is_chat)
    lines = b"".join([event async for event in answer.events()]).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def until_idle(service):
    for _ in range(2000):
        if not service.engine.health()["active_requests"]:
            return
        await asyncio.sleep(0.002)
    raise AssertionError("requests are still alive")


def test_a_stream_is_the_whole_in_pieces():
    async def test(service):
        for stop, likeliest in (([], 0), (["village"], 3), ("gain", 1)):
            body = {"prompt": [5], "max_tokens": 40, "logprobs": likeliest, "stop": stop, "seed": 3}
            one = await whole(service, **body)
            chunks = await events(service, **body, stream_options={"include_usage": True})
            (choice,) = one["choices"]
            texts = [chunk["choices"][0] for chunk in chunks[:-1]]
            assert "".join(each["text"] for each in texts) == choice["text"]
            assert choice["text"].startswith("We walked to the ")
            assert [each["finish_reason"] for each in texts[:-1]] == [None] * (len(texts) - 1)
            assert texts[-1]["finish_reason"] == choice["finish_reason"] == ("stop" if stop else "length")
            for key in ("tokens", "token_logprobs", "text_offset"):
                assert [value for each in texts if each["logprobs"] for value in each["logprobs"][key]] == (
                    choice["logprobs"][key])
            told = [value for each in texts if each["logprobs"] for value in each["logprobs"]["top_logprobs"] or ()]
            assert told == (choice["logprobs"]["top_logprobs"] or [])
            assert {len(each) for each in told} == ({likeliest} if likeliest else set())
            count = one["usage"]["completion_tokens"]
            assert chunks[-1]["choices"] == []
            for usage in (one["usage"], chunks[-1]["usage"]):
                # A stop string ends a text before or after the engine's final response, which has the metrics.
                cached = usage.pop("prompt_tokens_details", {"cached_tokens": 0} if stop else None)
                assert cached == {"cached_tokens": 0}
                assert usage == {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            assert len(choice["logprobs"]["tokens"]) == count == (40 if not stop else count)
            if stop:
                assert choice["text"] == TEXT[: TEXT.index("village" if stop == ["village"] else "gain")]
        await until_idle(service)

    run(test)


def test_a_refused_output_ends_the_others_of_its_call_at_once():
    async def refusal(read, service):
        try:
            chunks = await read(service, prompt=[5], n=12, max_tokens=3000, ignore_eos=True)
        except OpenAIError as error:
            assert error.status == 429
            return error.code
        return chunks[-1]["error"]["code"]          # another output's first token was sent before it

    async def test(service):
        for read in (whole, events):
            assert await refusal(read, service) == "queue_full"
            await until_idle(service)
        assert service.engine.health()["iterations"] < 3000           # each output has as many tokens

    run(test, step_seconds=0.001)


@pytest.mark.parametrize("read", [whole, events])
def test_an_output_that_a_stop_string_ended_generates_no_further_while_others_do(read):
    computed, alone = {5: 0, 6: 0}, 0

    def script(history):
        """Prompt 6 writes TEXT; prompt 5 writes it once it has been alone for some steps."""
        nonlocal alone
        computed[history[0]] += 1
        alone = alone + 1 if history[0] == 5 and computed[6] else 0
        return TOKENS[(len(history) - 1) % len(TOKENS)] if history[0] == 6 or alone > 3 else 9

    async def test(service):
        await read(service, prompt=[[5], [6]], max_tokens=3900, stop="village", ignore_eos=True)

    run(test, script=script, step_seconds=0.001)
    assert 3900 > computed[5] > computed[6] > 3


def test_several_prompts_and_texts_each_are_in_order_with_seeds_of_their_own():
    async def test(service):
        body = {"prompt": [[5], [6], [7]], "n": 2, "max_tokens": 6, "seed": 9, "ignore_eos": True}
        one = await whole(service, **body)
        assert [choice["index"] for choice in one["choices"]] == list(range(6))
        texts = [choice["text"] for choice in one["choices"]]
        assert len(set(texts)) == 6
        alone = [(await whole(service, prompt=[token], max_tokens=6, seed=seed, ignore_eos=True))["choices"][0]["text"]
                 for token in (5, 6, 7) for seed in (9, 10)]
        assert alone == texts
        pieces = {index: "" for index in range(6)}
        for chunk in await events(service, **body):
            pieces[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert list(pieces.values()) == texts
        fresh = await whole(service, prompt=[5], n=4, max_tokens=6)
        assert len({choice["text"] for choice in fresh["choices"]}) == 4
        assert one["usage"]["prompt_tokens"] == 3 and one["usage"]["completion_tokens"] == 36

    run(test, script=HASHED)


def test_echo_also_of_nothing():
    async def test(service):
        prompt = "Emma smiled, and"
        for extra in ({}, {"max_tokens": 0}):
            one = await whole(service, prompt=prompt, echo=True, **{"max_tokens": 5, **extra})
            text, used = one["choices"][0]["text"], one["usage"]["completion_tokens"]
            assert text.startswith(prompt) and (text == prompt) == bool(extra) and used == (0 if extra else 5)
            chunks = await events(service, prompt=prompt, echo=True, **{"max_tokens": 5, **extra})
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text

    run(test)


def test_echo_with_log_probs_tells_those_of_the_prompt_too():
    async def test(service):
        prompt = "Emma smiled, and"
        tokens = TOKENIZER.encode(prompt).ids
        for count, likeliest in ((5, 0), (5, 2), (0, 1)):
            body = {"prompt": prompt, "echo": True, "max_tokens": count, "logprobs": likeliest, "n": 2, "seed": 1}
            one = await whole(service, **body)
            chunks = await events(service, **body)
            for index, choice in enumerate(one["choices"]):
                told = choice["logprobs"]
                pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["index"] == index]
                for key, values in told.items():
                    assert [value for piece in pieces if piece for value in piece[key] or ()] == (values or [])
                assert len(told["tokens"]) == len(tokens) + count and "".join(told["tokens"][1:]) == choice["text"]
                assert told["tokens"][0] == "<s>" and told["text_offset"][1] == 0        # special, so not in the text
                assert told["text_offset"][0] == 0 and told["text_offset"][-1] + len(told["tokens"][-1]) == len(
                    choice["text"])
                assert told["token_logprobs"][0] is None and all(value < 0 for value in told["token_logprobs"][1:])
                assert (told["top_logprobs"] is None) == (likeliest == 0)
                if likeliest:
                    assert told["top_logprobs"][0] is None
                    for text, value, others in list(zip(told["tokens"], told["token_logprobs"],
                                                        told["top_logprobs"]))[1:]:
                        assert others[text] == value and likeliest <= len(others) <= likeliest + 1
        await until_idle(service)

    run(test, script=HASHED)


@pytest.mark.parametrize("prompt", ["<s>Emma</s>  smiled</s>", "</s>", " é</s>", "</s>😀"])
def test_an_echo_of_spelled_special_tokens_has_their_characters(prompt):
    async def test(service):
        (choice,) = (await whole(service, prompt=prompt, echo=True, logprobs=0, max_tokens=3))["choices"]
        told = choice["logprobs"]
        tokens = TOKENIZER.encode(prompt).ids
        assert len(told["tokens"]) == len(tokens) + 3 and choice["text"].startswith(prompt)
        ends = [*told["text_offset"][1:], len(choice["text"])]
        pieces = [choice["text"][place:end] for place, end in zip(told["text_offset"], ends)]
        assert pieces[0] == "" and "".join(pieces) == choice["text"]              # the first token is an added one
        for name, piece in zip(told["tokens"][1:], pieces[1:], strict=True):
            assert name.startswith("bytes:") or name == piece

    run(test, script=HASHED)


@pytest.mark.parametrize("text", ["Emma smiled, and", "It is 😀 a naïve café", "é😀", "— 文字 — ✓", "\x00\x7f 🎩🎩"])
def test_offsets_are_those_of_characters_that_several_tokens_may_share(text):
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    offsets = TokenPositions(TokenBytes(TOKENIZER), (), 7)
    found = [offsets.next(token) for token in tokens]
    before = [TOKENIZER.decode(tokens[:number]) for number in range(len(tokens))]
    assert found == [7 + len(decoded.rstrip("\N{REPLACEMENT CHARACTER}")) for decoded in before]
    assert offsets.next(tokens[0]) == 7 + len(text)


def test_invalid_bytes_have_the_positions_of_their_replacements():
    """Each byte is a token of the byte-level alphabet; the text is what Python decodes."""
    given = [0xF0, 0x9F, 0x98, 0x41, 0xC3, 0xA9, 0x80, 0xE2, 0x82, 0xC3, 0xA9, 0xFF, 0x42]
    offsets = TokenPositions(TokenBytes(TOKENIZER), (), 0)
    given_ids = [next(n for n in range(2, 258) if TokenBytes(TOKENIZER)[n] == bytes([byte])) for byte in given]
    assert [offsets.next(token) for token in given_ids] == [0, 0, 0, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7]
    assert bytes(given).decode(errors="replace") == "\ufffdAé\ufffd\ufffdé\ufffdB"


def test_echo_with_log_probs_tells_the_end_token_so_that_who_scores_drops_it_and_not_one_of_the_prompt():
    async def test():
        prompt = TOKENIZER.encode("Emma smiled, and").ids
        async with await AsyncEngine.start(str(MODEL)) as engine:
            service = OpenAIService(engine, MODEL)
            drawn = (await engine.generate({"input_ids": prompt, "request_output_len": 12})).tokens
            for count, stop in ((1, []), (4, []), (4, ["zzz"])):
                assert drawn.index(drawn[count - 1]) == count - 1
                body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 12, "temperature": 0, "stop": stop,
                        "stop_token_ids": [drawn[count - 1], 3]}
                one, bare = await whole(service, **body), await whole(service, **{**body, "echo": False})
                (choice,), (silent,) = one["choices"], bare["choices"]
                assert choice["text"] == TOKENIZER.decode(prompt) + silent["text"]
                assert choice["finish_reason"] == silent["finish_reason"] == "stop"
                assert {len(each) for each in choice["logprobs"].values()} == {len(prompt) + count}
                assert choice["logprobs"]["token_logprobs"][len(prompt):-1] == silent["logprobs"]["token_logprobs"]
                assert one["usage"]["completion_tokens"] == count == bare["usage"]["completion_tokens"] + 1
                chunks = [chunk["choices"][0] for chunk in await events(service, **body)]
                assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
                told = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
                for key, values in choice["logprobs"].items():
                    assert [value for each in told for value in each[key]] == values
            later = await whole(service, **{**body, "stop_token_ids": drawn[:1], "min_tokens": 3})
            assert later["usage"]["completion_tokens"] >= 3      # as without echo: no end before that many

    asyncio.run(test())


def test_a_chat_with_its_shapes(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ more }}assistant:")
    messages = [{"role": "user", "content": [{"type": "text", "text": "Who is "}, {"type": "text", "text": "Emma?"}]}]
    prompt = TOKENIZER.encode("user: Who is Emma?\nassistant:", add_special_tokens=False).ids

    async def test(service):
        body = {"messages": messages, "max_completion_tokens": 8, "logprobs": True, "seed": 4}
        one = await whole(service, True, **body)
        assert one["object"] == "chat.completion" and one["usage"]["prompt_tokens"] == len(prompt)
        choice = one["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": TOKENIZER.decode(TOKENS[:8])}
        assert len(choice["logprobs"]["content"]) == 8
        assert all({"token", "logprob", "bytes", "top_logprobs"} == set(each)
                   for each in choice["logprobs"]["content"])
        two = (await whole(service, True, **body, top_logprobs=2))["choices"][0]["logprobs"]["content"]
        for each, alone in zip(two, choice["logprobs"]["content"], strict=True):
            best = each.pop("top_logprobs")
            assert len(best) == 2 and best[0] == each and best[1]["logprob"] == each["logprob"] - 1
            assert each == {key: value for key, value in alone.items() if key != "top_logprobs"}
            assert alone["top_logprobs"] == []
        said = b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"])
        assert said.decode(errors="replace") == choice["message"]["content"]
        chunks = await events(service, True, **body, stream_options={"continuous_usage_stats": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks][0] == 0
        assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
        assert chunks[-2]["usage"]["completion_tokens"] == 8 and chunks[-1]["usage"] == one["usage"]
        with pytest.raises(OpenAIError, match="a template variable is named messages; ") as raised:
            await whole(service, True, messages=messages, chat_template_kwargs={"messages": []})
        assert raised.value.status == 400
        more = await whole(service, True, messages=messages, max_tokens=1, chat_template_kwargs={"more": "(x)"})
        assert more["usage"]["prompt_tokens"] > len(prompt)
        unlimited = await whole(service, True, messages=messages, stop=["home"])
        assert unlimited["choices"][0]["finish_reason"] == "stop"

    run(test, folder=folder, script=lambda history: TOKENS[(len(history) - len(prompt)) % len(TOKENS)])


@pytest.mark.parametrize("body, param", [
    ({}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[1, "a"]]}, "prompt"), ({"prompt": 3}, "prompt"),
    ({"n": 0}, "n"), ({"n": 2000}, "n"), ({"n": True}, "n"), ({"best_of": 3}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"min_tokens": 17}, "min_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"min_tokens": 5, "response_format": {"type": "json_object"}}, "min_tokens"),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    ({"logprobs": True}, "logprobs"), ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias"), ({"stop": [""]}, "stop"),
    ({"stop": "x" * 4097}, "stop"), ({"stop": ["x" * 4097]}, "stop"),
    ({"stop": 3}, "stop"), ({"seed": "x"}, "seed"), ({"temperature": "hot"}, "temperature"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"suffix": "x"}, "suffix"),
    ({"tools": [{}]}, "tools"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"response_format": {"type": "grammar"}}, "response_format"), ({"banana": 1}, "banana"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"), ({"stop_token_ids": [1.5]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
])
def test_what_cannot_be_used_is_refused_by_name(body, param):
    given = {} if not body or "prompt" in body else {"prompt": "x"}
    with pytest.raises(OpenAIError) as told:
        read_body(json.dumps({**given, **body}).encode(), is_chat=False)
    assert told.value.status == 400 and told.value.param == param and param in told.value.message
    assert json.loads(told.value.body())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body, message", [
    (b"{", "not JSON"), (b"[]", "of type list; expected a JSON object"), (b'{"messages": []}', "messages"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "type text"),
    (b'{"messages": [{"role": "user"}], "logprobs": true, "top_logprobs": 21}', "0..20"),
    (b'{"messages": [3]}', "object"), (b'{"messages": [{"role": "user"}], "top_logprobs": 3}', "top_logprobs"),
])
def test_chats_that_cannot_be_used(body, message):
    with pytest.raises(OpenAIError, match=message):
        read_body(body, is_chat=True)


@pytest.mark.parametrize("value, about", [(2**64, "1.84467e+19"), (-(2**63) - 1, "-9.22337e+18"), (10**30, "1e+30")])
def test_an_integer_of_more_than_64_bits_is_called_that(value, about):
    expected = {"seed": "an integer of at most 64 bits", "max_tokens": f"an integer in 0..{2**31 - 1}",
                "top_k": f"an integer in -1..{2**31 - 1}", "logprobs": "an integer in 0..20",
                "priority": f"an integer in {-2**31}..{2**31 - 1}"}
    for field, integers in expected.items():
        with pytest.raises(OpenAIError) as told:
            read_body(json.dumps({"prompt": "x", field: value}).encode(), is_chat=False)
        assert told.value.message == f"{field}: got about {about}, which has more than 64 bits; expected {integers}"
    for value in (2.5, 1e18):
        with pytest.raises(OpenAIError, match="seed: got float; expected int"):
            read_body(json.dumps({"prompt": "x", "seed": value}).encode(), is_chat=False)


def test_options_of_other_engines_and_harmless_fields():
    asked = read_body(json.dumps({
        "prompt": "x", "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [3], "min_tokens": 2,
        "ignore_eos": True, "priority": -1, "logit_bias": {"5": -100}, "seed": -1, "user": "me", "metadata": {},
        "suffix": None, "tools": [], "n": None, "echo": None, "best_of": 1}).encode(), is_chat=False)
    sampling = asked.sampling
    assert (sampling.top_k, sampling.min_p, sampling.stop_token_ids, sampling.min_tokens) == (5, 0.1, [3], 2)
    assert sampling.logit_bias == {5: -100} and sampling.seed == 2**64 - 1 and sampling.max_tokens == 16

    def order(priority):
        body = json.dumps({"prompt": "x", "priority": priority}).encode()
        return read_body(body, is_chat=False).sampling.priority

    values = [order(priority) for priority in (-1000, -1, 0, 1, 2, 1000)]
    assert values == sorted(values, reverse=True) and len(set(values)) == 6 and order(0) == 0.5
    assert all(0 < value < 1 for value in values)


@pytest.mark.parametrize("field, value, message", [
    ("temperature", -1, "temperature is -1; it must be a finite float32 of at least 0"),
    ("top_p", 2, "top_p is 2; it must be a number in [0, 1]"),
    ("top_k", 10**9, "top_k is 1000000000; it must be an integer in 0..1024"),
    ("min_p", 5, "min_p is 5; it must be a number in [0, 1]"),
    ("repetition_penalty", -1, "repetition_penalty is -1; it must be a finite float32 above 0"),
    ("presence_penalty", 1e39, "presence_penalty is 1e+39; it must be a finite float32"),
    ("frequency_penalty", -1e39, "frequency_penalty is -1e+39; it must be a finite float32"),
    ("logit_bias", {"1": 1000}, "logit_bias of token 1 is not a number in the valid range; expected "
     "numbers from -100 to 100; clip the"),
    ("logit_bias", {"99999": 1}, "logit_bias has a key that is not a token id of the model"),
    ("stop_token_ids", [99999], "stop_token_ids is 99999; it must be an integer in"),
    ("stop_token_ids", [*range(12)], "stop_token_ids and the checkpoint's end ids are 12 different ids"),
    ("prompt", [-5], "prompt holds an id outside 0..4095"), ("prompt", [2**40], "prompt holds an id outside 0..4095"),
    ("prompt", [[]], "prompt is empty; a prompt has at least one token"),
])
def test_a_refusal_of_the_engine_names_the_field_of_the_body(field, value, message):
    """`param` and the message have the field's name, not the tensor's, and no id that the engine gave the request."""
    async def test(service):
        for read in (whole, events):
            with pytest.raises(OpenAIError) as told:
                await read(service, **{"prompt": [1], field: value})
            assert (told.value.status, told.value.param) == (400, field)
            assert told.value.message.startswith(message)
    run(test)


def test_fields_of_a_chat_are_named_in_a_refusal():
    for text, param, message in (
            ("request 3: input_ids is empty; send a token", "messages", "messages is empty; send a token"),
            ("request 3: return_top_log_probs is 30; expected 0", "top_logprobs", "top_logprobs is 30; expected 0"),
            ("request 3: it is odd; temperature is not", None, "it is odd; temperature is not")):
        error = OpenAIError.of(RequestFailed(ErrorCode.INVALID_REQUEST, text), is_chat=True)
        assert (error.param, error.message, error.code) == (param, message, "invalid_request")


def test_a_request_that_is_too_large_names_fields_of_the_body():
    text = "request 3: input_ids has 500 tokens and request_output_len is 900; together they may need 9 blocks"
    error = OpenAIError.of(RequestFailed(ErrorCode.TOO_LARGE_FOR_KV_CACHE, text))
    assert (error.status, error.param, error.code) == (413, "prompt", "too_large_for_kv_cache")
    assert error.message == "prompt has 500 tokens and max_tokens is 900; together they may need 9 blocks"


def test_a_full_queue_tells_the_client_what_it_can_do():
    text = ("request 3: the queue has 16 requests already; max_queued_requests is 16; return no more than "
            "max_num_requests from get, or raise max_queued_requests")
    error = OpenAIError.of(RequestFailed(ErrorCode.QUEUE_FULL, text))
    assert (error.status, error.param, error.headers) == (429, None, {"Retry-After": "1"})
    assert error.message == ("the queue has 16 requests already; max_queued_requests is 16; send the request again "
                             "after the seconds in Retry-After, or ask for fewer outputs at once")


def test_every_event_has_the_usage_if_the_client_wants_it():
    async def test(service):
        for extra in ({}, {"echo": True}, {"echo": True, "logprobs": 1}, {"echo": True, "n": 2, "logprobs": 0},
                      {"echo": True, "max_tokens": 0}):
            chunks = await events(service, prompt="Emma smiled, and", **{"max_tokens": 5, **extra},
                                  stream_options={"continuous_usage_stats": True})
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts) and (counts[0] == 0) == ("echo" in extra)
            assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[0]["usage"]["prompt_tokens"]}

    run(test)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("ends_early", [False, True])
def test_events_have_the_shape_of_openais_client(tmp_path, is_chat, ends_early):
    """Each event is validated strictly, and `logprobs` is null where it has no token."""
    openai_types = pytest.importorskip("openai.types")
    chats = pytest.importorskip("openai.types.chat")
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    end = TOKENS[0] if ends_early else 7      # the first token, or none

    async def test(service):
        prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": [5]}
        body = {**prompt, "max_tokens": 5, "logprobs": True if is_chat else 0, "stop_token_ids": [end]}
        for extra in ({}, {"stream_options": {"include_usage": True}}, {"n": 2}):
            chunks = await events(service, is_chat, **body, **extra)
            has_usage = "stream_options" in extra
            assert [chunk.get("usage", 0) for chunk in chunks if chunk["choices"]] == (
                [None if has_usage else 0] * (len(chunks) - has_usage))
            assert ("total_tokens" in chunks[-1].get("usage", ())) == has_usage
            for index in range(extra.get("n", 1)):
                choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
                *before, last = choices
                assert [choice["finish_reason"] for choice in before] == [None] * len(before)
                assert last["finish_reason"] == ("stop" if ends_early else "length")
                tokens = [len(told["content"] if is_chat else told["tokens"])
                          for choice in choices if (told := choice["logprobs"]) is not None]
                assert 0 not in tokens and sum(tokens) == (0 if ends_early else 5)
                if is_chat:
                    assert choices[0]["delta"] == {"role": "assistant", "content": ""} and last["delta"] == {}
                    assert last["logprobs"] is None and all("role" not in each["delta"] for each in choices[1:])
            for chunk in chunks:
                if not is_chat:       # the client has one type for chunks and answers, where the reason is not null
                    for choice in chunk["choices"]:
                        choice["finish_reason"] = choice["finish_reason"] or "stop"
                kind = chats.ChatCompletionChunk if is_chat else openai_types.Completion
                kind.model_validate(chunk, strict=True)
        one = await whole(service, is_chat, **body)
        (chats.ChatCompletion if is_chat else openai_types.Completion).model_validate(one, strict=True)

    said = [*TOKENS[:5], 7]
    length = len(TOKENIZER.encode("user: x", add_special_tokens=False).ids) if is_chat else 1
    run(test, folder=folder, script=lambda history: said[(len(history) - length) % len(said)])


def test_every_tensor_that_a_body_sets_has_a_field():
    flags = {"return_log_probs", "raw_log_probs", "prompt_ignore_length"}      # their values cannot be wrong
    options = Sampling(top_p=0.5, top_k=2, min_p=0.5, seed=1, stop_token_ids=[5], min_tokens=1, repetition_penalty=2.0,
                       presence_penalty=1.0, frequency_penalty=1.0, logit_bias={1: 1.0}, log_probs=True,
                       top_log_probs=2, raw_log_probs=True)
    info = SimpleNamespace(vocab_size=100, max_seq_len=100, end_ids=(1,))
    assert set(options.tensors([1], info)) - flags <= set(FIELDS)


def test_errors_of_the_engine_come_before_the_first_event_with_their_status():
    async def test(service):
        for body, status, code in (({"prompt": [10**6]}, 400, "invalid_request"),
                                   ({"prompt": [1], "temperature": -1}, 400, "invalid_request"),
                                   ({"prompt": [1], "model": "other"}, 404, "model_not_found")):
            for read in (whole, events):
                with pytest.raises(OpenAIError) as told:
                    await read(service, **body)
                assert (told.value.status, told.value.code) == (status, code)
        answers = [await service.accept(json.dumps({"prompt": [1], "max_tokens": 3000}).encode(), False)
                   for _ in range(12)]
        results = await asyncio.gather(*[answer.whole() for answer in answers[8:]], return_exceptions=True)
        assert {each.status for each in results} == {429} and results[0].headers == {"Retry-After": "1"}
        for answer in answers:
            answer.cancel()
        await until_idle(service)
        assert service.health()[0] == 200
        service.is_draining = True
        assert service.health()[0] == 503
        with pytest.raises(OpenAIError) as told:
            await whole(service, prompt=[1])
        assert told.value.status == 503 and told.value.headers == {"Retry-After": "5"}

    run(test, step_seconds=0.002)


def test_an_error_in_the_middle_of_a_stream_is_an_event():
    async def test(service):
        answer = await service.accept(b'{"prompt": [1], "max_tokens": 3000, "stream": true}', False)
        seen = []
        async for event in answer.events():
            seen.append(event)
            if len(seen) == 3:
                await service.engine.close(drain=False)
        assert seen[-1] == b"data: [DONE]\n\n"
        error = json.loads(seen[-2].removeprefix(b"data: "))["error"]
        assert error["code"] == "shutdown" and error["type"] == "service_unavailable_error"

    run(test, step_seconds=0.002)


def test_several_end_ids_end_a_text_and_are_left_out():
    tokens = TOKENIZER.encode("We walked to the village", add_special_tokens=False).ids
    assert len(set(tokens)) == len(tokens) > 3

    async def test(service):
        body = {"prompt": [5], "max_tokens": 40, "stop_token_ids": [tokens[3], 7, tokens[2], 7], "logprobs": 0}
        one = await whole(service, **body)
        assert one["choices"][0]["text"] == TOKENIZER.decode(tokens[:2])
        assert one["choices"][0]["finish_reason"] == "stop" and one["usage"]["completion_tokens"] == 2
        assert len(one["choices"][0]["logprobs"]["tokens"]) == 2
        chunks = await events(service, **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == one["choices"][0]["text"]
        with pytest.raises(OpenAIError, match="stop_token_ids and the checkpoint's end ids are 20"):
            await whole(service, prompt=[5], stop_token_ids=list(range(20)))

    run(test, script=lambda history: tokens[(len(history) - 1) % len(tokens)])


def test_a_special_token_as_a_stop_string_ends_the_text_as_its_id_does():
    tokens = TOKENIZER.encode("We walked</s> home again.", add_special_tokens=False).ids

    async def test(service):
        by_id, by_text = [await whole(service, prompt=[5], max_tokens=40, **{name: [value]})
                          for name, value in (("stop_token_ids", 1), ("stop", "</s>"))]
        assert by_text["choices"] == by_id["choices"] and by_id["choices"][0]["text"] == "We walked"
        chunks = await events(service, prompt=[5], max_tokens=40, stop="walked</s>")
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "We "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        await until_idle(service)

    run(test, script=lambda history: tokens[(len(history) - 1) % len(tokens)])


def test_a_text_that_met_its_stop_string_stops_while_the_others_go_on():
    async def test(service):
        answer = await service.accept(json.dumps({"prompt": [[5], [6]], "max_tokens": 3000, "stream": True,
                                                  "stop": ["village"]}).encode(), False)
        told = answer.events()                 # dropping the iterator stops all of them
        async for event in told:
            if b'"finish_reason":"stop"' in event:
                break
        while (num_active := service.engine.health()["active_requests"]) == 2:
            await asyncio.sleep(0.002)
        assert num_active == 1
        answer.cancel()
        await until_idle(service)

    run(test, script=lambda history: TOKENS[(len(history) - 1) % len(TOKENS)] if history[0] == 5 else 300,
        step_seconds=0.002)


def test_other_requests_go_on_while_a_long_prompt_is_read():
    async def test(service):
        async def read():
            with pytest.raises(OpenAIError, match="prompt: got .* tokens; expected at most 3,999") as raised:
                await service.accept(json.dumps({"prompt": ["a " * 1500] * 400 + ["a " * 4500]}).encode(), False)
            assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")

        num_turns, here, everywhere = 0, time.thread_time(), time.process_time()
        reading = asyncio.create_task(read())
        while not reading.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        await reading
        here, everywhere = time.thread_time() - here, time.process_time() - everywhere
        assert num_turns > 20 and here < everywhere / 2, f"{num_turns} turns of the event loop, {here:.2f} s of " \
            f"{everywhere:.2f} s of processor time in its thread"

    run(test)


@pytest.mark.parametrize("items, is_read", [
    ("7," * 499_970, True), ("7," * 500_000, False), ("[]," * 45_000, True), ("{}," * 46_000, False),
    ("".join(f'"{number}":1,' for number in range(124_000)), True), ('"a":1,' * 126_000, False),
    ('"' + r"[{,:]\"" * 600_000 + '",', True)])          # marks inside a string are text
def test_a_body_has_a_bounded_number_of_values(items, is_read):
    ends = '{"prompt":{' if '":' in items else '{"prompt":['
    body = f"{ends}{items.rstrip(',')}{'}' if ends.endswith('{') else ']'}}}".encode()
    if is_read:
        assert parsed_json(body) == json.loads(body)
    else:
        with pytest.raises(OpenAIError, match="more than 500,000 values") as told:
            parsed_json(body)
        assert told.value.status == 413


def test_a_long_text_is_refused_without_tokenizing_it(monkeypatch):
    monkeypatch.setattr("batch_manager.extras.openai.service.encode", lambda *_, **__: 1 / 0)

    async def test(service):
        for body, is_chat in (({"prompt": "a" * 400_000}, False), ({"prompt": [7] * 4000}, False)):
            with pytest.raises(OpenAIError, match="expected at most 3,999, so that one more fits") as told:
                await whole(service, is_chat, **body)
            assert (told.value.status, told.value.code) == (400, "context_length_exceeded")

    run(test)


def test_a_schema_that_is_nested_too_deep_is_refused(tmp_path):
    pytest.importorskip("llguidance")
    schema = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}

    async def test(service):
        object.__setattr__(service.engine.info, "end_ids", (1,))
        with pytest.raises(OpenAIError, match="nested more than 254 deep") as told:
            await whole(service, prompt=[5], response_format={"type": "json_schema", "json_schema": {"schema": schema}})
        assert told.value.status == 400

    run(test)


def test_large_calls_are_noted_for_returning_memory():
    async def test(service):
        await whole(service, prompt=[5], max_tokens=2)
        assert not service.has_freed_much
        answer = await service.accept(json.dumps({"prompt": [5] * 3000, "max_tokens": 2, "stop": "x" * 4000}).encode(),
                                      False)
        assert service.has_freed_much
        service.has_freed_much = False
        await answer.whole()
        assert service.has_freed_much
        service.has_freed_much = False
        await whole(service, prompt=[5], max_tokens=1001, ignore_eos=True)
        assert service.has_freed_much

    run(test)


def test_prompts_share_the_objects_of_their_ids():
    async def test(service):
        text = "Emma walked home. " * 100
        for prompt, expected in (([4000] * 3, [4000] * 3), (text, TOKENIZER.encode(text).ids)):
            _, (ids,) = service._read(json.dumps({"prompt": prompt}).encode(), False)
            assert ids == expected and len(set(map(id, ids))) == len(set(ids)) < len(ids)
        assert service._shared([5, 4096]) == [5, 4096]           # the engine refuses an id outside the vocabulary

    run(test)


def test_a_whole_answer_is_sent_in_pieces_and_noted_for_returning_memory_at_its_end():
    responses = pytest.importorskip("batch_manager.extras.openai.responses")
    body, sent, ended = bytes(range(256)) * 5000, [], []

    async def send(message):
        assert not ended
        sent.append(message)

    answer = SimpleNamespace(cancel=lambda: ended.append(len(sent)))
    asyncio.run(responses.WholeAnswer(body, answer, {"x-request-id": "a"})({"type": "http"}, None, send))
    start, *pieces = sent
    assert (b"content-length", b"%d" % len(body)) in start["headers"] and (b"x-request-id", b"a") in start["headers"]
    assert b"".join(piece["body"] for piece in pieces) == body and not pieces[-1].get("more_body")
    assert max(len(piece["body"]) for piece in pieces) <= responses.LARGEST_PIECE and ended == [len(sent)]


def test_nothing_is_compiled_by_requests_after_the_start(monkeypatch, tmp_path):
    application = pytest.importorskip("batch_manager.extras.openai.application")
    guided_decoding = pytest.importorskip("batch_manager.extras.guided_decoding")
    pytest.importorskip("llguidance")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{# <tool_call></tool_call><think> #}")
    tool = {"type": "function", "function": {"name": "f"}}
    further = ({}, {"response_format": {"type": "json_object"}}, {"tools": [tool], "max_thinking_tokens": 1},
               {"tools": [tool], "tool_choice": "required", "separate_reasoning": False})

    async def test(service):
        async def start(*_, **__):
            object.__setattr__(service.engine.info, "end_ids", (1,))
            return service.engine

        monkeypatch.setattr(application, "AsyncEngine", SimpleNamespace(start=start))
        app = application.make_app(str(tmp_path))
        async with app.router.lifespan_context(app):
            monkeypatch.setattr(guided_decoding, "GuidedDecoding", None)
            caches = folder_template, _fast_kind, _machine
            compiled = [cache.cache_info().misses for cache in caches]
            modules = set(sys.modules)
            for more in further:
                await whole(app.state.service, True, messages=[{"role": "user", "content": "Who?"}], max_tokens=4,
                            **more)
            assert [cache.cache_info().misses for cache in caches] == compiled
            assert not [name for name in sys.modules.keys() - modules if not name.startswith("batch_manager.decoding")]

    run(test, folder=tmp_path)


def test_all_threads_of_the_server_allocate_from_one_heap(tmp_path):
    """malloc_trim does not return the free end of the others."""
    application = pytest.importorskip("batch_manager.extras.openai.application")
    if not hasattr(ctypes.CDLL(None), "malloc_info"):
        pytest.skip("the C library is not glibc")
    program = f"""
import ctypes, sys, threading
{inspect.getsource(application.use_one_heap)}
M_ARENA_MAX = {application.M_ARENA_MAX}
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p
use_one_heap()
for _ in range(4):
    threads = [threading.Thread(target=bytearray, args=[100_000]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
file = ctypes.c_void_p(library.fopen(sys.argv[1].encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
"""                                          # an import of the application would take seconds
    subprocess.run([sys.executable, "-c", program, tmp_path / "heaps"], check=True, timeout=120)
    assert (tmp_path / "heaps").read_text().count("<heap nr=") == 1


def test_the_garbage_collector_runs_after_large_calls_while_few_objects_live(monkeypatch):
    """Freed objects that the interpreter keeps for later use would keep whole arenas. A long run stops all streams."""
    application = pytest.importorskip("batch_manager.extras.openai.application")
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the C library is not glibc")
    monkeypatch.setattr(application, "SECONDS_BETWEEN_TRIMS", 0)
    live, collected = [None] * application.FEW_OBJECTS, []
    monkeypatch.setattr(application, "gc", SimpleNamespace(get_objects=lambda: live,
                                                           collect=lambda: collected.append(len(live))))

    async def test():
        service = SimpleNamespace(has_freed_much=True)
        trimming = asyncio.ensure_future(application.trim_after_large_calls(service))
        for _ in range(10):
            await asyncio.sleep(0)
        assert service.has_freed_much and not collected
        live.pop()
        while service.has_freed_much:
            await asyncio.sleep(0)
        trimming.cancel()
        assert collected == [application.FEW_OBJECTS - 1]

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("fields", [
    '"messages":[{"role":"user","content":"a","more":["of","the body"]}]',
    '"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"more":["of","the body"]}',
    '"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_object","schema":'
    '{"properties":{"a":{"enum":["of","the body"]}}}}'])
def test_an_answer_does_not_keep_the_objects_of_its_body(fields, tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}{{ more }}")

    async def test(service):
        service._held_calls.compiled = lambda parsed: None       # the scripted model has no end id
        answer = await service.accept(b"{%s}" % fields.encode(), True)

        def kept():
            gc.collect()
            return [each for each in gc.get_objects() if type(each) is list and each[1:] == ["the body"]]
        for _ in range(500):                             # the thread that read the body may not have let go of it yet
            if not kept():
                break
            await asyncio.sleep(0.01)
        assert not kept()
        answer.cancel()

    run(test, folder=tmp_path / "model")


def test_a_bias_of_the_whole_vocabulary_is_made_once_for_all_texts(monkeypatch):
    made, bias = [], Sampling.bias
    monkeypatch.setattr(Sampling, "bias", lambda sampling, size: made.append(size) or bias(sampling, size))
    seen = []

    async def test(service):
        streams = service.engine.streams
        service.engine.streams = lambda requests: streams([seen.append(request[0]) or request for request in requests])
        body = {"prompt": [[5], [6]], "n": 2, "max_tokens": 2, "logit_bias": {"7": -100, "8": 2.5}}
        assert len((await whole(service, **body))["choices"]) == 4
        assert made == [4096] and [tensors["embedding_bias"][7:9].tolist() for tensors in seen] == [[-100, 2.5]] * 4
        with pytest.raises(OpenAIError, match="logit_bias of token 7 is not a number in the valid range") as raised:
            await whole(service, prompt=[5], logit_bias={"7": 101})
        assert raised.value.status == 400

    run(test)


def test_the_documented_limits_are_those_of_the_server():
    root = MODEL.parents[2]
    page = (root / "docs" / "servers.md").read_text(encoding="utf-8")
    responses = pytest.importorskip("batch_manager.extras.openai.responses")
    params = TrtGptModelOptionalParams()
    assert f"413 above {responses.LARGEST_BODY:,} bytes" in page
    assert f"(`--max-queued-requests`, {params.max_queued_requests:,})" in page
    assert f"`max_queued_tokens` tokens ({params.max_queued_tokens:,})" in page
    assert f"`max_bytes_in_flight` bytes ({params.max_bytes_in_flight >> 30} GiB)" in page
    with pytest.raises(OpenAIError, match="max_completion_tokens"):
        read_body(b'{"prompt": "x", "max_completion_tokens": 3}', is_chat=False)
    fields = (root / "examples" / "openai_server.md").read_text(encoding="utf-8")
    assert "| `max_completion_tokens` | chats only: " in fields

    async def test(service):
        (choice,) = (one := await whole(service, prompt=[5], max_tokens=9000, ignore_eos=True))["choices"]
        assert choice["finish_reason"] == "length" and one["usage"]["total_tokens"] == service.engine.info.max_seq_len

    run(test, max_seq_len=100)
