"""The native backend compiles its steps if model and parameters permit it. All other steps run in torch.

cpu_compile=True is refused if the steps cannot be compiled. The log names the reason.
"""

import json
import logging
import os
import threading

import pytest
import torch

from batch_manager import (
    ConfigError,
    GptManager,
    KvCacheConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.layers.linear import Linear
from batch_manager.models import load_model
from batch_manager.models.llama import Llama
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.runtime.forms import comparison, table
from batch_manager.runtime.warm_up import warm_up
from batch_manager.triton_kernels.cpu.native.library import TYPES
from tests.harness.small_process import in_a_small_process

MODEL = "examples/models/austen-4m"


def backend(cpu_compile=None, factory=None, layout=packing.packed, max_draft_tokens=0, **options):
    kv = options.pop("kv_cache_config", KvCacheConfig(max_tokens=2048))
    params = TrtGptModelOptionalParams(cpu_compile=cpu_compile, kv_cache_config=kv, max_seq_len=128, device="cpu",
                                       **options)
    return build_native_backend(MODEL, params, layout=layout, num_slots=4, attention_factory=factory,
                                max_draft_tokens=max_draft_tokens)


def test_it_is_compiled_by_default_and_not_where_it_was_switched_off(caplog):
    with caplog.at_level(logging.INFO, "batch_manager"):
        assert "compiled" in backend()._forms.steps
    assert "steps run as compiled code on at most" in caplog.text      # other lines mention torch
    assert "the forms of steps are compiled, packed; without graph, fused, fixed: the device is cpu; " in caplog.text
    caplog.clear()
    made = backend(True, dtype="bfloat16")
    assert "compiled" in made._forms.steps and made.info.dispatch == "compiled"
    with caplog.at_level(logging.INFO, "batch_manager"):
        made = backend(False)
        assert "compiled" not in made._forms.steps and made.info.dispatch == "torch"
    assert "compiled code" not in caplog.text


@pytest.mark.parametrize(("options", "reason"), [
    ({"kv_cache_config": KvCacheConfig(max_tokens=2048, tokens_per_block=8)},
     "tokens_per_block is 8, not a multiple of 16 up to 256"),
    ({"factory": lambda spec, pool: None}, "Parts.attention is set")])
def test_what_cannot_be_compiled_runs_in_torch_or_is_refused(options, reason, caplog):
    with pytest.raises(ConfigError, match=f"cpu_compile is True, but {reason}"):
        backend(True, **options)
    if "factory" not in options:
        with caplog.at_level(logging.INFO, "batch_manager"):
            assert "compiled" not in backend(**options)._forms.steps
        assert f"; without compiled: {reason}" in caplog.text


@pytest.mark.parametrize("layout", [packing.packed, packing.split, packing.padded])
def test_deterministic_steps_have_no_other_form(layout):
    made = backend(True, layout=layout, deterministic=True)
    assert made.info.dispatch == "compiled" and len(made._forms.steps) == 1
    assert layout is packing.padded or made.info.absent["packed"].startswith("deterministic is set, and `compiled`")
    assert "compiled" not in backend(False, layout=layout, deterministic=True)._forms.steps


@pytest.fixture
def no_library(monkeypatch):
    monkeypatch.setattr(table, "load_library", lambda _: (_ for _ in ()).throw(
        table.CannotCompileError("found no C compiler: ...; apt-get install gcc")))


def test_without_a_compiler_one_warning_names_reason_cost_and_way_out(no_library, caplog, tmp_path):
    from batch_manager.tools.model_facts import described, inspect_model

    params = TrtGptModelOptionalParams(kv_cache_config=KvCacheConfig(max_tokens=256), device="cpu")
    with GptManager(MODEL, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, lambda _: [],
                    lambda *_: None, lambda: set(), optional_params=params) as manager:
        assert manager.info.dispatch == "torch"
        assert manager.health()["not_compiled"] == manager.info.not_compiled == (
            "found no C compiler: ...; apt-get install gcc")
        assert manager.health()["not_captured"] == manager.info.not_captured == "the device is cpu"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and all(word in warnings[0] for word in (
        "found no C compiler", "2 to 27 times slower", "apt-get install gcc"))
    facts = inspect_model(MODEL, device="cpu")
    assert facts["steps"] == "torch" and "without compiled: found no C compiler" in described(facts)
    with pytest.raises(ConfigError, match="cpu_compile is True, but found no C compiler"):
        backend(True)


def test_what_is_compiled_or_chosen_says_so(caplog):
    assert backend().info.not_compiled == ""
    assert backend(False).info.not_compiled == "cpu_compile is False"
    assert backend(cuda_graphs=False).info.not_captured == "cuda_graphs is False"
    assert "cannot be compiled: it computes in torch.float16" in backend(dtype="float16").info.not_compiled
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_type_without_products_of_its_own_runs_in_torch(caplog):
    with caplog.at_level(logging.INFO, "batch_manager"):
        assert "compiled" not in backend(dtype="float16")._forms.steps
    assert "; without compiled: Llama cannot be compiled: it computes in torch.float16" in caplog.text
    with pytest.raises(ConfigError, match="cpu_compile is True, but Llama cannot be compiled: it computes in"):
        backend(True, dtype="float16")


@pytest.mark.parametrize(("change", "reason"), [
    (lambda hidden: hidden * 2, "its forward failed while it was recorded: TypeError"),
    (lambda hidden: hidden.tanh(), "it uses the attribute tanh of its hidden states"),
    (lambda hidden: torch.tanh(hidden), "its forward failed while it was recorded: TypeError"),
    (lambda hidden: hidden + 1, "it adds an object of type int to its hidden states")])
def test_a_model_that_does_something_else_runs_in_torch(change, reason, monkeypatch, caplog):
    forward = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda self, hidden, positions, attention: forward(
        self, change(hidden), positions, attention))
    with caplog.at_level(logging.INFO, "batch_manager"):
        made = backend()
    assert "compiled" not in made._forms.steps
    assert f"; without compiled: Llama cannot be compiled: {reason}" in caplog.text


def dummy_backend(folder, config, **options):
    (folder / "config.json").write_text(json.dumps(config))
    params = TrtGptModelOptionalParams(cpu_compile=True, load_format="dummy", device="cpu",
                                       kv_cache_config=KvCacheConfig(max_tokens=512), **options)
    return build_native_backend(folder, params, layout=packing.packed, num_slots=4)


def test_a_model_with_slopes_is_compiled(tmp_path):
    config = {"architectures": ["BloomForCausalLM"], "vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    assert "compiled" in dummy_backend(tmp_path, config, max_seq_len=64)._forms.steps


@pytest.mark.parametrize("positions", [2, 3, 4])
def test_a_model_with_fewer_positions_than_the_first_step_has_tokens_is_compiled(tmp_path, positions):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": positions}
    assert "compiled" in dummy_backend(tmp_path, config)._forms.steps


def test_a_step_that_gives_something_else_than_torch_is_not_used(monkeypatch, caplog):
    multiply = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x: multiply(self, x) if not isinstance(x, torch.Tensor)
                        else multiply(self, x) * 1.5)
    with caplog.at_level(logging.INFO, "batch_manager"):
        assert "compiled" not in backend()._forms.steps
    assert "Llama cannot be compiled: differs from the layers: by" in caplog.text


@pytest.mark.parametrize("max_draft_tokens", [0, 1, 64])
def test_nothing_is_left_in_the_pool(max_draft_tokens):
    made = backend(max_draft_tokens=max_draft_tokens)
    assert not made._parts.pool.any() and not any(made._forms.steps.values())


@pytest.mark.parametrize(("options", "with_drafts_s", "expected"), [
    ({"max_draft_tokens": 64}, 3.4, 0.1), ({"max_draft_tokens": 2}, 3.4, 0.35), ({"max_draft_tokens": 9}, 40, 0.5),
    ({"max_draft_tokens": 9}, 1.9, 0.01), ({"max_draft_tokens": 9, "cpu_compile": False}, 3.4, 0.08), ({}, 3.4, 0.08)])
def test_the_cost_of_a_draft_is_measured_in_compiled_steps(monkeypatch, options, with_drafts_s, expected):
    """The fastest step without drafts takes 2 s, after one that takes less: it warms up. Others take longer."""
    seconds = [second for base in (9, 3, 2, 5, 4) for second in (base, with_drafts_s * base / 2)]
    seconds[:2] = 1, 1
    reads = iter([read for index, second in enumerate(seconds) for read in (100 * index, 100 * index + second)])
    monkeypatch.setattr("batch_manager.runtime.warm_up.process_time", lambda: next(reads))
    assert backend(**options).info.draft_cost == pytest.approx(expected)


def test_the_packed_weights_are_counted_as_those_of_onednn_are():
    sizes = [load_model(MODEL, device="cpu", compiled_step=compiled).weight_bytes for compiled in (True, False)]
    assert sizes[0] == sizes[1]
    assert set(TYPES) == {torch.float32, torch.bfloat16} < set(comparison.TOLERANCES)


def helper_count():
    """Return the number of threads of this process that were not started by Python."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def helpers_come_and_go():
    first = backend(num_threads=5)
    before = helper_count()
    second = backend(num_threads=5)
    first.close()
    assert helper_count() >= 4                     # the second backend keeps them
    second.close()
    second.close()
    assert helper_count() <= before - 4
    third = backend(num_threads=3)
    assert third.figures()["Compute Threads"] == 3
    third.close()
    assert helper_count() <= before - 4
    return True


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts the threads of the process as Linux does")
def test_c23_the_threads_that_helped_are_gone_with_the_last_backend():
    """In a process of its own: another test's backend may not have been collected yet."""
    assert in_a_small_process(helpers_come_and_go)


def test_the_threads_of_the_newest_step_are_a_statistic():
    made = backend(num_threads=2)
    assert made.figures() == {"Compute Threads": 2, "Compiled Steps": 0, "Packed Steps": 0}
    made._forms._forms[0]._forward._governor.newest = 1
    assert made.figures()["Compute Threads"] == 1
    assert backend(False, num_threads=2).figures() == {"Compute Threads": 2, "Packed Steps": 0}
    made.close()
    assert made.figures() == {}


@pytest.mark.parametrize(("softcap", "threads"), [(None, 1), (30.0, 3)])
def test_torch_has_one_thread_beside_a_compiled_head_and_all_for_a_head_of_its_own(tmp_path, softcap, threads):
    config = {"architectures": ["Gemma3ForCausalLM"], "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
              "max_position_embeddings": 64, "final_logit_softcapping": softcap}
    made, before, seen = dummy_backend(tmp_path, config, num_threads=3), torch.get_num_threads(), []
    model = made._forms._forms[0]._model
    embed = model.embed
    model.embed = lambda ids: seen.append(torch.get_num_threads()) or embed(ids)
    warm_up(made._parts, made._forms)
    assert set(seen) == {threads} and torch.get_num_threads() == before
