import re

import pytest

from batch_manager.config import KvCacheConfig
from batch_manager.errors import ConfigError, InsufficientMemoryError
from batch_manager.runtime.memory_plan import plan_host_blocks, plan_memory

MIB, GIB = 2**20, 2**30


def plan(config=None, **changes):
    facts = {"block_bytes": MIB, "free_bytes": 10 * GIB, "step_bytes": 0, "on_gpu": True, "max_seq_len": 4096,
             "max_num_sequences": None}
    return plan_memory(config or KvCacheConfig(), **{**facts, **changes})


@pytest.mark.parametrize("num_blocks, reason, config, facts", [
    (9216, "0.9 of 10,240.0 MiB free GPU memory", {}, {}),
    (5120, "0.5 of 10,240.0 MiB free GPU memory", {"free_gpu_memory_fraction": 0.5}, {}),
    (6144, "1 of 6,144.0 MiB free GPU memory", {"free_gpu_memory_fraction": 1}, {"step_bytes": 4 * GIB}),
    (5120, "1 of 5,120.0 MiB free GPU memory", {"free_gpu_memory_fraction": 1}, {"step_bytes": 90 * GIB}),
    (128, "2 sequences of 4,096 tokens", {}, {"max_num_sequences": 2}),
    (130, "2 sequences of 4,097 tokens", {}, {"max_num_sequences": 2, "max_seq_len": 4097}),
    (9216, "0.9 of", {}, {"max_num_sequences": 10**6}),
    (2048, "at most 2,048.0 MiB on a CPU", {}, {"on_gpu": False}),
    (921, "0.9 of 1,024.0 MiB free host memory", {}, {"on_gpu": False, "free_bytes": GIB}),
    (3, "max_tokens 129", {"max_tokens": 129}, {}),
    (2, "max_tokens 128", {"max_tokens": 128}, {"max_num_sequences": 1, "max_seq_len": 64}),
    (4096, "max_tokens 262,144", {"max_tokens": 4096 * 64}, {"on_gpu": False}),
    (64, "max_tokens 1,024", {"max_tokens": 1024, "tokens_per_block": 16}, {}),
])
def test_the_number_of_blocks_and_its_reason(num_blocks, reason, config, facts):
    result = plan(KvCacheConfig(**config), **facts)
    assert result.num_blocks == num_blocks
    assert reason in result.reason and "\n" not in result.reason
    assert result.pool_bytes == num_blocks * MIB


def test_max_tokens_beyond_the_share_is_refused_with_wanted_free_and_the_knob():
    with pytest.raises(InsufficientMemoryError) as raised:
        plan(KvCacheConfig(max_tokens=9217 * 64))
    text = str(raised.value)
    assert f"{9217 * MIB:,} bytes" in text and f"{9216 * MIB:,} bytes" in text
    assert re.search("lower KvCacheConfig.max_tokens, raise KvCacheConfig.free_gpu_memory_fraction", text)


def test_memory_for_less_than_one_block_is_refused():
    for facts in ({"free_bytes": MIB}, {"free_bytes": 0}, {"block_bytes": 9 * GIB + GIB // 2}):
        with pytest.raises(InsufficientMemoryError, match="needs 1 block of 64 tokens"):
            plan(**facts)


@pytest.mark.parametrize("config, facts, advice", [
    ({}, {"free_bytes": 0}, "free memory, or use a smaller model or dtype"),
    ({}, {"free_bytes": MIB - 1}, "free memory, or use a smaller model or dtype"),
    ({}, {"free_bytes": MIB}, "raise KvCacheConfig.free_gpu_memory_fraction, or free memory"),
    ({}, {"free_bytes": 2 * MIB - 2, "step_bytes": GIB}, "lower max_num_tokens or max_batch_size, or free memory"),
    ({}, {"free_bytes": 2 * MIB, "step_bytes": GIB},
     "raise KvCacheConfig.free_gpu_memory_fraction, lower max_num_tokens or max_batch_size, or free memory"),
    ({"max_tokens": 640}, {"free_bytes": 4 * MIB}, "lower KvCacheConfig.max_tokens, or free memory"),
    ({"max_tokens": 640}, {"free_bytes": 10 * MIB},
     "lower KvCacheConfig.max_tokens, raise KvCacheConfig.free_gpu_memory_fraction, or free memory"),
])
def test_a_refusal_advises_only_what_can_help(config, facts, advice):
    with pytest.raises(InsufficientMemoryError) as raised:
        plan(KvCacheConfig(**config), **facts)
    assert raised.value.fix == advice


@pytest.mark.parametrize("size, num_blocks", [(0, 0), (MIB, 1), (2 * MIB - 1, 1), (GIB, 1024)])
def test_host_blocks_are_whole_blocks_of_what_was_asked_for(size, num_blocks):
    assert plan_host_blocks(size, block_bytes=MIB, free_bytes=GIB) == num_blocks


def test_a_host_cache_that_does_not_fit_or_holds_no_block_is_refused_with_the_numbers():
    with pytest.raises(InsufficientMemoryError, match=r"1,073,741,825 bytes; 1,073,741,824 bytes of host memory"):
        plan_host_blocks(GIB + 1, block_bytes=MIB, free_bytes=GIB)
    with pytest.raises(ConfigError, match=r"1,048,575 bytes; one KV cache block takes 1,048,576"):
        plan_host_blocks(MIB - 1, block_bytes=MIB, free_bytes=GIB)


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 7, 100, 12345])
@pytest.mark.parametrize("block_bytes", [1, 1000, 5898240, 1 << 20, (1 << 20) + 1])
def test_pinned_pieces_waste_less_than_a_block_each_when_rounded_up_to_a_power_of_two(num_blocks, block_bytes):
    pytest.importorskip("torch")
    from batch_manager.runtime.kv_pool import pinned_pieces

    pieces = pinned_pieces(num_blocks, block_bytes)
    assert sum(pieces) == num_blocks and len(pieces) <= 20
    for piece in pieces:
        assert (1 << (piece * block_bytes - 1).bit_length()) - piece * block_bytes < block_bytes
