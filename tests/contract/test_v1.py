"""TrtGptModelType.V1: a batch runs in lockstep until its last member ends, and no request joins it.

In the pictures, a line is an iteration and a column is a request:

    C5   the request computed five context tokens
    G    it generated
    -    it is done and keeps an empty row of the batch
    !    its final response was sent in this iteration
"""

import json
import logging
import random
from types import SimpleNamespace

import pytest

from batch_manager import ConfigError, FinishReason, KvCacheConfig, SchedulerPolicy, TrtGptModelType
from batch_manager.handover import RowFailure
from batch_manager.loop.batch_scheme import batch_figures
from batch_manager.names import ErrorCode
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.scheduling.policies import make_scheduler
from batch_manager.stats.trace import Trace
from batch_manager.testing.scripted_backend import ScriptedBackend

V1, FUSED = TrtGptModelType.V1, TrtGptModelType.InflightFusedBatching
IN_FLIGHT_ONLY = {"Generation Requests", "Paused Requests", "MicroBatch ID"}
END = 7


class Recorded(ScriptedBackend):
    """A backend that records its batches."""

    def __init__(self, **options):
        super().__init__(**options)
        self.batches = []

    def start(self, batch):
        self.batches.append(batch)
        return super().start(batch)


@pytest.fixture
def static_world(make_world):
    """Return a function like make_world that makes V1 worlds.

    A world has two more attributes: `trace`, its traced iterations, and `records`, which returns its statistics.
    """
    def make(*, backend=None, model_type=V1, **options):
        trace = Trace()
        backend = backend if isinstance(backend, ScriptedBackend) else Recorded(**(backend or {}))
        world = make_world(model_type=model_type, backend=backend, parts={"trace": trace.append}, **options)
        world.trace = trace.iterations
        world.records = lambda: [json.loads(record) for record in world.client.stats]
        return world

    return make


@pytest.fixture
def submit(new_request):
    """submit(world, [(prompt length, new tokens), ...], **options) hands requests over and returns their prompts.

    Each prompt begins with the id of its request.
    """
    def hand_over(world, shapes, **options):
        prompts = [[i, *range(100, 99 + length)] for i, (length, _) in enumerate(shapes)]
        world.client.pending += [new_request(i, prompts[i], new, **options) for i, (_, new) in enumerate(shapes)]
        return prompts

    return hand_over


def picture(world):
    columns = sorted({request_id for iteration in world.trace for request_id in iteration.arrived})
    started, told, rows = set(), set(), []
    for iteration in world.trace:
        cells = dict.fromkeys(columns, ".") | dict.fromkeys(started - told, "-")
        cells |= {request_id: f"C{tokens}" for request_id, _, tokens in iteration.context}
        cells |= dict.fromkeys(iteration.generation, "G")
        started |= {request_id for request_id, _, _ in iteration.context}
        told |= set(iteration.finished)
        rows.append(" ".join((cells[i] + "!" * (i in iteration.finished)).ljust(3) for i in columns).rstrip())
    return "\n".join(rows)


def assert_right(world, prompts, counts):
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, count), i


def fails_for(first_token, failure):
    """Return a backend in which a step with a sequence that begins with this token fails.

    The step raises `failure` if it is an exception. Otherwise it reports `failure` for the row of the sequence.
    """
    def hook(batch):
        lengths = [(work.slot, work.start + len(work.token_ids)) for work in batch.context]
        lengths += list(zip(batch.generation.slots.tolist(), (batch.generation.kv_lengths + 1).tolist()))
        slots = [slot for slot, length in lengths if backend.history(slot, length)[0] == first_token]
        if slots and isinstance(failure, Exception):
            raise failure
        return dict.fromkeys(slots, failure)

    backend = Recorded(on_step=hook)
    return backend


# ---------------------------------------------------------------------- lockstep


def test_nobody_joins_until_the_last_member_is_done(static_world, submit):
    world = static_world(max_batch_size=3, max_num_sequences=8)
    prompts = submit(world, [(5, 2), (3, 4), (1, 1), (4, 2), (2, 1)])
    world.run()
    assert picture(world) == """\
C5  C3  C1  .   .
G   G   -   .   .
-   G   -   .   .
-!  G!  -!  .   .
.   .   .   C4  C2
.   .   .   G!  -!"""
    assert_right(world, prompts, [2, 4, 1, 2, 1])


def test_a_request_that_comes_while_a_batch_runs_waits_for_the_next(static_world, submit, new_request):
    world = static_world()
    submit(world, [(3, 4)])
    world.step(2)
    world.client.pending.append(new_request(1, [1, 2], 2))
    world.run()
    assert picture(world) == """\
C3  .
G   .
G   .
G!  .
.   C2
.   G!"""


def test_a_member_keeps_its_empty_place_in_the_padded_step_until_the_batch_ends(static_world, submit):
    world = static_world()
    submit(world, [(5, 2), (3, 4), (1, 1)])
    world.run()
    assert [(batch.num_sequences, batch.num_padded_rows) for batch in world.backend.batches] == [
        (3, 3), (2, 3), (1, 3), (1, 3)]


def test_in_flight_batches_have_no_empty_places(static_world, submit):
    world = static_world(model_type=FUSED)
    submit(world, [(5, 2), (3, 4), (1, 1)])
    world.run()
    assert {batch.num_padded_rows for batch in world.backend.batches} == {0}


def test_all_finals_are_sent_when_the_batch_is_done_one_response_each(static_world, submit):
    world = static_world()
    submit(world, [(5, 2), (3, 4), (1, 1)])
    world.step(3)
    assert not world.client.responses and len(world.loop.active) == 3
    world.step()
    assert [event for event in world.client.events if event.startswith("send")] == ["send 0", "send 1", "send 2"]
    assert world.client.events[-2:] == ["poll", "stats"], "before the poll of the iteration"
    assert len(world.loop.active) == 0


def test_a_streaming_flag_has_no_effect_but_that_the_one_response_leaves_the_prompt_out(static_world, submit):
    world = static_world()
    prompts = submit(world, [(5, 2), (3, 4)], streaming=True)
    world.run()
    for i, count in enumerate([2, 4]):
        (response,) = world.client.responses[i]
        assert response.final and response.tokens() == world.expected(prompts[i], count)
        assert response.finish_reason == FinishReason.LENGTH


def test_log_probs_and_logits_of_a_streaming_request_come_whole(static_world, new_request):
    world = static_world(backend={"vocab_size": 20})
    world.client.pending = [
        new_request(i, [i, 3, 4], 3, streaming=i == 0, return_log_probs=True, return_context_logits=True,
                    return_generation_logits=True) for i in range(2)]
    world.run()
    for i in range(2):
        tensors = world.client.final(i).tensors
        assert tensors["context_logits"].shape == (1, 3, 20) and tensors["generation_logits"].shape == (1, 1, 3, 20)
        assert tensors["output_log_probs"].shape == (1, 1, 3)


def test_c5_blocks_and_slots_of_a_member_are_free_when_its_final_is_sent(static_world, submit):
    world = static_world(backend={"num_blocks": 20, "tokens_per_block": 4})
    submit(world, [(5, 2), (3, 4), (1, 1)])
    owners = []
    world.client.on_send = lambda request_id, _: owners.append((len(world.loop.active), world.loop.kv.used_blocks))
    world.step(4)
    assert owners == [(2, 3), (1, 1), (0, 0)]


def test_c3_c4_an_id_is_taken_until_the_batch_is_done_and_free_from_then_on(static_world, submit, new_request):
    world = static_world()
    submit(world, [(5, 2), (3, 4)])
    world.step(3)
    world.client.pending.append(new_request(0, [9], 1))
    world.step()
    first, second = world.client.responses[0]
    assert first.code == "DUPLICATE_REQUEST_ID" and second.finish_reason == FinishReason.LENGTH
    world.client.pending.append(new_request(0, [9], 1))
    world.run()
    assert world.client.responses[0][2].tokens() == [9, *world.expected([9], 1)]


def test_get_is_asked_for_the_room_that_members_leave_done_or_not(static_world, submit):
    """A member of a running batch reduces the argument of get, even when the member is done."""
    world = static_world(max_batch_size=4)
    submit(world, [(5, 2), (3, 4), (1, 1)])
    world.run()
    assert world.client.asked == [4, 1, 1, 1, 4]


# ---------------------------------------------------------------------- members of a batch


def test_those_who_differ_in_what_must_be_shared_wait_for_their_own_batch_and_the_first_in_line_forms_the_next(
        static_world, new_request):
    """Requests with different end or pad ids run in different batches. The first waiting request starts each batch."""
    world = static_world()
    options = [{}, {"end_id": 3}, {}, {"pad_id": 0}, {"end_id": 3}, {"end_id": -1}, {"pad_id": 0}]
    world.client.pending = [new_request(i, [i], 2, **given) for i, given in enumerate(options)]
    world.run()
    assert picture(world) == """\
C1  .   C1  .   .   C1  .
G!  .   G!  .   .   G!  .
.   C1  .   .   C1  .   .
.   G!  .   .   G!  .   .
.   .   .   C1  .   .   C1
.   .   .   G!  .   .   G!"""
    assert all(world.client.final(i).error == "" for i in range(7))


def test_members_share_the_set_of_sampling_options_given_not_their_values(static_world, new_request):
    world = static_world()
    options = [{"temperature": 0.5}, {"temperature": 1.0}, {}, {"temperature": 0.7, "runtime_top_k": 3},
               {"runtime_top_k": 5, "temperature": 1.5}, {"beam_width": 1}]
    world.client.pending = [new_request(i, [i], 1, **given) for i, given in enumerate(options)]
    world.run()
    assert picture(world) == """\
C1! C1! .   .   .   .
.   .   C1! .   .   C1!
.   .   .   C1! C1! ."""


def test_what_a_response_holds_may_differ_within_a_batch(static_world, new_request):
    world = static_world()
    options = [{}, {"return_log_probs": True}, {"streaming": True}, {"priority": 0.9}, {"deadline_s": 5.0}]
    world.client.pending = [new_request(i, [i], 1, **given) for i, given in enumerate(options)]
    world.run()
    assert len(world.trace) == 1


def test_a_request_of_another_kind_is_not_overtaken_for_ever(static_world, new_request):
    world = static_world(max_batch_size=2, max_num_sequences=50)
    world.client.pending = [new_request(i, [i], 2, **({"end_id": 3} if i == 1 else {})) for i in range(40)]
    world.step(2)
    assert not world.client.finals(1)
    world.step(2)
    assert world.client.finals(1), "it was first in line when the first batch was done"
    world.run()


def test_a_neighbours_prompt_never_costs_anybody_tokens(static_world, submit):
    # The longest prompt and the longest output of a batch must fit in 20 tokens together. The output of 16 does not
    # fit with the prompt of 6, so the second request runs in the next batch.
    world = static_world(max_seq_len=20)
    prompts = submit(world, [(6, 3), (2, 16), (8, 12), (3, 1)])
    world.run()
    assert [sorted(i for i, _, _ in iteration.context) for iteration in world.trace if iteration.context] == [
        [0, 2, 3], [1]]
    assert_right(world, prompts, [3, 16, 12, 1])


def test_a_batch_takes_what_fits_the_pool_to_its_last_token_and_nobody_overtakes(static_world, submit):
    # The pool has 5 blocks of 4 tokens. The requests need 3, 4 and 1 blocks up to their last tokens.
    world = static_world(backend={"num_blocks": 5, "tokens_per_block": 4})
    submit(world, [(4, 5), (8, 6), (1, 1)])
    world.step()
    assert [request_id for request_id, _, _ in world.trace[0].context] == [0]
    world.run()
    assert [request_id for request_id, _, _ in world.trace[5].context] == [1, 2]


def test_max_num_tokens_does_not_limit_a_padded_step_max_batch_size_does(static_world, submit):
    world = static_world(max_num_tokens=10, max_batch_size=3)
    prompts = submit(world, [(30, 2), (25, 2), (9, 2), (50, 2)])
    world.run()
    assert [len(iteration.context) for iteration in world.trace] == [3, 0, 1, 0]
    assert_right(world, prompts, [2, 2, 2, 2])


def test_the_scheduler_policy_makes_no_difference_and_nobody_is_paused(static_world, submit):
    traces = []
    for policy in SchedulerPolicy:
        world = static_world(policy=policy, backend={"num_blocks": 9, "tokens_per_block": 4}, max_num_tokens=3)
        submit(world, [(4, 9), (3, 12), (8, 6), (1, 3)] * 2)
        world.run()
        traces.append(world.trace)
        assert not any(iteration.paused for iteration in world.trace)
    assert traces[0] == traces[1]


# ---------------------------------------------------------------------- ends of members


def test_a_stopped_member_ends_at_once_with_its_tokens_so_far_and_the_batch_goes_on(static_world, submit):
    world = static_world()
    prompts = submit(world, [(5, 5), (3, 4)])
    world.step()
    world.client.stops = {0}
    world.step()
    world.client.stops = set()
    world.run()
    assert picture(world) == """\
C5  C3
G!  G
.   G
.   G!"""
    assert world.client.final(0).finish_reason == FinishReason.CANCELLED and world.client.final(0).error == ""
    assert_right(world, prompts, [2, 4])
    assert [batch.num_padded_rows for batch in world.backend.batches] == [2, 2, 2, 2], "its row stays empty"


def test_stopping_the_last_one_that_runs_ends_the_batch_in_that_iteration(static_world, submit):
    world = static_world()
    prompts = submit(world, [(5, 1), (3, 9), (2, 2), (1, 1)], end_id=END)
    world.step(2)
    world.client.stops = {1}
    world.step()
    assert [world.client.final(i).finish_reason for i in range(4)] == [
        FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.LENGTH]
    assert_right(world, prompts, [1, 3, 2, 1])
    assert len(world.loop.active) == 0 and world.loop.kv.used_blocks == 0


def test_finals_of_a_batch_come_in_the_order_of_its_members(static_world, submit):
    world = static_world()
    submit(world, [(3, 3), (3, 3), (3, 1)])
    world.run()
    assert [event for event in world.client.events if event.startswith("send")] == ["send 0", "send 1", "send 2"]


@pytest.mark.parametrize("running", [0, 1, 2])
@pytest.mark.parametrize("breaks_a_rule", [False, True])
def test_members_that_end_together_with_the_last_one_that_runs_get_one_final_each(
        static_world, submit, running, breaks_a_rule):
    world = static_world()
    submit(world, [(3, 9 if i == running else 2) for i in range(3)])
    world.step(3)
    if breaks_a_rule:
        world.loop.scheduler = SimpleNamespace(schedule_request=lambda active, in_flight: None)
    else:
        world.client.stops = {0, 1, 2}
    world.step()
    assert [[final.final for final in world.client.responses[i]] for i in range(3)] == [[True]] * 3
    assert [world.client.final(i).finish_reason for i in range(3) if i != running] == [FinishReason.LENGTH] * 2
    last = world.client.final(running)
    assert last.code == "ENGINE_FAILED" if breaks_a_rule else last.finish_reason == FinishReason.CANCELLED
    assert not world.loop.active and not world.loop.finals._held


def test_a_stop_of_a_member_that_is_done_sends_its_natural_end_at_once(static_world, submit):
    world = static_world()
    prompts = submit(world, [(5, 1), (3, 4)])
    world.step(2)
    world.client.stops = {0}
    world.step()
    assert world.client.final(0).finish_reason == FinishReason.LENGTH
    assert not world.client.finals(1)
    world.run()
    assert_right(world, prompts, [1, 4])


def test_a_stop_of_a_request_that_waits_ends_it_without_tokens(static_world, submit):
    world = static_world(max_batch_size=1, max_num_sequences=4)
    prompts = submit(world, [(5, 3), (3, 4)])
    world.client.stops = {1}
    world.step()
    assert world.client.final(1).tokens() == prompts[1]
    assert world.client.final(1).finish_reason == FinishReason.CANCELLED
    world.run()


def test_a_deadline_of_a_member_ends_it_with_its_tokens_so_far_and_the_batch_goes_on(static_world, new_request):
    world = static_world()
    world.client.pending = [new_request(0, [1, 2], 50, deadline_s=2.0), new_request(1, [3], 5)]
    world.step(2)
    world.clock.now += 2.5
    world.step()
    assert world.client.final(0).finish_reason == FinishReason.TIMED_OUT
    assert world.client.final(0).tokens() == [1, 2, *world.expected([1, 2], 3)]
    world.run()
    assert world.client.final(1).tokens() == [3, *world.expected([3], 5)]


def test_a_deadline_or_a_failure_of_the_last_one_that_runs_ends_the_batch_in_that_iteration(static_world, new_request):
    def fails(batch):
        if batch.iteration == 2 and failing:
            raise RuntimeError

    for failing, code in ((True, "MODEL_ERROR"), (False, "")):
        world = static_world(backend={"on_step": fails})
        world.client.pending = [new_request(0, [1], 1), new_request(1, [3], 9, deadline_s=2.0)]
        world.step(2)
        world.clock.now += 0 if failing else 2.5
        world.step()
        assert (world.client.final(1).error or "[]").startswith(f"[{code}]")
        assert world.client.final(0).finish_reason == FinishReason.LENGTH and len(world.loop.active) == 0


def test_a_deadline_of_a_member_that_is_done_sends_its_natural_end_at_once(static_world, new_request):
    world = static_world(backend={"script": lambda history: END if history[0] == 2 else None})
    world.client.pending = [new_request(0, [1], 1, deadline_s=2.0, end_id=END), new_request(1, [3], 9, end_id=END),
                            new_request(2, [2], 9, deadline_s=2.0, end_id=END)]
    world.step()
    world.clock.now += 2.5
    world.step()
    assert world.client.final(0).finish_reason == FinishReason.LENGTH
    assert world.client.final(2).finish_reason == FinishReason.END_ID and world.client.final(2).tokens() == [2]
    assert not world.client.finals(1)
    world.run()


def test_a_deadline_that_passes_while_a_request_waits_for_a_batch_is_an_error(static_world, new_request):
    world = static_world(max_batch_size=1, max_num_sequences=4)
    world.client.pending = [new_request(0, [1], 5), new_request(1, [3], 5, deadline_s=1.0)]
    world.step()
    world.clock.now += 1.5
    world.step()
    assert world.client.final(1).code == "DEADLINE"
    world.run()


@pytest.mark.parametrize("failure", [RuntimeError("x"), RowFailure(ErrorCode.NON_FINITE_LOGITS, "not finite")],
                         ids=["raises", "row"])
@pytest.mark.parametrize("victim", range(3))
def test_c21_a_member_that_fails_is_told_at_once_and_the_batch_goes_on(static_world, submit, victim, failure):
    world = static_world(backend=fails_for(victim, failure))
    prompts, counts = submit(world, [(5, 2), (3, 4), (1, 3)]), [2, 4, 3]
    world.step()
    code = "MODEL_ERROR" if isinstance(failure, Exception) else "NON_FINITE_LOGITS"
    assert world.client.final(victim).code == code
    world.run()
    for i, prompt in enumerate(prompts):
        if i != victim:
            assert world.client.final(i).tokens() == prompt + world.expected(prompt, counts[i])


def test_c21_a_batch_too_large_for_memory_is_run_in_parts_that_keep_no_empty_places(static_world, submit):
    def fits_two(batch):
        if max(batch.num_sequences, batch.num_padded_rows) > 2:
            raise MemoryError

    world = static_world(backend=Recorded(on_step=fits_two))
    prompts = submit(world, [(5, 2), (3, 4), (1, 3), (2, 4), (7, 1)])
    world.run()
    assert_right(world, prompts, [2, 4, 3, 4, 1])


def test_members_end_by_their_end_id_and_are_told_together(static_world, submit):
    ends = {0: 5 + 1, 1: 3, 2: 1 + 2}    # request -> tokens of its sequence before the end id
    world = static_world(backend={"script": lambda history: END if ends.get(history[0]) == len(history) else None})
    prompts = submit(world, [(5, 9), (3, 9), (1, 9)], end_id=END)
    world.run()
    assert picture(world) == """\
C5  C3  C1
G   -   G
-!  -!  G!"""
    assert_right(world, prompts, [1, 0, 2])
    assert all(world.client.final(i).finish_reason == FinishReason.END_ID for i in range(3))


# ---------------------------------------------------------------------- statistics


def test_the_keys_of_in_flight_batching_give_way_to_those_of_v1(static_world, submit):
    records = {}
    for model_type in (V1, FUSED):
        world = static_world(model_type=model_type, flush_stats_when_idle=True)
        submit(world, [(5, 2)])
        world.run()
        (records[model_type],) = {frozenset(record) for record in world.records()}
    assert records[FUSED] - records[V1] == IN_FLIGHT_ONLY
    assert records[V1] - records[FUSED] == {"Total Generation Tokens", "Empty Generation Slots"}


def test_every_iteration_of_a_batch_reports_the_batch_as_it_was_formed(static_world, submit):
    world = static_world(max_batch_size=3, max_num_sequences=8)
    submit(world, [(5, 2), (3, 4), (1, 1), (4, 2)])
    world.run()
    names = ["Active Request Count", "Scheduled Requests", "Context Requests", "Total Context Tokens",
             "Total Generation Tokens", "Empty Generation Slots", "Generated Tokens"]
    assert [[record[name] for name in names] for record in world.records()] == [
        [4, 3, 3, 9, 7, 5, 3], [4, 3, 3, 9, 7, 5, 2], [4, 3, 3, 9, 7, 5, 1], [4, 3, 3, 9, 7, 5, 1],
        [1, 1, 1, 4, 2, 0, 1], [1, 1, 1, 4, 2, 0, 1]]
    assert [record["Iteration Counter"] for record in world.records()] == list(range(6))


def test_the_tokens_of_a_batch_are_bounded_by_what_its_longest_prompt_leaves():
    members = [LlmRequest(0, [0] * 12, 3), LlmRequest(1, [0] * 2, 18), LlmRequest(2, [0], 8)]
    assert batch_figures(members, max_seq_len=20) == {
        "Scheduled Requests": 3, "Context Requests": 3, "Total Context Tokens": 15,
        "Total Generation Tokens": 3 + 8 + 8, "Empty Generation Slots": 3 * 8 - 19}


def test_the_record_of_an_idle_engine_has_an_empty_batch(static_world, submit):
    world = static_world(flush_stats_when_idle=True)
    submit(world, [(5, 1)])
    world.run()
    assert len(world.client.stats) == 2
    assert {world.records()[-1][name] for name in ("Active Request Count", "Scheduled Requests", "Context Requests",
            "Total Context Tokens", "Total Generation Tokens", "Empty Generation Slots")} == {0}


# ---------------------------------------------------------------------- what V1 does not do


@pytest.mark.parametrize(("options", "name"), [
    ({"enable_trt_overlap": True}, "enable_trt_overlap"),
    ({"enable_chunked_context": True}, "enable_chunked_context"),
])
def test_options_that_contradict_a_static_batch_are_refused_at_construction_by_name(static_world, options, name):
    with pytest.raises(ConfigError, match=f"{name} .*V1"):
        static_world(**options)


def test_a_scheduler_of_ones_own_is_refused_with_v1(make_world):
    with pytest.raises(ConfigError, match="Parts.scheduler .*V1"):
        make_world(model_type=V1, parts={"scheduler": make_scheduler})


def test_block_reuse_is_switched_off_with_a_warning(static_world, submit, caplog):
    with caplog.at_level(logging.WARNING, "batch_manager"):
        world = static_world(kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    assert "enable_block_reuse is switched off" in caplog.text
    prompts = submit(world, [(30, 2), (30, 2)])
    world.run()
    assert_right(world, prompts, [2, 2])


@pytest.mark.parametrize(("name", "value"), [
    ("embedding_bias", [0.5] * 1000), ("draft_input_ids", [1, 2]),
])
def test_tensors_that_v1_does_not_take_are_refused_by_name(static_world, new_request, name, value):
    world = static_world()
    world.client.pending = [new_request(1, [1], 2, **{name: value}), new_request(2, [2], 2)]
    world.run()
    final = world.client.final(1)
    assert final.code == "INVALID_REQUEST" and name in final.error and "V1" in final.error
    assert world.client.final(2).error == ""


# ---------------------------------------------------------------------- the whole


@pytest.mark.parametrize("seed", range(2))
def test_random_streams_give_the_tokens_of_in_flight_batching(static_world, new_request, seed):
    """Every request gets one final response with the tokens that it gets with in-flight batching.

    A stopped request gets the first of these tokens. Some requests end with their end id.
    """
    draw = random.Random(seed)
    requests = [(i, [draw.randrange(1000) for _ in range(draw.randrange(1, 20))], draw.randrange(1, 16),
                 {"end_id": draw.choice([END, 8])}) for i in range(60)]
    stops = {i: draw.randrange(1, 40) for i in draw.sample(range(60), 10)}
    answers = []
    for model_type in (V1, FUSED):
        world = static_world(model_type=model_type, max_batch_size=draw.choice([1, 3, 8]), max_num_sequences=12,
                             backend={"num_blocks": 12, "tokens_per_block": 4, "max_seq_len": 40})
        world.client.pending = [new_request(i, prompt, new, streaming=model_type is V1 and i % 3 == 0, **options)
                                for i, prompt, new, options in requests]
        for iteration in range(2000):
            world.client.stops = {i for i, when in stops.items() if model_type is V1 and when == iteration % 40}
            if not world.step() and world.loop.is_empty and not world.client.pending:
                break
        assert world.loop.kv.used_blocks == 0
        answers.append(world)
    static, in_flight = answers
    for i, prompt, _, _ in requests:
        skipped = len(prompt) if i % 3 else 0
        got, expected = static.client.final(i).tokens()[skipped:], in_flight.client.final(i).tokens()[len(prompt):]
        if static.client.final(i).finish_reason == FinishReason.CANCELLED:
            assert i in stops and got == expected[:len(got)]
        else:
            assert got == expected and len(static.client.responses[i]) == 1


def test_c14_shutdown_drains_the_batch_and_those_who_wait_for_the_next(make_manager, new_client, new_request):
    client = new_client()
    client.pending = [new_request(i, [i + 1], 3 + i) for i in range(9)]
    manager = make_manager(client, model_type=V1, max_batch_size=3, max_num_sequences=9)
    while len(client.pending):
        pass
    assert manager.shutdown()
    assert all(client.final(i).finish_reason == FinishReason.LENGTH for i in range(9))


def test_c14_an_abort_answers_everybody_members_that_are_done_too(make_manager, new_client, new_request):
    client = new_client()
    client.pending = [new_request(0, [1], 1), new_request(1, [2], 900), new_request(2, [3], 900, end_id=3)]
    manager = make_manager(client, model_type=V1)
    while manager.num_active_requests < 3:
        pass
    assert manager.shutdown(drain=False)
    assert [client.final(i).code for i in range(3)] == ["SHUTDOWN"] * 3
