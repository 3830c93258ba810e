"""Recorded calls of kernels compile in another process: no call is lost, and errors are found.

`python -m tests.campaigns --suite T18` compiles every call of this folder for four GPUs and two versions of triton.
"""

import importlib.util
import inspect
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.campaigns.ahead_of_time import Allowed, compile_calls, judge, record_calls

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def argument_sets():
    spec = importlib.util.spec_from_file_location("argument_sets", HERE / "argument_sets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_call_is_made_again_as_it_was(argument_sets):
    whole = torch.zeros(3, 12, 8, dtype=torch.float16)
    query, numbers = whole[:, 1:5], torch.zeros(9, dtype=torch.int64)[1:]
    line = argument_sets.described("rms_norm", "rms_norm", (query, numbers, None, 1e-5, "silu"),
                                   {"flags": np.array([True, False]), "size": np.int32(3)})
    call = json.loads(line)
    (made, more, *others), kwargs = argument_sets.arguments(call)
    assert (made.shape, made.stride(), made.dtype) == (query.shape, query.stride(), query.dtype)
    assert made.data_ptr() % 16 == query.data_ptr() % 16 and more.data_ptr() % 16 == numbers.data_ptr() % 16
    assert others == [None, 1e-5, "silu"] and kwargs["size"] == 3
    assert kwargs["flags"].dtype == bool and kwargs["flags"].tolist() == [True, False]
    assert argument_sets.described("rms_norm", "rms_norm", (made, more, *others), kwargs) == line


def test_the_bfloat16_twin_differs_in_what_is_of_the_model_alone(argument_sets):
    logits, numbers = torch.zeros(2, 8), torch.zeros(2)
    line = argument_sets.described("sample_token", "sample_token", (logits, numbers), {"min_p": numbers})
    twin = argument_sets.in_bfloat16(json.loads(line))
    assert [value["dtype"] for value in twin["args"]] == ["bfloat16", "float32"]
    assert twin["kwargs"]["min_p"]["dtype"] == "float32"
    penalties = argument_sets.described("token_penalties", "token_penalties", (logits, numbers), {})
    assert argument_sets.in_bfloat16(json.loads(penalties)) == json.loads(penalties)
    assert [number for number, _ in argument_sets.read([line, penalties, line])] == [0, 0, 1]


def test_every_launcher_knows_what_is_of_the_model(argument_sets):
    for module, names in argument_sets.OF_THE_MODEL.items():
        found = argument_sets.launcher({"module": module, "function": module})
        assert set(names) <= set(inspect.signature(found).parameters), module


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Compile three recorded calls for four GPUs with the installed triton. Return the records of the compilation.

    Two calls are recorded from test_rms_norm.py. The third is a copy of the first, with strides that the kernel
    refuses.
    """
    if sys.platform != "linux":
        pytest.skip("triton is there for Linux only")
    file = tmp_path_factory.mktemp("calls") / "calls"
    record_calls(file, (HERE / "test_rms_norm.py",))
    recorded = file.read_text().splitlines()
    assert len(recorded) > 10 and all(json.loads(line)["module"] == "rms_norm" for line in recorded)
    broken = json.loads(recorded[0])
    broken["args"][0]["stride"][-1] = 2                                 # rows that are not contiguous
    file.write_text("\n".join([recorded[0], recorded[-1], json.dumps(broken)]))
    return compile_calls(file, ("sm_80", "sm_90", "sm_100", "gfx942"))


def test_recorded_calls_compile_in_their_dtype_and_in_bfloat16(records):
    kernels = [record for record in records if "kernel" in record]
    assert {record["gpu"] for record in kernels} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert {record["call"]["args"][0]["dtype"] for record in kernels} >= {"bfloat16", "float32"}
    assert all(record["kernel"] == "_rms_norm_kernel" and record["registers"] > 0 for record in kernels)
    ends = [record for record in records if "left" in record]
    assert len(ends) == 4 and all(end["left"] == 0 and end["variants"] >= 2 for end in ends)


def test_a_call_that_does_not_compile_is_named(records):
    wrong = judge(records)
    assert len(wrong) == 4 * 2 and all("rms_norm does not compile: AssertionError" in line for line in wrong)


def test_spills_stacks_and_too_much_shared_memory_are_wrong_but_for_what_is_allowed():
    call = {"args": [None, {"dtype": "int32"}, {"dtype": "float32"}], "kwargs": {}}
    good = {"gpu": "sm_90", "kernel": "_k", "call": call, "shared_bytes": 10, "shared_limit_bytes": 10, "spills": 0,
            "stack_bytes": 0}
    assert judge([good, {"gpu": "sm_90", "left": 0}]) == []
    assert "11 bytes of shared memory of 10" in judge([good | {"shared_bytes": 11}])[0]
    for change in ({"spills": 1}, {"stack_bytes": 16}):
        (line,) = judge([good | change])
        assert "in float32" in line
    allowed = (Allowed(("_k",), ("sm_90",), ("float32",), 16, 0, "why"),)
    assert judge([good | {"stack_bytes": 16}], allowed) == []
    assert len(judge([good | {"stack_bytes": 17}, good | {"stack_bytes": 16, "gpu": "sm_80"},
                      good | {"spills": 1}], allowed)) == 3
