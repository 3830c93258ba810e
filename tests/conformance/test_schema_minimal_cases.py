"""The engine agrees with the model of the rules on shrunk random records for which an earlier version differed."""

import pytest

from .schema_compare import differences

GNE_LINE = [{"id": 1, "arrival": 0, "prompt_len": 26, "max_new_tokens": 7},
            {"id": 11, "arrival": 0, "prompt_len": 36, "max_new_tokens": 1},
            {"id": 13, "arrival": 1, "prompt_len": 14, "max_new_tokens": 7, "priority": 0.8}]


def trace(policy, num_blocks, requests, tokens_per_block=4, **more):
    kv = {"tokens_per_block": tokens_per_block, "num_blocks": num_blocks, "max_seq_len": 64}
    kv |= more.pop("kv", {})
    return {"type": "scheduler_trace", "fixed_iterations": 200, "requests": requests,
            "config": {"capacity_policy": policy, "max_num_requests": 8, "kv": kv} | more}


def operations(*ops, **config):
    return {"type": "kv_ops", "ops": list(ops),
            "config": {"tokens_per_block": 4, "num_blocks": 8, "max_seq_len": 32} | config}


def same_prompt(count, **more):
    return [{"id": number, "arrival": 0, "prompt_len": 9, "prompt_tokens": list(range(9)), "max_new_tokens": 3} | more
            for number in range(count)]


CASES = {
    "contexts between chunks take their turn in the line": trace(
        "GUARANTEED_NO_EVICT", 24, GNE_LINE, insert_order="priority",
        micro_batch={"max_batch_size": 4, "max_num_tokens": 56, "max_context_length": 8,
                     "chunking": {"policy": "FIRST_COME_FIRST_SERVED", "unit": 4}}),
    "and wait behind the first that does not fit": trace(
        "GUARANTEED_NO_EVICT", 6, [{"id": 12, "arrival": 5, "prompt_len": 20, "max_new_tokens": 5},
                                   {"id": 17, "arrival": 6, "prompt_len": 11, "max_new_tokens": 6, "priority": 0.8}],
        tokens_per_block=8, insert_order="priority",
        micro_batch={"max_batch_size": 8, "max_num_tokens": 56, "max_context_length": 16,
                     "chunking": {"policy": "EQUAL_PROGRESS", "unit": 8}}),
    "all drafts count, also more than there will be tokens": trace(
        "MAX_UTILIZATION", 6, [{"id": 0, "arrival": 0, "prompt_len": 13, "max_new_tokens": 1, "draft_len": 4},
                               {"id": 1, "arrival": 0, "prompt_len": 9, "max_new_tokens": 1},
                               {"id": 30, "arrival": 0, "prompt_len": 5, "max_new_tokens": 1, "draft_len": 4}],
        tokens_per_block=8),
    "the first in line can be its own victim": {
        "type": "capacity_step", "requests": [{"id": 0, "arrival": 0, "prompt_len": 1, "max_new_tokens": 1,
                                               "state": "GENERATION_IN_PROGRESS", "generated": 1}],
        "config": {"capacity_policy": "MAX_UTILIZATION", "max_num_requests": 8, "blocks_per_request": 8}},
    "in a static batch too": trace(
        "STATIC_BATCH", 20, [{"id": 0, "arrival": 2, "prompt_len": 1, "max_new_tokens": 2},
                             {"id": 2, "arrival": 0, "prompt_len": 14, "max_new_tokens": 15},
                             {"id": 9, "arrival": 1, "prompt_len": 7, "max_new_tokens": 1, "priority": 0.3}],
        tokens_per_block=2, insert_order="priority", max_num_requests=2,
        micro_batch={"max_batch_size": 2, "chunking": {"policy": "FORCE_CHUNK", "unit": 4}}),
    "a later prompt of the same batch uses what an earlier one computed": trace(
        "STATIC_BATCH", 20, same_prompt(3), kv={"enable_block_reuse": True}),
    "micro-batches in flight": {
        "type": "scheduler_trace", "fixed_iterations": 20,
        "config": {"capacity_policy": None, "micro_batch": {"max_batch_size": 1, "num_micro_batches": 3}},
        "requests": [{"id": number, "arrival": 0, "prompt_len": 4, "max_new_tokens": 3} for number in range(2)]},
    "the whole prompt is charged without chunking": {
        "type": "micro_batch_step", "config": {"max_batch_size": 8, "max_num_tokens": 20}, "inflight": [],
        "requests": [{"id": 0, "arrival": 0, "prompt_len": 14, "max_new_tokens": 1},
                     {"id": 1, "arrival": 0, "prompt_len": 16, "max_new_tokens": 1, "context_position": 12}]},
    "drafts behind a prompt that is longer than the longest chunk": {
        "type": "chunking", "config": {"policy": "FIRST_COME_FIRST_SERVED", "unit": 1, "max_context_length": 44},
        "iterations": 1, "requests": [{"id": 1, "arrival": 0, "prompt_len": 45, "max_new_tokens": 1, "draft_len": 17,
                                       "estimated_reusable_tokens": 45}]},
    "the default priority has no end": {
        "type": "eviction_ops", "config": {"num_blocks": 2}, "ops": [
            {"op": "peek", "as": "a"}, {"op": "claim", "block": "a", "priority": 35, "duration": 5},
            {"op": "peek", "as": "b"}, {"op": "claim", "block": "b"}, {"op": "release", "block": "a"},
            {"op": "release", "block": "b"}, {"op": "advance_time", "ms": 9}, {"op": "refresh"},
            {"op": "peek", "as": "c"}]},
    "a later chunk needs nothing": operations(
        {"op": "needed_one_step", "request": {"id": 0, "prompt_len": 9, "max_new_tokens": 2, "context_position": 4}}),
    "a request past the longest sequence": operations(
        {"op": "remaining_to_completion", "request": {"id": 0, "prompt_len": 11, "max_new_tokens": 37}}),
    "a copy is kept as long as what it was copied from": operations(
        {"op": "add_sequence", "req": 0, "tokens": [1, 1, 1, 1, 2, 2, 2, 2, 3],
         "retention": {"ranges": [[0, None, 80]]}},
        {"op": "remove_sequence", "req": 0, "store_for_reuse": True},
        {"op": "add_sequence", "req": 1, "tokens": [1, 1, 1, 5, 5]},
        {"op": "remove_sequence", "req": 1, "store_for_reuse": True},
        {"op": "add_sequence", "req": 2, "tokens": [7] * 21},
        {"op": "add_sequence", "req": 3, "tokens": [1, 1, 1, 5, 5]}, enable_block_reuse=True),
    "a prompt that needs every block begins with a copy": operations(
        {"op": "add_sequence", "req": 0, "tokens": [0, 1, 2, 3, 4, 5, 6, 7, 8]},
        {"op": "remove_sequence", "req": 0, "store_for_reuse": True},
        {"op": "add_sequence", "req": 1, "tokens": [0] * 31}, enable_block_reuse=True),
    "also where the only free block is the one to copy": operations(
        {"op": "add_sequence", "req": 0, "tokens": [0, 1, 2, 3, 4, 5, 6, 7, 8]},
        {"op": "store_context", "req": 0}, {"op": "add_sequence", "req": 1, "tokens": [0, 1, 2, 3, 4, 5, 6, 7, 9]},
        {"op": "remove_sequence", "req": 0, "store_for_reuse": False},
        {"op": "remove_sequence", "req": 1, "store_for_reuse": False},
        {"op": "add_sequence", "req": 2, "tokens": [0, 1, 9]}, enable_block_reuse=True, num_blocks=4),
}


@pytest.mark.parametrize("name", CASES)
def test_the_product_follows_the_rules(adapter, name):
    assert differences(adapter, CASES[name]) == []
