"""Every Python block of the README and of docs/ runs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

import batch_manager  # noqa: E402
from batch_manager import InferenceRequest, SchedulerPolicy, SpeculativeConfig, TrtGptModelType  # noqa: E402
from batch_manager.testing import ScriptedBackend  # noqa: E402
from tests.harness.client import Client  # noqa: E402
from tests.harness.world import make_loop  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "models" / "austen-4m"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
# First line of a block -> the test that runs it.
RUN_BY = {
    '"""A server in forty lines: a queue of requests, four callbacks, and three prompts that the model continues."""':
        "tests/examples/test_forty_lines.py runs the example, which is this block",
    "from batch_manager.extras.llm import LLM": "tests/extras/test_llm.py runs the README's",
    "import sys": "tests/parallel/test_programs.py",
    'info = manager.load_adapter(7, "path/to/peft_folder")     # or {"lora_weights": ..., "lora_config": ...}':
        "tests/models/test_adapters.py, tests/contract/test_adapters.py",
    "def samples(first_id, prompt, count, **tensors):": "tests/examples/test_several_outputs.py",
    'KvCacheConfig(enable_block_reuse=True, disk_cache_path="cache", disk_cache_size=20 << 30)':
        "tests/integration/test_prompt_cache_on_disk.py runs engines with it",
    "from batch_manager import KvCacheConfig, KvTransferConfig, TrtGptModelOptionalParams":
        "tests/integration/test_contexts_from_another_engine.py runs engines with these options",
    "class Echo:": "here",
    "import asyncio": "here",
    "from batch_manager.extras.async_llm import AsyncLLM": "here",
    "from batch_manager.extras.text import TextStream, chat_prompt": "here",
    "class TopNSigma(batch_manager.LogitsStage):": "here",
    "from batch_manager import PerfMetrics, TrtGptModelOptionalParams": "here",
}


def blocks():
    return [block for page in PAGES
            for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)]


def block(first_line):
    found = {each for each in blocks() if each.startswith(first_line)}
    assert len(found) == 1, f"{len(found)} different blocks begin with {first_line!r}"
    return found.pop()


def test_every_block_is_run_by_a_test():
    assert {each.splitlines()[0] for each in blocks()} == RUN_BY.keys()


def test_every_request_of_a_page_ends_at_end_ids():
    """The engine ends a sequence only at the ids in its request's `end_id`. A request without it runs to its length."""
    for page in [*PAGES, *(REPOSITORY / "examples").rglob("*.md"), *(REPOSITORY / "batch_manager").rglob("*.md")]:
        for fenced in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            assert fenced.count('"request_output_len":') == fenced.count('"end_id":'), f"{page}:\n{fenced}"


def test_the_drafter_of_the_page_drafts():
    names = {}
    exec(block("class Echo:"), names)
    client = Client()
    client.pending = [InferenceRequest(1, {"input_ids": [1, 2, 3], "request_output_len": 9})]
    loop = make_loop(client, parts={"drafter": names["Echo"]()}, speculative_config=SpeculativeConfig("custom"))
    for _ in range(12):
        loop.step(accept_new=True)
    assert client.final(1).error == "" and json.loads(client.stats[-1])["Draft Tokens"] > 2


def test_pages_agree_on_the_five_lines():
    block("from batch_manager.extras.llm import LLM")


def test_asyncio(monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    exec(block("import asyncio"), {})
    *_, last = told = capsys.readouterr().out.splitlines()
    assert last == "64 tokens" and len("".join(told)) > 64


def test_texts_on_asyncio(monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    exec(block("from batch_manager.extras.async_llm"), {})
    assert sum(len(line) > 10 for line in capsys.readouterr().out.splitlines()) >= 3


def test_text_of_tokens(tmp_path):
    pytest.importorskip("jinja2")
    names = {}
    exec(block("from batch_manager.extras.text"), names)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompt_ids, stream = names["ask"](tokenizer, tmp_path, [{"role": "user", "content": "Good morning"}])
    assert tokenizer.decode(prompt_ids) == "user: Good morning\n"
    told = [names["on_response"](stream, tokenizer.encode(piece).ids, is_last)
            for piece, is_last in (("Emma smiled,", False), (" and said so.\n\nUser: no", True))]
    assert "".join(told) == "Emma smiled, and said so."


def test_prometheus():
    pytest.importorskip("prometheus_client")
    names = {}
    exec(block("from batch_manager import PerfMetrics"), names)
    waiting = [InferenceRequest(0, {"input_ids": [5, 6], "request_output_len": 4, "return_perf_metrics": True})]
    waiting.append(InferenceRequest(LAST := 9))
    with batch_manager.GptManager(
            None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION,
            lambda room: [waiting.pop(0) for _ in range(min(room, len(waiting)))], names["send_response"],
            return_batch_manager_stats_cb=names["statistics"], optional_params=names["optional_params"],
            terminate_req_id=LAST, parts=batch_manager.Parts(backend=ScriptedBackend())) as manager:
        manager.wait_until_terminate()
    kind, page = names["metrics_page"]()
    assert kind.startswith("text/plain")
    assert 'nv_trt_llm_request_metrics{model="austen-4m",request_type="active",version="1"} 0.0' in page.decode()
    assert 'vllm:e2e_request_latency_seconds_count{model_name="austen-4m"} 1.0' in page.decode()


def test_a_stage_of_ones_own(make_manager, new_client):
    names = {"batch_manager": batch_manager, "torch": torch}
    exec(block("class TopNSigma"), names)
    client = new_client()
    client.pending = [InferenceRequest(1, {"input_ids": list(range(100, 120)), "request_output_len": 12,
                                           "temperature": 1.0, "runtime_top_p": 0.9, "random_seed": 3})]
    seen = []
    stage = names["TopNSigma"]()
    apply = stage.apply
    stage.apply = lambda logits, rows, active: (apply(logits, rows, active), seen.append(
        (np.isfinite(logits.numpy()[active]).sum(1) < logits.shape[1]).all()))[0]
    manager = make_manager(client, model_path=MODEL, num_threads=1, parts={"stages": [stage]})
    client.wait_for_finals(1)
    manager.shutdown()
    assert len(seen) >= 12 and all(seen)
