"""C23: a manager with a real model leaves nothing behind, however it ends, even after many managers."""

import gc
import json
import os
import threading
import time
import weakref

import pytest
import torch

from batch_manager import (
    ConfigError,
    GptManager,
    KvCacheConfig,
    ModelLoadError,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)

CONSTRUCTIONS, WARM_UP = 20, 4
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "float32"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return tmp_path


def held():
    """Return the numbers of tensors, Python threads, threads of the process and open files."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return (tensors, threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


def settled(baseline, parts=()):
    """Wait up to 20 s until held() is no more than `baseline` and no object of `parts` is alive. Return what is more.

    A thread that was still ending when the baseline was taken makes the later numbers smaller.

    parts   weak references
    """
    deadline = time.monotonic() + 20
    while (more := [(now, before) for now, before in zip(held(), baseline, strict=True) if now > before]) or any(
            part() for part in parts):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return more


def make(folder, client):
    return GptManager(
        folder, TrtGptModelType.InflightFusedBatching, 2, SchedulerPolicy.MAX_UTILIZATION, client.get, client.send,
        client.poll, client.return_stats, TrtGptModelOptionalParams(
            device="cpu", load_format="dummy", max_batch_size=4, num_threads=torch.get_num_threads(),
            kv_cache_config=KvCacheConfig(max_tokens=256, tokens_per_block=8, enable_block_reuse=True)))


def run_one(folder, client, new_request, ending):
    """Run three requests on a manager, and end it in the way `ending`.

    Returns its KV cache manager, and weak references to the manager and its backend.
    """
    client.pending = [new_request(1, [1, 2, 3], 4, streaming=True), new_request(2, [5] * 20, 3, beam_width=2),
                      new_request(3, [7] * 9, 30 if ending == "abort" else 3, temperature=0.8, runtime_top_p=0.9)]
    manager = make(folder, client)
    kv, parts = manager._loop.kv, [weakref.ref(manager), weakref.ref(manager._loop.backend)]
    if ending != "abort":
        client.wait_for_finals(1, 2, 3)
    if ending == "with":
        with manager:
            pass
    elif ending != "dropped":
        assert manager.shutdown(drain=ending == "drain", timeout=20)
    client.responses.clear()
    return kv, parts


def test_c23_tensors_threads_files_and_blocks_are_back_after_each_of_twenty_managers(folder, new_client, new_request):
    endings = ("drain", "abort", "with", "dropped")
    for number in range(WARM_UP):
        run_one(folder, new_client(), new_request, endings[number % 4])
    time.sleep(0.1)
    baseline = held()
    for number in range(CONSTRUCTIONS):
        ending = endings[number % 4]
        kv, parts = run_one(folder, new_client(), new_request, ending)
        assert settled(baseline, parts) == [], f"manager {number}, {ending}"
        assert kv.used_blocks == 0 and not any(part() for part in parts)


def test_c23_a_model_that_does_not_load_leaves_nothing(folder, new_client):
    baseline = held()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | {"hidden_size": 33}))
    for _ in range(3):
        with pytest.raises((ConfigError, ModelLoadError)):
            make(folder, new_client())
        assert settled(baseline) == []
