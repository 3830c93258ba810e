"""What every test can use: a recorded client, a virtual clock, a loop without a thread, a guard against threads."""

import os

# The models of the tests are tiny: a second OpenMP thread costs more than it brings, most of all on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from batch_manager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    Parts,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.build import build_loop
from batch_manager.kv.audit import audit
from batch_manager.testing.scripted_backend import ScriptedBackend

SECONDS_UNTIL_A_TEST_GIVES_UP = 60.0

# Where several processes run the suite: the files that take longest, to begin with. None of the others takes as long as
# eight seconds, so that no process is left alone with a long one at the end.
LONGEST_FILES = (
    "kernels/test_paged_attention_context.py",
    "integration/test_whole_engine_interpreted.py",
    "simulation/test_simulation.py",
    "sweep/test_sweep.py",
    "soak/test_soak.py",
    "integration/test_reuse_and_windows.py",
    "integration/test_same_tokens_as_transformers.py",
    "kernels/test_ahead_of_time.py",
    "run_ahead/test_run_ahead.py",
    "revived/test_revived.py",
    "fuzzing/test_request_fuzzing.py",
    "runtime/test_recorded_steps.py",
    "interleaving/test_interleavings.py",
    "deterministic/test_differential.py",
    "compiled/test_products.py",
    "integration/test_feature_mixtures.py",
    "runtime/test_attention_windows.py",
    "attention/test_torch_paged.py",
    "tools/test_gpu_report.py",
    "contract/test_process_level.py",
    "interleaving/test_plants.py",
    "runtime/test_random_schedules.py",
    "models/test_gguf.py",
    "checkpoints/test_checkpoint_fuzzing.py",
    "decoding/test_distributions.py",
    "compiled/test_sanitizers.py",
    "kernels/test_paged_attention_decode.py",
    "kernels/test_sample_token.py",
    "kernels/test_beam_topk.py",
    "kv/test_state_machine.py",
    "examples/test_tiny_model.py",
    "deterministic/test_triton_path.py",
    "integration/test_same_beams_as_transformers.py",
    "runtime/test_no_compilation_while_serving.py",
    "contract/test_run_ahead.py",
    "attention/test_windows.py",
    "compiled/test_operations.py",
    "integration/test_features_as_transformers.py",
    "own_models/test_own_models.py",
    "property/test_kv_and_scheduling.py",
    "kernels/test_argument_sets.py",
)

# The suite tries the same examples every time. Looking for new ones is what campaigns are for.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_configure(config):
    """With `pytest -n` a process gets whole files, in the order of collection: it builds what a file's tests share."""
    gone = [name for name in LONGEST_FILES if not (Path(__file__).parent / name).exists()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py names files that are gone: {', '.join(gone)}")
    if config.getoption("dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """The longest files first, where several processes run."""
    if hasattr(config, "workerinput"):
        place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST_FILES)}
        items.sort(key=lambda item: place.get(item.path, len(place)))


def open_files() -> set[str]:
    """Files and sockets this process has open; not the devices, pipes and libraries that are opened once for all."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):                       # the listing itself is gone by now
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("socket:") or (target[0] == "/" and not target.startswith(("/dev", "/proc", "/sys"))):
                found.add(f"{number} {target}")
    return found


@pytest.fixture(autouse=True)
def nothing_outlives_its_test():
    """T12: no thread of ours, no thread that would keep the interpreter alive, no file."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    deadline = time.monotonic() + 5
    while leaked := ([t for t in threading.enumerate() if t not in threads
                      and (t.name.startswith("batch_manager") or not t.daemon)] or sorted(open_files() - files)):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {leaked}")
        gc.collect()
        time.sleep(0.01)


class VirtualClock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def timestamp(self) -> str:
        return "01-02-2026 03:04:05"


@dataclass
class Response:
    tensors: dict
    names: list[str]
    final: bool
    error: str

    def tokens(self, beam: int = 0) -> list[int]:
        length = int(self.tensors["sequence_length"][0, beam])
        return [int(t) for t in self.tensors["output_ids"][0, beam][:length]]

    @property
    def finish_reason(self) -> int:
        return int(self.tensors["finish_reason"][0, 0])

    @property
    def code(self) -> str:
        return self.error[1:].split("]")[0]


@dataclass
class Client:
    """The four callbacks, recorded. `events` is the order in which they were called."""

    pending: list = field(default_factory=list)
    responses: dict[int, list[Response]] = field(default_factory=lambda: defaultdict(list))
    stops: set[int] = field(default_factory=set)
    stats: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    on_send: Callable | None = None

    def get(self, max_num_requests: int) -> list:
        self.threads.add(threading.get_ident())
        self.asked.append(max_num_requests)
        self.events.append("get")
        count = len(self.pending) if max_num_requests < 0 else max_num_requests
        items, self.pending[:count] = self.pending[:count], []
        return items

    def send(self, request_id, tensors, final_response, error_message) -> None:
        self.threads.add(threading.get_ident())
        self.events.append(f"send {request_id}")
        response = Response({t.name: np.asarray(t.tensor) for t in tensors}, [t.name for t in tensors],
                            final_response, error_message)
        self.responses[request_id].append(response)
        if self.on_send is not None:
            self.on_send(request_id, response)

    def poll(self) -> set[int]:
        self.threads.add(threading.get_ident())
        self.events.append("poll")
        return self.stops

    def return_stats(self, record: str) -> None:
        self.threads.add(threading.get_ident())
        self.events.append("stats")
        self.stats.append(record)

    def finals(self, request_id: int) -> list[Response]:
        return [response for response in self.responses[request_id] if response.final]

    def final(self, request_id: int) -> Response:
        (only,) = self.finals(request_id)
        assert self.responses[request_id][-1] is only, "a response came after the final one"
        return only

    def streamed(self, request_id: int) -> list[int]:
        return [token for response in self.responses[request_id] if not response.error for token in response.tokens()]

    def wait_for_finals(self, *request_ids: int) -> None:
        deadline = time.monotonic() + SECONDS_UNTIL_A_TEST_GIVES_UP
        while not all(self.finals(request_id) for request_id in request_ids):
            assert time.monotonic() < deadline, f"no final for {[i for i in request_ids if not self.finals(i)]}"
            time.sleep(0.001)


def request(request_id: int, prompt: list[int], new_tokens: int, *, streaming: bool = False,
            **tensors) -> InferenceRequest:
    options = {name: tensors.pop(name) for name in ("priority", "deadline_s", "cache_salt", "arrival_time")
               if name in tensors}
    return InferenceRequest(request_id, {"input_ids": prompt, "request_output_len": new_tokens, **tensors},
                            is_streaming=streaming, **options)


@dataclass
class World:
    """A loop without a thread, its client, its clock and its scripted model."""

    loop: object
    client: Client
    clock: VirtualClock
    backend: ScriptedBackend

    def step(self, times: int = 1, *, accept_new: bool = True) -> bool:
        """Iterations, with the pool audited after each."""
        busy = False
        for _ in range(times):
            busy = self.loop.step(accept_new=accept_new)
            audit(self.loop.kv)
        return busy

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is alive; then no block may be held."""
        for _ in range(limit):
            if not self.step() and self.loop.is_empty and not self.client.pending:
                break
        else:
            pytest.fail(f"still busy after {limit} iterations")
        assert self.loop.kv.used_blocks == 0

    def expected(self, prompt: list[int], count: int, **options) -> list[int]:
        return self.backend.expected(prompt, count, **options)


def _params(kv_cache_config: KvCacheConfig | None = None, **options) -> TrtGptModelOptionalParams:
    return TrtGptModelOptionalParams(kv_cache_config=kv_cache_config or KvCacheConfig(), **options)


def build_world(*, policy=SchedulerPolicy.MAX_UTILIZATION, model_type=TrtGptModelType.InflightFusedBatching,
                backend=None, max_beam_width=1, terminate_req_id=None, exclude_input=False, parts=None,
                **params) -> World:
    client, clock = Client(), VirtualClock()
    scripted = backend if isinstance(backend, ScriptedBackend) else ScriptedBackend(**(backend or {}))
    params.setdefault("max_batch_size", 8)
    loop = build_loop(
        model_path=None, model_type=model_type, max_beam_width=max_beam_width,
        scheduler_policy=policy, get_inference_requests_cb=client.get, send_response_cb=client.send,
        poll_stop_signal_cb=client.poll, return_batch_manager_stats_cb=client.return_stats,
        optional_params=_params(**params), terminate_req_id=terminate_req_id,
        exclude_input_in_output=exclude_input, parts=Parts(backend=scripted, clock=clock, **(parts or {})))
    return World(loop, client, clock, scripted)


@pytest.fixture
def make_world():
    """make_world(policy=..., model_type=..., backend={...}, max_beam_width=..., terminate_req_id=...,
    exclude_input=..., parts={...}, **optional params)"""
    return build_world


@pytest.fixture
def make_manager():
    """A GptManager with a thread over a scripted model; shut down at the end of the test."""
    managers = []

    def make(client: Client, *, policy=SchedulerPolicy.MAX_UTILIZATION, backend=None, model_path=None,
             model_type=TrtGptModelType.InflightFusedBatching, max_beam_width=1, manager_options=None, parts=None,
             **params) -> GptManager:
        parts = dict(parts or {})
        if model_path is None:
            parts["backend"] = backend if isinstance(backend, ScriptedBackend) else ScriptedBackend(**(backend or {}))
        params.setdefault("max_batch_size", 8)
        manager = GptManager(model_path, model_type, max_beam_width, policy, client.get, client.send, client.poll,
                             client.return_stats, _params(**params), parts=Parts(**parts), **(manager_options or {}))
        managers.append(manager)
        return manager

    yield make
    for manager in managers:
        assert manager.shutdown(drain=False, timeout=20)


@pytest.fixture
def new_client():
    return Client


@pytest.fixture
def new_request():
    return request
