"""The OpenAI server, started as its README says, answers OpenAI's own client and plain HTTP requests on loopback."""

import asyncio
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx", reason="httpx is not installed: the OpenAI server was not tried")
openai = pytest.importorskip("openai", reason="openai is not installed: the OpenAI server was not tried")
pytest.importorskip("starlette", reason="starlette is not installed: the OpenAI server was not tried")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: the OpenAI server was not tried")
pytest.importorskip("torch")
msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed: the OpenAI server was not tried")
zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: the OpenAI server was not tried")

from batch_manager.errors import ConfigError  # noqa: E402
from batch_manager.extras.openai import application  # noqa: E402
from batch_manager.extras.openai.responses import LARGEST_BODY  # noqa: E402
from batch_manager.extras.openai.server import FewAlike  # noqa: E402
from batch_manager.extras.tokenizer import load_tokenizer  # noqa: E402
from batch_manager.tools import serve  # noqa: E402
from tests.harness import forked  # noqa: E402
from tests.harness.ports import free_port  # noqa: E402
from tests.harness.waiting import until  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENIZER = load_tokenizer(REPOSITORY / "examples" / "models" / "austen-4m")
SERVER = REPOSITORY / "examples" / "openai_server.py"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
LONG = 1500
ORIGIN = "https://example.org"


# The program `serve`, where uvicorn would wait for connections for 600 s instead of 5 s.
PATIENT = ("-c", """
import runpy, sys, uvicorn
config = uvicorn.Config
uvicorn.Config = lambda *arguments, **options: config(*arguments, **{**options, "timeout_graceful_shutdown": 600})
sys.argv.insert(1, "serve")
runpy.run_module("batch_manager.tools", run_name="__main__", alter_sys=True)
""")


class Server:
    """A server process and its log."""

    def __init__(self, folder, log, *options, program=("-m", "batch_manager.tools", "serve"), start=forked.Popen):
        command = [sys.executable, *program, str(folder), "--port", "0", "--num-threads", "1", *options]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.log = log
        with log.open("wb") as file:
            self.process = start(command, stdout=file, stderr=file, env=environment)
        deadline = time.monotonic() + 120
        while not (found := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        self.url = found[1]

    def alive(self):
        health = httpx.get(f"{self.url}/health").json()
        return health["active_requests"]

    def num_ended_by_length(self):
        """Return how many requests have reached their number of tokens so far."""
        found = re.search(r'^vllm:request_success_total\{.*finished_reason="length".*\} (\S+)$',
                          httpx.get(f"{self.url}/metrics").text, re.M)
        return float(found[1]) if found else 0

    def until(self, count, seconds=60):
        deadline = time.monotonic() + seconds
        while (alive := self.alive()) != count:
            assert time.monotonic() < deadline, f"{alive} requests are alive, {count} are expected"
            time.sleep(0.01)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


def test_the_table_of_routes_is_that_of_the_application():
    spec = importlib.util.spec_from_file_location("openai_server", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    routes = [(method, route.path_format.replace("{name}", "NAME")) for route in module.make_app("unused").routes
              if route.name != "refuse_socket" for method in route.methods - {"HEAD"}]
    page = SERVER.with_suffix(".md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(GET|POST) (/\S*)` \|", page, re.M)) == sorted(routes)


def test_allowed_origins_are_those_that_browsers_send():
    for origin, sent in (("HTTPS://Example.ORG:443", "https://example.org"), ("http://a.org:80", "http://a.org"),
                         ("http://a.org:8080", "http://a.org:8080"), ("http://[::1]:080", "http://[::1]"), ("*", "*")):
        assert application.normal_origin(origin) == sent
    for origin in ("https://*.org", "https://a.org/", "a.org", "https://a.org:99999", "https://u@a.org", "null",
                   "https://a.org:", "https://a..org", ""):
        with pytest.raises(ConfigError, match="the allowed origin is"):
            application.normal_origin(origin)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "austen"
    shutil.copytree(REPOSITORY / "examples" / "models" / "austen-4m", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    disk, replay = tmp_path_factory.mktemp("disk") / "cache", f"tcp://127.0.0.1:{free_port()}"
    events = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "replay_endpoint": replay}
    server = Server(folder, tmp_path_factory.mktemp("logs") / "log", "--max-batch-size", "8", "--max-queued-requests",
                    "16", "--allowed-origins", ORIGIN, "--disk-cache-path", str(disk), "--disk-cache-size", "50000000",
                    "--kv-events-config", json.dumps(events), start=subprocess.Popen)
    server.disk, server.replay = disk, replay
    yield server
    server.end()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_routes_and_options_of_openais_client(client):
    assert [model.id for model in client.models.list()] == ["austen"]
    fixed = {"model": "austen", "seed": 5, "max_tokens": 12}
    one = client.completions.create(prompt="Emma smiled, and", logprobs=0, **fixed)
    assert one.usage.completion_tokens == len(one.choices[0].logprobs.tokens) == 12
    assert "".join(one.choices[0].logprobs.tokens) == one.choices[0].text
    stream = client.completions.create(prompt="Emma smiled, and", stream=True,
                                       stream_options={"include_usage": True}, **fixed)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == one.choices[0].text
    assert chunks[-1].usage.total_tokens == one.usage.total_tokens == 12 + one.usage.prompt_tokens
    tokens = [200, 201, 202]
    for prompt, count in (("It is", 1), (["It is", "Emma"], 2), (tokens, 1), ([tokens, tokens], 2)):
        assert len(client.completions.create(prompt=prompt, **fixed).choices) == count
    three = client.completions.create(prompt="It is", n=3, **fixed)
    assert len({choice.text for choice in three.choices}) == 3
    greedy = [client.completions.create(prompt="It is", temperature=0, model="austen").choices[0].text
              for _ in range(2)]
    assert greedy[0] == greedy[1]
    cut = client.completions.create(prompt="Emma smiled, and", stop=one.choices[0].text[5:9], **fixed)
    assert cut.choices[0].text == one.choices[0].text.split(one.choices[0].text[5:9])[0]
    assert cut.choices[0].finish_reason == "stop"
    echo = client.completions.create(prompt="It is", echo=True, **fixed)
    assert echo.choices[0].text.startswith("It is")
    forced = client.completions.create(prompt="It is", logit_bias={"300": 100}, temperature=0.01, **fixed)
    assert len(set(forced.choices[0].text.split())) <= 1
    more = client.completions.create(prompt="It is", **fixed, extra_body={
        "ignore_eos": True, "min_tokens": 3, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2,
        "stop_token_ids": [1], "priority": 3, "return_timings": True})
    assert 0 < more.timings["queue_ms"] < more.timings["time_to_first_token_ms"] <= more.timings["total_ms"]
    prompt = list(range(100, 300))
    used = [client.completions.create(prompt=prompt, **fixed).usage.prompt_tokens_details.cached_tokens
            for _ in range(2)]
    assert used[0] == 0 and used[1] >= 128
    third = one.choices[0].logprobs.tokens[3]
    ends = client.completions.create(prompt="Emma smiled, and", logprobs=0, **fixed, extra_body={
        "stop_token_ids": [TOKENIZER.encode(third, add_special_tokens=False).ids[0]]})
    assert ends.choices[0].finish_reason == "stop"
    assert ends.choices[0].logprobs.tokens == one.choices[0].logprobs.tokens[:3]


def test_a_model_is_looked_up_by_its_name(client):
    assert client.models.retrieve("austen") == client.models.list().data[0]
    for name in ("other", "austen/other", ""):
        answer = httpx.get(f"{client.base_url}models/{name}")
        assert answer.status_code == 404 and answer.json()["error"] == {
            "message": f"the model {name!r} does not exist; this server has 'austen'", "param": "model",
            "type": "invalid_request_error", "code": "model_not_found"}
    with pytest.raises(openai.NotFoundError) as told:
        client.models.retrieve("gpt-4o")
    assert told.value.code == "model_not_found"


def test_pages_of_allowed_origins_may_call_the_server(server):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    answer = httpx.options(f"{server.url}/v1/chat/completions", headers={"Origin": ORIGIN, **asks})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
    assert {"authorization", "content-type"} <= set(answer.headers["access-control-allow-headers"].split(","))
    for body, status in (({"prompt": "x"}, 200), ({"prompt": "x", "stream": True}, 200), ({}, 400)):
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Origin": ORIGIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
    other = {"Origin": "https://example.com"}
    assert httpx.options(f"{server.url}/v1/models", headers={**other, **asks}).status_code == 400
    assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=other).headers


def test_log_probs_are_those_of_the_models_own_distribution(client, folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = "Emma smiled, and said that she would"
    given = client.completions.create(model="austen", prompt=prompt, echo=True, logprobs=4, max_tokens=8, seed=3,
                                      temperature=0.6, frequency_penalty=1.5, extra_body={"top_k": 20})
    text, told = given.choices[0].text, given.choices[0].logprobs
    assert text.startswith(prompt) and "".join(told.tokens[1:]) == text and given.usage.completion_tokens == 8
    tokens = [TOKENIZER.token_to_id(told.tokens[0]), *(
        TOKENIZER.encode(each, add_special_tokens=False).ids[0] for each in told.tokens[1:])]
    assert tokens[: given.usage.prompt_tokens] == TOKENIZER.encode(prompt).ids
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].double().log_softmax(1)
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    for place, token in enumerate(tokens[1:], 1):
        row = expected[place - 1]
        assert told.token_logprobs[place] == pytest.approx(float(row[token]), abs=1e-3)
        best = sorted(told.top_logprobs[place].values(), reverse=True)[:4]
        assert best == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)
    chat = client.chat.completions.create(model="austen", messages=[{"role": "user", "content": "Who?"}], seed=3,
                                          max_tokens=4, logprobs=True, top_logprobs=5)
    for each in chat.choices[0].logprobs.content:
        assert len(each.top_logprobs) == 5 and each.logprob <= each.top_logprobs[0].logprob


def test_chats(client):
    fixed = {"model": "austen", "seed": 5, "messages": [{"role": "user", "content": "Who is Emma?"}]}
    one = client.chat.completions.create(max_tokens=10, logprobs=True, **fixed)
    assert one.choices[0].message.role == "assistant" and len(one.choices[0].logprobs.content) == 10
    chunks = list(client.chat.completions.create(max_completion_tokens=10, stream=True, **fixed))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == one.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"


def test_a_response_format_is_kept(client):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"name": {"enum": ["Emma", "Jane"]}, "age": {"enum": [21, 27]}},
              "required": ["name", "age"], "additionalProperties": False}
    for extra in ({}, {"stream": True}):
        answer = client.chat.completions.create(
            model="austen", messages=[{"role": "user", "content": "Who?"}], max_tokens=120, temperature=0, **extra,
            response_format={"type": "json_schema", "json_schema": {"name": "who", "schema": schema}})
        text = ("".join(chunk.choices[0].delta.content or "" for chunk in answer) if extra
                else answer.choices[0].message.content)
        told = json.loads(text)
        assert told["name"] in ("Emma", "Jane") and told["age"] in (21, 27)


def test_errors_have_openais_shape_and_class(client, server):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as told:
        client.completions.create(model="austen", prompt="x", temperature=-1, stream=True)
    assert told.value.code == "invalid_request"
    for body in ({"presence_penalty": "much"}, {"logprobs": 21}, {"extra_body": {"banana": 1}}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="austen", prompt="x", **body)
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/health/", 404), ("POST", "/v1/completions/", 404),
                                 ("GET", "/v1/completions", 405)):
        answer = httpx.request(method, server.url + path)
        assert answer.status_code == status and answer.headers.get("allow") == ("POST" if status == 405 else None)
        assert re.search("there is no route .*; the routes are POST /v1/completions, .*GET /metrics",
                         answer.json()["error"]["message"])
    answer = httpx.get(f"{server.url}/v1/responses", headers={           # as the client's responses.connect
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
    assert answer.status_code == 404 and "WebSocket" in answer.json()["error"]["message"]
    answer = httpx.post(f"{server.url}/v1/completions", content=b"{", headers={"X-Request-Id": "mine"})
    assert answer.status_code == 400 and "not JSON" in answer.json()["error"]["message"]
    answer = httpx.post(f"{server.url}/v1/completions", content=b" " * (LARGEST_BODY + 1))
    assert answer.status_code == 413 and "the body is larger than" in answer.json()["error"]["message"]
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000000\r\n\r\n")
        assert b" 413 " in connection.recv(100), "the body was not sent"
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


def test_streams_that_are_cut_stop_and_leave_the_others_as_they_are(server):
    async def test():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            async def read(number, cut=None):
                length = LONG if cut else 40
                pieces = []
                stream = await client.completions.create(model="austen", prompt=f"Chapter {number}", seed=number,
                                                         max_tokens=length, stream=True, extra_body={
                                                             "ignore_eos": True})
                async for chunk in stream:
                    pieces.append(chunk.choices[0].text)
                    if cut and len(pieces) == cut:
                        await stream.close()
                        break
                return "".join(pieces)

            before = server.num_ended_by_length()
            together = await asyncio.gather(*[read(number, 5 if number % 4 == 0 else None) for number in range(12)])
            await asyncio.to_thread(server.until, 0)
            assert server.num_ended_by_length() - before == 9
            for number in range(12):
                if number % 4:
                    assert await read(number) == together[number] != ""
    asyncio.run(asyncio.wait_for(test(), 90))


def test_a_call_that_does_not_stream_and_times_out_is_stopped(server):
    before = server.num_ended_by_length()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", timeout=0.3, json={
            "prompt": "It is", "max_tokens": LONG, "ignore_eos": True, "n": 4})
    server.until(0)
    assert server.num_ended_by_length() == before


def test_too_many_calls_at_once_are_told_to_come_back(server):
    async def test():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            answers = await asyncio.gather(*[client.post("/v1/completions", json={
                "prompt": f"Chapter {number}", "max_tokens": 120, "ignore_eos": True}) for number in range(60)])
        answered = [answer for answer in answers if answer.status_code == 200]
        others = [answer for answer in answers if answer.status_code != 200]
        assert len(answered) >= 24
        assert all(answer.json()["usage"]["completion_tokens"] == 120 for answer in answered)
        assert others and all(answer.status_code == 429 and int(answer.headers["retry-after"]) for answer in others)
        assert others[0].json()["error"]["code"] == "queue_full"
    asyncio.run(asyncio.wait_for(test(), 90))
    server.until(0)


def test_metrics_count_what_was_served(server):
    def scraped():
        answer = httpx.get(f"{server.url}/metrics")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
        assert set(re.findall('model_name="(.*?)"', answer.text)) == {"austen"}      # the name that clients use
        return {line.rpartition("{")[0] or line: float(line.rpartition(" ")[2]) for line in answer.text.splitlines()
                if line.startswith("vllm:") and "finished_reason" not in line and "_bucket" not in line}

    server.until(0)
    before = scraped()
    told = httpx.post(f"{server.url}/v1/completions", json={"model": "austen", "prompt": "Emma", "max_tokens": 7,
                                                            "ignore_eos": True}).json()
    server.until(0)
    after = scraped()
    assert told["usage"]["completion_tokens"] == 7, told
    assert after["vllm:generation_tokens_total"] - before.get("vllm:generation_tokens_total", 0) == 7
    assert after["vllm:e2e_request_latency_seconds_count"] - before["vllm:e2e_request_latency_seconds_count"] == 1
    assert after["vllm:num_requests_running"] == 0


def test_prompts_are_told_to_subscribers_and_kept_on_disk(server):
    words = " ".join(f"{number} ladies" for number in range(40))
    httpx.post(f"{server.url}/v1/completions", json={"prompt": words, "max_tokens": 1}, timeout=60)
    num_blocks = len(TOKENIZER.encode(words).ids) // 64
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.linger, replay.rcvtimeo = 0, 60_000
        replay.connect(server.replay)
        stored, deadline = [], time.monotonic() + 60
        while not any(len(event["block_hashes"]) >= num_blocks for event in stored):
            assert time.monotonic() < deadline, stored
            replay.send_multipart((b"", (0).to_bytes(8, "big")))
            while (batch := replay.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
                stored += [event for event in msgspec.msgpack.decode(batch[2])["events"]
                           if event["type"] == "BlockStored"]
    while len(list(server.disk.glob("??/*.kv"))) < num_blocks:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert num_blocks >= 2


@pytest.mark.parametrize("options, words", [
    (["--disk-cache-path", "x"], "disk_cache_size is not set"),
    (["--disk-cache-size", "5"], "disk_cache_path is not set"), (["--disk-cache-size", "0"], "--disk-cache-size"),
    (["--disk-cache-path", "x", "--disk-cache-size", "5", "--no-block-reuse"], "enable_block_reuse is not set")])
def test_a_disk_cache_that_cannot_be_is_refused(options, words, capsys):
    try:
        status = serve.main([str(SERVER.parent / "models" / "austen-4m"), "--port", "0", *options])
    except SystemExit as end:
        status = end.code
    assert status == 2 and words in capsys.readouterr().err


def test_a_server_can_be_watched(server):
    def fields_of(line):
        return dict(field.split("=") for field in line.split())

    command = [sys.executable, "-m", "batch_manager.tools", "watch", "--url", server.url, "--interval", "0.5"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    try:
        fields = [fields_of(watching.stdout.readline())]         # this line compares two answers of the server
        for _ in range(3):
            assert httpx.post(f"{server.url}/v1/completions", timeout=60, json={
                "model": "austen", "prompt": "Emma", "max_tokens": 20, "ignore_eos": True}).status_code == 200
        deadline = time.monotonic() + 60
        while sum(int(each["finished"]) for each in fields) < 3 or fields[-1]["active"] != "0":
            assert time.monotonic() < deadline, fields
            fields.append(fields_of(watching.stdout.readline()))
    finally:
        watching.send_signal(signal.SIGINT)
        _, error = watching.communicate(timeout=60)
    assert (watching.returncode, error) == (130, "")
    assert {each["state"] for each in fields} == {"ok"}
    assert sum(int(each["new"]) for each in fields) == sum(int(each["finished"]) for each in fields) == 3
    assert any(float(each["tokens_per_s"]) > 0 for each in fields) and fields[-1]["kv_used"] == "0"
    assert float(fields[-1]["first_token_p50_ms"]) > 0 and fields[-1]["latency_over"].endswith("s")


def test_no_prompt_is_in_the_log(server):
    assert "Chapter" not in server.log.read_text() and "Traceback" not in server.log.read_text()


def test_sigterm_lets_a_stream_that_runs_end(folder, tmp_path):
    draining = Server(folder, tmp_path / "log", "--drain-seconds", "600", program=[str(SERVER)])
    try:
        with httpx.stream("POST", f"{draining.url}/v1/completions", timeout=60, json={
                "prompt": "It is", "max_tokens": 400, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)                                              # the request is running
            draining.process.send_signal(signal.SIGTERM)
            *_, last, done = lines
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == 400
        assert draining.process.wait(60) == 0, draining.log.read_text()      # not after 600 s
        assert "Traceback" not in draining.log.read_text() and "It is" not in draining.log.read_text()
    finally:
        draining.end()


def test_sigterm_refuses_requests_and_a_second_signal_ends_running_ones_at_once(folder, tmp_path):
    draining = Server(folder, tmp_path / "log", "--drain-seconds", "600", program=PATIENT)
    try:
        with httpx.stream("POST", f"{draining.url}/v1/completions", timeout=60, json={
                "prompt": "It is", "max_tokens": 2000, "ignore_eos": True, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            draining.process.send_signal(signal.SIGTERM)
            told = until(lambda: not (health := httpx.get(f"{draining.url}/health")).is_success and health)
            assert told.json()["status"] == "DRAINING" and "retry-after" in told.headers
            refused = httpx.post(f"{draining.url}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503 and "retry-after" in refused.headers
            draining.process.send_signal(signal.SIGTERM)
            *_, last, done = lines
        assert done == "data: [DONE]" and json.loads(last.removeprefix("data: "))["error"]["code"] == "shutdown"
        assert draining.process.wait(60) == 0, draining.log.read_text()
        assert "Traceback" not in draining.log.read_text()
    finally:
        draining.end()


def test_sigterm_drains_with_a_limit(folder, tmp_path):
    draining = Server(folder, tmp_path / "log", "--drain-seconds", "1")
    try:
        async def test():
            async with httpx.AsyncClient(base_url=draining.url, timeout=60) as client:
                async def last_event():
                    async with client.stream("POST", "/v1/completions", json={
                            "prompt": "It is", "max_tokens": 2000, "ignore_eos": True, "stream": True,
                            "stream_options": {"include_usage": True}}) as answer:
                        *_, last, done = [line async for line in answer.aiter_lines() if line]
                    assert done == "data: [DONE]"
                    return json.loads(last.removeprefix("data: "))

                streams = [asyncio.ensure_future(last_event()) for _ in range(64)]
                while (await client.get("/health")).json()["active_requests"] < 64:
                    await asyncio.sleep(0.01)
                draining.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*streams)
        ends = asyncio.run(asyncio.wait_for(test(), 60))
        cut = [end for end in ends if "error" in end]
        assert cut and all(end["error"]["code"] == "shutdown" for end in cut)
        assert all("usage" in end for end in ends if "error" not in end)
        assert draining.process.wait(60) == 0, draining.log.read_text()
        assert "Traceback" not in draining.log.read_text() and "It is" not in draining.log.read_text()
    finally:
        draining.end()


def test_a_start_up_that_is_refused_says_what_to_do_without_a_stack(tmp_path):
    ended = forked.run([sys.executable, SERVER, "nowhere", "--port", "0"], cwd=tmp_path, capture_output=True,
                           env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, text=True, timeout=60)
    assert ended.returncode == 2 and "pass an existing path" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Return (options) -> the text with which the program refuses them, before it looks for the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: pytest.fail("the server started"))

    def text(*options):
        with pytest.raises(SystemExit) as ended:
            sys.exit(serve.main(["nowhere", "--port", "0", *options]))
        assert ended.value.code == 2
        return capsys.readouterr().err
    return text


@pytest.mark.parametrize("option, value, message", [
    ("--port", "99999", "--port is 99999; expected 0 to 65535; 0 takes any free port"),
    ("--port", "-1", "--port is -1; expected 0 to 65535; 0 takes any free port"),
    ("--drain-seconds", "nan", "--drain-seconds is nan; expected at least 0; 0 ends running requests at once"),
    ("--drain-seconds", "-5", "--drain-seconds is -5.0; expected at least 0; 0 ends running requests at once"),
    ("--keep-alive-seconds", "0", "--keep-alive-seconds is 0; expected 1 to 86400"),
    ("--allowed-origins", "https://example.org/", "leave out the path and the final slash"),
    ("--allowed-origins", "https://*.org", "name each host"), ("--served-model-name", "", "served_model_name is empty"),
    ("--model", "another", "2 models were given; expected one folder or .gguf file"),
    ("--host", "nowhere.invalid", "pass another --host"),
    ("--host", "a" * 70, "pass another --host"),
])
def test_a_wrong_option_is_refused_in_one_line(refused, option, value, message):
    text = refused(option, value)
    assert message in text and text.count("\n") == 1, text


@pytest.mark.parametrize("options, seconds", [([], 75), (["--keep-alive-seconds", "9"], 9)])
def test_an_idle_connection_is_kept_longer_than_proxies_keep_it(monkeypatch, options, seconds):
    kept = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: kept.append(server.config.timeout_keep_alive))
    assert serve.main(["nowhere", "--port", "0", *options]) == 0 and kept == [seconds]


def test_more_connections_than_open_files_write_a_few_lines(folder, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import resource, sys; sys.modules['uvloop'] = None    # asyncio's own loop\n"
                       "from batch_manager.tools import serve\n"
                       "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); sys.exit(serve.main())\n")
    server = Server(folder, tmp_path / "log", program=[str(program)])
    try:
        others = [socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) for _ in range(150)]
        deadline = time.monotonic() + 20
        while "out of system resource" not in server.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.2)                                              # asyncio accepts again every second
        for each in others:
            each.close()
        server.until(0, 20)
        assert len(server.log.read_text().splitlines()) < 60
    finally:
        server.end()


def test_three_records_of_a_kind_pass_the_log_filter_in_a_minute():
    now = [0.0]
    few = FewAlike(lambda: now[0])

    def passed(count, text, level=logging.WARNING, raised=None):
        return sum(few.filter(logging.LogRecord("", level, "", 1, text, (), raised)) for _ in range(count))

    for _ in range(2):
        assert passed(100, "one\ndetail") == passed(100, "other") == 3 and passed(1, "one") == 0
        assert passed(100, "one", raised=(OSError, OSError(), None)) == 3 and passed(9, "one", logging.INFO) == 9
        now[0] += FewAlike.SECONDS


def test_a_start_up_that_fails_for_another_reason_has_another_status(tmp_path):
    code = ("import runpy, sys; from batch_manager.aio import AsyncEngine; AsyncEngine.start = lambda *_, **__: 1 / 0; "
            f"sys.argv = ['', '--model', 'nowhere', '--port', '0']; runpy.run_path({str(SERVER)!r}, None, '__main__')")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = forked.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True,
                           timeout=60)
    assert ended.returncode == 1 and "ZeroDivisionError" in ended.stderr


def test_a_port_in_use_is_refused_before_the_model_is_looked_for(refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        text = refused("--port", str(other.getsockname()[1]))
    assert "pass another --port" in text and "nowhere" not in text and "Traceback" not in text


def test_ctrl_c_tells_streams_that_run_and_ends_without_a_stack(folder, tmp_path):
    server = Server(folder, tmp_path / "log", program=PATIENT)
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            stream = client.completions.create(model="austen", prompt="Chapter", max_tokens=1900, stream=True,
                                               extra_body={"ignore_eos": True})
            with pytest.raises(openai.APIError, match="shut down") as told:
                for number, _ in enumerate(stream):
                    if number == 20:
                        server.process.send_signal(signal.SIGINT)
            assert told.value.code == "shutdown"
        assert server.process.wait(60) == 0, server.log.read_text()
        assert "Traceback" not in server.log.read_text() and "Chapter" not in server.log.read_text()
    finally:
        server.end()
