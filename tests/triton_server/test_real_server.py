"""The example's model repository works in the real server of nvidia-pytriton.

`.ci/triton` installs the server and runs these tests.
"""

import http.client
import json
import queue
import re
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

MISSING = [name for name in ("pytriton", "tritonclient", "torch") if find_spec(name) is None]
if MISSING:
    pytest.skip(f"Triton Inference Server was NOT tested: {', '.join(MISSING)} is not installed; .ci/triton does it",
                allow_module_level=True)
if int(np.__version__.split(".")[0]) >= 2:
    pytest.skip(f"Triton Inference Server was NOT tested: NumPy is {np.__version__} and its stub needs one below 2; "
                ".ci/triton installs it", allow_module_level=True)

import tritonclient.grpc as grpc  # noqa: E402

from tests.harness.ports import free_port  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROMPT, LENGTH = [5, 6, 7, 8], 24
LONG = {"input_ids": PROMPT, "request_output_len": 1000, "streaming": True}
SECONDS_TO_START = 60


class Server:
    def __init__(self, folder):
        self.http, self.grpc, self.metrics_port = (free_port() for _ in range(3))
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, EXAMPLES / "triton_server" / "make_repository.py", folder / "models", "--model",
             EXAMPLES / "models" / "austen-4m", "num_threads=1", "exclude_input_in_output=true",
             "max_tokens_in_paged_kv_cache=65536", "max_batch_size=32", "--run", f"--http-port={self.http}",
             f"--grpc-port={self.grpc}", f"--metrics-port={self.metrics_port}"],
            stdout=self.log, stderr=subprocess.STDOUT)

    def has_started(self):
        deadline = time.monotonic() + SECONDS_TO_START
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/health/ready", timeout=2).status == 200
            except OSError:
                time.sleep(0.1)
        return False

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait(60)
            self.log.close()

    def text(self):
        self.log.flush()
        return Path(self.log.name).read_text(encoding="utf-8", errors="replace")

    def metric(self, family, category):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        (value,) = re.findall(rf'^{family}{{[^}}]*="{category}"[^}}]*}} (\S+)$', text, re.M)
        return float(value)

    def is_idle(self):
        return (self.metric("nv_trt_llm_request_metrics", "active") == 0
                and self.metric("nv_trt_llm_kv_cache_block_metrics", "used") == 0)

    def wait_until(self, condition, seconds):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def post(self, route, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=30)
        connection.request("POST", f"/v2/models/gpt/{route}", json.dumps(body))
        return connection, connection.getresponse()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("triton"))
    if not server.has_started():
        text = server.text()
        server.close()
        if "error while loading shared libraries" in text or "GLIBC" in text:
            pytest.skip(f"Triton Inference Server was NOT tested: its binary cannot start here: {text[-300:]}")
        pytest.fail(text[-3000:])
    yield server
    server.close()


def inputs_of(tensors):
    types = {"input_ids": "INT32", "request_output_len": "INT32", "streaming": "BOOL", "stop": "BOOL",
             "temperature": "FP32"}
    made = []
    for name, value in tensors.items():
        array = np.array(value, {"INT32": np.int32, "BOOL": bool, "FP32": np.float32}[types[name]]).reshape(1, -1)
        made.append(grpc.InferInput(name, array.shape, types[name]))
        made[-1].set_data_from_numpy(array)
    return made


class GrpcStream:
    """One gRPC stream.

    `next()` returns (tokens of the next response, whether it is the final one), or raises its error.
    """

    def __init__(self, server):
        self.client, self.got = grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}"), queue.Queue()
        self.client.start_stream(lambda result, error: self.got.put((result, error)))

    def send(self, request_id="", **tensors):
        self.client.async_stream_infer("gpt", inputs_of(tensors), request_id=request_id,
                                       outputs=[grpc.InferRequestedOutput("output_ids")],
                                       enable_empty_final_response=True)

    def next(self):
        result, error = self.got.get(timeout=30)
        if error is not None:
            raise error
        array = result.as_numpy("output_ids")
        is_last = result.get_response().parameters["triton_final_response"].bool_param
        return ([] if array is None else array.reshape(-1).tolist()), is_last

    def rest(self):
        tokens, is_last = [], False
        while not is_last:
            more, is_last = self.next()
            tokens += more
        return tokens

    def close(self, cancel=False):
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


def test_the_same_tokens_over_grpc_and_both_routes_of_http(server):
    asked = {"input_ids": PROMPT, "request_output_len": LENGTH}
    connection, answer = server.post("generate", asked)
    whole = json.loads(answer.read())["output_ids"]
    connection.close()
    assert len(whole) == LENGTH and len(set(whole)) > 1
    connection, answer = server.post("generate_stream", {**asked, "streaming": True})
    events = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    connection.close()
    assert [event["output_ids"] for event in events] == whole
    stream = GrpcStream(server)
    stream.send(**asked, streaming=True)
    stream.send(**asked, streaming=False)
    both = stream.rest() + stream.rest()
    stream.close()
    assert both == whole * 2 or sorted(both) == sorted(whole * 2)    # the two run side by side


@pytest.mark.parametrize("how", ["gRPC cancels", "HTTP closes the socket", "stop=true"])
def test_requests_that_nobody_reads_are_gone_within_a_second(server, how):
    assert server.wait_until(server.is_idle, 5)
    if how == "HTTP closes the socket":
        connection, answer = server.post("generate_stream", LONG)
        assert answer.readline().startswith(b"data: ")
    else:
        stream = GrpcStream(server)
        stream.send("7", **LONG)
        assert stream.next()[0]
    assert server.wait_until(lambda: server.metric("nv_trt_llm_request_metrics", "active") == 1, 2)
    if how == "HTTP closes the socket":
        answer.close()
        connection.close()
    elif how == "gRPC cancels":
        stream.close(cancel=True)
    else:
        stopper = GrpcStream(server)
        stopper.send("7", input_ids=[0], request_output_len=1, stop=True)
        assert stopper.rest() == []
        stopper.close()
        assert len(stream.rest()) < 999
        stream.close()
    assert server.wait_until(server.is_idle, 1), "still there after a second"


def test_a_bad_request_is_refused_and_an_id_is_taken_once(server):
    stream = GrpcStream(server)
    stream.send("3", input_ids=[10**6], request_output_len=4)
    with pytest.raises(Exception, match=r"\[INVALID_REQUEST\]"):
        stream.next()
    stream.send("4", **LONG)
    assert stream.next()[0]
    other = GrpcStream(server)
    other.send("4", **LONG)
    with pytest.raises(Exception, match="is in use by an earlier request"):
        other.next()
    other.close()
    stream.close(cancel=True)
    assert server.wait_until(server.is_idle, 2)
