"""The engine and the model of the rules agree with assertions of public unit tests of TensorRT-LLM.

Sources, Apache-2.0: capacitySchedulerTest, microBatchSchedulerTest, kvCacheManagerTest, evictionPolicyTest and
llmRequestTest in cpp/tests/unit_tests/batch_manager, and tests/unittest/_torch/executor/test_py_scheduler.py. Each case
has the name of its test. Cases of cross attention and of disaggregated serving are left out, because the engine has
neither. So are two eviction cases of older versions, which released leaves of the prefix tree only.
"""

import pytest

from . import schema_oracle

GNE, MU, STATIC = "GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"
EP, FCFS, FORCE = "EQUAL_PROGRESS", "FIRST_COME_FIRST_SERVED", "FORCE_CHUNK"


@pytest.fixture(params=["model", "product"])
def module(request, adapter):
    return schema_oracle if request.param == "model" else adapter


def capacity(policy, num_blocks, most, max_seq_len=90, reuse=False, pages=None):
    config = {"capacity_policy": policy, "max_num_requests": most, "max_input_len": 1000,
              "kv": {"tokens_per_block": 10, "num_blocks": num_blocks, "max_seq_len": max_seq_len}}
    if reuse:
        config["kv"]["enable_block_reuse"] = True
    if pages:
        config["peft"] = {"max_device_pages": pages[0], "pages_per_task": pages[1]}
    return config


def alike(count, prompt_len, max_new_tokens, arrivals=None, **more):
    return [{"id": number, "arrival": arrivals[number] if arrivals else 0, "prompt_len": prompt_len,
             "max_new_tokens": max_new_tokens} | more for number in range(count)]


def prompts(max_new_tokens, *token_lists, **more):
    return [{"id": number, "arrival": 0, "prompt_len": len(tokens), "prompt_tokens": list(tokens),
             "max_new_tokens": max_new_tokens} | more for number, tokens in enumerate(token_lists)]


def prioritized(requests, **priority_of):
    return [each | ({"priority": priority_of[f"r{each['id']}"]} if f"r{each['id']}" in priority_of else {})
            for each in requests]


# name: config, requests, iterations, reused blocks (None: not asserted), {iterations: scheduled requests}

TRACES = {}
for policy in (GNE, MU, STATIC):
    TRACES |= {
        f"SimpleShouldFit {policy}": (
            capacity(policy, 20, 2, pages=(100, 15)),
            [each | {"lora_task": 1234 if each["id"] == 0 else 6789} for each in alike(2, 10, 80)],
            80, None, {(0, 80): {0, 1}}),
        f"SimpleLoraFitsDuplicateTask {policy}": (
            capacity(policy, 21, 4, pages=(30, 15)),
            [each | {"lora_task": 5678 if each["id"] == 1 else 1234} for each in alike(3, 10, 50)],
            50, None, {(0, 50): {0, 1, 2}}),
        f"SimpleShouldFitInChunk {policy}": (
            capacity(policy, 20, 2), alike(2, 50, 40, context_chunk=20), 42, None, {(0, 42): {0, 1}}),
    }
for policy, scheduled in ((GNE, {(0, 1): {0}, (1, 2): {0, 1, 2}, (2, 3): {1, 2}}),
                          (MU, {(0, 1): {0}, (1, 2): {0, 1, 2}, (2, 3): {1, 2}}),
                          (STATIC, {(0, 2): {0, 1, 2}})):
    TRACES[f"DelayDuplicateRequest {policy}"] = (
        capacity(policy, 20, 3, 50, reuse=True, pages=(100, 15)),
        prompts(2, range(21), range(21), range(21), lora_task=1234), 2 if policy == STATIC else 3, 4, scheduled)
for policy in (GNE, MU):
    TRACES[f"DelayDuplicateRequestChunked {policy}"] = (
        capacity(policy, 20, 2, reuse=True, pages=(100, 15)),
        prompts(40, range(50), range(50), lora_task=1234, context_chunk=20), 43, 4,
        {(0, 3): {0}, (3, 42): {0, 1}, (42, 43): {1}})
TRACES |= {
    "SimpleDoesntFitMaxUtilizationInChunk": (
        capacity(MU, 10, 2), alike(2, 30, 60, context_chunk=20), 100, None,
        {(0, 22): {0, 1}, (22, 61): {0}, (61, 100): {1}}),
    "SimpleDoesntFitMaxUtilizationInChunkedCache": (
        capacity(MU, 10, 2), alike(2, 70, 20, context_chunk=40), 42, None, {(0, 21): {0}, (21, 42): {1}}),
    "SimpleDoesntFitAddingNewRequestsMaxUtilization": (
        capacity(MU, 10, 4), alike(4, 10, 80, arrivals=[0, 0, 10, 10]), 227, None,
        {(0, 10): {0, 1}, (10, 21): {0, 1, 2, 3}, (21, 41): {0, 1}, (41, 80): {0}, (80, 90): {1, 2}, (90, 119): {1},
         (119, 139): {2, 3}, (139, 177): {2}, (178, 227): {3}}),
    "SimpleDoesntFitAddingNewRequestsMaxUtilizationPriorities": (
        capacity(MU, 10, 4) | {"insert_order": "priority"},
        prioritized(alike(4, 10, 80, arrivals=[0, 0, 10, 10]), r2=0.6, r3=0.7), 227, None,
        {(0, 10): {0, 1}, (10, 21): {0, 1, 2, 3}, (21, 31): {0, 2, 3}, (31, 51): {2, 3}, (51, 90): {3}, (90, 129): {2},
         (129, 139): {0, 1}, (139, 178): {0}, (178, 227): {1}}),
    "SimpleDoesntFitAddingNewRequestsGuaranteedCompletionInChunk": (
        capacity(GNE, 10, 4), alike(4, 30, 60, arrivals=[0, 0, 10, 10], context_chunk=20), 244, None,
        {(0, 61): {0}, (61, 122): {1}, (122, 183): {2}, (183, 244): {3}}),
    "SimpleFitsStaticBatch": (
        capacity(STATIC, 20, 2),
        [each | {"max_new_tokens": 40 if each["id"] == 1 else 80} for each in alike(3, 10, 80)],
        160, None, {(0, 40): {0, 1}, (41, 79): {0}, (80, 160): {2}}),
    "ReuseAwareSchedulingWithPartialPrefixMatch": (
        capacity(GNE, 20, 3, 50, reuse=True), prompts(5, range(30), [*range(20), *[999] * 10]), 6, 2,
        {(0, 1): {0}, (1, 5): {0, 1}, (5, 6): {1}}),
    "NoReuseWithDifferentPrompts": (
        capacity(GNE, 20, 2, 50, reuse=True), prompts(5, [100] * 20, [200] * 20), 5, 0, {(0, 5): {0, 1}}),
    "MaxUtilizationReuseReducesNeededBlocksOneStep": (
        capacity(MU, 6, 3, 50, reuse=True), prompts(5, range(30), range(30)), 6, 2,
        {(0, 1): {0}, (1, 5): {0, 1}, (5, 6): {1}}),
    "MaxUtilizationUnderMemoryPressureWithReuse": (
        capacity(MU, 5, 2, 40, reuse=True), prompts(5, range(20), range(20)), 6, 1,
        {(0, 1): {0}, (1, 5): {0, 1}, (5, 6): {1}}),
    "MaxUtilizationNoReuseWhenDisabled": (
        capacity(MU, 10, 2, 50), prompts(5, range(20), range(20)), 5, 0, {(0, 5): {0, 1}}),
    "SimpleWithOverlap": (
        {"capacity_policy": None, "micro_batch": {"max_batch_size": 2, "num_micro_batches": 2}}, alike(4, 10, 80),
        160, None, {(number, number + 1): {2, 3} if number % 2 else {0, 1} for number in range(160)}),
    "SimpleMaxNumTokensBW4": (
        {"capacity_policy": None, "micro_batch": {"max_batch_size": 4, "max_num_tokens": 15}},
        alike(4, 10, 10, beam_width=4), 21, None,
        {(0, 1): {0}, (1, 10): {0, 1}, (10, 11): {1, 2}, (11, 20): {2, 3}, (20, 21): {3}}),
    "DraftTokensGreaterThanChunkSize": (
        {"capacity_policy": None, "micro_batch": {"max_batch_size": 64, "max_num_tokens": 40, "max_context_length": 64,
                                                  "chunking": {"policy": FCFS, "unit": 16}}},
        alike(3, 3, 21, draft_len=17), 21, None, {(0, 21): {0, 1, 2}}),
}


@pytest.mark.parametrize("name", TRACES)
def test_capacity_and_micro_batch_runs(module, name):
    config, requests, num_iterations, reused, scheduled = TRACES[name]
    engine, rows, to_come = module.build(config), [], list(requests)
    while to_come or module.has_work(engine):
        while to_come and to_come[0]["arrival"] <= len(rows):
            module.submit(engine, dict(to_come.pop(0)))
        rows.append(module.step(engine))
    assert len(rows) == num_iterations
    for (first, last), who in scheduled.items():
        for row in rows[first:last]:
            assert {request_id for request_id, *_ in row["ctx"]} | set(row["gen"]) == who
    assert reused in (None, module.reused_blocks(engine))


def test_a_chunked_context_under_a_small_budget(module):
    """SimpleNoOverlapMaxNumTokens: two prompts of 12 tokens, with 7 tokens per step and a unit of 5."""
    engine = module.build({"capacity_policy": None, "micro_batch": {
        "max_batch_size": 2, "max_num_tokens": 7, "chunking": {"policy": EP, "unit": 5}}})
    for request in alike(2, 12, 5):
        module.submit(engine, request)
    rows = [module.step(engine) for _ in range(9)]
    assert [row["ctx"] for row in rows[:5]] == [[[0, 0, 5]], [[0, 5, 7]], [[1, 0, 5]], [[1, 5, 5]], [[1, 10, 2]]]
    assert [row["gen"] for row in rows] == [[], [], [0], [0], [0], [0, 1], [1], [1], [1]]


# name: (token budget, policy, unit), (prompt, drafts, cached tokens, state) of each, chunks, generation requests

STEPS = {
    "ReusableTokensWithChunkedContextFCFS": (
        (15, FCFS, 5), [(20, 0, 10)], [[0, 20]], []),
    "ReusableTokensWithChunkedContextFCFS_OverBudgetMultiRequest": (
        (7, FCFS, 1), [(20, 0, 15)] * 3, [[0, 20], [1, 2]], []),
    "ReusableTokensWithChunkedContextEqualProgress": (
        (3, EP, 1), [(15, 0, 10)] * 2, [[0, 12], [1, 11]], []),
    "test_reusable_tokens_fcfs_over_budget_multi_request": (
        (20, FCFS, 1), [(15, 0, 8)] * 3, [[0, 15], [1, 15], [2, 6]], []),
    "test_fcfs_fills_first_request": ((25, FCFS, 5), [(10, 0, 0), (20, 0, 0)], [[0, 10], [1, 15]], []),
    "test_equal_progress_basic": ((10, EP, 5), [(20, 0, 0)] * 2, [[0, 5], [1, 5]], []),
    "ReusableTokensZeroHasNoEffect": ((12, None, 0), [(10, 0, 0)] * 2, [[0, 10]], []),
    "ReusableTokensNoChunkingMinCostIsOne": ((10, None, 0), [(10, 0, 15), (10, 0, 0)], [[0, 10]], []),
    "ChunkSizeZeroNotScheduled": ((5, EP, 5), [(20, 0, 0)] * 2, [[0, 5]], []),
    "FullSchedulerPath": ((100, FORCE, 10), [(30, 0, 0)], [[0, 10]], []),
    "GenDraftTokensMaxNumTokens": ((128, None, 0), [(2, 63, 0, "GENERATION_IN_PROGRESS")] * 4, [], [0, 1]),
    "test_gen_draft_tokens": ((10, None, 0), [(10, 3, 0, "GENERATION_IN_PROGRESS")] * 3, [], [0, 1]),
    "test_completed_requests_filtered": (
        (None, None, 0), [(10, 0, 0), (10, 0, 0, "GENERATION_COMPLETE"), (10, 0, 0, "GENERATION_IN_PROGRESS")],
        [[0, 10]], [2]),
    "test_beam_width_1": (
        (12, None, 0), [(10, 0, 0), *[(10, 0, 0, "GENERATION_IN_PROGRESS")] * 3], [[0, 10]], [1, 2]),
}


@pytest.mark.parametrize("name", STEPS)
def test_micro_batch_steps(module, name):
    (budget, policy, unit), rows, chunks, generating = STEPS[name]
    config = {"max_batch_size": 64, "max_num_tokens": budget}
    if policy:
        config["chunking"] = {"policy": policy, "unit": unit}
    requests = []
    for number, (prompt_len, drafts, cached, *state) in enumerate(rows):
        request = {"id": number, "arrival": 0, "prompt_len": prompt_len, "max_new_tokens": 5, "draft_len": drafts,
                   "estimated_reusable_tokens": cached}
        requests.append(request | ({"state": state[0], "generated": 1} if state else {}))
    found = module.micro_batch_step(config, requests, [])
    assert (sorted(found["ctx"]), sorted(found["gen"])) == (chunks, generating)


def test_requests_of_one_adapter_stand_together(module):
    """test_sort_by_lora_task_id: requests without an adapter come first."""
    requests = [{"id": number, "arrival": 0, "prompt_len": 10, "max_new_tokens": 5, "state": "GENERATION_IN_PROGRESS",
                 "generated": 1} for number in range(3)]
    requests[0]["lora_task"], requests[2]["lora_task"] = 5, 3
    assert module.micro_batch_step({"max_batch_size": 4}, requests, [])["gen"] == [1, 2, 0]


def test_credit_only_on_the_first_chunk(module):
    """test_reusable_tokens_only_on_first_chunk: reusable tokens do not lower the cost of a later chunk."""
    def scheduled(*requests):
        config = {"max_batch_size": 4, "max_num_tokens": 30}
        found = module.micro_batch_step(config, [each | {"max_new_tokens": 5} for each in requests], [])
        return [request_id for request_id, _ in found["ctx"]]

    later = {"id": 0, "prompt_len": 30, "context_position": 10, "estimated_reusable_tokens": 20}
    fresh = {"id": 2, "prompt_len": 30, "estimated_reusable_tokens": 20}
    other = {"id": 3, "prompt_len": 20}
    assert scheduled(later) == [0] and scheduled(later, other) == [0] and scheduled(fresh, other) == [2, 3]


def test_drafts_are_cut_to_the_unit(module):
    """DraftTokensGreaterThanChunkSize: 17 drafts after 3 tokens, with a unit of 16 and 40 tokens per step."""
    config = {"max_batch_size": 64, "max_num_tokens": 40, "max_context_length": 64,
              "chunking": {"policy": FCFS, "unit": 16}}
    assert module.micro_batch_step(config, alike(3, 3, 21, draft_len=17), [])["draft"] == {"0": 13, "1": 13, "2": 5}


# name: unit, capacity, longest chunk, prompts, drafts, positions with EQUAL_PROGRESS and with FIRST_COME_FIRST_SERVED,
# drafts that are kept

CHUNKS = {
    "ContextLengthNeverSatisfied": (100, None, 20, (25, 25), (0, 0), [[0, 0]], [[0, 0]], [0, 0]),
    "ChunkLongerThanContext": (30, None, 25, (25, 25), (0, 0), [[25, 25]], [[25, 25]], [0, 0]),
    "TokenCapacitySmallerThanChunkUnit": (20, 10, None, (25, 25), (0, 0), [[0, 0]], [[0, 0]], [0, 0]),
    "SchedulingOrder": (5, 30, None, (25, 25), (0, 0), [[15, 15], [25, 25]], [[25, 5], [25, 25]], [0, 0]),
    "CompletionOrder": (5, 30, None, (25, 15), (0, 0), [[15, 15], [25, 15]], [[25, 5], [25, 15]], [0, 0]),
    "LongFirstShortLater": (
        5, 30, 10, (25, 15), (0, 0), [[10, 10], [20, 15], [25, 15]], [[10, 10], [20, 15], [25, 15]], [0, 0]),
    "DraftTokensDiscard": (5, 30, None, (27, 27), (5, 5), [[15, 15], [27, 27]], [[27, 0], [27, 27]], [3, 3]),
    "DraftTokensDiscard3": (
        5, 20, None, (27, 27), (5, 5), [[10, 10], [20, 20], [27, 27]], [[20, 0], [27, 10], [27, 27]], [3, 3]),
    "DraftTokensDiscardDueToMaxContextLength": (5, 30, 10, (6, 6), (5, 5), [[6, 6]], [[6, 6]], [4, 4]),
    "DraftTokensDiscardAll": (5, 50, None, (25, 25), (5, 5), [[25, 25]], [[25, 25]], [0, 0]),
    "DraftTokensDiscardAll2": (5, 25, None, (25, 25), (5, 5), [[15, 10], [25, 25]], [[25, 0], [25, 25]], [0, 0]),
    "DraftTokensNoDiscard": (10, 30, None, (25, 25), (5, 5), [[20, 10], [25, 25]], [[25, 0], [25, 25]], [5, 5]),
    "DraftTokensNoChunkingDiscardAll": (64, None, 4128, (4128,), (3,), [[4128]], [[4128]], [0]),
    "DraftTokensNoChunkingDiscardSome": (64, None, 4128, (4127,), (3,), [[4127]], [[4127]], [1]),
    "DraftTokensNoChunkingDiscardNone": (64, None, 4128, (4125,), (3,), [[4125]], [[4125]], [3]),
}


@pytest.mark.parametrize("policy", [EP, FCFS])
@pytest.mark.parametrize("name", CHUNKS)
def test_context_chunking(module, name, policy):
    unit, capacity, longest, lengths, drafts, equal, in_order, kept = CHUNKS[name]
    positions = equal if policy == EP else in_order
    requests = [{"id": number, "arrival": 0, "prompt_len": length, "max_new_tokens": 1, "draft_len": draft}
                for number, (length, draft) in enumerate(zip(lengths, drafts, strict=True))]
    config = {"policy": policy, "unit": unit, "capacity": capacity, "max_context_length": longest}
    found = module.chunk(config, requests, len(positions))
    assert (found["positions"], found["final_draft_lengths"]) == (positions, kept)


@pytest.mark.parametrize("lengths, capacity, positions", [
    ((30,), None, [[10]]), ((10,), None, [[10]]), ((25, 15, 5), None, [[10, 10, 5]]), ((30, 30), 20, [[10, 10]]),
    ((25, 25), 15, [[10, 0], [20, 0], [25, 10], [25, 20], [25, 25]]),
], ids=["Basic", "ExactUnitSize", "MultipleRequests", "CapacityExactFit", "CapacityAcrossIterations"])
def test_force_chunk(module, lengths, capacity, positions):
    requests = [{"id": number, "arrival": 0, "prompt_len": length, "max_new_tokens": 1}
                for number, length in enumerate(lengths)]
    config = {"policy": FORCE, "unit": 10, "capacity": capacity}
    assert module.chunk(config, requests, len(positions))["positions"] == positions


# The free order, retention and pauses


def test_released_blocks_come_last_or_first(module):
    """ReleaseBlockTest: a block that is released to the front is the next free block. Otherwise it comes last."""
    ops = [{"op": "peek", "as": "a"}, {"op": "claim", "block": "a"}, {"op": "peek", "as": "b"},
           {"op": "release", "block": "a", "front": True}, {"op": "peek", "as": "c"}, {"op": "claim", "block": "a"},
           {"op": "release", "block": "a"}, {"op": "peek", "as": "d"}]
    blocks = [result["block"] for result in module.eviction_ops({"num_blocks": 8}, ops)["results"] if "block" in result]
    assert blocks[0] != blocks[1] and blocks[0] == blocks[2] and blocks[0] != blocks[3]


def test_the_one_released_first_comes_first(module):
    """LRUTest: the block that was released first is used first."""
    ops = [{"op": "peek", "as": "one"}, {"op": "claim", "block": "one"}, {"op": "peek", "as": "two"},
           {"op": "claim", "block": "two"}, {"op": "release", "block": "two"}, {"op": "release", "block": "one"},
           {"op": "claim_next", "count": 6}, {"op": "peek", "as": "x"}, {"op": "claim", "block": "x"},
           {"op": "peek", "as": "y"}]
    blocks = [result["block"] for result in module.eviction_ops({"num_blocks": 8}, ops)["results"] if "block" in result]
    assert blocks[2:] == [blocks[1], blocks[0]]


def test_priorities_end_with_time(module):
    """TimedBlockTest: a block whose retention ends falls back to the default priority."""
    ops = [{"op": "peek", "as": "b0"}, {"op": "claim", "block": "b0", "priority": 80, "duration": 1},
           {"op": "release", "block": "b0"}, {"op": "refresh"}, {"op": "advance_time", "ms": 2}, {"op": "refresh"},
           {"op": "peek", "as": "b1"}, {"op": "claim", "block": "b1", "priority": 80, "duration": 3},
           {"op": "peek", "as": "b2"}, {"op": "claim", "block": "b2", "priority": 50, "duration": 8},
           {"op": "claim_next", "count": 6}, {"op": "advance_time", "ms": 3}, {"op": "release", "block": "b1"},
           {"op": "release", "block": "b2"}, {"op": "refresh"}, {"op": "peek", "as": "first"},
           {"op": "advance_time", "ms": 4}, {"op": "refresh"}, {"op": "peek", "as": "second"}]
    blocks = [result["block"] for result in module.eviction_ops({"num_blocks": 8}, ops)["results"] if "block" in result]
    _, b1, b2, first, second = blocks
    assert (first, second) == (b2, b1)


@pytest.mark.parametrize("ranges, size, length, priorities", [
    ([[0, 64, 80], [129, None, 50]], 64, 256, [80, None, None, 50]),
    ([[0, 64, 80], [66, 67, 50]], 64, 256, [80, None, None, None]),
    ([[127, 193, 80]], 64, 32, [None]),
    ([[1, None, 80]], 64, 128, [None, 80]),
])
def test_block_config(module, ranges, size, length, priorities):
    assert module.retention_map(ranges, size, length) == {"priorities": priorities}


@pytest.mark.parametrize("ranges", [[[0, 64, 80], [64, 32, 80]], [[0, 64, 80], [30, 128, 80]]])
def test_invalid_ranges(module, ranges):
    assert module.retention_map(ranges) == {"error": True}


def test_pause(module):
    """LlmRequestTest.pause: a pause adds the output to the prompt, which is cut to the longest allowed prompt."""
    found = module.request_pause({"id": 77, "prompt_len": 5, "max_new_tokens": 66},
                                 [{"generated": 5, "max_input_len": 12}, {"generated": 4, "max_input_len": 12}])
    assert [(after["prompt_len"], after["max_new_tokens"], after["generated"]) for after in found["after_pause"]] == [
        (10, 61, 0), (12, 59, 0)]


# The block tables


def run_ops(module, num_blocks, *ops):
    config = {"tokens_per_block": 4, "num_blocks": num_blocks, "max_seq_len": 16, "enable_block_reuse": True}
    return module.kv_ops(config, list(ops))["results"]


def add(req, tokens, **more):
    return {"op": "add_sequence", "req": req, "tokens": list(tokens)} | more


def grow(req, *tokens):
    return {"op": "append_tokens", "req": req, "tokens": list(tokens)}


def remove(req, **more):
    return {"op": "remove_sequence", "req": req, "store_for_reuse": True} | more


def test_block_manager_reuse(module):
    results = run_ops(
        module, 8, add(0, range(9)), grow(0, 9, 10), remove(0), add(1, range(9)), grow(1, 9, 10), remove(1),
        add(10, range(10)), add(11, range(11)), remove(10), remove(11), add(2, range(5)), add(3, [*range(10), 11]),
        remove(2), remove(3), add(4, [*range(10), 12]), remove(4, tokens_kept=9), add(14, [*range(10), 12]), remove(14),
        add(5, [0] * 31), remove(5), add(6, [0]))
    added = {0: (0, [0, 1, 2]), 3: (8, [0, 1, 3]), 6: (9, [0, 1, 2]), 7: (8, [0, 1, 4]), 10: (4, [0, 5]),
             11: (10, [0, 1, 4]), 14: (10, [0, 1, 4]), 16: (9, [0, 1, 2])}
    name_of = {}
    for place, (reused, blocks) in added.items():
        assert results[place]["reused_tokens"] == reused
        for block, name in zip(results[place]["block_ids"], blocks, strict=True):
            assert name_of.setdefault(block, name) == name
    assert len(set(name_of.values())) == len(name_of)
    assert (results[18]["reused_tokens"], results[18]["free_blocks"]) == (1, 0), "one token by chance, every block used"
    assert (results[20]["reused_tokens"], results[20]["used_blocks"]) == (0, 1)


def test_block_manager_reuse_with_adapters(module):
    """A request finds only blocks that were computed with its adapter."""
    results = run_ops(
        module, 16, add(0, range(9), lora_task=0), grow(0, 9, 10), remove(0), add(1, range(9), lora_task=0),
        grow(1, 9, 10), remove(1), add(10, range(9), lora_task=0), add(11, range(11), lora_task=0), remove(10),
        remove(11), add(2, range(9), lora_task=1), add(3, range(9)))
    assert [results[place]["reused_tokens"] for place in (0, 3, 6, 7, 10, 11)] == [0, 8, 8, 10, 0, 0]


def test_leaf_block(module):
    """KVCacheManagerLeafBlockTest: a reused leaf of the prefix tree grows, and an empty pool raises an error."""
    results = run_ops(
        module, 4, add(0, range(4)), {"op": "store_context", "req": 0}, grow(0, 0), remove(0), add(1, [1, 1, 2, 3]),
        add(2, [2, *range(1, 12)]), remove(1), remove(2), add(3, [2, *range(1, 12)]), grow(3, 0), add(4, [42]))
    assert results[4]["reused_tokens"] == 0 and results[4]["block_ids"] != results[0]["block_ids"]
    assert (results[8]["reused_tokens"], results[8]["free_blocks"], results[9]["free_blocks"]) == (11, 1, 0)
    assert results[10] == {"error": "out_of_blocks"}
