"""Every field of a request body, at every level, is read, refused by name, logged once, or stated to be neutral."""

import json
import re
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("orjson")

from batch_manager.extras.openai import OpenAIError, unread_fields  # noqa: E402
from batch_manager.extras.openai.fields import read_body  # noqa: E402
from batch_manager.extras.openai.json_object import JsonObject  # noqa: E402
from batch_manager.extras.openai.unread_fields import ANY, LABELS, LOGGED, NOT_BUILT, OF_CHATS, OF_COMPLETIONS  # noqa: E402
from batch_manager.extras.repeated_names import MOST_NAMES, SOME_NAME, repeated_name  # noqa: E402
from batch_manager.extras.template_messages import PART_KEYS  # noqa: E402
from batch_manager.option_values import unique_names  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "servers.md"
MESSAGES = [{"role": "user", "content": "Hello."}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# What each server's own documentation or source states as the default.
DEFAULTS = {
    "vllm": {
        "use_beam_search": False, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0,
        "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None,
        "prompt_logprobs": None, "allowed_token_ids": None, "bad_words": [], "priority": 0, "request_id": None,
        "return_tokens_as_token_ids": False, "return_token_ids": False, "cache_salt": None, "kv_transfer_params": None,
        "vllm_xargs": None, "include_reasoning": True, "structured_outputs": None, "guided_json": None},
    "sglang": {
        "top_k": -1, "min_p": 0.0, "min_tokens": 0, "regex": None, "ebnf": None, "repetition_penalty": 1.0,
        "stop_token_ids": None, "stop_regex": None, "no_stop_trim": False, "ignore_eos": False,
        "skip_special_tokens": True, "lora_path": None, "session_params": None, "separate_reasoning": True,
        "stream_reasoning": True, "return_hidden_states": False, "return_routed_experts": False,
        "routed_experts_start_len": 0, "return_cached_tokens_details": False, "custom_logit_processor": None,
        "custom_params": None, "rid": None, "data_parallel_rank": None, "bootstrap_host": None},
    "llama.cpp": {
        "cache_prompt": True, "return_tokens": False, "return_progress": False, "sse_ping_interval": -1, "n_keep": 0,
        "n_discard": 0, "n_indent": 0, "n_cache_reuse": 0, "t_max_predict_ms": -1, "response_fields": [],
        "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "typical_p": 1.0, "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0, "repeat_last_n": 64, "repeat_penalty": 1.0, "dry_multiplier": 0.0, "dry_base": 1.75,
        "dry_allowed_length": 2, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", ":", "\"", "*"],
        "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "n_probs": 0, "min_keep": 0, "grammar": "",
        "timings_per_token": False, "post_sampling_probs": False, "lora": [], "id_slot": -1, "image_data": [],
        "reasoning_format": "auto", "parse_tool_calls": True, "min_p": 0.05, "stop": [], "logit_bias": {}},
}


def read(is_chat=False, **fields):
    prompt = {"messages": MESSAGES} if is_chat else {"prompt": "x"}
    return read_body(json.dumps({**prompt, **fields}).encode(), is_chat=is_chat)


def refusal(is_chat=False, **fields):
    with pytest.raises(OpenAIError) as told:
        read(is_chat, **fields)
    assert told.value.status == 400 and told.value.param in told.value.message
    return told.value.param


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("server", DEFAULTS)
def test_defaults_of_other_servers_pass(server, is_chat):
    read(is_chat, **DEFAULTS[server])
    read(is_chat, add_special_tokens=not is_chat)
    read(True, n_predict=-1)         # a chat's default is the rest of the context


@pytest.mark.parametrize("field, value", [
    ("use_beam_search", True), ("use_beam_search", 0), ("skip_special_tokens", False), ("skip_special_tokens", 1),
    ("length_penalty", 0.8), ("include_stop_str_in_output", True), ("bad_words", ["x"]), ("allowed_token_ids", [1]),
    ("truncate_prompt_tokens", 10), ("prompt_logprobs", 0), ("guided_regex", "a+"), ("structured_outputs", {}),
    ("cache_salt", "x"), ("return_token_ids", True), ("include_reasoning", False), ("documents", [{"text": "x"}]),
    ("no_stop_trim", True), ("regex", "a"), ("stop_regex", "a"), ("lora_path", "x"), ("return_hidden_states", True),
    ("repeat_penalty", 1.1), ("mirostat", 2), ("dry_multiplier", 0.8), ("typical_p", 0.9), ("grammar", "root ::= 'a'"),
    ("json_schema", {}), ("n_predict", 5), ("cache_prompt", False), ("samplers", ["top_k"]), ("xtc_probability", 0.1),
    ("tool_choice", "required"), ("functions", [{}]), ("function_call", "x"), ("verbosity", "low"),
    ("continue_final_message", True), ("chat_template", "x"), ("suffix", "x"),
])
def test_other_values_are_refused_by_name(field, value):
    assert refusal(True, **{field: value}) == refusal(False, **{field: value}) == field


def test_every_field_of_the_table_passes_with_its_values_and_with_no_other():
    for name, (values, _) in NOT_BUILT.items():
        for value in ([None, "?", 5] if values is ANY else [None, *values]):
            read(True, **{name: value})
        if values is not ANY:
            assert refusal(True, **{name: {"no": "such value"}}) == name


def test_some_fields_depend_on_the_route():
    assert refusal(True, add_special_tokens=True) == refusal(False, add_special_tokens=False) == "add_special_tokens"
    assert refusal(True, echo=True) == "echo" and read(False, echo=True).echo
    assert refusal(False, chat_template_kwargs={"x": 1}) == "chat_template_kwargs"
    assert refusal(False, tools=[TOOL]) == "tools" and refusal(False, reasoning_effort="low") == "reasoning_effort"
    assert read(True, reasoning_effort="low").template_options == {"reasoning_effort": "low"}


def test_a_prompt_for_an_answer_is_asked_for_once_or_alike():
    name = "add_generation_prompt"
    for value in (True, False):
        assert refusal(True, **{name: value, "chat_template_kwargs": {name: not value}}) == name
        assert read(True, **{name: value, "chat_template_kwargs": {name: value}}).template_options == {name: value}


def test_the_other_routes_name_of_a_field_is_not_suggested():
    with pytest.raises(OpenAIError, match=r"did you mean max_tokens\?"):
        read(max_completion_tokens=5)


@pytest.mark.parametrize("body, name", [
    ('{"prompt":"x","seed":1,"seed":2}', "seed"), ('{"prompt":"x","logit_bias":{"1":0,"1":1}}', "1"),
    ('{"prompt":"x","seed":1,"se\\u0065d" : 2}', "seed"), ('{"prompt":"\\u003a","user":"a:b","user":":"}', "user"),
    ('{"prompt":"' + 9000 * "\\u003A:\\n" + '","seed":1,"seed":2}', "seed"),
    ('{"prompt":"x","metadata":{' + ",".join(f'"{n}":1' for n in range(MOST_NAMES)) + ',"0":2}}', SOME_NAME),
    ('{"messages":[{"role":"user","content":"x","content":"y"}]}', "content")])
def test_a_repeated_name_is_refused_by_its_name(body, name):
    with pytest.raises(OpenAIError) as told:
        read_body(body.encode(), is_chat="messages" in body)
    assert told.value.status == 400 and told.value.message.startswith(f"{name}: ")
    assert told.value.param == (None if name == SOME_NAME else name)


def test_repeated_names_are_those_that_a_hook_of_the_parser_finds():
    random = Random(1)
    names = ["a", "b", ":", "a:", '"', "\\", "\\\\", "u003a", "\\u003a", ":\n", "\xe9", "\U0001f600", "{", '{"a":1']

    def string():
        text = json.dumps(random.choice(names), ensure_ascii=random.random() < 0.5)
        return text.replace(":", random.choice(("\\u003A", "\\u003a"))) if random.random() < 0.4 else text

    def value(depth=0):
        kind = random.random() if 0 < depth < 4 else depth == 0
        if kind < 0.4:
            return string() if kind else "1"
        if kind < 0.6:
            return f"[{','.join(value(depth + 1) for _ in range(random.randrange(4)))}]"
        pairs = [string() + random.choice((":", " :\n")) + value(depth + 1) for _ in range(random.randrange(4))]
        return "{" + ",".join(pairs) + "}"

    found = 0
    for _ in range(3000):
        text = value()
        try:
            json.loads(text, object_pairs_hook=unique_names)
            expected = None
        except ValueError as error:
            expected, found = str(error), found + 1
        name = repeated_name(text.encode(), json.loads(text))
        assert (name is None) == (expected is None), text
    assert found > 100


def test_values_without_an_effect_are_logged_once(caplog):
    unread_fields._logged.clear()
    described = {"type": "json_schema", "json_schema": {"name": "x", "description": "y", "schema": {}}}
    for _ in range(2):
        read(store=False, service_tier="auto", user="me", metadata={"a": "b"})
    assert not caplog.records
    for _ in range(2):
        read(True, **call(function={"name": "f", "arguments": "{bad"}))
        read(store=True, service_tier="flex", response_format=described)
    told = [re.search(r"value of (.+?) that", record.getMessage())[1] for record in caplog.records]
    assert told == ["the arguments of a tool call", "response_format.json_schema.description", "store", "service_tier"]


def test_every_field_of_openais_api_is_known():
    openai = pytest.importorskip("openai")
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats
    assert openai
    for is_chat, params in ((True, chats), (False, completions)):
        for field in params.CompletionCreateParamsBase.__annotations__:
            with pytest.raises(OpenAIError) as told:
                read_body(json.dumps({"prompt": "x", "messages": MESSAGES, field: {"?": 0}}).encode(), is_chat=is_chat)
            assert told.value.code != "unknown_parameter" or told.value.param in ("prompt", "messages")


# ---------------------------------------------------------------------- objects inside a body


@pytest.mark.parametrize("given, schema", [
    ({"type": "text"}, None), ({"type": "json_object"}, {"type": "object"}),
    ({"type": "json_object", "schema": {"type": "array"}}, {"type": "array"}),
    ({"type": "json_object", "schema": {"properties": {"a": {}}}}, {"type": "object", "properties": {"a": {}}}),
    ({"type": "json_object", "schema": {"$ref": "#/$defs/a"}}, {"$ref": "#/$defs/a"}),
    ({"type": "json_schema", "json_schema": {"name": "n", "strict": False, "schema": {"type": "null"}}},
     {"type": "null"}),
    ({"type": "json_schema", "json_schema": {"schema": True, "strict": None}}, {}),
])
def test_the_schema_of_a_response_format(given, schema):
    assert read(response_format=given).response_format == schema


def part(**fields):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **fields}]}]}


def call(**fields):
    return {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [fields]}]}


@pytest.mark.parametrize("fields, param", [
    ({"response_format": {"type": "json_object", "shema": {}}}, "response_format.shema"),
    ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
     "response_format.json_schema.x"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
     "response_format.json_schema.strict"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": {"5": False}}, "logit_bias"), ({"logit_bias": {"5": "1"}}, "logit_bias"),
    (part(extra=1), "messages[0].content[0].extra"), (part(text=None), "messages[0].content[0].text"),
    (part(type="image_url"), "messages[0].content[0].type"), (part(text=5), "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"), ({"messages": [{"role": 5}]}, "messages[0].role"),
    ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": {}}]}, "messages[1].tool_calls"),
    (call(type="custom", custom={}), "messages[1].tool_calls[0].type"), (call(), "messages[1].tool_calls[0].function"),
    (call(function={}), "messages[1].tool_calls[0].function.name"),
    (call(function={"name": "f", "arguments": 5}), "messages[1].tool_calls[0].function.arguments"),
    *((call(function={"name": "f", "arguments": text}), "messages[1].tool_calls[0].function.arguments")
      for text in ("[1]", "5", "null", '"x"', '{"a":NaN}', '{"a":1e999}')),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "[1]"}}]},
     "messages[0].function_call.arguments"),
    (call(function={"name": "f", "arguments": '{"a":{"b":1,"b":2}}'}),
     "messages[1].tool_calls[0].function.arguments.b"),
    (call(function={"name": "f", "arguments": " " * 262_145}), "messages[1].tool_calls[0].function.arguments"),
])
def test_a_part_of_a_field_is_refused_by_its_name(fields, param):
    assert refusal(True, **fields) == param


def choose(choice, tools=(TOOL,), **fields):
    parsed = read(True, tools=list(tools), tool_choice=choice, **fields).tools
    return parsed and (list(parsed.schemas), parsed.is_forced, parsed.is_parallel)


def test_the_choice_of_a_tool():
    two = [TOOL, {"type": "function", "function": {"name": "g", "strict": True}}]
    assert choose(None, two) == (["f", "g"], False, True) and choose("auto", two)[1] is False
    assert choose("required", two, parallel_tool_calls=False) == (["f", "g"], True, False)
    assert choose("none", two) is None and choose("none", []) is None and choose(None, []) is None
    assert choose({"type": "function", "function": {"name": "g"}}, two) == (["g"], True, True)
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "f"}}]}
        assert choose({"type": "allowed_tools", "allowed_tools": allowed}, two) == (["f"], mode == "required", True)
    parsed = read(True, tools=two).tools
    assert parsed.strict == {"g"} and parsed.given == two
    assert parsed.schemas["g"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert choose(None, [{"type": "function", "function": {"name": "n" * 256}}])[0] == ["n" * 256]


@pytest.mark.parametrize("fields, param", [
    ({"tools": [5]}, "tools[0]"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    *(({"tools": [{"function": {"name": name}}]}, "tools[0].function.name") for name in ("", "a b", "n" * 257, None)),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
    ({"tools": [{**TOOL, "x": 1}]}, "tools[0].x"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [TOOL], "min_tokens": 5}, "min_tokens"), ({"tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
    ({"reasoning_format": "x"}, "reasoning_format"), ({"max_thinking_tokens": -1}, "max_thinking_tokens"),
])
def test_tools_are_refused_by_the_name_of_their_part(fields, param):
    assert refusal(True, **fields) == param


def test_messages_reach_the_template_with_all_their_keys():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                                             {"type": "text", "text": "b"}], "name": "Ann"},
                *call(id="1", index=0, more=1, function={"name": "f", "arguments": "{}", "x": 1})["messages"]]
    (parsed,) = read(True, messages=messages).prompts
    assert parsed == [{**messages[0], "content": "ab"}, *messages[1:]]


def test_the_page_lists_what_the_code_reads(monkeypatch):
    taken, take = set(), JsonObject.take

    def recorded(self, name, *arguments, **options):
        taken.add(re.sub(r"\[\d+\]", "[]", f"{self._path}{name}"))
        return take(self, name, *arguments, **options)

    monkeypatch.setattr(JsonObject, "take", recorded)
    taken |= {f"messages[].content[].{key}" for key in PART_KEYS}
    read(response_format={"type": "json_object"}, stream=True, stream_options={})
    schema = {"type": "json_schema", "json_schema": {"schema": {}}}
    read(True, response_format=schema, **part(), logprobs=True)
    read(True, **call(function={"name": "f"}))
    read(True, messages=[{"role": "assistant", "function_call": {"name": "f"}}])
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
    for choice in (allowed, {"type": "function", "function": {"name": "f"}}):
        read(True, tools=[TOOL], tool_choice=choice)
    page = PAGE.read_text(encoding="utf-8")
    rows = page.partition("### Fields of objects in a body")[2].partition("\n###")[0]
    assert sorted(re.findall(r"`([a-z_\[\].]+\.[a-z_\[\].]+)`", rows)) == sorted(name for name in taken if "." in name)
    server = (PAGE.parents[1] / "examples" / "openai_server.md").read_text(encoding="utf-8")
    fields = server.partition("## Fields\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([a-z_]+)`", fields)) | {"prompt", "messages"}
    assert {name for name in taken if "." not in name} <= listed


def test_the_page_lists_every_field_without_an_effect():
    table = PAGE.read_text(encoding="utf-8").partition("### Fields of other servers")[2].partition("\n#")[0]
    listed = {}
    for values, names in re.findall(r"^\| (.+?) \| (`.+`) \|$", table, re.M):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in listed, name
            listed[name] = values
    stated = {**{name: ANY for name in LABELS}, **{name: values for name, (values, _) in LOGGED.items()},
              **{name: values for name, (values, _) in NOT_BUILT.items()}}
    assert listed == {name: shown(values) for name, values in stated.items()}
    assert {*OF_CHATS} | {*OF_COMPLETIONS} <= set(re.findall(r"`(\w+)`", table))


def shown(values):
    return "any value" if values is ANY else ", ".join(f"`{json.dumps(each)}`" for each in values) or "none"


if __name__ == "__main__":    # prints the table of the page
    by_values = {}
    for name, values in {**{name: ANY for name in LABELS}, **{name: values for name, (values, _) in LOGGED.items()},
                         **{name: values for name, (values, _) in NOT_BUILT.items()}}.items():
        by_values.setdefault(shown(values), []).append(f"`{name}`")
    for values, names in by_values.items():
        print(f"| {values} | {', '.join(names)} |")
