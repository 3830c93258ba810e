"""T8: each option and argument at its limits, just beyond them, and of a wrong type. An error starts no worker."""

import inspect
import threading
from dataclasses import fields
from math import inf, nan, nextafter
from pathlib import Path

import numpy as np
import pytest

from batch_manager import (
    BackendInfo,
    ContextChunkingPolicy,
    GptManager,
    KvCacheConfig,
    KvTransferConfig,
    ParallelConfig,
    Parts,
    PeftCacheConfig,
    SchedulerPolicy,
    SpeculativeConfig,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.adapter_values import LARGEST_ADAPTER_SIZE, MODULE_NAMES
from batch_manager.arguments import MAX_BEAM_WIDTH
from batch_manager.config import (
    MAX_DRAFT_TOKENS,
    MAX_LOOKUP,
    MAX_POSITION,
    MAX_RANKS,
    MAX_THREADS,
    MAX_TREE_DEPTH,
)
from batch_manager.errors import ConfigError
from batch_manager.option_values import LONGEST_WAIT_S, MAX_COUNT
from batch_manager.testing.scripted_backend import ScriptedBackend

NO_COUNT = ("1", 1.0, True, [1], nan, MAX_COUNT + 1, 2**70)
NO_FLAG = (0, 1, "True", [], 1.0)
COUNT = ((1, 2, 2**40, MAX_COUNT), (0, -1, None, *NO_COUNT))
COUNT_FROM_0 = ((0, 1, 2**40, MAX_COUNT), (-1, None, *NO_COUNT))
COUNT_OR_NONE = ((None, 1, 2**40, MAX_COUNT), (0, -1, *NO_COUNT))
FLAG = ((True, False), (None, *NO_FLAG))
OPEN_FLAG = ((None, True, False), NO_FLAG)

# option -> (values that work, values that do not)
KV_OPTIONS = {
    "max_tokens": COUNT_OR_NONE,
    "max_attention_window": COUNT_OR_NONE,
    "sink_token_length": ((0, 1, MAX_POSITION), (-1, None, MAX_POSITION + 1, *NO_COUNT)),
    "free_gpu_memory_fraction": ((5e-324, 0.9, nextafter(1, 0), 1, 1.0),
                                 (0, -0.1, nextafter(1, 2), 2, nan, inf, "0.9", True, None, [0.9])),
    "enable_block_reuse": FLAG,
    "tokens_per_block": ((8, 16, 32, 64, 128, 256), (0, 1, 4, 7, 9, 63, 65, 255, 257, 512, -8, 64.0, "64", True, None)),
    "host_cache_size": COUNT_FROM_0,
    "enable_partial_reuse": FLAG,
    "disk_cache_path": (("/folder",), ("", b"folder", 5, True, ["folder"])),
    "disk_cache_size": (COUNT[0], COUNT_OR_NONE[1]),
    "disk_cache_read_only": FLAG,
    "disk_io_threads": ((1, 2, MAX_THREADS), (0, -1, None, MAX_THREADS + 1, *NO_COUNT)),
    "disk_min_tokens": COUNT,
    "event_buffer_max_size": COUNT_FROM_0,
    "event_hash_key": ((None, b"k", bytes(64)), ()),    # its errors do not show it: test_kv_events.py
    "event_tokens": FLAG,
    "kv_cache_dtype": (("auto", "fp8_e4m3"), ("", "fp8_e5m2", "FP8", 8, None, ["auto"])),   # "fp8" becomes fp8_e4m3
}
KV_COMPANIONS = {"sink_token_length": {"max_attention_window": 8},
                 "disk_cache_path": {"enable_block_reuse": True, "disk_cache_size": 1},
                 "disk_cache_read_only": {"enable_block_reuse": True, "disk_cache_path": "x", "disk_cache_size": 1},
                 "disk_cache_size": {"enable_block_reuse": True, "disk_cache_path": "folder"},
                 **dict.fromkeys(("host_cache_size", "event_buffer_max_size"), {"enable_block_reuse": True})}

SIZE = ((1, 2, MAX_RANKS), (0, -1, None, MAX_RANKS + 1, *NO_COUNT))
RANK = ((None, 0, 1, 3), (-1, 4, *NO_COUNT))
SECONDS = ((5e-324, 1, LONGEST_WAIT_S), (0, 0.0, -1, -5e-324, LONGEST_WAIT_S + 1, inf, nan, "1", True, None))
PARALLEL_OPTIONS = {
    "tensor_parallel_size": SIZE,
    "pipeline_parallel_size": SIZE,
    "rank": RANK,
    "local_rank": ((None, 0, 9), (-1, *NO_COUNT)),
    "leader": ((None, "host:1", "10.0.0.1:65535", "[::1]:29500"),
               ("", "host", ":1", "host:", "host:0", "host:65536", "host:x", "::1:29500", "host:-1", 29500, b"h:1")),
    "device_ids": ((None, (0,), (1, 0), (0, 0)), ((), [], 0, "01", (-1,), (0, None), (0.0,), (True,), {0})),
    "collectives": ((None, "nccl", "gloo"), ("", "mpi", "NCCL", 0, ["gloo"])),
    "rank_timeout_s": SECONDS,
    "connect_timeout_s": SECONDS,
}
PARALLEL_COMPANIONS = {"rank": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}

PEFT_OPTIONS = {
    "host_cache_size": COUNT,
    "device_cache_percent": ((5e-324, 0.02, nextafter(1, 0)), (0, -0.1, 1, 1.0, nan, inf, "0.9", True, None, [0.9])),
    "num_host_module_layer": COUNT_FROM_0,
    "num_device_module_layer": COUNT_FROM_0,
    "max_adapter_size": ((1, 64, LARGEST_ADAPTER_SIZE), (0, -1, LARGEST_ADAPTER_SIZE + 1, None, *NO_COUNT)),
    "lora_modules": ((None, ("attn_q",), MODULE_NAMES), ((), "attn_q", ("q_proj",), (1,), 5)),
    "lora_prefetch_dir": ((None, "adapters", Path("adapters")), (5, ["adapters"])),
}

SPECULATIVE_OPTIONS = {
    "method": (("ngram", "suffix", "custom"), ("draft_model", "", "Ngram", "eagle", None, 5, ["ngram"])),
    "num_speculative_tokens": ((1, 7, MAX_DRAFT_TOKENS), (0, -1, MAX_DRAFT_TOKENS + 1, None, *NO_COUNT)),
    "prompt_lookup_max": ((2, MAX_LOOKUP), (0, -1, MAX_LOOKUP + 1, None, *NO_COUNT)),
    "prompt_lookup_min": ((1, 4), (0, -1, 5, None, *NO_COUNT)),        # the most is 4
    "suffix_decoding_max_tree_depth": ((2, 24, MAX_TREE_DEPTH), (0, 1, -1, MAX_TREE_DEPTH + 1, None, *NO_COUNT)),
    "suffix_decoding_max_spec_factor": ((1, 0.5, 256.0), (0, 0.003, -1, 257, nan, None, "1", True, [1])),
    "suffix_decoding_min_token_prob": ((0, 0.1, 1), (-0.1, 1.1, nan, None, "1", True, [1])),
    "model": (("folder", "a.gguf"), ("", 5, b"folder", ["folder"])),
    "quantization": ((None, "int8", "int4"), ("int2", "", 8, ["int8"])),
}
COMPANIONS = {(SpeculativeConfig, "model"): {"method": "draft_model"},
              (SpeculativeConfig, "quantization"): {"method": "draft_model", "model": "folder"}}

HOSTS = ("", "a\n", "é", "x" * 256, None, 5, b"10.0.0.1")
TRANSFER_OPTIONS = {
    "role": (("producer", "consumer", "both"), ("prefill", "", None, 5, ["both"])),
    "host": (("127.0.0.1", "::1", "x" * 255), (*HOSTS, "0.0.0.0", "::")),
    "port": ((0, 1, 65535), (-1, 65536, None, *NO_COUNT)),
    "peers": ((None, (), ("10.0.0.1", "a")), ("10.0.0.1", 5, *((host,) for host in HOSTS))),
    "load_failure_policy": (("recompute", "fail"), ("retry", "", None, 5)),
    "held_blocks_fraction": ((5e-324, 0.5, 1, 1.0), (0, -0.1, 1.1, nan, inf, "1", None, True)),
    "timeout_s": SECONDS,
    "load_timeout_s": SECONDS,
}

OPTIONS = {
    "kv_cache_config": ((KvCacheConfig(),), (None, {}, KvCacheConfig, 5)),
    "enable_trt_overlap": FLAG,
    "run_ahead": OPEN_FLAG,
    "enable_chunked_context": FLAG,
    "context_chunking_policy": (tuple(ContextChunkingPolicy), (0, 1, None, "EQUAL_PROGRESS", SchedulerPolicy(1))),
    "normalize_log_probs": FLAG,
    "max_batch_size": COUNT,
    "max_num_tokens": COUNT,
    "max_seq_len": ((None, 2, 3, MAX_COUNT), (1, 0, -1, *NO_COUNT)),
    "max_num_sequences": ((None, -1, 1, 2, MAX_COUNT), (0, -2, -1.0, *NO_COUNT)),
    "device": ((None, "cpu"), (0, b"cpu", ["cpu"], True)),
    "dtype": (("auto", "float32", "float16", "bfloat16"), ("float64", "", "Auto", None, 5, ["auto"])),
    "load_format": (("auto", "dummy"), ("", "pickle", None, 5)),
    "gather_context_logits": FLAG,
    "gather_generation_logits": FLAG,
    "num_threads": ((None, 1, MAX_THREADS), (0, -1, MAX_THREADS + 1, *NO_COUNT)),
    "cuda_graphs": OPEN_FLAG,
    "deterministic": FLAG,
    "flush_stats_when_idle": FLAG,
    "log_callback_errors": FLAG,
    "max_queued_requests": COUNT_FROM_0,
    "max_queued_tokens": COUNT_FROM_0,
    "max_request_bytes": COUNT,
    "max_bytes_in_flight": COUNT,
    "max_admissions_per_iteration": COUNT,
    "idle_poll_interval_s": SECONDS,
    "hang_warning_s": ((0, 0.0, 30, LONGEST_WAIT_S), (-5e-324, -1, LONGEST_WAIT_S + 1, inf, nan, "1", True, None)),
    "cpu_compile": OPEN_FLAG,
    "model_implementation": (("auto", "native", "transformers"), ("", "hf", "Native", None, 5, ["auto"])),
    "quantization": ((None, "int8", "int4"), ("", "int2", "INT8", 8, ["int8"])),
    "quantized_activations": ((None, "int8"), ("", "int4", "INT8", 8, ["int8"])),
    "parallel_config": ((None, ParallelConfig()), ({}, 2, ParallelConfig)),
    "peft_cache_config": ((None, PeftCacheConfig()), ({}, PeftCacheConfig, 5, True)),
    "speculative_config": ((None, SpeculativeConfig()), (SpeculativeConfig, "ngram", 5, ["ngram"])),
    "kv_transfer_config": ((None,), ({}, KvTransferConfig, "producer", 5)),    # others need enable_block_reuse
}

PART_OPTIONS = {
    "scheduler": ((None,), ()),                        # checked when it is built, see ARGUMENTS
    "attention": ((None, lambda spec, kv_pool: None), (5, "triton")),
    "backend": ((None, ScriptedBackend), (5, "scripted")),
    "clock": ((None,), (5, "clock", object())),
    "trace": ((None, print), (5, "file.json")),
    "after_responses": ((None, print), (5, "hook")),
    "at_end": ((None, print), (5, "hook")),
    "kv_events": ((None, print), (5, "hook")),
    "block_store": ((None,), (5, "folder", object())),
    "drafter": ((None,), (5, "ngram", object(), print)),
    "logits_post_processor_batched": ((None, print), (5, "batched")),
    "stages": ((None, [], (), lambda num_slots, device: []), (5, "stages", {}, object())),
}


def cases(table: dict, which: int) -> list:
    return [pytest.param(name, value, id=f"{name}: {repr(value).partition(' at 0x')[0]:.30}")
            for name, row in table.items() for value in row[which]]


def test_every_option_is_in_the_tables():
    for options, table in ((KvCacheConfig, KV_OPTIONS), (ParallelConfig, PARALLEL_OPTIONS),
                           (PeftCacheConfig, PEFT_OPTIONS), (SpeculativeConfig, SPECULATIVE_OPTIONS),
                           (KvTransferConfig, TRANSFER_OPTIONS), (TrtGptModelOptionalParams, OPTIONS),
                           (Parts, PART_OPTIONS)):
        assert [field.name for field in fields(options)] == list(table)
    arguments = set(inspect.signature(GptManager).parameters)
    assert arguments == {name for name, _ in ARGUMENTS} | GOOD.keys() | {"trt_engine_path"}


@pytest.mark.parametrize("name, value", cases(KV_OPTIONS, 0))
def test_a_good_value_of_the_kv_cache(name, value):
    assert getattr(KvCacheConfig(**{name: value, **KV_COMPANIONS.get(name, {})}), name) == value


@pytest.mark.parametrize("name, value", cases(KV_OPTIONS, 1))
def test_a_bad_value_of_the_kv_cache(name, value):
    with pytest.raises(ConfigError) as raised:
        KvCacheConfig(**{name: value, **KV_COMPANIONS.get(name, {})})
    assert f"KvCacheConfig.{name} is {value!r}" in str(raised.value) and "; " in str(raised.value)


@pytest.mark.parametrize("name, value", cases(PARALLEL_OPTIONS, 0))
def test_a_good_value_of_ranks(name, value):
    assert getattr(ParallelConfig(**{name: value, **PARALLEL_COMPANIONS.get(name, {})}), name) == value


@pytest.mark.parametrize("name, value", cases(PARALLEL_OPTIONS, 1))
def test_a_bad_value_of_ranks(name, value):
    with pytest.raises(ConfigError) as raised:
        ParallelConfig(**{name: value, **PARALLEL_COMPANIONS.get(name, {})})
    assert f"ParallelConfig.{name} is {value!r}" in str(raised.value) and "; " in str(raised.value)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("options", "table", "name"), [
    (options, table, name) for options, table in ((PeftCacheConfig, PEFT_OPTIONS),
                                                  (SpeculativeConfig, SPECULATIVE_OPTIONS),
                                                  (KvTransferConfig, TRANSFER_OPTIONS)) for name in table])
def test_values_of_adapters_drafts_and_transfers(options, table, name, which):
    for value in table[name][which]:
        given = {name: value, **COMPANIONS.get((options, name), {})}
        if not which:
            assert getattr(options(**given), name) == value
            continue
        with pytest.raises(ConfigError, match=f"{options.__name__}.{name} is "):
            options(**given)


@pytest.mark.parametrize("options, says", [
    ({"disk_cache_read_only": True}, "disk_cache_read_only is set but disk_cache_path is not set"),
    ({"sink_token_length": 1}, "sink_token_length is 1 but max_attention_window is not set"),
    ({"host_cache_size": 1}, "host_cache_size is 1 but enable_block_reuse is not set")])
def test_options_of_the_kv_cache_that_need_another(options, says):
    with pytest.raises(ConfigError) as raised:
        KvCacheConfig(**options)
    assert says in str(raised.value)


@pytest.mark.parametrize("name, value", cases(OPTIONS, 0))
def test_a_good_value_of_the_engine(name, value):
    assert getattr(TrtGptModelOptionalParams(**{name: value}), name) == value


@pytest.mark.parametrize("name, value", cases(OPTIONS, 1))
def test_a_bad_value_of_the_engine(name, value):
    with pytest.raises(ConfigError) as raised:
        TrtGptModelOptionalParams(**{name: value})
    text = str(raised.value)
    assert (f"{name} is {value!r}" in text or f"{name} is of type {type(value).__name__}" in text) and "; " in text


@pytest.mark.parametrize("name, value", cases(PART_OPTIONS, 0))
def test_a_good_part(name, value):
    assert getattr(Parts(**{name: value}), name) is value


@pytest.mark.parametrize("name, value", cases(PART_OPTIONS, 1))
def test_a_bad_part(name, value):
    with pytest.raises(ConfigError) as raised:
        Parts(**{name: value})
    assert f"Parts.{name} is of type {type(value).__name__}; " in str(raised.value)


GOOD = {"model_path": None, "model_type": TrtGptModelType.InflightFusedBatching, "max_beam_width": 1,
        "scheduler_policy": SchedulerPolicy.MAX_UTILIZATION, "get_inference_requests_cb": lambda most: [],
        "send_response_cb": lambda *response: None, "optional_params": TrtGptModelOptionalParams()}

# argument -> values that it may not have
ARGUMENTS = [(name, value) for name, values in {
    "model_path": (5, b"nowhere", "", "/nowhere", "nul\0", [], 1.0),
    "trt_engine_path": ("/nowhere", 5),
    "model_type": (0, 1, 2, 3, "V1", None, True, SchedulerPolicy(0)),
    "max_beam_width": (0, -1, MAX_BEAM_WIDTH + 1, 2**70, None, "1", 1.0, True, [1]),
    "scheduler_policy": (0, 1, None, "MAX_UTILIZATION", TrtGptModelType(0)),
    "get_inference_requests_cb": (None, 5, []),
    "send_response_cb": (None, 5, []),
    "poll_stop_signal_cb": (5, set()),
    "return_batch_manager_stats_cb": (5, "stats.json"),
    "optional_params": (5, {}, TrtGptModelOptionalParams),
    "terminate_req_id": (-1, 2**64, np.int64(-1), np.True_, True, 1.0, "1"),
    "max_draft_tokens": (65, -1, 0.0, False, "0"),
    "exclude_input_in_output": (None, 0, 1, "no"),
    "parts": (5, {}, Parts, ScriptedBackend()),
}.items() for value in values]
WITH_A_BACKEND = [
    ({"optional_params": TrtGptModelOptionalParams(max_seq_len=1025)}, "max_seq_len is 1,025"),
    ({"optional_params": TrtGptModelOptionalParams(max_num_tokens=7)}, "max_num_tokens is 7"),
    ({"optional_params": TrtGptModelOptionalParams(deterministic=True)}, "deterministic"),
    ({"optional_params": TrtGptModelOptionalParams(cuda_graphs=True)}, "cuda_graphs"),
    ({"optional_params": TrtGptModelOptionalParams(kv_cache_config=KvCacheConfig(max_attention_window=8))},
     "max_attention_window is 8"),
    ({"optional_params": TrtGptModelOptionalParams(kv_cache_config=KvCacheConfig(
        enable_block_reuse=True, host_cache_size=1))}, "host_cache_size is 1"),
    ({"parts": Parts(backend=ScriptedBackend(), scheduler=lambda limits, kv: 5)}, "returned a value of type int"),
    *(({"model_type": TrtGptModelType.V1, "optional_params": TrtGptModelOptionalParams(**{name: True})}, name)
      for name in ("enable_trt_overlap", "enable_chunked_context")),
]


@pytest.fixture
def started(monkeypatch):
    """Return a list to which the name of each thread is added when the thread is started."""
    names, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (names.append(thread.name), start(thread))[1])
    return names


def assert_refused_without_a_worker(arguments, says, started):
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as raised:
        GptManager(**{**GOOD, **arguments})
    assert says in str(raised.value), str(raised.value)
    assert set(started) <= {"batch_manager loading"} and set(threading.enumerate()) == before


@pytest.mark.parametrize("name, value", [pytest.param(name, value, id=f"{name}: {value!r:.30}")
                                         for name, value in ARGUMENTS])
def test_a_bad_argument(name, value, started):
    is_path = name in ("model_path", "trt_engine_path")
    parts = {} if is_path or name == "parts" else {"parts": Parts(backend=ScriptedBackend())}
    path = {} if is_path else {"model_path": None}
    says = (value if isinstance(value, str) and value.startswith("/") else "") if is_path else name
    assert_refused_without_a_worker({**parts, **path, name: value}, says, started)


@pytest.mark.parametrize("arguments, says", WITH_A_BACKEND, ids=[says for _, says in WITH_A_BACKEND])
def test_arguments_that_the_backend_contradicts(arguments, says, started):
    assert_refused_without_a_worker({"parts": Parts(backend=ScriptedBackend()), **arguments}, says, started)


def test_what_is_no_scheduler_is_refused_before_the_model_is_read(started):
    assert_refused_without_a_worker({"model_path": "not there", "parts": Parts(scheduler=5)},
                                    "Parts.scheduler is of type int", started)


def test_two_names_for_one_path(started):
    assert_refused_without_a_worker({"model_path": "a", "trt_engine_path": "b"}, "are both set", started)


@pytest.mark.parametrize("missing", ["model_type", "max_beam_width", "scheduler_policy", "get_inference_requests_cb",
                                     "send_response_cb"])
def test_a_missing_argument(missing, started):
    arguments = {name: value for name, value in GOOD.items() if name != missing}
    with pytest.raises(TypeError, match=missing):
        GptManager(**arguments)
    assert not started


@pytest.mark.parametrize("name, value", [
    ("max_beam_width", 2), ("max_beam_width", MAX_BEAM_WIDTH), ("terminate_req_id", 0),
    ("terminate_req_id", 2**64 - 1), ("max_draft_tokens", None),
    ("max_draft_tokens", 0), ("max_draft_tokens", 64), ("exclude_input_in_output", True),
    *(("optional_params", TrtGptModelOptionalParams(**{option: value})) for option, value in (
        ("idle_poll_interval_s", 5e-324), ("idle_poll_interval_s", LONGEST_WAIT_S), ("hang_warning_s", 0),
        ("hang_warning_s", LONGEST_WAIT_S)))], ids=str)
def test_an_engine_lives_at_the_limits_of_its_arguments(name, value):
    with GptManager(**{**GOOD, "parts": Parts(backend=ScriptedBackend()), name: value}) as manager:
        assert not manager.wait_until_terminate(timeout=0.05)
        assert manager.health()["state"] == "RUNNING" and not manager.health()["is_hanging"]


class FailsAsAnInteger:
    dtype = "no dtype"

    def __index__(self):
        raise RuntimeError("no integer")


def test_the_refusal_of_a_number_of_sequences_names_every_valid_value():
    with pytest.raises(ConfigError, match="is -2; expected an integer of at least 1, or -1 for no limit, or None"):
        TrtGptModelOptionalParams(max_num_sequences=-2)


@pytest.mark.parametrize("options, name, value", [
    (KvCacheConfig, "max_tokens", np.int64(64)), (KvCacheConfig, "tokens_per_block", np.uint8(16)),
    (KvCacheConfig, "free_gpu_memory_fraction", np.float32(0.5)), (KvCacheConfig, "host_cache_size", np.int16(0)),
    (TrtGptModelOptionalParams, "max_batch_size", np.int64(4)), (TrtGptModelOptionalParams, "max_seq_len", np.int32(4)),
    (TrtGptModelOptionalParams, "max_num_sequences", np.int64(-1)),
    (TrtGptModelOptionalParams, "max_num_sequences", np.array(4)),
    (TrtGptModelOptionalParams, "num_threads", np.uint64(1)),
    (TrtGptModelOptionalParams, "idle_poll_interval_s", np.float16(0.5)),
    (TrtGptModelOptionalParams, "hang_warning_s", np.float64(2)),
    (TrtGptModelOptionalParams, "hang_warning_s", np.int8(2))], ids=repr)
def test_a_number_of_numpy_becomes_a_plain_number(options, name, value):
    plain = getattr(options(**{name: value}), name)
    assert type(plain) in (int, float) and plain == value


@pytest.mark.parametrize("options, name, value", [
    (KvCacheConfig, "max_tokens", np.int64(0)), (KvCacheConfig, "tokens_per_block", np.int64(9)),
    (KvCacheConfig, "free_gpu_memory_fraction", np.float32(2)), (KvCacheConfig, "max_tokens", 10**5000),
    (TrtGptModelOptionalParams, "max_batch_size", np.float64(4)), (TrtGptModelOptionalParams, "max_seq_len", np.True_),
    (TrtGptModelOptionalParams, "max_num_sequences", np.array([4, 4])),
    (KvCacheConfig, "max_tokens", np.array(True)), (KvCacheConfig, "max_tokens", FailsAsAnInteger()),
    (TrtGptModelOptionalParams, "hang_warning_s", np.float32(nan))], ids=lambda value: f"{type(value).__name__}")
def test_a_number_of_numpy_is_checked(options, name, value):
    with pytest.raises(ConfigError, match=f"{name} is .*; "):
        options(**{name: value})


def test_an_engine_takes_the_integers_of_numpy():
    info = {"vocab_size": np.int64(10), "max_seq_len": 8, "num_blocks": 4, "tokens_per_block": np.int32(4),
            "num_slots": 2, "dispatch": "none", "attention_window": np.int64(4), "end_ids": (np.int64(3),)}
    info = BackendInfo(**info)
    numbers = (info.vocab_size, info.tokens_per_block, info.attention_window, *info.end_ids)
    assert [type(number) for number in numbers] == [int] * 4
    with GptManager(**{**GOOD, "parts": Parts(backend=ScriptedBackend()), "max_beam_width": np.int64(2),
                       "terminate_req_id": np.uint64(2**64 - 1), "max_draft_tokens": np.int64(0)}) as manager:
        assert type(manager.info.max_beam_width) is int
