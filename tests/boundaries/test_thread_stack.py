"""The threads of the engine have large enough stacks, even if the host has set a small stack size."""

import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from batch_manager.thread_stack import LEAST_STACK_BYTES, start_with_enough_stack

MODEL = Path(__file__).parents[2] / "examples/models/austen-4m"
HOST = """
import queue, sys, threading
from batch_manager import GptManager, InferenceRequest, SchedulerPolicy, TrtGptModelType

threading.stack_size(65536)
waiting, finals = [InferenceRequest(1, {"input_ids": [5, 6, 7], "request_output_len": 16})], queue.Queue()


def get(most):
    taken = waiting[:most]
    del waiting[:most]
    return taken


def send(request_id, tensors, is_final, error):
    finals.put((request_id, len(tensors), error))


manager = GptManager(sys.argv[1], TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, get, send)
print(*finals.get(timeout=60), threading.stack_size())
manager.shutdown()
"""


def test_an_engine_in_a_host_with_small_stacks():
    result = subprocess.run([sys.executable, "-c", HOST, str(MODEL)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    request_id, num_tensors, *_, stack_bytes = result.stdout.split()
    assert (request_id, stack_bytes) == ("1", "65536") and int(num_tensors) > 0


@pytest.mark.parametrize(("host_bytes", "during"), [(0, 0), (65536, 0), (LEAST_STACK_BYTES, LEAST_STACK_BYTES)])
@pytest.mark.parametrize("fails", [False, True])
def test_the_setting_of_the_host_is_the_same_afterwards(host_bytes, during, fails):
    before, seen = threading.stack_size(host_bytes), []

    def start() -> None:
        size = threading.stack_size(0)      # the call also sets the size
        threading.stack_size(size)
        seen.append(size)
        if fails:
            raise RuntimeError("can't start new thread")

    try:
        thread = threading.Thread()
        thread.start = start
        with pytest.raises(RuntimeError) if fails else nullcontext():
            start_with_enough_stack(thread)
        assert (seen, threading.stack_size(0)) == ([during], host_bytes)
    finally:
        threading.stack_size(before)
