"""A process that was stopped and then continues is not reported as hanging. A callback that blocks is reported."""

import os
import signal
import subprocess
import sys
import time

CHILD = """
import logging, os, signal, sys, threading, time
from batch_manager import GptManager, InferenceRequest, Parts, SchedulerPolicy
from batch_manager import TrtGptModelOptionalParams, TrtGptModelType
from batch_manager.testing import ScriptedBackend
logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
requests = [InferenceRequest(1, {"input_ids": [1], "request_output_len": 4})]
told = threading.Event()
def get(count):
    given, requests[:] = list(requests), []
    return given
def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)
    told.wait()
    time.sleep(0.3)              # longer than the watchdog waits between two looks
def hold():
    told.wait(20)
def send(*_):
    BLOCK()
    print("released", flush=True)
with GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, get, send,
                optional_params=TrtGptModelOptionalParams(hang_warning_s=1.0),
                parts=Parts(backend=ScriptedBackend())) as manager:
    sys.stdin.readline()
    print("HANGING" if manager.health()["is_hanging"] else "AWAKE", flush=True)
    told.set()
    sys.stdin.readline()
"""


def child(block):
    """A process whose send callback calls `block`, one of the names in CHILD."""
    return subprocess.Popen([sys.executable, "-c", CHILD.replace("BLOCK", block)], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_process_that_was_frozen_inside_a_callback_is_not_reported():
    process = child("freeze")
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED
    time.sleep(2.5)
    process.stdin.write("\n")            # health is read as soon as the process continues
    process.stdin.flush()
    os.kill(process.pid, signal.SIGCONT)
    output = process.communicate("\n", timeout=60)[0]
    assert process.returncode == 0
    assert "no heartbeat" not in output and "AWAKE" in output, output


def test_a_callback_that_blocks_is_reported_as_before():
    process = child("hold")
    while "no heartbeat of the worker" not in (line := process.stdout.readline()):
        assert line and "released" not in line, "it was not reported"
    output = process.communicate("\n\n", timeout=60)[0]
    assert process.returncode == 0 and "HANGING" in output, output
