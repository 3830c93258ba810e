"""OpenAI servers of which one computes prompts and the other continues them, also while one of them dies."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from batch_manager import ConfigError, KvCacheConfig, KvTransferConfig, TrtGptModelOptionalParams  # noqa: E402
from batch_manager.aio import AsyncEngine  # noqa: E402
from batch_manager.extras.openai import OpenAIError, OpenAIService  # noqa: E402
from batch_manager.extras.openai.application import engine_params  # noqa: E402
from batch_manager.extras.openai.fields import read_body  # noqa: E402
from batch_manager.extras.openai.transfers import options_of_json  # noqa: E402
from examples.disaggregated_proxy import make_app  # noqa: E402
from tests.harness import forked  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, " * 8
ASKED = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 3, "logprobs": 2}
DECODE_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


async def text_of(service, body, is_chat=False):
    answer = await service.accept(json.dumps(body).encode(), is_chat)
    return json.loads(await answer.whole())


def test_a_prompt_of_one_service_is_continued_by_the_other():
    async def inside():
        cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=16, max_tokens=4096)
        engines = [await AsyncEngine.start(str(MODEL), takes_all=True, process=process, optional_params=(
            TrtGptModelOptionalParams(kv_cache_config=cache, max_batch_size=4, flush_stats_when_idle=True,
                                      kv_transfer_config=role and KvTransferConfig(role=role))))
            for role, process in ((None, False), ("producer", True), ("consumer", False))]
        try:
            alone, prefill, decode = (OpenAIService(engine, str(MODEL), ["austen"]) for engine in engines)
            wanted = await text_of(alone, ASKED)
            first = await text_of(prefill, {**ASKED, "max_tokens": 1, "kv_transfer_params": DECODE_ELSEWHERE})
            params = first["kv_transfer_params"]
            assert params["do_remote_prefill"] and params["remote_num_tokens"] > 64
            found = await text_of(decode, {**ASKED, "kv_transfer_params": {**params, "other": [1]}})
            assert found["choices"] == wanted["choices"]
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= params["remote_num_tokens"]
            assert "kv_transfer_params" not in found and "kv_transfer_params" not in wanted
            for service, transfer, sent in ((alone, DECODE_ELSEWHERE, "decode"), (decode, DECODE_ELSEWHERE, "decode"),
                                            (prefill, params, "prefill")):
                with pytest.raises(OpenAIError, match=f"^kv_transfer_params has do_remote_{sent}: true; this .* "
                                                      "--kv-transfer-config, or") as raised:
                    await text_of(service, {**ASKED, "kv_transfer_params": transfer})
                assert raised.value.param == "kv_transfer_params" and "request_type" not in raised.value.message
            assert (await text_of(alone, {**ASKED, "kv_transfer_params": {}}))["choices"] == wanted["choices"]
            other = {**ASKED, "prompt": f"Once more: {PROMPT}"}
            first = await text_of(prefill, {**other, "kv_transfer_params": DECODE_ELSEWHERE})
            await engines[1].close(drain=False)
            found = await text_of(decode, {**other, "kv_transfer_params": first["kv_transfer_params"]})
            assert found["choices"] == (await text_of(alone, other))["choices"], "what does not come is computed"
        finally:
            for engine in engines:
                await engine.close(drain=False)
    asyncio.run(asyncio.wait_for(inside(), 120))


GOOD = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 5, "remote_request_id": "ab" * 16}


@pytest.mark.parametrize("given, more, text", [
    ({"do_remote_decode": True, "do_remote_prefill": True}, {}, "not both"),
    ({"do_remote_decode": 1}, {}, "to be true"), ({"do_remote_decode": ""}, {}, "to be true"),
    ({"do_remote_prefill": True}, {}, "expected"),
    ({**GOOD, "remote_port": "5"}, {}, "expected remote_host, remote_port"),
    ("x", {}, "kv_transfer_params"), (DECODE_ELSEWHERE, {"stream": True}, "stream"),
    (DECODE_ELSEWHERE, {"echo": True, "logprobs": 1}, "got echo: true with logprobs"),
    (GOOD, {"echo": True, "logprobs": 1}, "got echo: true with logprobs"),
    (DECODE_ELSEWHERE, {"n": 2}, "got 2 outputs"), (GOOD, {"prompt": ["a", "b"]}, "got 2 outputs")])
def test_fields_that_are_refused(given, more, text):
    with pytest.raises(OpenAIError, match=text) as raised:
        read_body(json.dumps({"prompt": "a", "kv_transfer_params": given, **more}).encode(), is_chat=False)
    assert raised.value.status == 400 and raised.value.param == "kv_transfer_params"


def test_options_in_json_as_vllm_has_them():
    config, size = options_of_json(json.dumps({
        "kv_connector": "NixlConnector", "kv_role": "kv_producer", "engine_id": "a", "kv_ip": "127.0.0.2", "kv_port": 7,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"host_cache_size": 5, "peers": ["a"], "timeout_s": 2}}))
    assert size == 5 and config == KvTransferConfig(role="producer", host="127.0.0.2", port=7, peers=("a",),
                                                    load_failure_policy="fail", timeout_s=2)
    params = engine_params(block_reuse=True, kv_transfer_config='{"kv_role": "kv_both"}')
    assert params.kv_transfer_config == KvTransferConfig()


@pytest.mark.parametrize("text, fact", [
    *((text, "cannot be read as JSON") for text in ("", "[", "[" * 100_000)),
    *((text, f"is JSON of type {kind}; expected a JSON object")
      for text, kind in (("[]", "list"), ("5", "int"), ("null", "NoneType"), ('"kv_role"', "str"))),
    *((f'{{"kv_connector_extra_config": {text}}}', f"kv_connector_extra_config of .* is JSON of type {kind}; expected")
      for text, kind in (("[]", "list"), ("5", "int"), ("null", "NoneType"), ('"x"', "str"))),
    ('{"kv_role": "kv_producer", "kv_role": "kv_consumer"}', "'kv_role' occurs twice"),
    ('{"kv_connector_extra_config": {"timeout_s": 1, "timeout_s": 2}}', "'timeout_s' occurs twice"),
    ('{"kv_rank": 0}', "has 'kv_rank'"), ('{"kv_role": "x"}', "role is 'x'"), ('{"kv_role": 5}', "role is 5"),
    ('{"kv_port": -1}', "port is -1"), ('{"kv_connector_extra_config": {"role": "both"}}', "has 'role'"),
    ('{"kv_connector_extra_config": {"timeout_s": 0}}', "timeout_s is 0"),
    ('{"kv_ip": "0.0.0.0"}', "host is '0.0.0.0'; it stands for all addresses")])
def test_options_that_are_refused(text, fact):
    with pytest.raises(ConfigError, match=fact):
        options_of_json(text)
    with pytest.raises(ConfigError, match="enable_block_reuse=False"):
        engine_params(block_reuse=False, kv_transfer_config="{}")


@contextmanager
def server(role, **config):
    """Run `batch-manager serve` in a process. Yields it and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {"kv_role": f"kv_{role}", "kv_connector_extra_config": {"load_timeout_s": 20}, **config}
    process = forked.Popen(
        [sys.executable, "-m", "batch_manager.tools", "serve", str(MODEL), "--port", str(port), "--max-batch-size", "4",
         "--kv-transfer-config", json.dumps(config)], stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, "the server does not answer"
            try:
                httpx.get(f"{address}/health").raise_for_status()
                break
            except httpx.TransportError:
                time.sleep(0.05)
        drain = threading.Thread(target=process.stderr.read)
        drain.start()
        yield process, address
    finally:
        process.kill()
        process.wait(60)
        drain.join(60)


def post(address, body):
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    return answer.status_code, answer.json()


def text_through_a_proxy(servers, body, strike=None):
    """Return the text of a stream through the example's proxy. `strike` is called when a server has sent two events."""
    class Struck(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request):
            answer = await super().handle_async_request(request)
            if strike is not None and answer.headers["content-type"].startswith("text/event-stream"):
                lines = answer.aiter_lines()
                begun = [await anext(lines) for _ in range(3)]                # an event, an empty line, an event
                strike()

                async def rest():
                    for line in begun:
                        yield f"{line}\n".encode()
                    async for line in lines:
                        yield f"{line}\n".encode()
                return httpx.Response(answer.status_code, content=rest())
            return answer

    async def inside():
        app = make_app([servers[0]], [servers[1]], transport=Struck())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy", timeout=60) as client:
            answer = await client.post("/v1/completions", json={**body, "stream": True})
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)
    return asyncio.run(inside())


def test_a_stream_goes_on_at_one_of_two_processes_when_the_other_is_killed():
    with ExitStack() as stack:
        _, first = stack.enter_context(server("producer"))
        decode, second = stack.enter_context(server("consumer"))
        bodies = [{**ASKED, "max_tokens": 40, "logprobs": None, "seed": seed, "prompt": f"{seed} {PROMPT}"}
                  for seed in range(2)]
        alone = [post(first, body)[1]["choices"] for body in bodies]
        transfer = post(first, {**bodies[0], "kv_transfer_params": DECODE_ELSEWHERE})[1]["kv_transfer_params"]
        status, found = post(second, {**bodies[0], "kv_transfer_params": transfer})
        assert status == 200 and found["choices"] == alone[0]
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= transfer["remote_num_tokens"] > 64
        for strike in (None, lambda: decode.send_signal(signal.SIGKILL)):
            assert text_through_a_proxy((first, second), bodies[1], strike) == alone[1][0]["text"]
        assert decode.wait(60) == -signal.SIGKILL
