"""Fixtures of all tests: a recording client, requests, a loop without a thread, a manager, and a check for leaks."""

import os

# The models of the tests are so small that a second OpenMP thread makes them slower, most of all on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import gc
import random
import signal
import sys
import threading
import time
from pathlib import Path

import hypothesis
import pytest

pytest.register_assert_rewrite("tests.harness")
pytest_plugins = ("tests.harness.processes", "tests.harness.skips")

from tests.harness import forked  # noqa: E402
from tests.harness import world as harness  # noqa: E402
from tests.harness.client import Client  # noqa: E402
from tests.harness.requests import request  # noqa: E402
from tests.harness.world import build_world  # noqa: E402

# Several processes run these files first, nearly in the order of their lengths. Each other file takes less than seven
# seconds of a slow core, so that no process still runs a long file when the others have finished. A process waits while
# another one compiles the library that both need: the first file compiles that of most others, while the next two run
# without it, and files that compile the same others are apart.
LONGEST_FILES = (
    "compiled/test_rows_alone.py",
    "runtime/test_recorded_steps.py",
    "sweep/test_sweep.py",
    "matrix/test_matrix.py",
    "parallel/test_engines.py",
    "deterministic/test_differential.py",
    "parallel/test_exchange.py",
    "parallel/test_faults.py",
    "kernels/test_paged_attention_context.py",
    "examples/test_redis_worker.py",
    "integration/test_same_tokens_as_transformers.py",
    "benchmarks/tests/test_gpu_report.py",
    "examples/test_openai_server.py",
    "soak/test_soak.py",
    "runtime/test_gpu_rehearsal.py",
    "integration/test_reuse_and_windows.py",
    "compiled/test_other_processors.py",
    "fuzzing/test_request_fuzzing.py",
    "run_ahead/test_run_ahead.py",
    "examples/test_notebook.py",
    "checkpoints/test_checkpoint_fuzzing.py",
    "simulation/test_simulation.py",
    "interleaving/test_interleavings.py",
    "compiled/test_sanitizers.py",
    "integration/test_same_beams_as_transformers.py",
    "structure/test_wheel.py",
    "revived/test_revived.py",
    "parallel/test_programs.py",
    "integration/test_speculation.py",
    "contract/test_process_level.py",
    "tools/test_first_quarter.py",
    "models/test_same_logits_as_transformers.py",
    "attention/test_torch_paged.py",
    "kernels/test_pretended_gpu.py",
    "models/test_gguf.py",
    "runtime/test_forms.py",
    "parallel/test_processes.py",
    "compiled/test_quantised_products.py",
    "integration/test_whole_engine_interpreted.py",
    "contract/test_run_ahead.py",
    "structure/test_types.py",
    "integration/test_contexts_from_another_engine.py",
    "deterministic/test_triton_path.py",
    "runtime/test_no_compilation_while_serving.py",
    "examples/test_chat.py",
    "models/test_adapters.py",
    "runtime/test_random_schedules.py",
    "structure/test_site.py",
    "tools/test_watch.py",
    "benchmarks/tests/test_two_engines.py",
    "models/test_through_transformers.py",
    "tools/test_bench_program.py",
    "kernels/test_ahead_of_time.py",
    "tools/test_simulate.py",
    "property/test_kv_and_scheduling.py",
    "models/test_ranks.py",
    "compiled/test_products.py",
    "tools/test_simulate_capacity.py",
    "loop/test_starved_requests.py",
    "examples/test_tiny_model.py",
    "aio/test_engine_process.py",
    "examples/test_jsonl_batch.py",
    "attention/test_slopes_and_sink_logits.py",
    "structure/test_structure.py",
    "compiled/test_attention_in_blocks.py",
    "kernels/test_argument_sets.py",
    "kv/test_state_machine.py",
    "kernels/test_paged_attention_decode.py",
    "contract/test_clauses_black_box_process.py",
    "integration/test_features_as_transformers.py",
    "integration/test_features_with_beams_as_transformers.py",
    "runtime/test_attention_windows.py",
    "attention/test_windows.py",
    "kernels/test_sample_token.py",
    "extras/test_adapters.py",
)

# The suite tries the same examples every time. Campaigns look for new ones.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:       # as in the background of a shell: programs inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gone = [name for name in LONGEST_FILES if not (Path(__file__).parent / name).exists()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py names files that are gone: {', '.join(gone)}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Put the longest files first if several processes run the tests."""
    if hasattr(config, "workerinput"):
        place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST_FILES)}
        items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish(session):
    forked.take_environment()


def pytest_unconfigure(config):
    gc.unfreeze()                       # libraries check for leaks when the process ends


@pytest.fixture(scope="module", autouse=True)
def objects_of_modules_are_not_collected():
    """Freeze all objects that exist before the tests of a file, so that garbage collections do not visit them.

    Otherwise every full collection would visit the objects of torch, of transformers and of 13,000 collected tests.
    An exception in a callback of the collector is lost, Ctrl-C too: the one of hypothesis, for deadlines, is removed.
    """
    gc.callbacks.clear()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cuda_is_started():
    """Start CUDA before the first test, if the collected tests have imported torch. See harness/gpu.py."""
    if "torch" in sys.modules:
        from tests.harness.gpu import start_cuda

        start_cuda()


@pytest.fixture(autouse=True)
def draws_depend_on_no_other_test():
    """Seed the generators of the process. Which tests ran in it before depends on the times that they took."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture(autouse=os.environ.get("BATCH_MANAGER_GPU_REHEARSAL") == "1")
def rehearsal_of_gpu_tests():
    from tests.harness.gpu import rehearsal

    with rehearsal():
        yield


def open_files() -> set[str]:
    """The open files and sockets of this process, without devices, pipes, and files under /proc and /sys."""
    found = set()
    for number in set(os.listdir("/proc/self/fd")) - {str(forked.descriptor())}:
        with contextlib.suppress(OSError):                       # the descriptor of listdir is already closed
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("socket:") or (target[0] == "/" and not target.startswith(("/dev", "/proc", "/sys"))):
                found.add(f"{number} {target}")
    return found


@pytest.fixture(autouse=True)
def nothing_outlives_its_test():
    """T12: a test leaves no thread of the package, no thread that keeps the interpreter alive, and no file open."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    deadline = time.monotonic() + 5
    while leaked := ([t for t in threading.enumerate() if t not in threads
                      and (t.name.startswith("batch_manager") or not t.daemon)] or sorted(open_files() - files)):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {leaked}")
        gc.collect()
        time.sleep(0.01)


@pytest.fixture
def make_world():
    """The function `build_world` of tests/harness/world.py, which returns a loop without a thread.

    Its arguments are policy, model_type, backend={...}, max_beam_width, terminate_req_id, exclude_input, parts={...},
    and the fields of TrtGptModelOptionalParams.
    """
    return build_world


@pytest.fixture
def make_manager():
    """A function that returns a GptManager with a thread and a scripted model. The fixture shuts the managers down."""
    managers = []

    def make(client: Client, **options):
        managers.append(harness.make_manager(client, **options))
        return managers[-1]

    yield make
    for manager in managers:
        assert manager.shutdown(drain=False, timeout=20)


@pytest.fixture
def new_client():
    return Client


@pytest.fixture
def new_request():
    return request
