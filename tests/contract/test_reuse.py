"""C12 and C13: prompts reuse cached blocks of earlier requests, and no output changes."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from batch_manager import KvCacheConfig, SchedulerPolicy, TrtGptModelType
from batch_manager.handover import BlockCopy, RowFailure
from batch_manager.names import ErrorCode
from batch_manager.stats.trace import Trace
from batch_manager.testing.scripted_backend import ScriptedBackend

REUSE = KvCacheConfig(enable_block_reuse=True)
POLICIES = list(SchedulerPolicy)
SIZE = 4
TRUNK = list(range(100, 121))                                      # 21 tokens: five full blocks and one token


def world_with(make_world, kv=REUSE, num_blocks=40, **options):
    backend = options.pop("backend", {})
    if isinstance(backend, dict):
        backend = {"num_blocks": num_blocks, "tokens_per_block": SIZE, **backend}
    trace = Trace()
    world = make_world(backend=backend, kv_cache_config=kv, parts={"trace": trace.append}, **options)
    world.trace = trace
    return world


def chunks(world, request_id):
    """Return (start, size) of every chunk of a request."""
    return [chunk[1:] for iteration in world.trace.iterations for chunk in iteration.context if chunk[0] == request_id]


def ask(world, new_request, request_id, prompt, count=5, **options):
    """Run one request alone to its end, check its `count` tokens, and return the (start, size) of its chunks."""
    world.client.pending.append(new_request(request_id, prompt, count, **options))
    world.run()
    final = world.client.final(request_id)
    assert final.error == "" and final.tokens() == prompt + world.expected(prompt, count)
    return chunks(world, request_id)


def used_again(world):
    return json.loads(world.client.stats[-1])["Reused KV cache blocks"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_begins_behind_what_is_cached_of_it(make_world, new_request, policy):
    world = world_with(make_world, policy=policy)
    assert ask(world, new_request, 1, TRUNK) == [(0, 21)]
    assert ask(world, new_request, 2, TRUNK) == [(20, 1)], "the last token is always computed"
    assert ask(world, new_request, 3, TRUNK[:20]) == [(19, 1)], "so is that of a prompt of whole blocks"
    assert ask(world, new_request, 4, TRUNK[:10] + [7, 8, 9]) == [(10, 3)], "part of a block is copied"
    assert ask(world, new_request, 5, [7, *TRUNK]) == [(0, 22)]
    assert used_again(world) == 5 + 5 + 3


def test_what_was_generated_is_found_too(make_world, new_request):
    world = world_with(make_world)
    ask(world, new_request, 1, TRUNK, 10)
    everything = world.client.final(1).tokens()
    assert len(everything) == 31
    assert ask(world, new_request, 2, [*everything, 1, 2]) == [(30, 3)], "the newest token was never in the cache"


def test_reuse_is_off_unless_asked_for(make_world, new_request):
    world = world_with(make_world, kv=KvCacheConfig())
    ask(world, new_request, 1, TRUNK)
    assert ask(world, new_request, 2, TRUNK) == [(0, 21)]
    assert used_again(world) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_begin_behind_what_is_cached_and_end_with_a_block(make_world, new_request, policy):
    world = world_with(make_world, policy=policy, enable_chunked_context=True, max_num_tokens=8)
    prompt = [*TRUNK[:10], *range(200, 225)]
    ask(world, new_request, 1, TRUNK)
    assert ask(world, new_request, 2, prompt) == [(10, 6), (16, 8), (24, 8), (32, 3)]


def test_a_chunk_is_published_when_it_is_done_and_the_next_prompt_need_not_wait_for_the_end(make_world, new_request):
    world = world_with(make_world, enable_chunked_context=True, max_num_tokens=8)
    prompt = list(range(300, 360))
    world.client.pending = [new_request(1, prompt, 3)]
    world.step(3)                                                  # 24 of 60 tokens
    world.client.stops = {1}
    world.step()                                                   # the fourth chunk, then the stop
    world.client.stops = set()
    assert world.client.final(1).finish_reason == 5
    assert ask(world, new_request, 2, prompt)[0] == (31, 5), "all but the last of 32 tokens"


def test_stats_tell_live_cached_and_free_blocks_apart(make_world, new_request):
    world = world_with(make_world, flush_stats_when_idle=True)
    ask(world, new_request, 1, TRUNK)                              # 25 tokens stored, 7 blocks, the last one begun
    record = json.loads(world.client.stats[-1])
    assert record["Used KV cache blocks"] == 0
    assert record["Free KV cache blocks"] == 40 and record["Cached KV cache blocks"] == 7
    world.client.pending = [new_request(2, TRUNK, 5)]
    world.step()
    record = json.loads(world.client.stats[-1])
    assert record["Used KV cache blocks"] == 6 and record["Free KV cache blocks"] == 34
    assert record["Cached KV cache blocks"] == 7 - 5, "the last token is computed in a block of its own"


def test_what_is_evicted_goes_to_the_host_comes_back_and_is_counted(make_world, new_request):
    world = world_with(make_world, KvCacheConfig(enable_block_reuse=True, host_cache_size=1), num_blocks=7,
                       backend={"host_blocks": 9})
    ask(world, new_request, 1, TRUNK)
    for number in range(2, 4):                                     # each takes the whole pool
        ask(world, new_request, number, [number] * 21)
    record = json.loads(world.client.stats[-1])
    assert record["Host KV cache blocks"] == record["Used Host KV cache blocks"] == 9
    assert ask(world, new_request, 4, TRUNK)[0][0] > 0


def test_a_host_cache_that_cannot_be_had_is_refused(make_world):
    with pytest.raises(ValueError, match="no blocks in host memory"):
        world_with(make_world, KvCacheConfig(enable_block_reuse=True, host_cache_size=1))
    old = ScriptedBackend(tokens_per_block=SIZE)
    old.info = replace(old.info, copies_blocks=False)
    with pytest.raises(ValueError, match="enable_block_reuse is set; the backend of type ScriptedBackend does not copy "
                                         "blocks: its"):
        world_with(make_world, backend=old)
    with pytest.raises(ValueError, match="enable_block_reuse is not set"):
        KvCacheConfig(host_cache_size=1)


@pytest.mark.parametrize("salts", [("a", "b"), ("a", b"a"), (None, "a"), ("", None)])
def test_prompts_with_different_salts_share_nothing(make_world, new_request, salts):
    world = world_with(make_world)
    for number, salt in enumerate(salts):
        assert ask(world, new_request, number, TRUNK, cache_salt=salt) == [(0, 21)]
    for number, salt in enumerate(salts, 10):
        assert ask(world, new_request, number, TRUNK, cache_salt=salt) == [(20, 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_context_logits_are_those_of_every_token_of_the_prompt(make_world, new_request, policy):
    """A request with return_context_logits computes its whole prompt, because cached blocks have no logits."""
    world = world_with(make_world, policy=policy, num_blocks=10)
    ask(world, new_request, 1, TRUNK)
    follow = [world.expected(TRUNK[:n], 1)[0] for n in range(1, len(TRUNK) + 1)]
    for number in (2, 3, 3):                                       # ids can be reused
        world.client.responses.pop(number, None)
        world.client.pending = [new_request(number, TRUNK, 5, return_context_logits=True)]
        world.run()
        logits = world.client.final(number).tensors["context_logits"]
        assert logits.shape == (1, 21, 1000) and np.argmax(logits[0], axis=1).tolist() == follow
    assert chunks(world, 2) == [(0, 21)] and chunks(world, 3) == [(0, 21)] * 2


def test_context_logits_survive_a_pause_after_which_the_prompt_is_found_in_the_cache(make_world, new_request):
    world = world_with(make_world, num_blocks=12)
    prompts = {1: TRUNK, 2: list(range(400, 420))}
    world.client.pending = [new_request(i, prompt, 20, return_context_logits=True) for i, prompt in prompts.items()]
    world.run()
    assert world.loop.timings.recomputed_tokens > 0
    assert len(chunks(world, 2)) == 2 and chunks(world, 2)[1][0] > 0
    for i, prompt in prompts.items():
        follow = [world.expected(prompt[:n], 1)[0] for n in range(1, len(prompt) + 1)]
        assert np.argmax(world.client.final(i).tensors["context_logits"][0], axis=1).tolist() == follow


def test_prompts_that_arrive_together_compute_what_they_have_in_common_once(make_world, new_request):
    world = world_with(make_world)
    prompts = {i: [*TRUNK, i, i] for i in range(4)}
    world.client.pending = [new_request(i, prompt, 6) for i, prompt in prompts.items()]
    world.run()
    assert chunks(world, 0) == [(0, 23)]
    assert [chunks(world, i)[0][0] >= 20 for i in (1, 2, 3)] == [True] * 3
    assert all(world.client.final(i).tokens() == prompt + world.expected(prompt, 6) for i, prompt in prompts.items())


def test_with_two_micro_batches_nothing_is_found_before_the_step_that_computed_it_was_read(make_world, new_request):
    class Late(ScriptedBackend):
        """Backend that computes a step when the step is read."""

        def start(self, batch):
            start = super().start

            class Pending:
                def finish(self):
                    return start(batch).finish()

            return Pending()

    world = world_with(make_world, backend=Late(num_blocks=40, tokens_per_block=SIZE), enable_trt_overlap=True)
    world.client.pending = [new_request(1, TRUNK, 6)]
    world.step()                                                   # launched, not read
    world.client.pending = [new_request(2, [*TRUNK, 1], 6)]
    world.step()
    assert chunks(world, 2) == []
    world.run()
    assert chunks(world, 2) == [(20, 2)]
    assert world.client.final(2).tokens() == [*TRUNK, 1, *world.expected([*TRUNK, 1], 6)]


# Faults.

def starts_with(backend, token):
    """Return a function that lists the slots of a batch whose sequences begin with the token."""
    def slots(batch):
        lengths = [(work.slot, work.start + len(work.token_ids)) for work in batch.context]
        lengths += zip(batch.generation.slots.tolist(), (batch.generation.kv_lengths + 1).tolist())
        return [slot for slot, length in lengths if backend.history(slot, length)[0] == token]

    return slots


@pytest.mark.parametrize("chunked", [False, True])
def test_c12_what_a_row_that_is_not_finite_computed_is_never_found(make_world, new_request, chunked):
    planted = []

    def plants(batch):
        if batch.context and not planted and batch.iteration == (1 if chunked else 0):
            planted.append(batch.context[0].slot)
            return {batch.context[0].slot: RowFailure(ErrorCode.NON_FINITE_LOGITS, "not finite")}
        return None

    world = world_with(make_world, backend={"on_step": plants}, enable_chunked_context=chunked, max_num_tokens=12)
    prompt = TRUNK if chunked else TRUNK[:11]
    world.client.pending = [new_request(1, prompt, 5)]
    world.run()
    assert world.client.final(1).code == "NON_FINITE_LOGITS" and planted
    # The first chunk succeeded. Its blocks are published, except that of its last token.
    assert ask(world, new_request, 2, prompt)[0][0] == (8 if chunked else 0)
    for number in range(3, 30):                                 # they use every block of the pool, cleared or not
        ask(world, new_request, number, [number] * 11)


def test_blocks_that_a_failing_request_shares_are_not_cleared(make_world, new_request):
    def plants(batch):
        backend = world.backend
        slots = [slot for slot in starts_with(backend, TRUNK[0])(batch) if batch.iteration == 4
                 and slot == world.loop.active.get(2).seq_slot]
        return {slot: RowFailure(ErrorCode.NON_FINITE_LOGITS, "not finite") for slot in slots}

    class Zeroes(ScriptedBackend):
        def clear_block(self, block_id, first_token):
            super().clear_block(block_id, first_token)
            self._pool[block_id * SIZE + first_token:(block_id + 1) * SIZE] = 0

    world = world_with(make_world, backend=Zeroes(num_blocks=40, tokens_per_block=SIZE, on_step=plants))
    world.client.pending = [new_request(1, TRUNK, 20)]
    world.step()
    world.client.pending = [new_request(2, [*TRUNK, 5], 20)]
    world.run()
    assert chunks(world, 2) == [(20, 2)]
    assert world.client.final(2).code == "NON_FINITE_LOGITS"
    assert world.client.final(1).tokens() == TRUNK + world.expected(TRUNK, 20)
    assert ask(world, new_request, 3, TRUNK) == [(20, 1)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_is_narrowed_down_does_not_repeat_its_copies(make_world, new_request, overlap):
    class Counts(ScriptedBackend):
        copied, raised = 0, 0

        def _carry_out(self, operation):
            self.copied += isinstance(operation, BlockCopy)
            super()._carry_out(operation)

    def fails(batch):
        if starts_with(backend, TRUNK[0])(batch) and any(603 in work.token_ids for work in batch.context):
            backend.raised += 1
            raise RuntimeError("a step of this sequence")

    backend = Counts(num_blocks=40, tokens_per_block=SIZE, on_step=fails)
    world = world_with(make_world, backend=backend, enable_trt_overlap=overlap)
    ask(world, new_request, 1, TRUNK)
    prompts = {i: [*TRUNK[:10], 600 + i, *range(20)] for i in range(2, 8)}
    world.client.pending = [new_request(i, prompt, 5) for i, prompt in prompts.items()]
    world.run()
    for i, prompt in prompts.items():
        final = world.client.final(i)
        assert chunks(world, i)[0][0] >= 10
        if i == 3:
            assert final.code == "MODEL_ERROR"
        else:
            assert final.tokens() == prompt + world.expected(prompt, 5)
    assert backend.raised >= 2, "whole, and in parts"
    assert backend.copied == len(prompts)


class CannotCopy(ScriptedBackend):
    """A backend whose first `times` block copies raise `error`. It records the copies that succeed."""

    def __init__(self, error, times=10**9):
        super().__init__(num_blocks=40, tokens_per_block=SIZE)
        self.error, self.times, self.copied = error, times, []

    def _carry_out(self, operation):
        if isinstance(operation, BlockCopy):
            if self.times:
                self.times -= 1
                raise self.error
            self.copied.append(operation)
        super()._carry_out(operation)


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("cannot"), "MODEL_ERROR"),
                                             (MemoryError(), "OUT_OF_MEMORY")], ids=["error", "memory"])
def test_c21_a_copy_that_fails_is_a_step_that_failed(make_world, new_request, error, code):
    """A failed copy fails its step, and the next launch repeats the copy.

    Other requests cannot find the target block before the copy is made.
    """
    backend = CannotCopy(error)
    world = world_with(make_world, backend=backend)
    ask(world, new_request, 1, TRUNK)
    world.client.pending = [new_request(i, [*TRUNK[:10], i, i], 5) for i in (2, 3)]
    world.run()
    assert [world.client.final(i).code for i in (2, 3)] == [code] * 2 and world.loop.failure is None
    assert json.loads(world.client.stats[-1])["Failed Steps"] == 3, "whole, and each half"

    backend.times = 0
    assert ask(world, new_request, 4, [*TRUNK[:10], 2, 2]) == [(10, 2)]
    assert len(backend.copied) == 3, "that of each, once"
    assert ask(world, new_request, 5, TRUNK) == [(20, 1)]


def test_c21_a_copy_that_fails_for_a_time_costs_nobody_anything_but_who_was_alone(make_world, new_request):
    """A block copy that fails once makes the step of two requests fail. Both run to their end after the bisection."""
    backend = CannotCopy(RuntimeError(), times=1)
    world = world_with(make_world, backend=backend)
    ask(world, new_request, 1, TRUNK)
    prompts = {i: [*TRUNK[:10], i, i] for i in (2, 3)}
    world.client.pending = [new_request(i, prompt, 5) for i, prompt in prompts.items()]
    world.run()
    for i, prompt in prompts.items():
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, 5)
    assert len(backend.copied) == 2


def test_c21_an_engine_whose_copy_failed_lives(make_manager, new_client, new_request):
    client = new_client()
    client.pending = [new_request(1, TRUNK, 5)]
    manager = make_manager(client, backend=CannotCopy(RuntimeError("cannot")), kv_cache_config=REUSE)
    client.wait_for_finals(1)
    client.pending += [new_request(2, [*TRUNK[:10], 1, 2], 5)]
    client.wait_for_finals(2)
    assert client.final(2).code == "MODEL_ERROR" and "raised RuntimeError" in client.final(2).error
    assert manager.health()["state"] == "RUNNING"


# Windows.

@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sink", [0, 3])
def test_blocks_that_left_the_window_return_to_the_pool(make_world, new_request, policy, sink):
    world = world_with(make_world, KvCacheConfig(max_attention_window=10, sink_token_length=sink), num_blocks=40,
                       backend={"window": 10, "sink": sink}, policy=policy)
    world.client.pending = [new_request(1, TRUNK, 60)]
    world.run()
    assert world.client.final(1).tokens() == TRUNK + world.expected(TRUNK, 60)
    used = [json.loads(record)["Used KV cache blocks"] for record in world.client.stats]
    assert used[0] == 6 and max(used[1:]) <= (1 if sink else 0) + 4 and used[-1] >= 3


def test_c8_who_may_be_paused_has_to_fit_with_all_that_it_has(make_world, new_request):
    """Under MAX_UTILIZATION a request is refused if its whole sequence does not fit the pool, even with a window.

    A paused request starts over with prompt and output as context, and stores all of it at once.
    """
    options = {"kv": KvCacheConfig(max_attention_window=8), "num_blocks": 8, "backend": {"window": 8}}
    prompt, most = TRUNK[:4], 8 * SIZE

    world = world_with(make_world, policy=SchedulerPolicy.MAX_UTILIZATION, **options)
    world.client.pending = [new_request(1, prompt, most - 4), new_request(2, prompt, most - 3)]
    world.run()
    assert world.client.final(1).tokens() == prompt + world.expected(prompt, most - 4)
    assert world.client.final(2).code == "TOO_LARGE_FOR_KV_CACHE"
    assert "9 blocks" in world.client.final(2).error

    world = world_with(make_world, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, **options)
    ask(world, new_request, 1, prompt, 10 * most)


def test_windows_and_reuse_together(make_world, new_request):
    world = world_with(make_world, KvCacheConfig(max_attention_window=10, enable_block_reuse=True), num_blocks=40,
                       backend={"window": 10})
    ask(world, new_request, 1, TRUNK, 30)
    assert ask(world, new_request, 2, TRUNK, 30) == [(20, 1)]
    assert ask(world, new_request, 3, [*TRUNK, 5, 6], 30) == [(20, 3)], "the block of token 20 left the window"


def test_with_sinks_reuse_is_switched_off_and_said_once(make_world, new_request, caplog):
    kv = KvCacheConfig(max_attention_window=10, sink_token_length=2, enable_block_reuse=True)
    world = world_with(make_world, kv, backend={"window": 10, "sink": 2})
    assert caplog.text.count("enable_block_reuse is switched off") == 1
    ask(world, new_request, 1, TRUNK)
    assert ask(world, new_request, 2, TRUNK) == [(0, 21)]


def test_a_backend_that_looks_further_back_than_it_was_configured_to_is_refused(make_world):
    for backend in ({}, {"window": 20}, {"window": 10, "sink": 1}):
        with pytest.raises(ValueError, match="max_attention_window is 10"):
            world_with(make_world, KvCacheConfig(max_attention_window=10), backend=backend)
    world_with(make_world, KvCacheConfig(max_attention_window=5000))    # longer than any sequence


def test_the_first_of_a_static_batch_computes_every_prompt_whole(make_world, new_request):
    world = world_with(make_world, model_type=TrtGptModelType.V1)
    ask(world, new_request, 1, TRUNK)
    assert ask(world, new_request, 2, TRUNK) == [(0, 21)]


# Everything at once. tests/property/test_loop.py and tests/matrix have more random streams.

@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", POLICIES)
def test_streams_of_prompts_with_common_beginnings_in_a_small_pool(make_world, new_request, policy, seed):
    draw = random.Random(seed)
    world = world_with(make_world, num_blocks=16, policy=policy, enable_chunked_context=True, max_num_tokens=24,
                       enable_trt_overlap=seed % 2 == 1)
    trunks = [[draw.randrange(1000) for _ in range(30)] for _ in range(2)]
    prompts = {i: draw.choice(trunks)[:draw.randrange(31)] + [draw.randrange(1000)] for i in range(30)}
    lengths = {i: draw.randrange(1, 20) for i in prompts}
    world.client.pending = [new_request(i, prompt, lengths[i], cache_salt=draw.choice([None, None, "s"]))
                            for i, prompt in prompts.items()]
    world.run()
    for i, prompt in prompts.items():
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, lengths[i])
    assert used_again(world) > 10
    assert world.loop.kv.usage().evicted_blocks > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [15, 16, 17])
def test_prompts_that_arrive_together_wait_for_one_another_once(make_world, new_request, policy, length):
    """Of eight equal prompts, the first is computed alone, and then the other seven are computed together.

    The seven do not wait for one another, because the block of a prompt's last token is not published while its request
    runs.
    """
    world = world_with(make_world, num_blocks=80, policy=policy, max_batch_size=8)
    prompt = TRUNK[:length]
    world.client.pending = [new_request(i, prompt, 12) for i in range(8)]
    world.run()
    steps = [iteration for iteration in world.trace.iterations if iteration.context]
    assert [len(step.context) for step in steps] == [1, 7]
    for i in range(8):
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, 12)
