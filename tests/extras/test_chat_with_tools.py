"""LLM.chat and AsyncLLM.chat return calls of tools, and reasoning, as values."""

import asyncio

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from batch_manager import FinishReason, InvalidRequestError, Parts  # noqa: E402
from batch_manager.extras.async_llm import AsyncLLM  # noqa: E402
from batch_manager.extras.llm import LLM  # noqa: E402
from tests.extras.calling_model import TEMPLATE, Caller, backend_of, folder_of  # noqa: E402

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}
CALL = ('<think>Hm.</think>Let me see. <tool_call>\n'
        '{"name": "get_weather", "arguments": {"city": "Köln 😀"}}\n</tool_call>')
MESSAGES = [{"role": "user", "content": "Rain?"}]


def says(prompt):
    return "It rains." if "tool: rain" in prompt else CALL


def check(first):
    (call,) = first.tool_calls
    assert (call.name, call.arguments, call.is_whole) == ("get_weather", {"city": "Köln 😀"}, True)
    assert (first.text, first.reasoning, first.finish_reason) == ("Let me see.", "Hm.", FinishReason.END_ID)
    return [*MESSAGES, {"role": "assistant", "content": first.text, "tool_calls": [call.message()]},
            {"role": "tool", "tool_call_id": call.identity, "content": "rain"}]


def test_a_loop_with_threads_and_with_coroutines(tmp_path):
    folder = folder_of(tmp_path)
    with LLM(folder, parts=Parts(backend=backend_of(Caller(folder, says)))) as llm:
        answer = llm.chat(check(llm.chat(MESSAGES, tools=[TOOL])), tools=[TOOL])
        assert (answer.text, answer.tool_calls, answer.error) == ("It rains.", [], None)
        plain = llm.chat(MESSAGES)
        assert plain.text == CALL and plain.tool_calls == [] and plain.reasoning == ""
        cut = llm.chat(MESSAGES, tools=[TOOL], max_tokens=45)
        (call,) = cut.tool_calls
        assert cut.finish_reason is FinishReason.LENGTH and not call.is_whole
        with pytest.raises(ValueError):
            _ = call.arguments
        for wrong in (5, "x", [5], [None]):
            with pytest.raises(InvalidRequestError, match="tools is, or has, an object of type"):
                llm.chat(MESSAGES, tools=wrong)

    async def loop():
        parts = Parts(backend=backend_of(Caller(folder, says)))
        async with await AsyncLLM.start(folder, parts=parts) as llm:
            answer = await llm.chat(check(await llm.chat(MESSAGES, tools=[TOOL])), tools=[TOOL])
            assert (answer.text, answer.tool_calls) == ("It rains.", [])
    asyncio.run(loop())


def test_calls_in_an_unknown_format_stay_in_the_text(tmp_path):
    folder = folder_of(tmp_path, TEMPLATE.replace("tool_call>", "c>"))
    with LLM(folder, parts=Parts(backend=backend_of(Caller(folder, says)))) as llm:
        assert llm.chat(MESSAGES, tools=[TOOL]).text == CALL
