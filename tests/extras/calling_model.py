"""A scripted model that writes given texts, for tests of the OpenAI server's tools and reasoning."""

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path

import tokenizers

from batch_manager import Parts, TrtGptModelOptionalParams
from batch_manager.aio import AsyncEngine
from batch_manager.extras.openai import OpenAIService
from batch_manager.testing.scripted_backend import ScriptedBackend

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
BEGIN, END = 0, 1      # tokens: the prompt ends with <s>, and an output with </s>
# Qwen's way of tools, calls and reasoning, as far as the tests need it.
TEMPLATE = """{% for t in tools or [] %}{{ t | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% if m.reasoning_content %}<think>{{
m.reasoning_content }}</think>{% endif %}{% for c in m.tool_calls or [] %}<tool_call>
{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}<s>{% if enable_thinking %}</s><think>{% endif %}"""


def folder_of(parent, template=TEMPLATE, special=(), words=()):
    """Make a folder with a tokenizer, more special tokens and words in it, and a chat template."""
    folder = Path(parent) / "caller"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(MODEL / name, folder / name)
    if special or words:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(list(special))
        tokenizer.add_tokens(list(words))
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


class Caller:
    """The script of a ScriptedBackend.

    says      function (text of the prompt, number of the output from 0) -> text of the output
    """

    def __init__(self, folder, says):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.says, self._outputs, self.prompts = says, {}, []
        self._opening = self.tokenizer.encode("<think>", add_special_tokens=False).ids

    def __call__(self, history):
        at = history.index(BEGIN) + 1
        if history[at:at + 1] == [END]:              # the prompt has opened the reasoning
            at += 1 + len(self._opening)
        key = tuple(history[:at])
        if key not in self._outputs:
            prompt = self.tokenizer.decode(list(key), skip_special_tokens=False)
            self.prompts.append(prompt)
            text = self.says(prompt)
            self._outputs[key] = self.tokenizer.encode(text, add_special_tokens=False).ids
        output = self._outputs[key]
        return output[len(history) - at] if len(history) - at < len(output) else END


def backend_of(caller, max_seq_len=100_000):
    """Return the scripted backend of a Caller, with an end id."""
    backend = ScriptedBackend(vocab_size=caller.tokenizer.get_vocab_size(), max_seq_len=max_seq_len,
                              num_blocks=max_seq_len // 5, verify=False, script=caller)
    backend.info = dataclasses.replace(backend.info, end_ids=(END,))
    return backend


def run(test, says, folder, **options):
    """Run test(service, caller) on a new event loop. `options` are those of OpenAIService."""
    async def inside():
        caller = Caller(folder, says if callable(says) else lambda prompt: says)
        params = TrtGptModelOptionalParams(max_batch_size=8, max_queued_requests=16)
        async with await AsyncEngine.start(parts=Parts(backend=backend_of(caller)), optional_params=params,
                                           takes_all=True) as engine:
            await asyncio.wait_for(test(OpenAIService(engine, folder, ["caller"], **options), caller), 120)
    asyncio.run(inside())


async def whole(service, **body):
    body = {"messages": [{"role": "user", "content": "Rain?"}], **body}
    answer = await service.accept(json.dumps(body).encode(), True)
    return json.loads(await answer.whole())


async def chunks(service, **body):
    body = {"messages": [{"role": "user", "content": "Rain?"}], **body, "stream": True}
    answer = await service.accept(json.dumps(body).encode(), True)
    lines = b"".join([event async for event in answer.events()]).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(chunks):
    """Return the message and the finish reason that the chunks of one output add up to, as clients join them."""
    message, reason = {"role": "assistant", "content": ""}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            for key, value in choice["delta"].items():
                if key != "tool_calls":
                    message[key] = value if key == "role" else message.get(key, "") + value
                    continue
                calls = message.setdefault("tool_calls", [])
                for part in value:
                    if part["index"] == len(calls):
                        calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                    else:
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if not message["content"] and "tool_calls" in message:
        message["content"] = None
    return message, reason
