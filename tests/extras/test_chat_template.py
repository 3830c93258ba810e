"""Chat templates render as in transformers, and hostile templates reach no Python object outside the sandbox."""

import enum
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from batch_manager import ConfigError, InvalidRequestError

jinja2 = pytest.importorskip("jinja2")

from batch_manager.extras import chat_template  # noqa: E402
from batch_manager.extras.template_sandbox import template_environment  # noqa: E402
from batch_manager.extras.text import chat_prompt  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"

CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
          "+ '<|im_end|>' + '\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")

BLOCKS = """{{- bos_token }}
{%- set ns = namespace(found=false, count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.found = true %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if ns.count > 4 %}{% break %}{% endif %}
{{ '[' ~ message.role ~ ']' }} {{ message.content | trim }}
    {% if message.name is defined %}{{ message.name }}{% endif %}
    {% if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
{{ call | tojson }}
{{ call.function.arguments | tojson(indent=2) }}
        {%- endfor %}
    {%- endif %}
    {% generation %}{% set inside = message.role | upper %}({{ inside }}){% endgeneration %}

{% endfor %}
{%- if not ns.found %}none{% endif %}
{%- if tools %}
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
{% endif %}
{{ dict(a=1, **dict.fromkeys(['b'], 2)) | tojson(sort_keys=true, separators=(',', ':')) }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if add_generation_prompt %}[assistant]{% endif %}{{ eos_token }}"""

TALK = [{"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is <b>1 & 2</b>? 'été'", "name": None},
        {"role": "assistant", "content": " ", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<2>"}}}]},
        {"role": "tool", "content": "3"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "1 < 2 & \"é\"", "parameters": {}}}]


def folder(path, **config):
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def test_parts_that_a_template_cannot_read_are_refused_by_their_message(tmp_path):
    parts = [{"type": "text", "text": "Hello."}]
    with pytest.raises(InvalidRequestError, match=r"content of messages\[1\] is a list of parts.*join the parts"):
        chat_prompt(folder(tmp_path, chat_template=CHATML), [*TALK[:1], {"role": "user", "content": parts}])


@pytest.mark.parametrize("template", [CHATML, BLOCKS], ids=["chatml", "blocks"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"bos_token": "B"}])
@pytest.mark.parametrize("tools", [None, TOOLS, []])
def test_texts_are_those_of_transformers(tmp_path, template, variables, tools):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    for generation in (False, True):
        for talk in (TALK, TALK[1:2], TALK[:2] * 3):
            if tools and template is CHATML:
                with pytest.raises(InvalidRequestError, match="1 tool has no effect: the chat template leaves them"):
                    chat_prompt(tmp_path, talk, tools, **variables)
                continue
            assert chat_prompt(tmp_path, talk, tools, add_generation_prompt=generation, **variables) \
                == tokenizer.apply_chat_template(talk, tools, tokenize=False, add_generation_prompt=generation,
                                                 **variables)
    assert chat_prompt(tmp_path, TALK).endswith(("assistant\n", "[assistant]</s>"))


def test_a_template_may_lie_in_three_places_and_be_one_of_several(tmp_path):
    user = [{"role": "user", "content": "hi"}]
    folder(tmp_path, chat_template="config {{ bos_token }}{{ eos_token }}{{ pad_token }}", eos_token="</s>",
           bos_token={"content": "<s>", "special": True, "__type": "AddedToken"}, pad_token=None)
    assert chat_prompt(tmp_path, user) == "config <s></s>"
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "bos_token": "other"}')
    assert chat_prompt(tmp_path, user) == "config <s></s><pad>"
    folder(tmp_path, chat_template=[{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"},
                                    {"name": "rag", "template": "rag"}])
    assert chat_prompt(tmp_path, user) == "plain" and chat_prompt(str(tmp_path), user, TOOLS) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file é{{ tools is none }}\n", encoding="utf-8")
    assert chat_prompt(tmp_path, user) == "file éTrue" and chat_prompt(tmp_path, user, TOOLS) == "file éFalse"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools' file")
    assert chat_prompt(tmp_path, user, TOOLS) == "tools' file" and chat_prompt(tmp_path, user) == "file éTrue"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has templates 'tool_use' and no default"):
        chat_prompt(tmp_path, user)
    (tmp_path / "chat_template.jinja").write_text("another file")
    assert chat_prompt(tmp_path, user) == "another file", "a file that changed is read again"


def test_the_time_is_there_and_html_is_not_escaped(tmp_path):
    template = "{{ strftime_now('%Y') }} {{ messages[0].content }} {{ messages[0].content | tojson }}"
    text = chat_prompt(folder(tmp_path, chat_template=template), [{"role": "user", "content": "<é> & '\""}])
    year, rest = text.split(" ", 1)
    assert year.isdigit() and rest == "<é> & '\" \"<é> & '\\\"\""


# ---------------------------------------------------------------------- what templates of known models read

# Each reads tool calls, reasoning and empty contents with the constructs of the model's own template.
OF_MODELS = {
    "qwen 2.5": """{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}""",
    "qwen 3.5": """{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- ('<think>\\n' + reasoning + '\\n</think>' if reasoning else '') + content }}
    {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<function=' + tool_call.name + '>\\n' }}
            {%- for name, value in tool_call.arguments | items %}
                {{- '<parameter=' + name + '>' + (value | tojson if value is not string else value) + '</parameter>' }}
            {%- endfor %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}""",
    "llama 3.1": """{{- bos_token }}{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- endif %}
{%- endfor %}""",
    "gpt-oss": """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if "thinking" in message %}
            {{- "<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set tool_call = message.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|message|>" }}
            {{- tool_call.arguments | tojson }}{{- "<|call|>" }}
        {%- else %}{{- "<|start|>assistant<|message|>" + message.content + "<|return|>" }}{%- endif %}
    {%- else %}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif %}
{%- endfor %}""",
    "deepseek v3": """{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<User>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<tool>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] + '</tool>' }}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<Assistant>' + content + '<end>' }}
    {%- endif %}
{%- endfor %}""",
}
ARGUMENTS = {"a": 1, "b": ["<é>", None, 1.5], "c": {"d": True}}


def called(arguments, **fields):
    return [{"role": "user", "content": "Add."}, {"role": "assistant", **fields, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}]}]


@pytest.fixture(params=OF_MODELS)
def of_a_model(tmp_path, request):
    """Return (template folder, transformers' tokenizer with the same template)."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = OF_MODELS[request.param]
    tokenizer.save_pretrained(tmp_path)
    return tmp_path, tokenizer


def test_arguments_of_a_tool_call_may_be_a_json_string(of_a_model):
    here, tokenizer = of_a_model
    expected = tokenizer.apply_chat_template(called(ARGUMENTS, content=""), tokenize=False)
    assert ("<é>" in expected) != (tokenizer.chat_template == OF_MODELS["deepseek v3"])
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=1, ensure_ascii=False)):
        talk = called(arguments, content="")
        assert chat_prompt(here, talk, add_generation_prompt=False) == expected
        assert talk == called(arguments, content=""), "what was passed has not changed"


@pytest.mark.parametrize("arguments, text", [
    ('{"a": 1}', '{"a": 1}'), ('{"a"', '"{\\"a\\""'), ("", '""'), ("5", "5"), ("null", "null"), ("[1]", "[1]"),
    ("[" * 100_000, json.dumps("[" * 100_000)), ({"a": "1"}, '{"a": "1"}'),
])
def test_arguments_that_are_not_json_stay_a_string(tmp_path, arguments, text):
    form = ("{% for c in messages[1].tool_calls %}{{ (c.function or c).arguments | tojson }}{% endfor %}"
            "{{ messages[1].function_call.arguments | tojson }}")
    talk = called(arguments, function_call={"name": "add", "arguments": arguments})
    talk[1]["tool_calls"].append({"name": "add", "arguments": arguments})
    assert chat_prompt(folder(tmp_path, chat_template=form), talk) == text * 3


@pytest.mark.parametrize("given", [{}, {"arguments": None}])
def test_missing_arguments_are_an_empty_object(of_a_model, given):
    talk = called("{}", content="")
    missing = called("{}", content="")
    missing[1]["tool_calls"][0]["function"] = {"name": "add", **given}
    assert chat_prompt(of_a_model[0], missing) == chat_prompt(of_a_model[0], talk)


def test_a_template_that_prints_arguments_gets_the_json_string(tmp_path):
    form = "{% set a = messages[1].tool_calls[0].function.arguments %}" \
           "{{ 'x' + a + 'y' }}{{ a }}{{ a ~ 'z' }}{{ a.b[1] }}"
    text = json.dumps(ARGUMENTS, indent=3)
    assert chat_prompt(folder(tmp_path, chat_template=form), called(text)) == f"x{text}y{text}{text}zNone"


@pytest.mark.parametrize("given", [
    {"reasoning": "R"}, {"reasoning_content": "R"}, {"thinking": "R"}, {"reasoning": "R", "reasoning_content": None},
    {"reasoning": "R", "thinking": "T"}, {"reasoning": "", "thinking": "T"}, {"reasoning": None},
])
def test_reasoning_reaches_the_template_under_the_names_of_transformers(of_a_model, given):
    here, tokenizer = of_a_model
    talk = [*called(ARGUMENTS, content="", **given), {"role": "assistant", "content": "So.", **given}]
    assert chat_prompt(here, talk, add_generation_prompt=False) == tokenizer.apply_chat_template(talk, tokenize=False)
    tokenizer.chat_template = "{{ messages | tojson }}"
    tokenizer.save_pretrained(here)
    assert chat_prompt(here, talk) == tokenizer.apply_chat_template(talk, tokenize=False)


@pytest.mark.parametrize("missing", [{"content": None}, {}])
def test_an_empty_content_is_none_to_templates_that_ask(of_a_model, missing):
    """The reference is the template itself, with None in the message."""
    here, tokenizer = of_a_model
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = chat_template_utils._compile_jinja_template(tokenizer.chat_template)
    given = json.dumps(ARGUMENTS) if tokenizer.chat_template == OF_MODELS["deepseek v3"] else ARGUMENTS
    expected = template.render(messages=called(given, content=None), bos_token=tokenizer.bos_token)
    assert chat_prompt(here, called(json.dumps(ARGUMENTS), **missing)) == expected


@pytest.mark.parametrize("text, expected", [
    ("{{ 'a' + m.content }}{{ m.content + 'b' }}{{ m['content'] | trim }}", "ab"),
    ("{{ m.content.strip() + m.content.split('x')[-1] }}{{ m.content | default('') }}{{ 'x' in m.content }}", "False"),
    ("{{ m.content is none }} {{ m.content == none }} {{ m.content != none }} {{ m.content is string }}",
     "True True False False"),
    ("{{ m.content is defined }} {{ 'content' in m }} {{ m | tojson }}", 'False False {"role": "assistant"}'),
    ("{{ m.tool_calls is none }} {{ m.name is none }} {{ x is none }}", "True False False"),
])
def test_a_null_content_adds_nothing(tmp_path, text, expected):
    here = folder(tmp_path, chat_template="{% set m = messages[1] %}" + text)
    talk = [{"role": "user"}, {"role": "assistant", "content": None, "tool_calls": None}]
    assert chat_prompt(here, talk) == expected
    with pytest.raises(InvalidRequestError, match="UndefinedError"):
        chat_prompt(folder(tmp_path, chat_template="{{ 'a' + messages[0].content }}"), talk)


def test_input_that_a_template_leaves_out_is_logged_once(tmp_path, caplog):
    here = folder(tmp_path, chat_template=OF_MODELS["qwen 2.5"])
    talk = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi.", "nmae": "Ann", "x": None},
            *called("{}", reasoning="R"), {"role": "user", "content": "3", "tool_call_id": "1"}]
    talk[3]["tool_calls"][0].update(extra=1, index=0)
    for _ in range(3):
        chat_prompt(here, talk, enable_thinkng=False, add_generation_prompt=True)
    told = sorted(record.getMessage().partition(" leaves out ")[2].partition(", which")[0] for record in caplog.records)
    assert told == ["'extra' of tool calls", "'nmae' of messages", "'reasoning' of messages",
                    "messages with the role 'developer'", "the variable 'add_generation_prompt'",
                    "the variable 'enable_thinkng'"]
    caplog.clear()
    whole = folder(tmp_path, chat_template="{% for m in messages %}{{ m | tojson }}{% endfor %}")
    chat_prompt(whole, talk)
    assert not caplog.records, "a template that prints the whole message reads its keys"
    chat_prompt(here, [{"role": "user", "content": "Hi.", "long": 1}] * 1001)
    assert not caplog.records, "a long conversation is not rendered again"
    for number in range(400):      # clients choose the names
        chat_prompt(here, [{"role": "user", "content": "Hi.", "x" * 100: 1}], **{f"v{number}": 1})
    assert len(caplog.records) <= 256


@pytest.mark.parametrize("asks, told", [
    ("{{ m.name }}", 0), ("{{ m['name'] }}", 0), ("{{ m.get('name') }}", 0), ("{{ 'x' if 'name' in m }}", 0),
    ("{{ m | tojson }}", 0), ("{{ m.name | length * 0 }}", 0),
    ("{% for key, value in m.items() %}{{ value }}{% endfor %}", 0), ("{{ m.name if m.role == 'tool' }}", 1), ("", 1)])
def test_a_key_is_read_where_the_template_asks_the_message_for_it(tmp_path, caplog, asks, told):
    other = "{% for t in m.tool_calls %}{{ t.name }}{% endfor %}"
    form = "{% for m in messages %}{{ m.content }}" + asks + other + "{% endfor %}"
    chat_prompt(folder(tmp_path, chat_template=form), [{"role": "user", "content": "Hi.", "name": "Ann"}])
    assert sum("'name' of messages" in record.getMessage() for record in caplog.records) == told


# ---------------------------------------------------------------------- hostile templates

ESCAPES = """
{{ ''.__class__.__mro__[1].__subclasses__() }}
{{ ''['__class__']['__mro__'] }}
{{ (''|attr('__class__'))|attr('__mro__') }}
{{ messages.__class__.__base__.__subclasses__() }}
{{ messages[0].items.__self__.__class__ }}
{{ raise_exception.__globals__['os'] }}
{{ raise_exception.__globals__ }}
{{ strftime_now.__code__.co_consts }}
{{ (raise_exception|attr('__globals__'))['__builtins__'] }}
{{ cycler.__init__.__globals__.os.popen('id').read() }}
{{ joiner.__init__.__globals__ }}
{{ lipsum.__globals__.os.popen('id').read() }}
{{ namespace.__init__.__globals__ }}
{{ dict.__class__.__call__.__globals__ }}
{{ dict.fromkeys.__func__.__globals__ }}
{{ dict.mro() }}
{{ dict.fromkeys.__self__ }}
{{ self.__init__.__globals__ }}
{{ self._TemplateReference__context }}
{{ '{0.__class__.__mro__}'.format(messages) }}
{{ '{x.__class__.__mro__}'.format_map({'x': messages}) }}
{% set f = '{0.__class__.__init__.__globals__}'.format %}{{ f(raise_exception) }}
{{ ('{0.__globals__}'|attr('format'))(raise_exception) }}
{{ '{0.__globals__}'['format'](raise_exception) }}
{{ ['{0.__globals__}'.format]|map('string')|list and ['{0.__globals__}'.format][0](raise_exception) }}
{{ messages|map(attribute='__class__')|map(attribute='__mro__')|list }}
{{ messages|map('attr', '__class__')|map('attr', '__mro__')|list }}
{{ messages|groupby('__class__')|list }}
{{ (messages|map('upper')).gi_frame.f_globals }}
{{ (messages|map('upper')).gi_frame.f_back.f_globals['os'] }}
{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}
{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}
{% for x in messages %}{{ loop.__init__.__globals__ }}{% endfor %}
{% for x in messages %}{{ loop._iterator.gi_frame.f_globals }}{% endfor %}
{% set ns = namespace(__class__=1) %}{{ ns }}
{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.x.y }}
{% set ns = namespace({'_Namespace__attrs': {}}) %}{{ ns.x.y }}
{% set ns = namespace(x=raise_exception) %}{{ ns.x.__globals__.os }}
{% import 'os' as os %}{{ os.popen('id').read() }}
{% include '/etc/passwd' %}
{% extends '/etc/passwd' %}
{{ messages.append(1) }}
{{ messages.clear() }}
{{ messages[0].update({'content': 'mine'}) }}
{{ messages[0].pop('content') }}
{{ messages[0].__setitem__('content', 'mine') }}
{% do messages.append(1) %}
{{ undefined_name.__class__.__mro__ }}
{{ (undefined_name|string).__class__.__mro__ }}
{{ undefined_name.__init__.__globals__ }}
{{ messages.__reduce_ex__(2) }}
{{ range(10000000000) | list }}
{{ messages | tojson(cls=raise_exception) }}
{{ (1).__class__.__base__ }}
{{ ().__class__.__bases__[0].__subclasses__() }}
{{ [].sort.__self__.__class__.__mro__ }}
{{ ''.join.__class__.__mro__ }}
""".strip().splitlines()


@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_reaches_a_python_object(tmp_path, template):
    talk = [{"role": "user", "content": "secret"}]
    here = folder(tmp_path, chat_template=template + "|end")
    try:
        text = chat_prompt(here, talk)
    except (ConfigError, InvalidRequestError) as error:
        assert type(error) is ConfigError or "violated the sandbox" not in str(error)
    else:    # a value that a template may not read prints as nothing, or as Undefined in a list
        assert text in ("|end", "[Undefined]|end", f"[(Undefined, {talk})]|end")
    assert talk == [{"role": "user", "content": "secret"}], "what was passed has not changed"


def test_these_templates_do_reach_something_without_the_sandbox(tmp_path):
    """At least 25 of the hostile templates work in jinja2's ordinary environment, so the sandbox is what stops them."""
    environment = jinja2.Environment(extensions=["jinja2.ext.do"])
    environment.globals.update(raise_exception=chat_prompt, strftime_now=chat_prompt)
    reached = 0
    for template in ESCAPES:
        try:
            text = environment.from_string(template + "|end").render(messages=[{"role": "user", "content": "secret"}])
        except Exception:    # the ordinary environment stops some templates too
            continue
        reached += text != "|end"
    assert reached >= 25


def test_leaving_the_sandbox_is_the_folders_fault_and_named(tmp_path):
    with pytest.raises(ConfigError, match=r"violated the sandbox: SecurityError.*review the template"):
        chat_prompt(folder(tmp_path, chat_template="{{ ''.__class__.__mro__ }}"), [])


def test_methods_of_what_is_passed_are_out_of_reach(tmp_path):
    class Loud(str):
        def shout(self):
            raise AssertionError("reached")

    class Colour(enum.IntEnum):
        RED = 3

    here = folder(tmp_path, chat_template="{{ messages[0].content.shout is defined }} {{ x }} {{ y }} {{ z }} {{ b }}")
    assert chat_prompt(here, [{"role": "user", "content": Loud("a")}], x=Colour.RED, y=np.float64(0.5),
                       z=(1, Loud("b")), b=True) == "False 3 0.5 [1, 'b'] True"
    for value in (object(), np.zeros(2), len, b"bytes", {1, 2}, Path("x")):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\['content'\] is of type " + type(value).__name__):
            chat_prompt(here, [{"role": "user", "content": value}])
        with pytest.raises(InvalidRequestError, match="x is of type"):
            chat_prompt(here, [], x=value)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("template, said", [
    ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
    ("{{ messages[0].content + 1 }}", "TypeError"),
    ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ("{{ nothing.at.all }}", "UndefinedError"),
    ("{{ nothing | tojson }}", "TypeError"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
])
def test_a_template_that_fails_refuses_the_messages_and_says_why(tmp_path, template, said):
    with pytest.raises(InvalidRequestError, match=f"the chat template cannot be applied: {said}.*see the template"):
        chat_prompt(folder(tmp_path, chat_template=template), [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, ["hi"], [["role"]], None, 5])
def test_messages_of_another_form_are_refused(tmp_path, messages):
    with pytest.raises(InvalidRequestError, match="no list of dictionaries|not a list of dictionaries"):
        chat_prompt(folder(tmp_path, chat_template=CHATML), messages)


def test_messages_without_an_end_are_refused(tmp_path):
    endless = {"role": "user"}
    endless["content"] = endless
    with pytest.raises(InvalidRequestError, match="RecursionError"):
        chat_prompt(folder(tmp_path, chat_template=CHATML), [endless])


def test_a_folder_without_a_template_is_named(tmp_path):
    for content in (None, "{}", '{"chat_template": null}', '{"chat_template": 5}'):
        if content:
            (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match=f"{tmp_path.name}' has no chat template; expected chat_template"):
            chat_prompt(tmp_path, [])
    with pytest.raises(ConfigError, match="there is no folder"):
        chat_prompt(tmp_path / "nowhere", [])
    folder(tmp_path, chat_template=[{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "x"}])
    with pytest.raises(ConfigError, match="has templates 'rag', 'tool_use' and no default"):
        chat_prompt(tmp_path, [])


@pytest.mark.parametrize("content, said", [
    (b"{", "is not JSON"), (b"[]", "contains a value of type list"), (b"\xff", "cannot be read"),
    (b"[" * 100_000, "is not JSON"),
    (b'{"chat_template": ["x"]}', "a list with wrong entries"),
    (b'{"chat_template": [{"name": "x"}]}', "a list with wrong entries"),
    (b'{"chat_template": [{"name": 5, "template": "x"}]}', "a list with wrong entries"),
    (b'{"chat_template": "{% for %}"}', "cannot be compiled: TemplateSyntaxError"),
    (b'{"chat_template": "{{ x | nosuchfilter }}"}', "cannot be compiled"),
])
def test_files_that_are_wrong_are_named(tmp_path, content, said):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        chat_prompt(tmp_path, [])


def test_without_jinja2_or_with_an_old_one_the_error_says_what_to_do(tmp_path, monkeypatch):
    here = folder(tmp_path, chat_template="x")
    template_environment.cache_clear()
    monkeypatch.setattr(jinja2, "__version__", "3.1.5")
    with pytest.raises(ConfigError, match="jinja2 is version 3.1.5; expected at least 3.1.6"):
        chat_prompt(here, [])
    monkeypatch.setattr(jinja2, "__version__", "3.2.0.dev1")
    assert chat_prompt(here, []) == "x"
    template_environment.cache_clear()
    chat_template.folder_template.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r'pip install "batch-manager\[text\]"'):
        chat_prompt(here, [])
    monkeypatch.undo()
    assert chat_prompt(os.fspath(here), []) == "x"


def test_variables_may_be_called_anything_but_messages(tmp_path):
    here = folder(tmp_path, chat_template="{{ messages[0].content }} in {{ folder }}")
    assert chat_prompt(here, [{"role": "user", "content": "hi"}], folder="a drawer") == "hi in a drawer"
    variables = {"messages": []}
    with pytest.raises(InvalidRequestError, match="a template variable is named messages; "):
        chat_prompt(here, [], **variables)
