"""C17 and C18: how a process with a manager ends, and which responses it sends before. Each test runs a process.

Only the processes of tests that need torch import it. Without torch, a process starts in a fifth of the time.
"""

import json
import subprocess
import sys
import textwrap

import pytest

PREAMBLE = """
    import os, signal, sys, threading, time
    from batch_manager import (
        GptManager, InferenceRequest, KvCacheConfig, ManagerClosedError, Parts, RequestScheduler, SchedulerPolicy,
        TrtGptModelOptionalParams, TrtGptModelType)
    from batch_manager.testing.scripted_backend import ScriptedBackend

    def slow(batch):
        time.sleep(0.005)

    signal.signal(signal.SIGINT, signal.default_int_handler)    # a job in the background ignores it

    pending = [InferenceRequest(i, {"input_ids": [i + 1], "request_output_len": 50_000}) for i in range(3)]
    started = threading.Event()

    def get(n):
        items, pending[:n] = pending[:n], []
        return items

    def send(request_id, tensors, final, error):
        os.write(1, f"final {request_id} {error[:10]}\\n".encode())

    def make(**options):
        backend = ScriptedBackend(on_step=slow, max_seq_len=60_000, num_blocks=20_000)
        return GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, get, send,
                          parts=Parts(backend=backend), **options)

    manager = make()
    while manager.num_active_requests < 3:
        time.sleep(0.001)
"""
FINALS = {"final 0 [SHUTDOWN]", "final 1 [SHUTDOWN]", "final 2 [SHUTDOWN]"}


def run(body: str, seconds: float = 120.0) -> subprocess.CompletedProcess:
    script = textwrap.dedent(PREAMBLE) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=seconds)


@pytest.mark.parametrize(("body", "status"), [
    ("", 0),
    ("import torch; torch.ones(300, 300) @ torch.ones(300, 300)", 0),
    ("sys.exit(7)", 7),
    ("raise ValueError('at the top')", 1),
    ("threading.Thread(target=lambda: time.sleep(0.2)).start()", 0),
    ("import atexit; atexit.register(lambda: manager.shutdown())", 0),
    ("from concurrent.futures import ThreadPoolExecutor as Pool; Pool(1).submit(manager.wait_until_terminate)", 0),
], ids=["the script ends", "torch has computed", "sys.exit", "an uncaught exception", "another thread lives",
        "shutdown at exit", "a thread of an executor waits"])
def test_c17_interpreter_exit_aborts_with_finals_without_hanging_and_keeps_the_exit_status(body, status):
    result = run(body)
    assert result.returncode == status
    assert set(result.stdout.split("\n")) - {""} == FINALS


def test_c17_two_managers_both_answer_at_interpreter_exit():
    result = run("""
        pending = [InferenceRequest(i + 10, {"input_ids": [1], "request_output_len": 50_000}) for i in range(2)]
        second = make()
        while manager.num_active_requests + second.num_active_requests < 5:    # either may have asked first
            time.sleep(0.001)
        """)
    assert result.returncode == 0
    assert set(result.stdout.split("\n")) - {""} >= FINALS


def test_c18_a_forked_child_has_an_inert_copy_and_exits_without_hanging():
    result = run("""
        child = os.fork()
        if child == 0:
            said = []
            for call in (manager.notify, manager.shutdown, manager.health, lambda: manager.num_active_requests,
                         manager.wait_until_terminate):
                try:
                    call()
                    said.append("returned")
                except ManagerClosedError:
                    said.append("raised")
            os.write(1, f"child {' '.join(said)}\\n".encode())
            sys.exit(5)
        _, status = os.waitpid(child, 0)
        os.write(1, f"status {os.waitstatus_to_exitcode(status)}\\n".encode())
        manager.shutdown(drain=False)
        """)
    assert result.returncode == 0, result.stderr
    lines = set(result.stdout.split("\n")) - {""}
    assert lines == FINALS | {"child raised raised raised raised raised", "status 5"}


def test_c18_a_forked_child_leaves_a_with_block_with_the_status_it_was_given():
    result = run("""
        with manager:
            child = os.fork()
            if child == 0:
                sys.exit(5)
            _, status = os.waitpid(child, 0)
            os.write(1, f"status {os.waitstatus_to_exitcode(status)}\\n".encode())
            manager.shutdown(drain=False)
        """)
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.split("\n")) - {""} == FINALS | {"status 5"}


@pytest.mark.parametrize("ending", ["return", "sys.exit(5)"])
def test_c18_a_callback_that_forks_answers_nobody_in_the_child(ending):
    """A child that is forked in a callback sends no response, whether the callback returns or exits in the child."""
    result = run(f"""
        forked = []

        def stats(record):
            if not forked:
                forked.append(os.fork())
                if forked[0] == 0:
                    {ending}

        manager.shutdown(drain=False)    # it would ask for them, too
        pending = [InferenceRequest(i, {{"input_ids": [i + 1], "request_output_len": 100}}) for i in range(3, 6)]
        second = make(return_batch_manager_stats_cb=stats)
        while not forked:
            time.sleep(0.001)
        os.waitpid(forked[0], 0)
        second.shutdown()
        """)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.split("\n") if line]
    assert sorted(lines) == sorted(FINALS | {f"final {i} " for i in range(3, 6)})


@pytest.mark.parametrize("ending", ["return", "sys.exit(5)"])
@pytest.mark.parametrize("place", ["trace", "scheduler", "clock", "step"])
def test_c18_a_child_that_is_forked_in_other_code_of_the_users_answers_nobody(place, ending):
    """A child that is forked in a trace, scheduler, clock or step sends no response and ends.

    It ends where the fork's code ends it, or at its next callback or step.
    """
    result = run(f"""
        forked, sent = [], []

        def fork(*_):
            if not forked and sent:
                forked.append(os.fork())
                if forked[0] == 0:
                    {ending}

        class Clock:
            def monotonic(self):
                if threading.current_thread().name == "batch_manager worker":
                    fork()
                return time.monotonic()

            def timestamp(self):
                return "now"

        def scheduler(limits, kv_cache_manager):
            from batch_manager.scheduling.policies import make_scheduler
            made = make_scheduler(limits, kv_cache_manager)

            class Forking(RequestScheduler):
                def schedule_request(self, active, inflight):
                    fork()
                    return made.schedule_request(active, inflight)
            return Forking()

        manager.shutdown(drain=False)
        lines = []

        def send(request_id, tensors, final, error):
            sent.append(request_id)
            os.write(1, f"{{'final' if final else 'token'}} {{request_id}} {{error}}\\n".encode())

        place = {place!r}
        parts = {{"trace": dict(trace=fork), "scheduler": dict(scheduler=scheduler), "clock": dict(clock=Clock()),
                 "step": {{}}}}[place]
        backend = ScriptedBackend(on_step=fork if place == "step" else slow)
        pending = [InferenceRequest(i, {{"input_ids": [i + 1], "request_output_len": 20}}, is_streaming=True)
                   for i in range(3, 6)]
        second = GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, get, send,
                            return_batch_manager_stats_cb=lambda record: None, parts=Parts(backend=backend, **parts))
        while not forked:
            time.sleep(0.001)
        os.waitpid(forked[0], 0)
        second.shutdown()
        """)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.split("\n") if line and line not in FINALS]
    assert sorted(lines) == sorted([f"token {i} " for i in range(3, 6)] * 19 + [f"final {i} " for i in range(3, 6)])


@pytest.mark.parametrize(("caught", "status"), [(False, -2), (True, 0)])
def test_c17_an_interrupt_while_a_model_is_loaded_passes_and_leaves_no_thread(tmp_path, caught, status):
    """An interrupt while a model is loaded has Python's exit status and error text. No thread computes afterwards."""
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4000, "hidden_size": 1024,
        "intermediate_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 8, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "torch_dtype": "float32"}))
    result = run(f"""
        manager.shutdown(drain=False)
        import torch

        def interrupt():
            while not any(thread.name == "batch_manager loading" for thread in threading.enumerate()):
                time.sleep(0.001)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            params = TrtGptModelOptionalParams(load_format="dummy", device="cpu",
                                               kv_cache_config=KvCacheConfig(max_tokens=256))
            GptManager({str(tmp_path)!r}, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION,
                       get, send, optional_params=params)
            os.write(1, b"loaded\\n")
        except KeyboardInterrupt:
            os.write(1, f"threads {{[thread.name for thread in threading.enumerate()]}}\\n".encode())
            if not {caught}:
                raise
        """, seconds=120)
    assert result.returncode == status, result.stderr
    assert "threads ['MainThread']" in result.stdout and "terminate called" not in result.stderr


def test_a_keyboard_interrupt_in_the_main_thread_aborts_with_finals():
    result = run("""
        import signal
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        time.sleep(20)
        """)
    assert result.returncode != 0
    assert set(result.stdout.split("\n")) - {""} == FINALS


def test_an_exception_injected_into_the_worker_still_answers_everybody():
    result = run("""
        import ctypes
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(manager._worker.ident), ctypes.py_object(SystemExit))
        time.sleep(0.5)
        manager.shutdown(drain=False)
        """)
    assert result.returncode == 0
    finals = [line.split()[1] for line in result.stdout.split("\n") if line]
    assert sorted(finals) == ["0", "1", "2"]
