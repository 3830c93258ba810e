"""Tool calls and reasoning in answers of the OpenAI service, with a scripted model."""

import asyncio
import json
import sys

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("llguidance")
pytest.importorskip("torch")

from batch_manager import ConfigError  # noqa: E402
from batch_manager.extras.openai import OpenAIError  # noqa: E402
from batch_manager.extras.openai.application import make_app  # noqa: E402
from tests.extras.calling_model import TEMPLATE, chunks, folder_of, joined, run, whole  # noqa: E402

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time"}}


def call(name="get_weather", **arguments):
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)}\n</tool_call>'


def without_ids(message):
    """Return the message with its calls' ids checked and removed."""
    ids = [each.pop("id") for each in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) and all(each.startswith("call_") for each in ids)
    return message


def called(message):
    return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in message["tool_calls"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("models"))


def test_a_stream_of_calls_is_the_whole_in_pieces(folder):
    text = "<think>So 😀.</think>\n\nLet me see. " + call(city="Köln 😀") + "\n" + call("get_time")

    async def test(service, caller):
        body = {"tools": [WEATHER, TIME]}
        one, parts = await whole(service, **body), await chunks(service, **body, stream_options={"include_usage": True})
        (choice,) = one["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
        assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "So 😀."
        assert called(choice["message"]) == [("get_weather", {"city": "Köln 😀"}), ("get_time", {})]
        message, reason = joined(parts)
        assert reason == "tool_calls"
        assert without_ids(message) == without_ids(choice["message"])
        tokens = [one["usage"], parts[-1]["usage"]]
        reasoning = len(caller.tokenizer.encode("So 😀.</think>", add_special_tokens=False).ids)
        for usage in tokens:
            assert 3 < usage["completion_tokens_details"]["reasoning_tokens"] <= reasoning + 1
            assert usage["completion_tokens"] == len(caller.tokenizer.encode(text, add_special_tokens=False).ids)

    run(test, text, folder)


def test_tools_change_nothing_of_a_text(folder):
    async def test(service, caller):
        for body in ({}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}):
            (choice,) = (await whole(service, **body))["choices"]
            assert choice == {"index": 0, "message": {"role": "assistant", "content": " a < b. \n\n"}, "logprobs": None,
                              "finish_reason": "stop"}
            assert joined(await chunks(service, **body)) == ({"role": "assistant", "content": " a < b. \n\n"}, "stop")
        assert ["get_weather" in prompt for prompt in caller.prompts] == [False, True]    # none: as without tools

    run(test, " a < b. \n\n", folder)


def test_a_request_without_tools_runs_no_code_of_theirs(folder):
    """A chat without tools makes the calls that it makes in a service that knows no format."""
    async def test(service, caller):
        seen = set()
        service.prepare()

        def note(frame, event, _):
            if event == "call" and "/extras/" in frame.f_code.co_filename:
                seen.add(frame.f_code)

        async def codes(**body):
            seen.clear()
            sys.setprofile(note)
            try:
                await whole(service, **body)
                await chunks(service, **body)
            finally:
                sys.setprofile(None)
            return {code.co_qualname for code in seen if "tool_calls" in code.co_filename}

        assert await codes() == set()
        assert "CallParser.push" in await codes(tools=[WEATHER])

    run(test, "It rains.", folder, reasoning_parser="none")


def test_calls_and_results_reach_the_template(folder):
    """Arguments as a string and as an object, results as a string and as parts, reasoning under both of its names."""
    async def test(service, caller):
        for arguments, result, name in (('{"city": "Bath"}', "rain", "reasoning_content"),
                                        ({"city": "Bath"}, [{"type": "text", "text": "rain"}], "reasoning")):
            called = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
            await whole(service, tools=[WEATHER], messages=[
                {"role": "user", "content": "Rain?"},
                {"role": "assistant", "content": None, name: "Hm.", "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "call_1", "content": result}])
            prompt = caller.prompts[-1]
            assert "<think>Hm.</think><tool_call>" in prompt and '{"city": "Bath"}' in prompt and "tool: rain" in prompt

    run(test, "It rains.", folder)


def test_an_output_is_held_to_its_tools(folder):
    """The scripted model writes something else; the grammar chooses among what is allowed."""
    async def test(service, caller):
        body = {"tools": [WEATHER, TIME], "max_tokens": 60, "parallel_tool_calls": False}
        (choice,) = (await whole(service, **body, tool_choice={"type": "function", "function": {"name": "get_time"}})
                     )["choices"]
        assert called(choice["message"]) == [("get_time", {})] and choice["finish_reason"] == "tool_calls"
        (choice,) = (await whole(service, **body, tool_choice="required"))["choices"]
        assert choice["finish_reason"] in ("tool_calls", "length")
        assert {each["function"]["name"] for each in choice["message"]["tool_calls"]} <= {"get_weather", "get_time"}

    run(test, "I would rather not. " * 20, folder, reasoning_parser="none")


def test_a_free_output_is_held_from_the_begin_of_a_call_on(folder):
    async def test(service, caller):
        (choice,) = (await whole(service, tools=[WEATHER, TIME], max_tokens=80))["choices"]
        assert choice["message"]["content"] == "Let me see." and choice["finish_reason"] == "length"
        (name,) = {each["function"]["name"] for each in choice["message"]["tool_calls"]}
        assert name in ("get_weather", "get_time")

    run(test, "Let me see. " + call("no_such_tool", x=1), folder)


def test_a_call_that_is_cut_off_has_the_finish_reason_length(folder):
    async def test(service, caller):
        body = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}
        (choice,) = (await whole(service, **body))["choices"]
        assert choice["finish_reason"] == "length"
        message, reason = joined(await chunks(service, **body))
        assert reason == "length" and message["tool_calls"][0]["function"]["arguments"].startswith('{"city": "')

    run(test, call(city="very long " * 50), folder)


def test_an_output_that_ends_inside_a_call_does_not_ask_for_it(folder):
    text = call("get_time") + "\n" + call(city="Bath")

    async def test(service, caller):
        encoded = caller.tokenizer.encode(text, add_special_tokens=False)
        token = encoded.ids[encoded.char_to_token(text.index("Bath"))]
        body = {"tools": [WEATHER, TIME], "stop_token_ids": [token]}
        (choice,) = (await whole(service, **body))["choices"]
        assert choice["finish_reason"] == "stop" and len(choice["message"]["tool_calls"]) == 2
        assert joined(await chunks(service, **body))[1] == "stop"

    run(test, text, folder)


def test_one_call_ends_the_output_if_calls_are_not_parallel(folder):
    async def test(service, caller):
        for body in ({"parallel_tool_calls": False}, {"parallel_tool_calls": True}):
            (choice,) = (await whole(service, tools=[WEATHER, TIME], **body))["choices"]
            assert len(choice["message"]["tool_calls"]) == 1 + body["parallel_tool_calls"]
            message, reason = joined(await chunks(service, tools=[WEATHER, TIME], **body))
            assert without_ids(message) == without_ids(choice["message"]) and reason == "tool_calls"

    run(test, call(city="Bath") + "\n" + call("get_time"), folder)


def test_stop_strings_end_the_visible_text_alone(folder):
    text = "<think>STOP</think>One STOP two"

    async def test(service, caller):
        for read in (whole, chunks):
            answer = await read(service, stop=["STOP"])
            message, reason = joined(answer) if read is chunks else (answer["choices"][0]["message"],
                                                                    answer["choices"][0]["finish_reason"])
            assert (message["content"], message["reasoning"], reason) == ("One ", "STOP", "stop")

    run(test, text, folder)

    async def inside_arguments(service, caller):
        (choice,) = (await whole(service, tools=[WEATHER], stop=["STOP", "\n"]))["choices"]
        assert called(choice["message"]) == [("get_weather", {"city": "STOP"})]
        assert choice["finish_reason"] == "tool_calls"

    run(inside_arguments, call(city="STOP"), folder)


def test_reasoning_has_a_budget(folder):
    async def test(service, caller):
        for options in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
            answer = await whole(service, max_thinking_tokens=8, **options)
            message = answer["choices"][0]["message"]
            assert message["reasoning"].startswith("Well, well") and 5 < len(message["reasoning"]) < 60
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 8 + 8
            assert message["content"]

    def says(prompt):
        return ("" if prompt.endswith("<think>") else "<think>") + "Well, well. " * 30 + "</think>Yes."
    run(test, says, folder)


def test_reasoning_stays_in_the_text_if_asked_to(folder):
    async def test(service, caller):
        for body in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
            (choice,) = (await whole(service, **body))["choices"]
            assert choice["message"] == {"role": "assistant", "content": "<think>Hm.</think>Yes."}

    run(test, "<think>Hm.</think>Yes.", folder)


def test_a_response_format_holds_after_reasoning(folder):
    async def test(service, caller):
        (choice,) = (await whole(service, response_format={"type": "json_object"}))["choices"]
        assert choice["message"]["reasoning"] == "Hm." and json.loads(choice["message"]["content"]) == {"a": 1}

    run(test, '<think>Hm.</think>\n{"a": 1}', folder)


def test_a_response_format_holds_the_answer_beside_tools(folder):
    async def test(service, caller):
        body = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
        for question, expected in (("Rain?", None), ("Why?", {"a": 1})):
            (choice,) = (await whole(service, **body, messages=[{"role": "user", "content": question}]))["choices"]
            message = choice["message"]
            if expected is None:
                assert called(message) == [("get_weather", {"city": "Bath"})] and message["content"] is None
            else:
                assert json.loads(message["content"]) == expected and "tool_calls" not in message

    run(test, lambda prompt: call(city="Bath") if "Rain?" in prompt else '{"a": 1}', folder)


def test_formats_are_named_by_options_and_unknown_ones_are_refused(folder, tmp_path):
    async def test(service, caller):
        (choice,) = (await whole(service, tools=[WEATHER]))["choices"]
        assert called(choice["message"]) == [("get_weather", {"city": "Bath"})]

    run(test, '[get_weather(city="Bath")]', folder, tool_call_parser="pythonic", reasoning_parser="none")
    for options in ({"tool_call_parser": "x"}, {"reasoning_parser": "x"}):
        with pytest.raises(ConfigError) as told:
            make_app(str(folder), **options)
        assert next(iter(options)) in told.value.fact

    async def refused(service, caller):
        for body, param in (({"tools": [WEATHER]}, "tools"), ({"max_thinking_tokens": 5}, "max_thinking_tokens")):
            with pytest.raises(OpenAIError) as told:
                await whole(service, **body)
            assert told.value.status == 400 and told.value.param == param

    run(refused, "x", folder, tool_call_parser="none", reasoning_parser="none")
    plain = TEMPLATE.replace("<tool_call>", "<c>").replace("<think>", "<t>").replace("/think", "/t")
    run(refused, "x", folder_of(tmp_path, plain))


def test_marks_that_are_special_tokens(tmp_path):
    template = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]").replace("<think>", "[THINK]").replace(
        "</think>", "[/THINK]")
    folder = folder_of(tmp_path, template, ["[TOOL_CALLS]", "[THINK]", "[/THINK]", "<unused>"])

    async def test(service, caller):
        for body in ({}, {"stop": ["zzz"]}):
            (choice,) = (await whole(service, tools=[WEATHER], **body))["choices"]
            assert called(choice["message"]) == [("get_weather", {"city": "Bath"})]
            assert choice["message"]["content"] == "I see." and choice["message"]["reasoning"] == "Hm."
            assert len(choice["message"]["tool_calls"][0]["id"]) == 9        # as Mistral's templates demand
        (choice,) = (await whole(service, tools=[WEATHER], tool_choice="required", max_tokens=99))["choices"]
        assert choice["message"]["tool_calls"]

    run(test, '[THINK]Hm.[/THINK]I see.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bath"}}]', folder)


@pytest.mark.parametrize(("parser", "free", "schema", "held"), [
    ("hermes", call("f", a=[None]), {"properties": {"a": {"type": "array", "uniqueItems": True,
                                                          "contains": {"type": "null"}}}}, call(town=1)),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n[null]\n</parameter>\n</function>\n</tool_call>", {},
     "<tool_call>\n<function=get_weather>\n<parameter=town>\n1\n</parameter>\n</function>\n</tool_call>")])
def test_a_schema_that_no_grammar_holds(folder, parser, free, schema, held):
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    strict = {"type": "function", "function": {**odd["function"], "strict": True}}

    async def test(service, caller):
        (choice,) = (await whole(service, tools=[odd, WEATHER]))["choices"]
        assert called(choice["message"]) == [("f", {"a": [None]})]           # written freely
        for body in ({"tools": [odd], "tool_choice": "required"}, {"tools": [strict]}):
            with pytest.raises(OpenAIError) as told:
                await whole(service, **body)
            assert told.value.status == 400 and told.value.param == "tools"

    async def test_of_the_other(service, caller):
        (choice,) = (await whole(service, tools=[odd, WEATHER], max_tokens=60))["choices"]
        (found,) = choice["message"]["tool_calls"]
        assert found["function"]["arguments"].startswith('{"city"')

    run(test, free, folder, tool_call_parser=parser)
    run(test_of_the_other, held, folder, tool_call_parser=parser)


def test_arguments_of_100_kb_a_long_name_and_two_calls(tmp_path):
    """Over HTTP, whole and streamed, in each form of chats."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("starlette")
    from tests.extras.calling_server import app_of

    word, name = "word, 😀 and " * 65, "n" * 200     # one token each
    city = word * 130
    assert len(city) > 100_000
    text = call(name, city=city) + "\n" + call(name, city="")
    chat = {"messages": [{"role": "user", "content": "Rain?"}]}
    described = {"name": name, "parameters": CITY}
    bodies = {
        "chat/completions": {**chat, "tools": [{"type": "function", "function": described}]},
        "responses": {"input": "Rain?", "tools": [{"type": "function", **described}]},
        "messages": {**chat, "max_tokens": 5000, "tools": [{"name": name, "input_schema": CITY}]}}

    def read(path, answer):
        """Return (name, arguments) of each call."""
        if path == "chat/completions":
            return called(answer["choices"][0]["message"])
        if path == "responses":
            return [(item["name"], json.loads(item["arguments"])) for item in answer["output"]]
        return [(block["name"], block["input"]) for block in answer["content"]]

    def arguments(path, event):
        if path == "chat/completions":
            parts = [part for choice in event["choices"] for part in choice["delta"].get("tool_calls", ())]
            return "".join(part["function"]["arguments"] for part in parts)
        if event["type"] == "response.function_call_arguments.delta":
            return event["delta"]
        return event["delta"]["partial_json"] if event["type"] == "content_block_delta" else ""

    async def test(service, caller):
        transport = httpx.ASGITransport(app_of(service))

        async def check(path, body):
            answer = await client.post(f"/v1/{path}", json=body)
            if not body.get("stream"):
                assert read(path, answer.json()) == [(name, {"city": city}), (name, {"city": ""})]
                return
            events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
            assert "".join(arguments(path, event) for event in events) == "".join(
                json.dumps({"city": each}, ensure_ascii=False) for each in (city, ""))

        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            await asyncio.gather(*(check(path, {**body, "stream": is_streaming}) for path, body in bodies.items()
                                   for is_streaming in (False, True)))

    run(test, text, folder_of(tmp_path, words=[word, name]))


def test_a_call_can_be_cancelled_in_its_middle(folder):
    async def test(service, caller):
        body = {"messages": [{"role": "user", "content": "Rain?"}], "tools": [WEATHER], "stream": True}
        answer = await service.accept(json.dumps(body).encode(), True)
        async for event in answer.events():
            if b"arguments" in event:
                answer.cancel()
                break
        for _ in range(2000):
            if not service.engine.health()["active_requests"]:
                return
            await asyncio.sleep(0.002)
        raise AssertionError("the request is still alive")

    run(test, call(city="word " * 3000), folder)


def test_forced_calls_of_random_schemas_are_valid(tmp_path):
    """At temperature 1.5, in each format. More: `python tests/campaigns/tool_calls.py --schemas 2000`."""
    pytest.importorskip("jsonschema")
    from tests.extras import forced_calls

    counts, wrong = forced_calls.run(tmp_path, range(14), max_tokens=100)      # each format once
    assert not wrong and counts["valid calls"] > 5
