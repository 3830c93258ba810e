"""A process that was stopped and then continues is not reported as hanging. A callback that blocks is reported."""

import os
import signal
import subprocess
import sys
import time

CHILD = """
import logging, sys, time
from batch_manager import GptManager, InferenceRequest, Parts, SchedulerPolicy
from batch_manager import TrtGptModelOptionalParams, TrtGptModelType
from batch_manager.testing import ScriptedBackend
logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
requests = [InferenceRequest(1, {"input_ids": [1], "request_output_len": 4})]
def get(count):
    given, requests[:] = list(requests), []
    return given
def send(*_):
    print("in send", flush=True)
    time.sleep(BLOCKS)
with GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, get, send,
                optional_params=TrtGptModelOptionalParams(hang_warning_s=1.0),
                parts=Parts(backend=ScriptedBackend())) as manager:
    sys.stdin.readline()
    print("HANGING" if manager.health()["is_hanging"] else "AWAKE", flush=True)
    sys.stdin.readline()
"""


def child(blocks):
    process = subprocess.Popen([sys.executable, "-c", CHILD.replace("BLOCKS", str(blocks))], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while "in send" not in process.stdout.readline():
        assert process.poll() is None
    return process


def rest_of(process):
    process.stdin.write("\n\n")
    process.stdin.flush()
    return process.communicate(timeout=30)[0]


def test_a_process_that_was_frozen_inside_a_callback_is_not_reported():
    process = child(blocks=0.6)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    process.stdin.write("\n")            # health is read as soon as the process continues
    process.stdin.flush()
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    output = rest_of(process)
    assert process.returncode == 0
    assert "no heartbeat" not in output and "AWAKE" in output, output


def test_a_callback_that_blocks_is_reported_as_before():
    process = child(blocks=2.5)
    time.sleep(1.6)
    output = rest_of(process)
    assert process.returncode == 0
    assert "no heartbeat of the worker" in output and "HANGING" in output, output
