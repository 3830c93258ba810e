"""The files and the host of the Triton example work with a fake of the server's Python API, without Triton's binary."""

import importlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE, MODEL = REPOSITORY / "examples" / "triton_server", REPOSITORY / "examples" / "models" / "austen-4m"
SECONDS = 30


class TritonError(Exception):
    INVALID_ARG, ALREADY_EXISTS, UNAVAILABLE, INTERNAL, CANCELLED = range(5)

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


class Family:
    GAUGE = "gauge"
    gauges = {}

    def __init__(self, name, description, kind):
        self.name = name

    def Metric(self, labels):    # named as in Triton
        key = (self.name, *(value for name, value in labels.items() if name not in ("model", "version")))
        return SimpleNamespace(set=lambda value: self.gauges.__setitem__(key, value))


class Tensor:
    def __init__(self, name, array):
        self._name, self.array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self.array


class Response:
    def __init__(self, output_tensors=(), error=None):
        self.tensors, self.error = {tensor.name(): tensor.array for tensor in output_tensors}, error


PB_UTILS = SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1, TritonError=TritonError, MetricFamily=Family,
                           Tensor=Tensor, InferenceResponse=Response)


class Request:
    """A fake request of Triton's Python API. It is also its own response sender and keeps the responses."""

    def __init__(self, request_id="", outputs=("output_ids", "finish_reason"), timeout=0, parameters="{}", sequence=0,
                 **tensors):
        self.timeout, self.parameters, self.correlation_id = lambda: timeout, lambda: parameters, lambda: sequence
        self.flags = lambda: 0
        self._id, self._outputs, self.is_gone, self.responses = request_id, outputs, False, []
        self.over, self.lock = threading.Event(), threading.Lock()
        self._inputs = [Tensor(name, np.asarray(value).reshape(1, -1)) for name, value in tensors.items()]

    def inputs(self):
        return self._inputs

    def request_id(self):
        return self._id

    def requested_output_names(self):
        return list(self._outputs)

    def get_response_sender(self):
        return self

    def send(self, response=None, flags=0):
        assert not self.over.is_set(), "a response after the final one"
        if response is not None:
            self.responses.append(response)
        if flags:
            self.over.set()

    def is_cancelled(self):
        assert not self.over.is_set(), "asked after the final response, when the server has deleted the request"
        return self.is_gone

    def result(self):
        assert self.over.wait(SECONDS)
        return self.responses

    def tokens(self):
        return [int(token) for response in self.result() for token in response.tensors["output_ids"].reshape(-1)]


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", PB_UTILS)
    Family.gauges = {}
    names = ("triton_settings", "triton_metrics", "triton_host", "make_repository")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name)


@pytest.fixture
def host(triton):
    host = triton.triton_host.TritonPythonModel()
    parameters = {"gpt_model_path": str(MODEL), "num_threads": "1", "exclude_input_in_output": "true",
                  "cpu_compile": "false", "max_tokens_in_paged_kv_cache": "4096", "cancellation_check_period_ms": "20",
                  "stats_check_period_ms": "10"}
    host.initialize({"model_name": "gpt", "model_version": "1", "model_config": json.dumps(
        {"parameters": {name: {"string_value": value} for name, value in parameters.items()},
         "input": [{"name": name} for name, *_ in triton.make_repository.INPUTS]})})
    yield host
    host.finalize()


def gauge_is(category, value):
    deadline = time.monotonic() + 20
    while Family.gauges.get(category) != value and time.monotonic() < deadline:
        time.sleep(0.005)
    return Family.gauges.get(category) == value


LONG = {"input_ids": [5, 6, 7], "request_output_len": 800, "streaming": True}


def test_the_same_tokens_streamed_and_whole_and_only_outputs_that_were_asked_for(host):
    whole, streamed = (Request(input_ids=[5, 6, 7], request_output_len=8, streaming=streaming)
                       for streaming in (False, True))
    host.execute([whole, streamed])
    assert whole.tokens() == streamed.tokens() and len(whole.tokens()) == 8
    assert (len(whole.responses), len(streamed.responses)) == (1, 8)
    assert set(whole.responses[0].tensors) == {"output_ids", "finish_reason"}


def test_stop_and_a_client_that_is_gone_end_their_request_and_the_gauges_fall(host):
    stopped, left = Request("a", **LONG), Request("b", **LONG)
    host.execute([stopped, left])
    assert gauge_is(("nv_trt_llm_request_metrics", "active"), 2)
    stopper = Request("a", input_ids=[0], request_output_len=1, stop=True)
    host.execute([stopper])
    assert stopper.result() == []
    assert stopped.result()[-1].tensors["finish_reason"].item() == 5
    left.is_gone = True
    assert left.result()[-1].error.code == TritonError.CANCELLED
    assert gauge_is(("nv_trt_llm_request_metrics", "active"), 0)
    assert gauge_is(("nv_trt_llm_kv_cache_block_metrics", "used"), 0)
    assert not host._live and not host._ids and not host._stops


def test_a_stop_that_comes_before_the_worker_took_the_request_is_kept(host):
    request = Request("a", **LONG)
    taken, host._manager.notify = host._manager.notify, lambda: None
    host.execute([request, Request("a", input_ids=[0], request_output_len=1, stop=True)])
    host._manager.notify = taken
    taken()
    assert request.result()[-1].tensors["finish_reason"].item() == 5


def test_refusals_have_the_servers_status(host):
    wrong = [Request(input_ids=[10**6], request_output_len=4), Request(input_ids=[1], nonsense=1),
             Request("z", input_ids=[0], request_output_len=1, stop=True)]
    host.execute(wrong)
    for request in wrong:
        assert request.result()[-1].error.code == TritonError.INVALID_ARG
    first, second = Request("a", **LONG), Request("a", **LONG)
    host.execute([first, second])
    assert "is in use by an earlier request" in str(second.result()[-1].error)
    assert not first.over.is_set()
    first.is_gone = True
    first.result()


def test_the_timeout_is_the_deadline_and_other_parameters_are_refused_by_name(host):
    timed = Request("t", timeout=1, **LONG)      # 1 us: over before the worker takes the request
    wrong = [Request(parameters='{"temprature": 0.5}', **LONG), Request(parameters='{"my_trace": "x"}', **LONG),
             Request(sequence=7, **LONG)]
    passed = Request(parameters='{"triton_enable_empty_final_response": true}', input_ids=[5], request_output_len=1)
    host.execute([timed, *wrong, passed])
    errors = [request.result()[-1].error for request in wrong]
    assert {error.code for error in errors} == {TritonError.INVALID_ARG}
    assert "did you mean the input 'temperature'?" in str(errors[0]) and "'my_trace'" in str(errors[1])
    assert "sequence_id" in str(errors[2]) and len(passed.tokens()) == 1
    assert str(timed.result()[-1].error).startswith("[DEADLINE] ")


def test_the_repository_that_is_written(tmp_path):
    command = [sys.executable, EXAMPLE / "make_repository.py", tmp_path / "models", "--model", MODEL]
    done = subprocess.run([*command, "max_batch_size=7", "batch_scheduler_policy=max_utilization"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    config = (tmp_path / "models" / "gpt" / "config.pbtxt").read_text()
    assert 'key: "max_batch_size" value: { string_value: "7" }' in config and "decoupled: true" in config
    assert '{ name: "stop" data_type: TYPE_BOOL dims: [ 1 ] optional: true }' in config
    compile((tmp_path / "models" / "gpt" / "1" / "model.py").read_text(), "model.py", "exec")
    wrong = subprocess.run([*command[:2], tmp_path / "other", *command[3:], "max_batchsize=7"], capture_output=True,
                           text=True, timeout=60)
    assert wrong.returncode == 2 and "did you mean 'max_batch_size'" in wrong.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("parameters", [{"max_batch_size": "many"}, {"batch_scheduler_policy": "best"},
                                        {"enable_chunked_context": "perhaps"}, {"max_batch_size": "0"},
                                        {"max_beam_width": "0"}, {"cancellation_check_period_ms": "-5"},
                                        {"stats_check_period_ms": "0"}])
def test_values_that_cannot_be_used_are_refused(triton, parameters):
    with pytest.raises(ValueError, match=next(iter(parameters.values()))):
        triton.triton_settings.read(parameters)


def test_names_of_the_original_and_ours(triton):
    settings = triton.triton_settings.read({
        "enable_kv_cache_reuse": "true", "max_queue_size": "5", "max_seq_len": "99", "tokens_per_block": "16",
        "batching_strategy": "V1", "max_attention_window_size": "${window}"})
    assert settings.optional_params.kv_cache_config.enable_block_reuse
    assert settings.optional_params.kv_cache_config.max_attention_window is None
    assert (settings.optional_params.max_queued_requests, settings.optional_params.max_seq_len) == (5, 99)
    assert settings.positional[1].name == "V1"
