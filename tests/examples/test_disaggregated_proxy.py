"""The proxy before servers for prompts and servers that continue them: what it asks of whom, also when one is gone.

tests/extras/test_openai_transfers.py has it before two real servers.
"""

import asyncio
import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from examples.disaggregated_proxy import make_app  # noqa: E402

TICKET = {"do_remote_prefill": True, "remote_request_id": "ab" * 16}
TEXT = ["It is", " a", " truth", " univ", "ersally"]


class Servers(httpx.AsyncBaseTransport):
    """Servers that answer each call with TEXT. `calls` has (host, body) of each.

    gone        hosts that nobody listens at
    statuses    host -> status of its answers other than 200
    breaks_at   host -> number of events after which its stream breaks
    hangs_at    host -> number of events after which no other one comes
    texts       host -> its text instead of TEXT
    """

    def __init__(self, gone=(), statuses=(), breaks_at=(), hangs_at=(), texts=(), more=None):
        self.gone, self.statuses, self.breaks_at, self.texts = set(gone), dict(statuses), dict(breaks_at), dict(texts)
        self.hangs_at, self.calls, self.more = dict(hangs_at), [], more or {}

    async def handle_async_request(self, request):
        host, body = request.url.host, json.loads(request.content or "{}")
        self.calls.append((host, body))
        if host in self.gone:
            raise httpx.ConnectError("gone")
        status = self.statuses.get(host, 200)
        if status != 200:
            return httpx.Response(status, headers={"retry-after": "1"}, json={"error": {"message": host}})
        text = self.texts.get(host, TEXT)
        if body.get("stream"):
            return httpx.Response(200, stream=Stream(self._events(host, text, "chat" in request.url.path)))
        answer = {"choices": [{"index": 0, "text": "".join(text)}]}
        if body.get("kv_transfer_params", {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = TICKET
        return httpx.Response(200, json=answer)

    async def _events(self, host, text, is_chat):
        for number, piece in enumerate(text):
            if number == self.breaks_at.get(host):
                raise httpx.ReadError("broken")
            if number == self.hangs_at.get(host):
                await asyncio.Event().wait()
            reason = "length" if number == len(text) - 1 else None
            content = {"delta": {"content": piece}} if is_chat else {"text": piece, "logprobs": None}
            yield event({"id": host, "choices": [{"index": 0, **content, **self.more, "finish_reason": reason}]})
        yield event({"id": host, "choices": [], "usage": {"completion_tokens": len(text)}}) + b"data: [DONE]\n\n"


class Stream(httpx.AsyncByteStream):
    def __init__(self, pieces):
        self._pieces = pieces

    def __aiter__(self):
        return self._pieces


def event(value):
    return f"data: {json.dumps(value)}\n\n".encode()


def answer_of(servers, body=None, path="/v1/completions", prompts=("http://p/",), generation=("http://g",)):
    async def inside():
        app = make_app(list(prompts), list(generation), silent_seconds=0.2, transport=servers)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            if body is None:
                return await client.get(path)
            return await client.post(path, content=body if type(body) is bytes else json.dumps(body))
    return asyncio.run(asyncio.wait_for(inside(), 20))


def events(answer):
    *found, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(each) for each in (found if done == "[DONE]" else [*found, done])]


def text_of(answer, is_chat=False):
    choices = [choice for each in events(answer) for choice in each["choices"]]
    return "".join(choice["delta"]["content"] if is_chat else choice["text"] for choice in choices)


BODY = {"prompt": "It", "max_tokens": 5, "stream_options": {"include_usage": True}}


def test_a_prompt_is_computed_by_one_server_and_continued_by_the_other():
    servers = Servers()
    answer = answer_of(servers, {**BODY, "stream": True})
    assert text_of(answer) == "".join(TEXT) and events(answer)[-1]["usage"]
    (first, asked), (second, went_on) = servers.calls
    assert (first, second) == ("p", "g") and asked["kv_transfer_params"] == {"do_remote_decode": True}
    assert "stream" not in asked and went_on["kv_transfer_params"] == TICKET and went_on["stream"]
    assert asked["seed"] == went_on["seed"], "without a seed, the proxy chooses one"
    servers = Servers()
    assert answer_of(servers, {**BODY, "seed": 7}).json()["choices"][0]["text"] == "".join(TEXT)
    assert [body["seed"] for _, body in servers.calls] == [7, 7]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("servers, asked", [
    ({"gone": "p"}, "pg"), ({"gone": "g"}, "pgp"), ({"statuses": {"p": 400}}, "pg"), ({"statuses": {"p": 429}}, "pg"),
    ({"statuses": {"p": 503}}, "pg"), ({"statuses": {"g": 503}}, "pgp")])
def test_one_server_is_enough(servers, asked, stream):
    servers = Servers(**servers)
    answer = answer_of(servers, {**BODY, "stream": stream})
    assert answer.status_code == 200
    assert (text_of(answer) if stream else answer.json()["choices"][0]["text"]) == "".join(TEXT)
    assert "".join(host for host, _ in servers.calls) == asked
    if asked != "pgp":
        assert "kv_transfer_params" not in servers.calls[-1][1], "nobody has a ticket"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("breaks_at", range(6))
@pytest.mark.parametrize("other", [TEXT, ["It", " is a tr", "uth universally"], ["".join(TEXT)]])
def test_a_stream_goes_on_where_it_stopped(path, breaks_at, other):
    servers = Servers(breaks_at={"g": breaks_at}, texts={"p": other})
    answer = answer_of(servers, {**BODY, "stream": True}, path)
    found = events(answer)
    assert text_of(answer, "chat" in path) == "".join(TEXT) and answer.text.endswith("data: [DONE]\n\n")
    assert len({each["id"] for each in found}) == 1
    assert [choice["finish_reason"] for each in found for choice in each["choices"]].count("length") == 1
    assert servers.calls[0][1]["seed"] == servers.calls[-1][1]["seed"]


def test_a_stream_goes_on_elsewhere_when_its_server_hangs():
    servers = Servers(hangs_at={"g": 2})
    answer = answer_of(servers, {**BODY, "stream": True})
    assert text_of(answer) == "".join(TEXT) and [host for host, _ in servers.calls] == ["p", "g", "p"]


@pytest.mark.parametrize("servers", [
    {"gone": "p", "breaks_at": {"g": 2}}, {"breaks_at": {"g": 2}, "texts": {"p": ["It was", " a", " lie"]}},
    {"breaks_at": {"g": 2}, "more": {"logprobs": {"tokens": ["a"]}}}, {"breaks_at": {"g": 2, "p": 1}}])
def test_a_stream_that_cannot_go_on_ends_with_an_error(servers):
    answer = answer_of(Servers(**servers), {**BODY, "stream": True})
    *told, last = events(answer)
    assert "error" in last and "".join(each["choices"][0]["text"] for each in told) == "It is a"
    assert "[DONE]" not in answer.text


def test_what_a_server_refuses_is_passed_on():
    answer = answer_of(Servers(statuses={"p": 429, "g": 429}), BODY)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1" and answer.json()["error"]
    assert answer_of(Servers(statuses={"p": 503, "g": 503}), BODY).headers["retry-after"] == "1"
    for gone in (answer_of(Servers(gone="pg"), BODY), answer_of(Servers(gone="pg"), path="/health")):
        assert gone.status_code == 503 and gone.json()["error"]["message"]
    assert answer_of(Servers(gone="g"), path="/v1/models").status_code == 200
    for body in (b"", b"[1]", b"[" * 100_000, b"\xff"):
        assert answer_of(Servers(), body).status_code == 400


def test_calls_go_to_the_servers_of_a_kind_in_turn():
    servers = Servers(gone="a")

    async def inside():
        app = make_app(["http://p", "http://q"], ["http://a", "http://b"], transport=servers)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            return [(await client.post("/v1/completions", json=BODY)).status_code for _ in range(2)]
    assert asyncio.run(inside()) == [200, 200]
    assert "".join(host for host, _ in servers.calls) == "pabqb"
    assert servers.calls[2][1]["kv_transfer_params"] == TICKET, "nobody has used it"


def test_a_client_that_goes_away_ends_the_call():
    closed = []

    class Slow(Servers):
        async def handle_async_request(self, request):
            try:
                await asyncio.sleep(60)
            finally:
                closed.append(request.url.host)

    async def inside():
        app = make_app(["http://p"], ["http://g"], transport=Slow())
        told = [{"type": "http.request", "body": json.dumps(BODY).encode()}, {"type": "http.disconnect"}]

        async def receive():
            await asyncio.sleep(0)
            return told.pop(0)

        async def send(message):
            return None
        await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"",
                   "root_path": "", "scheme": "http", "server": ("proxy", 80)}, receive, send)
        await asyncio.sleep(0)
    asyncio.run(asyncio.wait_for(inside(), 20))
    assert closed == ["p"]
