"""Draft tokens change the number of tokens that a step yields, and change no token.

These tests propose draft tokens between iterations, as a drafter would, to the scripted backend.
"""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from batch_manager import ConfigError, KvCacheConfig, TrtGptModelType
from batch_manager.arguments import EngineArguments
from batch_manager.kv.audit import audit
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.names import SchedulerPolicy
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.scheduling.contract import broken_rule
from batch_manager.scheduling.interfaces import SchedulerOutput
from batch_manager.scheduling.policies import make_scheduler

MOST = 4


@pytest.fixture
def drafting_world(make_world):
    """Return make_world, for engines that accept up to MOST draft tokens for a sequence in each step."""
    return partial(make_world, max_draft_tokens=MOST)


def run(world, prompts, right, draw, most_steps=400):
    """Run all requests to their end with draft tokens. Return the number of draft tokens that were proposed.

    prompts      request id -> prompt
    right        probability that a draft token is the token that the model generates; otherwise it is another token
    draw         random generator
    most_steps   largest number of iterations to run
    """
    proposed = 0
    for _ in range(most_steps):
        if not world.step():
            break
        for request in world.loop.active:
            left = request.final_length - request.num_tokens
            if request.beam_width == 1 and left > 1 and draw.random() < 0.8:    # also behind a context
                count = min(draw.randint(1, MOST), left - 1)
                known = world.expected(prompts[request.request_id], 100)[request.total_generated_tokens:][:count]
                drafts = [token if draw.random() < right else (token + 1) % 1000 for token in known]
                request.propose(drafts)
                proposed += len(drafts)
    return proposed


OPTIONS = {
    "plain": {},
    "overlap": {"enable_trt_overlap": True},
    "chunks": {"enable_chunked_context": True, "max_num_tokens": 17},
    "reuse": {"kv_cache_config": KvCacheConfig(enable_block_reuse=True)},
    "run-ahead": {"backend": {"is_asynchronous": True}},
    "window": {"backend": {"window": 6}},
    "window and sinks": {"backend": {"window": 8, "sink": 3}, "enable_chunked_context": True, "max_num_tokens": 17},
    "window and reuse": {"backend": {"window": 6, "is_asynchronous": True},
                         "kv_cache_config": KvCacheConfig(enable_block_reuse=True)},
    "beams": {"max_beam_width": 2},
}


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
@pytest.mark.parametrize(("name", "right"), [*((name, 0.6) for name in OPTIONS),
                                             *((name, right) for name in ("plain", "window and reuse")
                                               for right in (1.0, 0.0))])
def test_drafts_change_no_token(drafting_world, new_request, policy, name, right):
    draw = random.Random(f"{policy} {right} {name}")
    verified = {"context": 0, "generation": 0}

    def on_step(batch):
        verified["context"] += sum(work.num_drafts for work in batch.context)
        if batch.generation.num_drafts is not None:
            verified["generation"] += int(batch.generation.num_drafts.sum())

    options = dict(OPTIONS[name])
    backend = {"num_blocks": 30, "tokens_per_block": 4, "on_step": on_step, **options.pop("backend", {})}
    # Eight active requests wait for room in the step, and get drafts before their first chunk.
    world = drafting_world(policy=policy, backend=backend, max_batch_size=4, max_num_sequences=12, **options)
    shared = [draw.randrange(1000) for _ in range(6)]
    prompts = {i: shared[:draw.choice([0, 6])] + [draw.randrange(1000) for _ in range(draw.randint(1, 6))]
               for i in range(12)}
    counts = {i: draw.randint(1, 25) for i in prompts}
    width = {i: 2 if name == "beams" and i % 4 == 3 else 1 for i in prompts}
    world.client.pending = [
        new_request(i, prompt, counts[i], streaming=width[i] == 1 and i % 2 == 0, return_log_probs=i % 3 == 0,
                    beam_width=width[i]) for i, prompt in prompts.items()]
    assert run(world, prompts, right, draw) > 50
    for i, prompt in prompts.items():
        if width[i] == 1:
            got = world.client.streamed(i) if i % 2 == 0 else world.client.final(i).tokens()[len(prompt):]
            assert got == world.expected(prompt, counts[i])
        else:
            assert not world.client.final(i).error
    assert verified["context"] > 3 and verified["generation"] > 30, verified
    audit(world.loop.kv)
    assert world.loop.kv.used_blocks == 0


def test_a_step_yields_all_accepted_drafts_and_one_more(drafting_world, new_request):
    world = drafting_world()
    prompt = [5, 6, 7]
    world.client.pending = [new_request(1, prompt, 20, streaming=True)]
    world.step()
    (request,) = world.loop.active
    request.propose(world.expected(prompt, 20)[1:5])
    world.step()
    assert request.total_generated_tokens == 6 and world.loop.kv.kv_length(request) == 3 + 5
    assert len(world.client.streamed(1)) == 6


def test_rejected_drafts_give_their_blocks_back(drafting_world, new_request):
    world = drafting_world(backend={"tokens_per_block": 2})
    prompt = [5, 6, 7]
    world.client.pending = [new_request(1, prompt, 20)]
    world.step()
    (request,) = world.loop.active
    before = world.loop.kv.used_blocks
    request.propose([(token + 1) % 1000 for token in world.expected(prompt, 20)[1:5]])
    world.step()
    assert request.total_generated_tokens == 2 and world.loop.kv.kv_length(request) == 4
    assert world.loop.kv.used_blocks == before and request.draft_len == 0
    audit(world.loop.kv)


def test_an_end_id_among_the_drafts_ends_the_request_there(drafting_world, new_request):
    world = drafting_world()
    prompt = [5, 6, 7]
    expected = world.expected(prompt, 20)
    world.client.pending = [new_request(1, prompt, 20, end_id=expected[3])]
    world.step()
    (request,) = world.loop.active
    request.propose(expected[1:5])
    world.step()
    final = world.client.final(1)
    assert final.tokens() == prompt + expected[:3] and final.finish_reason == 1


def test_a_step_with_drafts_that_fails_is_run_again_without_them(drafting_world, new_request):
    """Also one of a single sequence; it costs nothing. Drafts behind a context are dropped likewise."""
    prompts = {i: [i, i + 1] for i in range(4)}
    failed = {True: [], False: []}           # whether the step was of one sequence -> iterations

    def on_step(batch):
        if batch.has_drafts and (batch.context or len(failed[batch.num_sequences == 1]) < 3):
            failed[batch.num_sequences == 1].append(batch.iteration)
            raise RuntimeError("planted")

    world = drafting_world(backend={"on_step": on_step}, max_batch_size=2, max_num_sequences=4)
    world.client.pending = [new_request(i, prompt, 15) for i, prompt in prompts.items()]
    assert run(world, prompts, 0.7, random.Random(3)) > 10
    assert failed[True] and failed[False] and world.loop._runner.num_failed_steps == sum(map(len, failed.values()))
    for i, prompt in prompts.items():
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, 15)


def test_the_last_chunk_of_a_context_verifies_drafts(drafting_world, new_request):
    """Prompt and drafts are one step, also in blocks behind the prompt's; rejected drafts give their blocks back."""
    world = drafting_world(backend={"tokens_per_block": 2}, max_batch_size=2, max_num_sequences=4)
    prompts = {i: [5, 6, i] for i in range(4)}
    expected = {i: world.expected(prompt, 20) for i, prompt in prompts.items()}
    world.client.pending = [new_request(i, prompt, 20, streaming=True, return_context_logits=i == 3)
                            for i, prompt in prompts.items()]
    world.step()
    for request in world.loop.active:
        if request.request_id == 2:                                # waits; all of its drafts are right
            request.propose(expected[2][:MOST])
        elif request.request_id == 3:                              # two are right
            request.propose([*expected[3][:2], expected[3][2] + 1, 0])
    world.client.stops = {0, 1}
    while not world.client.streamed(3):
        world.step()
    of_2, of_3 = (request for request in world.loop.active if request.request_id in (2, 3))
    assert world.client.streamed(2) == expected[2][:MOST + 1] and world.client.streamed(3) == expected[3][:3]
    assert [world.loop.kv.kv_length(request) for request in (of_2, of_3)] == [3 + MOST, 3 + 2]
    assert [world.loop.kv.held_blocks(request) for request in (of_2, of_3)] == [4, 3]
    assert of_2.draft_len == of_3.draft_len == 0
    first = world.client.responses[3][0]
    assert first.tensors["context_logits"].shape[-2] == 3          # of the prompt alone
    world.run()
    assert all(world.client.streamed(i) == expected[i] for i in (2, 3))


def test_drafts_behind_a_later_chunk_fill_the_last_block_of_the_prompt(drafting_world, new_request):
    world = drafting_world(backend={"tokens_per_block": 4}, enable_chunked_context=True, max_num_tokens=8)
    prompt = list(range(10))
    world.client.pending = [new_request(1, prompt, 20, streaming=True)]
    world.step()
    (request,) = world.loop.active
    assert request.remaining_context == 2
    request.propose(world.expected(prompt, MOST))
    world.step()
    assert world.client.streamed(1) == world.expected(prompt, 3) and request.draft_len == 0
    assert world.loop.kv.kv_length(request) == 12 and world.loop.kv.held_blocks(request) == 3


class KeepsOneDraft:
    """A scheduler of one's own that sets draft_lengths."""

    def __init__(self, limits, kv_cache_manager):
        self.whole = make_scheduler(limits, kv_cache_manager)

    def schedule_request(self, active_requests, inflight_request_ids):
        plan = self.whole.schedule_request(active_requests, inflight_request_ids)
        return replace(plan, draft_lengths=self.lengths(plan.context_requests))

    def lengths(self, contexts):
        return np.array([min(request.draft_len, 1) for request in contexts], np.uint8)


def test_a_plan_says_how_many_drafts_a_context_keeps(drafting_world, new_request):
    world = drafting_world(parts={"scheduler": KeepsOneDraft}, max_batch_size=1, max_num_sequences=2)
    world.client.pending = [new_request(i, [5, 6, i], 20, streaming=True) for i in range(2)]
    world.step()
    (waiting,) = (request for request in world.loop.active if request.is_context)
    drafts = world.expected([5, 6, 1], MOST)
    waiting.propose(drafts)
    world.client.stops = {0}
    while not world.client.streamed(1):
        world.step()
    assert world.client.streamed(1) == drafts[:2]


@pytest.mark.parametrize(("lengths", "rule"), [
    ([0, 0], "the plan has 2 draft lengths for 1 context request"),
    ([1.5], "gets a draft length of type float, not an integer"), ([-1], "keeps -1 draft tokens and has 0"),
    ([1], "keeps 1 draft token and has 0")])
def test_a_plan_with_wrong_draft_lengths_breaks_the_contract(drafting_world, new_request, lengths, rule):
    scheduler = type("Wrong", (KeepsOneDraft,), {"lengths": lambda self, contexts: lengths})
    world = drafting_world(parts={"scheduler": scheduler})
    world.client.pending = [new_request(1, [5, 6], 3)]
    world.step()
    assert rule in world.client.final(1).error


def test_more_drafts_than_a_step_has_room_for_break_the_contract(drafting_world):
    """A plan's tokens and blocks include the drafts behind contexts."""
    world = drafting_world(max_num_tokens=8, max_batch_size=4, backend={"tokens_per_block": 2})
    kv, limits = world.loop.kv, world.loop.limits
    requests = [LlmRequest(i, [i, 2, 3], 9, draft_tokens=range(count)) for i, count in ((0, 1), (1, 2))]
    for request in requests:
        request.seq_slot = request.request_id
    plan = SchedulerOutput(requests, [], [])
    assert broken_rule(plan, requests, (), kv, limits) == "the step has 9 tokens and max_num_tokens is 8"
    requests[1].propose(())
    assert broken_rule(plan, requests, (), kv, limits) is None
    for blocks, needed in ((4, None), (3, "the plan needs 4 KV cache blocks and its pauses leave 3 free")):
        requests[0].propose([0])
        small = KvCacheManager(blocks, 2, 100, max_draft_len=MOST)
        assert broken_rule(plan, requests, (), small, limits) == needed


@pytest.mark.parametrize(("value", "says"), [
    (65, "max_draft_tokens is 65; expected an integer in 0..64, or None"),
    (-1, "expected an integer in 0..64"), (True, "expected an integer in 0..64")])
def test_max_draft_tokens_is_in_its_range(value, says):
    with pytest.raises(ConfigError, match=says):
        EngineArguments(max_draft_tokens=value)


def test_drafts_need_a_backend_that_verifies_them(make_world):
    assert make_world(max_draft_tokens=np.int64(64)).loop.limits.max_draft_tokens == 64
    says = ("max_draft_tokens is 3; the backend verifies no draft tokens; lower max_draft_tokens to 0, or verify them "
            "and state it as BackendInfo.max_draft_tokens")
    with pytest.raises(ConfigError, match=says):
        make_world(max_draft_tokens=3, backend={"verify": False})
    with pytest.raises(ConfigError, match="max_draft_tokens is set with TrtGptModelType.V1; a step of a static batch"):
        make_world(max_draft_tokens=1, model_type=TrtGptModelType.V1)
    with pytest.raises(ConfigError, match="max_draft_tokens is 8 and max_num_tokens is 8; expected a step that can"):
        make_world(max_draft_tokens=8, max_num_tokens=8)
    assert make_world(max_draft_tokens=7, max_num_tokens=8).loop.kv.window.max_draft_len == 7
