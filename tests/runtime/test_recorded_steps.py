"""CUDA graphs can replace fixed launches: the shape determines them, and a replay gives the right results.

The steps run on interpreted kernels, without a GPU, in their own process; see recorded_steps.py.
"""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from batch_manager.runtime.forms.graph.form import WITHOUT_GRAPHS
from tests.integration import engine_modes

from .capture_recorder import Recorder

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Run recorded_steps.py. Return (answers of an engine in torch to the same requests, {kind: findings})."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU; with one graphs are captured")
    folder = tmp_path_factory.mktemp("engine")
    expected = json.loads(json.dumps(engine_modes.run(folder, "plain_rows")["requests"]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "tests.runtime.recorded_steps", folder], cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True,
        timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in map(json.loads, done.stdout.splitlines()):
        found.setdefault(line["finding"], []).append(line)
    return expected, found


def test_two_batches_of_a_shape_launch_the_same_and_a_replay_of_one_gives_the_other(findings):
    recordings = findings[1]["recording"]
    assert len(recordings) == 8 + 4 + 2
    for recording in recordings:
        assert not recording["fused"].keys() & {"_lora_shrink_kernel", "_lora_expand_add_kernel"}
        assert recording["different"] == [] and recording["refusals"] == [], recording
        one, other = recording["launches"]
        assert one == other > 20
        assert recording["replayed"] and min(recording["sampled"]) >= 0
        _, is_split, _, _, contexts, _ = recording["shape"]
        assert recording["merges"] == is_split * (1 + (contexts > 0))
        assert recording["has_split_rows"] == is_split
        assert recording["has_split_contexts"] == (is_split and contexts > 0)


def test_a_split_step_whose_decode_kernel_combines_the_parts_takes_a_launch_fewer_and_leaves_zeros(findings):
    separate, merged = findings[1]["merged in decode"]
    for found, counters in ((separate, []), (merged, [0])):
        assert found["different"] == [] and found["refusals"] == [] and found["replayed"]
        assert found["has_split_rows"] and found["counters"] == counters
    assert (separate["merges"], merged["merges"]) == (1, 0) and separate["sampled"] == merged["sampled"]
    assert merged["launches"][0] == separate["launches"][0] - 1


def test_steps_with_adapters_are_determined_by_their_shape_and_take_two_launches_more_for_each_product(findings):
    for found in findings[1]["adapted"]:
        assert found["shape"][-1] and found["different"] == [] and found["refusals"] == [] and found["replayed"]
        assert found["launches"][0] == found["launches"][1]
        assert found["fused"]["_lora_shrink_kernel"] == found["fused"]["_lora_expand_add_kernel"] == 4      # one layer
    assert len(findings[1]["adapted"]) == 2


@pytest.mark.parametrize("samples, most", [(False, 6), (True, 8)])
def test_around_its_layers_a_step_launches_little(findings, samples, most):
    (found,) = [found for found in findings[1]["count"] if found["samples"] == samples]
    of_one_layer, of_two_layers = found["launches"]
    around = 2 * len(of_one_layer) - len(of_two_layers)
    assert 2 < around <= most, of_one_layer
    # The norms of queries and keys are part of attention.
    assert Counter(of_two_layers) - Counter(of_one_layer) == {
        "_fused_linear_kernel": 2, "_decode_kernel": 1, "aten.addmm_.default": 2}
    assert of_one_layer[0] == "_prepare_step_kernel" and of_one_layer[-1] == "_sample_token_kernel"


@pytest.mark.parametrize("plant, shows", [("rows_of_the_host", "refusals"), ("length_as_a_number", "different"),
                                          ("waits", "refusals")])
def test_what_is_not_an_input_of_the_step_shows(findings, plant, shows):
    (found,) = findings[1][plant]
    assert found[shows]
    assert found["replayed"] == (plant == "waits")


def test_graphs_are_dropped_if_a_replayed_step_differs_from_a_launched_one(findings):
    found = {line["name"]: line for line in findings[1]["wrong replay"]}
    assert found["none"]["has_graphs"] and found["none"]["absent"] == {}
    for name, says in (("token_of_the_last_row", "has token"), ("log_prob_of_a_split_step", "log-probability differs"),
                       ("token_of_a_context", "has token"), ("raises", "capturing Shape(rows=8, is_split=False")):
        assert not found[name]["has_graphs"] and says in found[name]["absent"]["graph"]
    assert all(line["pool_is_zero"] for name, line in found.items() if name != "must")
    levels = found["raises"]["levels"]
    assert len(levels) == 5 and levels[-1] == [logging.WARNING, WITHOUT_GRAPHS % found["raises"]["absent"]["graph"]]
    assert found["must"]["error"].startswith("cuda_graphs is True, but capturing ")


def test_an_engine_that_replays_its_steps_gives_what_the_engine_in_torch_gives(findings):
    expected, (replay,) = findings[0], findings[1]["replay"]
    assert replay["captured"] == 12 + 2
    assert replay["replayed"]["generation"] >= 6 and replay["replayed"]["contexts"] >= 4
    assert replay["split"].keys() == {"false", "true"}, replay["split"]
    assert replay["requests"].keys() == expected.keys()
    for number, answer in expected.items():
        np.testing.assert_allclose(replay["requests"][number]["log_probs"], answer["log_probs"], atol=1e-4, rtol=0)
        assert replay["requests"][number]["tokens"] == answer["tokens"]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_layer_of_a_llama_takes_five_launches_with_few_rows_where_separate_ones_are_eight(findings, is_split):
    found = {line["label"]: line for line in findings[1]["launches"] if line["is_split"] == is_split}
    attention = {"_decode_kernel": 1, **({"_merge_kernel": 1} if is_split else {})}
    assert found["separate"]["layer"] == {
        **attention, "_rms_norm_kernel": 2, "aten.linear.default": 2, "_gated_activation_kernel": 1,
        "aten.addmm_.default": 2}
    assert found["fused"]["layer"] == {**attention, "_fused_linear_kernel": 2, "aten.addmm_.default": 2}
    # Products add no residual, and keys are appended by a launch of their own.
    assert found["deterministic"]["layer"] == {
        "_context_kernel": 1, "_rope_kv_append_kernel": 1, **({"_merge_kernel": 1} if is_split else {}),
        "_rms_norm_kernel": 2, "_deterministic_linear_kernel": 4, "_gated_activation_kernel": 1, "aten.add_.Tensor": 2}
    assert sum(found["deterministic"]["around"].values()) == 20
    assert sum(found["separate"]["layer"].values()) == 8 + is_split
    assert sum(found["fused"]["layer"].values()) == 5 + is_split
    # The norm before the head is fused too.
    assert sum(found["fused"]["around"].values()) == sum(found["separate"]["around"].values()) - 1


def test_a_layer_takes_five_launches_with_many_rows_of_a_small_llama(findings):
    """A step of one layer and a head. A graph of the step is right, and fusion changes the logits by rounding only."""
    (found,) = findings[1]["many rows"]
    of_products = {"_rms_norm_kernel", "_fused_linear_kernel", "_gated_activation_kernel", "aten.linear.default",
                   "aten.addmm_.default"}
    fused, separate = ({name: count for name, count in found[label].items() if name in of_products}
                       for label in ("fused", "separate"))
    # The norm before the head is fused too, because this model has few tokens.
    assert separate == {"_rms_norm_kernel": 2 + 1, "aten.linear.default": 2 + 1, "_gated_activation_kernel": 1,
                        "aten.addmm_.default": 2}
    assert fused == {"_fused_linear_kernel": 2 + 1, "aten.addmm_.default": 2}
    assert found["fused"]["_decode_kernel"] == found["separate"]["_decode_kernel"] == 1
    assert found["difference"] <= 0.02 * found["scale"] and found["scale"] > 0.1, found
    assert found["different"] == [] and found["refusals"] == [] and found["replayed"], found


def test_fused_and_separate_launches_give_the_same_logits_to_within_rounding(findings):
    assert len(findings[1]["logits"]) == 4
    for line in findings[1]["logits"]:
        assert line["difference"] <= 1e-5 * line["scale"] and line["scale"] > 0.1, line


def record(function):
    with Recorder() as recorder:
        function()
    return recorder


def test_the_recorder_tells_numbers_sizes_and_addresses_apart():
    memory, other = torch.zeros(8), torch.zeros(8)
    same = [record(lambda: memory[2:].add_(3).mul(2)) for _ in range(2)]
    assert same[0].entries == same[1].entries and len(same[0].entries) == 3 and same[0].refusals == []
    for different in (lambda: memory[2:].add_(4).mul(2), lambda: memory[1:].add_(3).mul(2),
                      lambda: memory[2:7].add_(3).mul(2), lambda: other[2:].add_(3).mul(2),
                      lambda: memory[2:].add_(3).add(2)):
        assert record(different).entries != same[0].entries


@pytest.mark.parametrize("function", [
    lambda memory: memory.sum().item(), lambda memory: memory.tolist(), lambda memory: bool(memory[0] > 1),
    lambda memory: memory[memory > 1], lambda memory: memory.nonzero(), lambda memory: memory.numpy(),
    lambda memory: memory.copy_(torch.from_numpy(np.ones(8, np.float32))), lambda memory: memory + torch.tensor(2.0)])
def test_the_recorder_names_what_a_capture_refuses(function):
    memory = torch.zeros(8)
    assert record(lambda: function(memory)).refusals


def test_a_replay_runs_with_the_arguments_of_the_recording_in_its_memory():
    memory, result, number = torch.arange(4.0), torch.zeros(4), [2]
    recorder = record(lambda: result.copy_(memory.mul(number[0])[1:].sum().expand(4)))
    memory.add_(1)
    number[0] = 5
    recorder.replay()
    assert result.tolist() == [18.0] * 4
