"""Clients run their own tool loops against the OpenAI server, in front of a scripted model that calls.

    python tests/campaigns/tool_clients.py [--only NAME ...] [--python INTERPRETER] [--node FOLDER]

The clients are those that are installed: in this environment, for --python (LlamaIndex, llm, the Agents SDK,
smolagents, Haystack, AutoGen, Semantic Kernel), and in node_modules of --node (openai, ai, @ai-sdk/openai-compatible,
zod). Each loop has to call the tool, pass its result back, and return the model's last text. Results are recorded in
tests/CAMPAIGNS.md.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.extras.calling_model import folder_of
from tests.extras.calling_server import serving

WEATHER = '''
def get_weather(city: str, days: int) -> str:
    """Tell the weather."""
    calls.append((city, days))
    return f"rain in {city} for {days} days"
calls = []
'''
PERSON = '''
from pydantic import BaseModel
class Person(BaseModel):
    name: str
    age: int
'''
DONE = '''
assert calls and set(calls) == {("Bath", 7)}, calls
assert "rain in Bath for 7 days" in text, text
'''
# name -> program. `url` is the address of the server.
HERE = {
    "openai: completions": WEATHER + '''
import json, openai
client = openai.OpenAI(base_url=url + "/v1", api_key="x")
tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city", "days"],
    "additionalProperties": False}, "strict": True}}
for is_streaming in (False, True):
    messages = [{"role": "user", "content": "Rain?"}]
    while True:
        if is_streaming:
            with client.chat.completions.stream(model="caller", messages=messages, tools=[tool]) as stream:
                for _ in stream: pass
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="caller", messages=messages, tools=[tool]).choices[0].message
        if not message.tool_calls: break
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    text = message.content
''' + DONE + PERSON + '''
parsed = client.chat.completions.parse(model="caller", messages=messages[:1],
                                       tools=[openai.pydantic_function_tool(Person)])
assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Person(name="Bath", age=7)
''',
    "openai: responses": WEATHER + '''
import json, openai
client = openai.OpenAI(base_url=url + "/v1", api_key="x")
tool = {"type": "function", "name": "get_weather", "strict": True, "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city", "days"],
    "additionalProperties": False}}
for is_streaming in (False, True):
    items = [{"role": "user", "content": "Rain?"}]
    while True:
        if is_streaming:
            with client.responses.stream(model="caller", input=items, tools=[tool]) as stream:
                for _ in stream: pass
                response = stream.get_final_response()
        else:
            response = client.responses.create(model="caller", input=items, tools=[tool])
        items += response.output
        called = [item for item in response.output if item.type == "function_call"]
        if not called: break
        for item in called:
            items.append({"type": "function_call_output", "call_id": item.call_id,
                          "output": get_weather(**json.loads(item.arguments))})
    text = response.output_text
''' + DONE,
    "anthropic": '''
import anthropic
calls = []
client = anthropic.Anthropic(base_url=url, api_key="x")
@anthropic.beta_tool
def get_weather(city: str, days: int) -> str:
    """Tell the weather."""
    calls.append((city, days))
    return f"rain in {city} for {days} days"
for is_streaming in (False, True):
    runner = client.beta.messages.tool_runner(model="caller", max_tokens=500, tools=[get_weather], stream=is_streaming,
                                              messages=[{"role": "user", "content": "Rain?"}])
    for each in runner:
        message = each.get_final_message() if is_streaming else each
    text = "".join(block.text for block in message.content if block.type == "text")
''' + DONE,
    "langchain: bind_tools": WEATHER + '''
from langchain_openai import ChatOpenAI
from langchain_core.messages import HumanMessage, ToolMessage
for options in ({}, {"use_responses_api": True}):
    model = ChatOpenAI(base_url=url + "/v1", api_key="x", model="caller", **options).bind_tools([get_weather])
    for is_streaming in (False, True):
        messages = [HumanMessage("Rain?")]
        while True:
            if is_streaming:
                message = None
                for chunk in model.stream(messages):
                    message = chunk if message is None else message + chunk
            else:
                message = model.invoke(messages)
            if not message.tool_calls: break
            messages.append(message)
            for call in message.tool_calls:
                messages.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
        text = message.text if isinstance(message.text, str) else message.text()
''' + DONE + PERSON + '''
found = ChatOpenAI(base_url=url + "/v1", api_key="x", model="caller").with_structured_output(
    Person, method="function_calling").invoke("Who?")
assert found == Person(name="Bath", age=7)
''',
    "instructor": PERSON + '''
import instructor, openai
client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="x"))
for is_partial in (False, True):
    made = client.chat.completions.create_partial if is_partial else client.chat.completions.create
    found = made(model="caller", response_model=Person, messages=[{"role": "user", "content": "Who?"}])
    found = list(found)[-1] if is_partial else found
    assert (found.name, found.age) == ("Bath", 7)
''',
    "pydantic-ai": WEATHER + PERSON + '''
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
provider = OpenAIProvider(base_url=url + "/v1", api_key="x")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    text = Agent(kind("caller", provider=provider), tools=[get_weather]).run_sync("Rain?").output
    assert Agent(kind("caller", provider=provider), output_type=Person).run_sync("Who?").output == Person(
        name="Bath", age=7)
''' + DONE,
}
ELSEWHERE = {
    "LlamaIndex": WEATHER + '''
import asyncio
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
llm = OpenAILike(model="caller", api_base=url + "/v1", api_key="x", is_chat_model=True, is_function_calling_model=True)
async def main():
    return str(await FunctionAgent(tools=[get_weather], llm=llm).run("Rain?"))
text = asyncio.run(main())
''' + DONE,
    "llm -T": '''
import os, pathlib, subprocess, sys, tempfile
home = tempfile.mkdtemp()
pathlib.Path(home, "extra-openai-models.yaml").write_text(
    f"- model_id: caller\\n  model_name: caller\\n  api_base: {url}/v1\\n  supports_tools: true\\n")
pathlib.Path(home, "t.py").write_text("""
def get_weather(city: str, days: int) -> str:
    'Tell the weather.'
    return f"rain in {city} for {days} days"
""")
for more in ([], ["--no-stream"]):
    command = [sys.executable, "-m", "llm", "-m", "caller", "--functions", home + "/t.py", "--key", "x", *more, "Rain?"]
    text = subprocess.run(command, env={**os.environ, "LLM_USER_PATH": home}, capture_output=True, text=True)
    assert "rain in Bath for 7 days" in text.stdout, (text.stdout, text.stderr)
text = subprocess.run([sys.executable, "-m", "llm", "-m", "caller", "-T", "llm_version", "--key", "x", "Which?"],
                      env={**os.environ, "LLM_USER_PATH": home}, capture_output=True, text=True)
assert "It is 0." in text.stdout or "It is 1." in text.stdout, (text.stdout, text.stderr)
''',
    "Agents SDK": '''
import openai
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)
calls = []
@function_tool
def get_weather(city: str, days: int) -> str:
    """Tell the weather."""
    calls.append((city, days))
    return f"rain in {city} for {days} days"
client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="x")
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    agent = Agent("a", tools=[get_weather], model=kind("caller", client))
    text = Runner.run_sync(agent, "Rain?").final_output
''' + DONE,
    "smolagents": '''
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
calls = []
@tool
def get_weather(city: str, days: int) -> str:
    """Tell the weather.

    Args:
        city: a city
        days: number of days
    """
    calls.append((city, days))
    return f"rain in {city} for {days} days"
for is_streaming in (False, True):
    model = OpenAIServerModel("caller", api_base=url + "/v1", api_key="x")
    agent = ToolCallingAgent([get_weather], model, stream_outputs=is_streaming, max_steps=3)
    text = agent.run("Rain?")
''' + DONE,
    "Haystack": '''
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
''' + WEATHER + '''
for callback in (None, lambda chunk: None):
    model = OpenAIChatGenerator(model="caller", api_base_url=url + "/v1", api_key=Secret.from_token("x"))
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(get_weather)], streaming_callback=callback)
    text = agent.run(messages=[ChatMessage.from_user("Rain?")])["messages"][-1].text
''' + DONE,
    "AutoGen": '''
import asyncio
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
''' + WEATHER + '''
kind = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}
async def main():
    for is_streaming in (False, True):
        client = OpenAIChatCompletionClient(model="caller", base_url=url + "/v1", api_key="x", model_info=kind)
        agent = AssistantAgent("a", model_client=client, tools=[get_weather], reflect_on_tool_use=True,
                               model_client_stream=is_streaming)
        text = (await agent.run(task="Rain?")).messages[-1].content
    return text
text = asyncio.run(main())
''' + DONE,
    "Semantic Kernel": '''
import asyncio, openai
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function
calls = []
class Weather:
    @kernel_function(description="Tell the weather.")
    def get_weather(self, city: str, days: int) -> str:
        calls.append((city, days))
        return f"rain in {city} for {days} days"
async def main():
    service = OpenAIChatCompletion("caller", async_client=openai.AsyncOpenAI(base_url=url + "/v1", api_key="x"))
    kernel = Kernel(services=service)
    kernel.add_plugin(Weather(), "w")
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())
    history = ChatHistory()
    history.add_user_message("Rain?")
    found = await service.get_chat_message_content(history, settings, kernel=kernel)
    pieces = [str(each) async for each in service.get_streaming_chat_message_content(history, settings, kernel=kernel)]
    return str(found) + "".join(pieces)
text = asyncio.run(main())
''' + DONE,
}
JAVASCRIPT = {
    "openai: runTools (JavaScript)": '''
import OpenAI from "openai";
const client = new OpenAI({baseURL: url + "/v1", apiKey: "x"});
for (const stream of [false, true]) {
  let calls = [];
  const runner = client.chat.completions.runTools({
    model: "caller", stream, messages: [{role: "user", content: "Rain?"}],
    tools: [{type: "function", function: {
      name: "get_weather", parse: JSON.parse, description: "d",
      function: ({city, days}) => { calls.push([city, days]); return `rain in ${city} for ${days} days`; },
      parameters: {type: "object", properties: {city: {type: "string"}, days: {type: "integer"}}}}}]});
  const text = await runner.finalContent();
  if (JSON.stringify(calls) !== '[["Bath",7]]' || !text.includes("rain in Bath for 7 days")) throw new Error(text);
}
''',
    "AI SDK": '''
import {generateText, streamText, tool, stepCountIs} from "ai";
import {createOpenAICompatible} from "@ai-sdk/openai-compatible";
import {createOpenAI} from "@ai-sdk/openai";
import {z} from "zod";
const own = createOpenAI({baseURL: url + "/v1", apiKey: "x"});
const models = [createOpenAICompatible({name: "x", baseURL: url + "/v1", apiKey: "x"})("caller"), own.chat("caller"),
                own.responses("caller")];
for (const model of models) {
  for (const streams of [false, true]) {
    let calls = [];
    const options = {
      model, prompt: "Rain?", providerOptions: {openai: {store: false}}, stopWhen: stepCountIs(5),
      tools: {get_weather: tool({
      description: "d", inputSchema: z.object({city: z.string(), days: z.number().int()}),
      execute: async ({city, days}) => { calls.push([city, days]); return `rain in ${city} for ${days} days`; }})}};
    const text = streams ? await streamText(options).text : (await generateText(options)).text;
    if (JSON.stringify(calls) !== '[["Bath",7]]' || !text.includes("rain in Bath for 7 days")) throw new Error(text);
  }
}
''',
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--python", default=sys.executable, help="interpreter with the clients that need their own")
    parser.add_argument("--node", default=".", help="folder with node_modules")
    options = parser.parse_args()
    runs = [*((name, [sys.executable], "", text) for name, text in HERE.items()),
            *((name, [options.python], "", text) for name, text in ELSEWHERE.items()),
            *((name, ["node", "--input-type=module", "-e"], "const ", text) for name, text in JAVASCRIPT.items())]
    wrong = ran = 0
    with tempfile.TemporaryDirectory() as folder, serving(folder_of(folder)) as url:
        for name, command, declares, text in runs:
            if options.only and name not in options.only:
                continue
            program = f"{declares}url = '{url}'\n{text}"
            if not declares:                     # from a file: smolagents reads the source of a tool
                (file := Path(folder) / "client.py").write_text(program)
                program = str(file)
            ended = subprocess.run([*command, program], capture_output=True, text=True, cwd=options.node, timeout=300)
            is_absent = "ModuleNotFoundError" in ended.stderr or "ERR_MODULE_NOT_FOUND" in ended.stderr
            if is_absent:
                print(f"{name}: not installed: {ended.stderr.strip().splitlines()[-1][:100]}")
                continue
            ran, wrong = ran + 1, wrong + bool(ended.returncode)
            print(f"{name}: {'WRONG' if ended.returncode else 'done'}", flush=True)
            if ended.returncode:
                print((ended.stdout + ended.stderr)[-3000:], flush=True)
    print(f"{ran} clients, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
