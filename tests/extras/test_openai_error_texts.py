"""No error text of the OpenAI service has a path of the server, a stack or a text of the prompt."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from batch_manager import ConfigError, ErrorCode, InvalidRequestError, Parts
from batch_manager.aio import AsyncEngine, RequestFailed
from batch_manager.testing.scripted_backend import ScriptedBackend

pytest.importorskip("tokenizers")
jinja2 = pytest.importorskip("jinja2")

from batch_manager.extras.openai import OpenAIError, OpenAIService, service  # noqa: E402
from batch_manager.extras.openai.errors import without_paths  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
PROMPT = "My password is swordfish, and what now?"
PATHS = ("/srv/secret models/austen", "/srv/secret/austen.gguf")
QUOTED = f"'{PATHS[0]}/chat_template.jinja' and {PATHS[1]}: line 3"
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
COMPLETION = {"prompt": PROMPT, "max_tokens": 4}
SCHEMA = {"response_format": {"type": "json_object"}}


def error_texts(body, is_chat, folder=MODEL, prepare=lambda service: None):
    """Return the error texts of a whole and of a streamed answer; None: it has none."""
    async def told(answers, body):
        try:
            answer = await answers.accept(json.dumps(body).encode(), is_chat)
            if not answer.is_streaming:
                await answer.whole()
                return None
            events = b"".join([event async for event in answer.events()])
            return events.decode() if b'"error"' in events else None
        except OpenAIError as error:
            return error.body().decode()

    async def inside():
        backend = ScriptedBackend(vocab_size=4096, max_seq_len=400, num_blocks=200, verify=False)
        async with await AsyncEngine.start(parts=Parts(backend=backend), takes_all=True) as engine:
            object.__setattr__(engine.info, "end_ids", (1,))
            answers = OpenAIService(engine, folder, ["austen"])
            prepare(answers)
            return [await told(answers, {**body, "stream": streams}) for streams in (False, True)]
    return asyncio.run(inside())


def check(texts):
    for text in texts:
        assert text is not None
        for secret in ("/srv", "secret", "swordfish", "jinja'", str(MODEL.parent), "models/austen", "Traceback",
                       'File "'):
            assert secret not in text, text


@pytest.fixture
def folder(tmp_path):
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("template", [
    None, "{{ raise_exception('" + PATHS[1] + ": ' + messages[0].content) }}",
    "{% if %}", "{{ messages[0].content | int(default=x) / 0 }}", "{{ {}[messages[0].content].a }}",
    "{{ messages[0].content.__class__ }}", "{{ (messages[0].content).nothing.at_all }}",
    "{{ 1 + messages[0].content }}", "{% include 'other.jinja' %}", "{{ x() }}"])
def test_chat_templates(folder, template):
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    texts = error_texts(CHAT, True, folder)
    check(texts)
    assert not any(str(folder) in text for text in texts)


def test_files_that_cannot_be_read(folder):
    for name, content in (("chat_template.jinja", b"\xff\xfe"), ("tokenizer_config.json", b"{")):
        path = folder / name
        texts = error_texts(CHAT, True, folder, lambda _, path=path, content=content: path.write_bytes(content))
        check(texts)
        assert not any(str(folder) in text for text in texts)
        path.unlink()


@pytest.mark.parametrize("name, raised, body", [
    ("chat_prompt", ConfigError(f"{QUOTED} is wrong", f"expected {PATHS[1]}", f"see {QUOTED}"), CHAT),
    ("chat_prompt", InvalidRequestError(f"{QUOTED} is wrong", f"expected {PATHS[1]}", f"see {QUOTED}"), CHAT),
    ("encode", InvalidRequestError(QUOTED, QUOTED, QUOTED), COMPLETION)])
def test_parts_that_fail(monkeypatch, name, raised, body):
    def fails(*_, **__):
        raise raised
    monkeypatch.setattr(service, name, fails)
    check(error_texts(body, name == "chat_prompt"))


def test_a_tokenizer_that_fails():
    class Fails:
        def __getattr__(self, name):
            return getattr(service.load_tokenizer(MODEL), name)

        def encode(self, *_, **__):
            raise RuntimeError(f"{QUOTED}: {PROMPT}")

    check(error_texts(COMPLETION, False, prepare=lambda answers: setattr(answers, "tokenizer", Fails())))


@pytest.mark.parametrize("raised", [ConfigError(QUOTED, QUOTED, QUOTED), InvalidRequestError(QUOTED, QUOTED, QUOTED)])
def test_grammars_that_fail(raised):
    class Fails:
        def json_schema(self, _):
            raise raised

    check(error_texts({**COMPLETION, **SCHEMA}, False, prepare=lambda answers: setattr(answers, "_guided", Fails())))


@pytest.mark.parametrize("schema, reason", [
    ({"$ref": "#/$defs/Nope"}, "Pointer '/$defs/Nope' does not exist"),
    ({"properties": {"a": {"format": "x /etc/passwd y", "type": "string"}}}, "Unknown format: x /etc/passwd y"),
    ({"type": "string", "pattern": "("}, "regex parse error: error: unclosed group")])
def test_a_schema_error_quotes_the_schema_and_has_its_reason(schema, reason):
    pytest.importorskip("llguidance")
    given = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    for text in error_texts({**COMPLETION, **given}, False):
        assert reason in text and "expected a JSON schema that" in text, text


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_code_of_the_engine(monkeypatch, code):
    def fails(*_, **__):
        raise RequestFailed(code, f"request 7: {QUOTED}; see {PATHS[1]}; and {QUOTED}")
    monkeypatch.setattr(AsyncEngine, "streams", fails)
    check(error_texts(COMPLETION, False))


@pytest.mark.parametrize("name", [".", "model", "./model", "models/../model", "model/"])
def test_a_folder_by_its_relative_name(tmp_path, monkeypatch, name):
    folder = tmp_path if name == "." else tmp_path / "model"
    for each in (folder, tmp_path / "models"):
        each.mkdir(exist_ok=True)
    shutil.copy(MODEL / "tokenizer.json", folder)
    monkeypatch.chdir(tmp_path)
    for text in error_texts(CHAT, True, name):
        assert json.loads(text)["error"]["message"] == (
            "the folder of the model has no chat template; expected chat_template.jinja, or chat_template in "
            "tokenizer_config.json")


@pytest.mark.parametrize("known, text, expected", [
    (".", "see ./a.json. Or '.'.", "see a file of the model. Or of the model."),
    ("model", "the model's 'model', model/a.json and 'model/a b'",
     "the model's of the model, a file of the model and a file of the model"),
    ("a/b", "a/b.json, xa/b, a/bc, a/b: no", "a/b.json, xa/b, a/bc, of the model: no")])
def test_only_whole_paths_are_left_out(known, text, expected):
    assert without_paths(text, known) == expected


@pytest.mark.parametrize("text, expected", [
    ("see '/a b/c.json' and /d/e: it", "see of the server and of the server: it"),
    ("expected 1/2, and/or 3 /v1", "expected 1/2, and/or 3 /v1"),
    ("'models/x' or models/x", "of the model or of the model"),
    ("https://example.org/a/b and 3 / 4", "https://example.org/a/b and 3 / 4")])
def test_paths_are_left_out(text, expected):
    assert without_paths(text, "models/x") == expected
