"""The Responses API and Anthropic's Messages API: thin forms of chats, each with its official client."""

import asyncio
import json

import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("llguidance")

from tests.extras.calling_model import folder_of, run  # noqa: E402
from tests.extras.calling_server import app_of  # noqa: E402

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False}
CALL = '<think>Hm.</think>Let me see. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def says(prompt):
    return "<think>So.</think>It rains." if "tool: rain" in prompt else CALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("models"))


def client_of(service):
    transport = httpx.ASGITransport(app_of(service))
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)


def test_the_tool_loop_of_the_responses_api(folder):
    tool = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}

    async def test(service, caller):
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=client_of(service))
        for is_streaming in (False, True):
            items = [{"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}]
            for number in range(2):
                kinds = []
                if is_streaming:
                    async with client.responses.stream(model="caller", input=items, tools=[tool]) as stream:
                        kinds = [event.type async for event in stream]
                        response = await stream.get_final_response()
                    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
                    assert "response.output_text.delta" in kinds
                    assert ("response.function_call_arguments.done" in kinds) == (number == 0)
                else:
                    response = await client.responses.create(model="caller", input=items, tools=[tool])
                assert response.status == "completed" and response.usage.output_tokens_details.reasoning_tokens > 0
                items += response.output
                reasoning = [item.content[0].text for item in response.output if item.type == "reasoning"]
                calls = [item for item in response.output if item.type == "function_call"]
                assert reasoning == [["Hm.", "So."][number]] and len(calls) == 1 - number
                for call in calls:
                    assert json.loads(call.arguments) == {"city": "Köln"} and response.output_text == "Let me see."
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
            assert response.output_text == "It rains."

    run(test, says, folder)


def test_the_tool_loop_of_the_messages_api(folder):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed: its client was not tried")
    tool = {"name": "get_weather", "input_schema": CITY, "description": "d"}

    async def test(service, caller):
        http = client_of(service)
        async with http:
            client = anthropic.AsyncAnthropic(base_url="http://test", api_key="x")
            for is_streaming in (False, True):
                messages = [{"role": "user", "content": [{"type": "text", "text": "Rain?"}]}]
                for number in range(2):
                    body = {"model": "caller", "max_tokens": 200, "messages": messages, "tools": [tool],
                            "system": "Be."}
                    answer = await http.post("/v1/messages", json={**body, "stream": is_streaming})
                    message = (from_events(answer.text) if is_streaming else
                               anthropic.types.Message.model_validate(answer.json()))
                    kinds = [block.type for block in message.content]
                    assert kinds == ["thinking", "text", "tool_use"][: 3 - number]
                    assert message.stop_reason == ["tool_use", "end_turn"][number] and message.usage.output_tokens > 5
                    messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
                    if number == 0:
                        assert message.content[2].input == {"city": "Köln"}
                        messages.append({"role": "user", "content": [
                            {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "rain"}]})
                assert message.content[1].text == "It rains."
            await client.close()

    def from_events(text):
        """Let the official client's accumulator join the events."""
        from anthropic._models import construct_type_unchecked
        from anthropic.lib.streaming._messages import accumulate_event

        snapshot, unfinished = None, {}
        for line in text.split("\n"):
            if line.startswith("data: "):
                event = construct_type_unchecked(value=json.loads(line[6:]),
                                                 type_=anthropic.types.RawMessageStreamEvent)
                snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=unfinished)
        return snapshot

    run(test, says, folder)


@pytest.mark.parametrize("path, body, param", [
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("responses", {"background": True}, "background"),
    ("responses", {"input": [{"type": "image"}]}, "input[0].type"), ("responses", {"other": 1}, "other"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ("messages", {"max_tokens": None}, "max_tokens"), ("messages", {"tools": [{"type": "bash"}]}, "tools[0].type"),
    ("messages", {"thread": {"type": "create"}}, "thread"), ("messages", {"other": 1}, "other"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ("messages", {"tool_choice": {"type": "x"}}, "tool_choice.type"),
    ("messages", {"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
])
def test_what_is_not_built_is_refused_by_name(folder, path, body, param):
    async def test(service, caller):
        given = {"responses": {"input": "x"}, "messages": {"messages": [{"role": "user", "content": "x"}],
                                                           "max_tokens": 5}}[path]
        async with client_of(service) as client:
            answer = await client.post(f"/v1/{path}", json={**given, **body})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert param in error["message"]
        assert error["type"] == "invalid_request_error" and ("param" in error) == (path == "responses")

    run(test, "x", folder)


def test_a_value_of_another_type_is_read_or_refused(folder):
    """In each place of a body of each form, and of its prompt."""
    from batch_manager import BatchManagerError
    from batch_manager.extras.openai.errors import OpenAIError
    from batch_manager.extras.openai.responses import CHATS, MESSAGES, RESPONSES

    function = {"name": "f", "description": "d", "parameters": CITY, "strict": True}
    parts = [{"type": "text", "text": "x", "cache_control": {}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bath"}'}}
    bodies = {CHATS: {
        "messages": [{"role": "user", "content": parts}, {
            "role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x"}],
        "tools": [{"type": "function", "function": function}], "stream": True,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"x": 1},
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "f"}}]}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, "stop": ["x"],
    }, RESPONSES: {
        "instructions": "Be.", "include": [], "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]}],
        "tools": [{"type": "function", **function}], "text": {"format": {
            "type": "json_schema", "name": "x", "schema": {}}}, "reasoning": {"effort": "low", "summary": "auto"},
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "metadata": {"a": "b"}, "max_output_tokens": 5, "chat_template_kwargs": {"x": 1}, "stop": ["x"],
    }, MESSAGES: {
        "max_tokens": 5, "system": parts, "stop_sequences": ["x"], "messages": [{"role": "user", "content": parts}, {
            "role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""},
                                             {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "x"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": parts}]}],
        "tools": [{"name": "f", "input_schema": CITY}], "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5}, "chat_template_kwargs": {"x": 1},
        "output_config": {"effort": "low", "format": {"schema": {}}},
    }}

    def changed(value):
        """Yield the value with each of its parts replaced by values of other types."""
        yield from (None, 5, 1.5, True, "tools", [], [5], [[]], {}, {"type": []}, {"tools": [1], "messages": 5})
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            for other in changed(value[key]):
                copy = value.copy()
                copy[key] = other
                yield copy

    async def test(service, caller):
        for form, body in bodies.items():
            service._read(json.dumps(body).encode(), True, form.read)
            for other in changed(body):
                try:
                    service._read(json.dumps(other).encode(), True, form.read)
                except (OpenAIError, BatchManagerError):
                    pass
                except Exception as error:
                    raise AssertionError(f"{form.read}: {other}") from error

    run(test, "x", folder)


def test_prompts_are_counted_as_they_are_in_answers(folder):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed: its client was not tried")
    tool = {"name": "get_weather", "input_schema": CITY}

    async def test(service, caller):
        async with client_of(service) as http:
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http)
            asked = {"model": "caller", "input": "Rain?", "instructions": "Be.",
                     "tools": [{"type": "function", "name": "f", "parameters": CITY}]}
            response = await client.responses.create(**asked)
            assert (await client.responses.input_tokens.count(**asked)).input_tokens == response.usage.input_tokens > 20
            body = {"model": "caller", "messages": [{"role": "user", "content": "Rain?"}], "tools": [tool]}
            counted = await http.post("/v1/messages/count_tokens", json=body)
            answer = await http.post("/v1/messages", json={**body, "max_tokens": 5})
            used = anthropic.types.Message.model_validate(answer.json()).usage
            assert anthropic.types.MessageTokensCount.model_validate(counted.json()).input_tokens == (
                used.input_tokens + used.cache_read_input_tokens) > 20
            wrong = await http.post("/v1/messages/count_tokens", json={**body, "x": 1})
            assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
            assert len(caller.prompts) == 2

    run(test, says, folder)


@pytest.mark.parametrize("method, path", [
    ("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel"), ("DELETE", "/v1/chat/completions/x"),
    ("GET", "/v1/chat/completions"), ("POST", "/v1/messages/batches"), ("POST", "/v1/conversations")])
def test_what_would_be_stored_is_refused_with_the_reason(folder, method, path):
    async def test(service, caller):
        async with client_of(service) as client:
            answer = await client.request(method, path)
        assert answer.status_code in (404, 405) and "nothing is stored" in answer.json()["error"]["message"]
        assert ("type" in answer.json()) == path.startswith("/v1/messages")      # Anthropic's form of an error

    run(test, "x", folder)


def test_an_output_that_is_cut_off_and_one_that_a_stop_string_ends(folder):
    async def test(service, caller):
        async with client_of(service) as client:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
            assert (await client.post("/v1/messages", json=body)).json()["stop_reason"] == "max_tokens"
            body = {**body, "max_tokens": 90, "stop_sequences": ["see"]}
            answer = (await client.post("/v1/messages", json=body)).json()
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "see")
            answer = (await client.post("/v1/responses", json={"input": "x", "max_output_tokens": 3})).json()
            assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})

    run(test, says, folder)


def test_a_client_that_goes_away_stops_its_request(folder):
    async def test(service, caller):
        from batch_manager.extras.openai.responses import MESSAGES, RESPONSES

        for form, body in ((RESPONSES, {"input": "x"}),
                           (MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5000})):
            answer = await service.accept(json.dumps({**body, "stream": True}).encode(), True, form.read)
            shaped = form.answer(answer, answer.form)
            async for _ in shaped.events():
                shaped.cancel()
                break
            for _ in range(2000):
                if not service.engine.health()["active_requests"]:
                    break
                await asyncio.sleep(0.002)
            assert not service.engine.health()["active_requests"]

    run(test, "word " * 3000, folder)
