"""Draft tokens change the number of tokens that a step yields, and change no token.

No request can enable drafts yet. These tests propose draft tokens between iterations, as a drafter would.
"""

import random
from dataclasses import replace

import pytest

from batch_manager import options
from batch_manager.kv.audit import audit
from batch_manager.names import SchedulerPolicy

MOST = 4


@pytest.fixture
def drafting_world(make_world, monkeypatch):
    """Return make_world, whose engines now accept up to MOST draft tokens for a sequence in each step."""
    resolve = options.resolve_limits
    monkeypatch.setattr(options, "resolve_limits",
                        lambda *given: replace(resolve(*given), max_draft_tokens=MOST))
    return make_world


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
            if request.is_generating and request.beam_width == 1 and left > 1 and draw.random() < 0.8:
                count = min(draw.randint(1, MOST), left - 1)
                known = world.expected(prompts[request.request_id], 100)[request.total_generated_tokens:][:count]
                drafts = [token if draw.random() < right else (token + 1) % 1000 for token in known]
                request.propose(drafts)
                proposed += len(drafts)
    return proposed


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
@pytest.mark.parametrize("right", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("options", [{}, {"enable_trt_overlap": True}, {"enable_chunked_context": True}])
def test_drafts_change_no_token(drafting_world, new_request, policy, right, options):
    draw = random.Random(f"{policy} {right} {options}")
    world = drafting_world(policy=policy, backend={"num_blocks": 30, "tokens_per_block": 4}, **options)
    prompts = {i: [draw.randrange(1000) for _ in range(draw.randint(1, 12))] for i in range(12)}
    counts = {i: draw.randint(1, 25) for i in prompts}
    world.client.pending = [new_request(i, prompt, counts[i], streaming=i % 2 == 0, return_log_probs=i % 3 == 0)
                            for i, prompt in prompts.items()]
    assert run(world, prompts, right, draw) > 50
    for i, prompt in prompts.items():
        got = world.client.streamed(i) if i % 2 == 0 else world.client.final(i).tokens()[len(prompt):]
        assert got == world.expected(prompt, counts[i])
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


def test_a_step_with_drafts_that_fails_is_run_again_in_parts(drafting_world, new_request):
    prompts = {i: [i, i + 1] for i in range(4)}
    failures = []

    def on_step(batch):
        if batch.generation.num_drafts is not None and batch.num_sequences > 1 and len(failures) < 3:
            failures.append(batch.iteration)
            raise RuntimeError("planted")

    world = drafting_world(backend={"on_step": on_step})
    world.client.pending = [new_request(i, prompt, 15) for i, prompt in prompts.items()]
    assert run(world, prompts, 0.7, random.Random(3)) > 10
    assert failures
    for i, prompt in prompts.items():
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, 15)
