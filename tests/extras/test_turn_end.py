"""A token that ends a turn, but no output, is named once at the start, with the option."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from batch_manager import ConfigError, TrtGptModelOptionalParams  # noqa: E402
from batch_manager.aio import AsyncEngine  # noqa: E402
from batch_manager.extras.async_llm import AsyncLLM  # noqa: E402
from batch_manager.extras.llm import LLM  # noqa: E402
from batch_manager.extras.openai import OpenAIService  # noqa: E402
from batch_manager.extras.tokenizer import load_tokenizer  # noqa: E402
from batch_manager.extras.turn_end import log_unused_turn_ends  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}ENDS\n{% endfor %}"


def model(tmp_path, eos_token="</s>", ends="", end_ids=1):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("ENDS", ends))
    return folder


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("eos_token, ends, end_ids, named", [
    ("</s>", "", [1], None), ("</s>", "</s>", [1, 5], None), ("<s>", "", [1], [0]), ("</s>", "<s>", [1], [0]),
    ("</s>", "<s>", [], [0, 1]), ({"content": "</s>"}, " </s>", [5], [1]), (None, "and", [5], None),
    ("nowhere", "{{ raise_exception('x') }}", [5], None),
])
def test_a_turn_end_that_is_no_end_id_is_named(tmp_path, caplog, eos_token, ends, end_ids, named):
    folder = model(tmp_path, eos_token, ends)
    transformers = pytest.importorskip("transformers")
    for tokenizer in (load_tokenizer(folder), transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), additional_special_tokens=["<s>", "</s>"])):
        caplog.clear()
        log_unused_turn_ends(folder, tokenizer, end_ids, vocab_size=4096)
        told = warnings(caplog)
        assert len(told) == (named is not None) and (not told or f"pass stop_token_ids={named}, or" in told[0])
    log_unused_turn_ends(tmp_path / "nowhere", object(), ())      # refused where it is used


def test_each_text_host_logs_it_at_the_start(tmp_path, caplog):
    folder = model(tmp_path, "<s>")
    with LLM(folder, num_threads=1):
        pass
    assert [("'<s>' (0)" in told, "stop_token_ids=[0]" in told) for told in warnings(caplog)] == [(True, True)]
    caplog.clear()

    async def start():
        async with await AsyncEngine.start(str(folder), optional_params=TrtGptModelOptionalParams(num_threads=1)) as (
                engine):
            OpenAIService(engine, folder)

    asyncio.run(start())
    assert len(warnings(caplog)) == 1


def test_too_many_end_ids_are_refused_at_the_start(tmp_path):
    folder = model(tmp_path, end_ids=list(range(1, 10)))
    told = "the checkpoint has 9 end ids: eos_token_id of generation_config.json, .*; expected at most 8, "
    with pytest.raises(ConfigError, match=told):
        LLM(folder, num_threads=1)

    async def start():
        with pytest.raises(ConfigError, match=told):
            await AsyncLLM.start(folder, num_threads=1)
        async with await AsyncEngine.start(str(folder), optional_params=TrtGptModelOptionalParams(num_threads=1)) as (
                engine):                                 # its requests set their own end_id
            with pytest.raises(ConfigError, match=told):
                OpenAIService(engine, folder)

    asyncio.run(start())
