"""Beam search with the scripted model gives the results of an oracle, also with small pools, faults and stops."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from batch_manager import (
    FinishReason,
    KvCacheConfig,
    RequestScheduler,
    SchedulerPolicy,
)
from batch_manager.errors import ConfigError
from batch_manager.handover import BlockCopy, RowFailure
from batch_manager.names import ErrorCode
from batch_manager.scheduling.interfaces import SchedulerOutput
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.testing.scripted_tokens import expected_candidates

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
VOCAB = 23
END, LENGTH = FinishReason.END_ID, FinishReason.LENGTH


def live_beams(prompt, width, steps, rate=0.0):
    """Return the beams after `steps` steps of the oracle's search without an end id: [(sum of log-probs, tokens)].

    The best beam comes first. `rate` is the request's beam_search_diversity_rate.
    """
    beams = [(0.0, [])]
    for _ in range(steps):
        beams = step(prompt, beams, width, rate)[:width]
    return beams


def step(prompt, beams, width, rate=0.0, window=None):
    """Return the 2 * width best continuations of the beams by one token, best first: [(sum of log-probs, tokens)].

    rate     beam_search_diversity_rate; continuations are ordered by sum - rate * rank among those of the same beam
    window   attention window in tokens; None: no window
    """
    found = []
    for total, text in beams:
        follows = expected_candidates([*prompt, *text], 2 * width, vocab_size=VOCAB, window=window)
        follows.sort(key=lambda candidate: (-candidate[1], candidate[0]))
        found += [(total + log_prob - rate * rank, total + log_prob, [*text, token])
                  for rank, (token, log_prob) in enumerate(follows)]
    found.sort(key=lambda candidate: -candidate[0])
    return [candidate[1:] for candidate in found[:2 * width]]


def search(prompt, count, *, beam_width, end_id=-1, len_penalty=0.0, early_stopping=1,
           beam_search_diversity_rate=0.0, window=None):
    """Return the hypotheses of a plain beam search, best first: [(tokens, sum of log-probs, finish reason)]."""
    beams, finished = [(0.0, [])], []
    for length in range(1, count + 1):
        candidates = step(prompt, beams, beam_width, beam_search_diversity_rate, window)
        for total, text in candidates[:beam_width]:
            if text[-1] == end_id:
                finished.append((total / length**len_penalty, text[:-1], total, END))
            elif length == count:
                finished.append((total / length**len_penalty, text, total, LENGTH))
        finished = sorted(finished, key=lambda text: -text[0])[:beam_width]
        beams = [candidate for candidate in candidates if candidate[1][-1] != end_id][:beam_width]
        if len(finished) == beam_width:
            reach = length if early_stopping == 0 else count
            if early_stopping == 1 or max(beams)[0] / reach**len_penalty <= finished[-1][0]:
                break
    return [(text, total, reason) for _, text, total, reason in finished]


def random_requests(new_request, count, seed, widths=(1, 2, 3, 4), longest=16, **fixed):
    draw = random.Random(seed)
    asked = {}
    for i in range(count):
        options = {"beam_width": draw.choice(widths), "end_id": draw.choice([-1, *range(20)]),
                   "len_penalty": draw.choice([0.0, 0.5, 1.0, 2.0]), "early_stopping": draw.choice([0, 1, 2]),
                   "beam_search_diversity_rate": draw.choice([0.0, 0.0, 0.5]), **fixed}
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 14))]
        asked[i] = prompt, draw.randrange(1, longest), options
    return asked, [new_request(i, prompt, new_tokens, return_log_probs=True, **options)
                   for i, (prompt, new_tokens, options) in asked.items()]


def assert_right(world, asked, window=None):
    """Assert that all responses are those of the oracle. Return the number of hypotheses that ended with an end id.

    asked   request id -> (prompt, number of new tokens, request tensors)
    """
    ended = 0
    for i, (prompt, count, options) in asked.items():
        final = world.client.final(i)
        assert final.error == ""
        width = options["beam_width"]
        if width == 1:
            assert final.tokens()[len(prompt):] == world.expected(prompt, count, end_id=options["end_id"])
            continue
        expected = search(prompt, count, window=window, **options)
        assert len(expected) == width
        assert final.tensors["output_ids"].shape[:2] == (1, width)
        assert [final.tokens(beam) for beam in range(width)] == [prompt + text for text, *_ in expected]
        assert final.tensors["cum_log_probs"][0].tolist() == pytest.approx([total for _, total, _ in expected])
        assert final.tensors["finish_reason"][0].tolist() == [reason for *_, reason in expected]
        ended += sum(reason == END for *_, reason in expected)
    return ended


def paused(world):
    return sum(json.loads(record)["Paused Requests"] for record in world.client.stats)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [MAX, GUARANTEED])
def test_requests_of_any_widths_get_what_each_would_get_alone(make_world, new_request, policy, seed):
    """Requests of different beam widths get the results of the oracle, although the pool is too small for all of them.

    `World.step` audits the pool after every iteration. tests/matrix combines beams with the other features.
    """
    world = make_world(policy=policy, backend={"num_blocks": 26, "tokens_per_block": 4, "vocab_size": VOCAB},
                       max_beam_width=4)
    asked, world.client.pending = random_requests(new_request, 14, seed)
    world.run()
    assert assert_right(world, asked) > 0
    assert (paused(world) > 0) == (policy is MAX)


def test_beams_give_the_blocks_back_that_leave_the_window(make_world, new_request):
    world = make_world(backend={"num_blocks": 40, "tokens_per_block": 4, "vocab_size": VOCAB, "window": 9},
                       max_beam_width=3, kv_cache_config=KvCacheConfig(max_attention_window=9))
    asked = {i: ([i + 1] * (3 + 4 * i), 30, {"beam_width": 3}) for i in range(3)}
    world.client.pending = [new_request(i, prompt, count, return_log_probs=True, **options)
                            for i, (prompt, count, options) in asked.items()]
    world.run()
    assert_right(world, asked, window=9)
    assert max(json.loads(record)["Used KV cache blocks"] for record in world.client.stats) <= 3 * 3 * 4


def test_a_backend_without_copies_is_refused_where_beams_are_allowed(make_world):
    class WithoutCopies(ScriptedBackend):
        def __init__(self):
            super().__init__()
            self.info = replace(self.info, copies_blocks=False)

    with pytest.raises(ConfigError, match="max_beam_width is 2; the backend of type WithoutCopies does not copy "
                                          "blocks: .*copies_blocks"):
        make_world(max_beam_width=2, backend=WithoutCopies())
    with pytest.raises(ConfigError, match="enable_block_reuse is set; the backend of type WithoutCopies does not "
                                          "copy blocks"):
        make_world(kv_cache_config=KvCacheConfig(enable_block_reuse=True), backend=WithoutCopies())
    make_world(backend=WithoutCopies())


def test_plain_requests_of_a_manager_with_beams(make_world, new_request):
    world = make_world(backend={"num_blocks": 12, "tokens_per_block": 4}, max_beam_width=5)
    world.client.pending = [new_request(i, [i] * 5, 12, streaming=i % 2 == 0) for i in range(4)]
    world.run()
    for i in range(4):
        got = world.client.streamed(i) if i % 2 == 0 else world.client.final(i).tokens()[5:]
        assert got == world.expected([i] * 5, 12)
    assert paused(world) > 0


def test_beams_share_the_blocks_they_have_in_common(make_world, new_request):
    world = make_world(backend={"num_blocks": 64, "tokens_per_block": 4, "vocab_size": VOCAB}, max_beam_width=8)
    prompt = list(range(10))                     # two full blocks and a half
    world.client.pending = [new_request(1, prompt, 12, beam_width=8, return_log_probs=True)]
    world.step()
    assert world.loop.kv.used_blocks == 2 + 8
    world.step(2)                                # tokens 11 and 12 fill the third block
    assert world.loop.kv.used_blocks <= 2 + 8
    used = []
    while len(world.loop.active):
        used.append(world.loop.kv.used_blocks)
        world.step()
    assert max(used) < 2 + 8 * 4                 # blocks that beams filled before they parted are held once
    assert_right(world, {1: (prompt, 12, {"beam_width": 8})})


def test_a_prompt_of_whole_blocks_is_shared_whole(make_world, new_request):
    world = make_world(backend={"num_blocks": 64, "tokens_per_block": 4, "vocab_size": VOCAB}, max_beam_width=3)
    world.client.pending = [new_request(1, list(range(8)), 6, beam_width=3, return_log_probs=True)]
    world.step()
    assert world.loop.kv.used_blocks == 2
    world.step()
    assert world.loop.kv.used_blocks == 2 + 3
    world.run()
    assert_right(world, {1: (list(range(8)), 6, {"beam_width": 3})})


def test_one_token_is_the_whole_search(make_world, new_request):
    world = make_world(backend={"vocab_size": VOCAB}, max_beam_width=3)
    world.client.pending = [new_request(1, [3, 4], 1, beam_width=3, return_log_probs=True)]
    world.run()
    assert_right(world, {1: ([3, 4], 1, {"beam_width": 3})})
    assert world.backend.num_steps == 1


def test_the_tensors_of_a_response(make_world, new_request):
    world = make_world(backend={"vocab_size": VOCAB}, max_beam_width=4)
    options = {"beam_width": 4, "end_id": 3, "len_penalty": 1.0, "early_stopping": 0}
    prompt = next(prompt for prompt in ([7, 8, last] for last in range(VOCAB))
                  if len({len(text) for text, *_ in search(prompt, 9, **options)}) > 2)
    world.client.pending = [new_request(1, prompt, 9, pad_id=5, return_log_probs=True, return_generation_logits=True,
                                        return_context_logits=True, **options),
                            new_request(2, prompt, 9, **options)]
    world.run()
    expected = search(prompt, 9, **options)
    longest = max(len(text) for text, *_ in expected)
    tensors, plain = world.client.final(1).tensors, world.client.final(2).tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "output_ids": (1, 4, 3 + longest), "sequence_length": (1, 4), "context_logits": (1, 3, VOCAB),
        "generation_logits": (1, 4, longest, VOCAB), "output_log_probs": (1, 4, longest), "cum_log_probs": (1, 4),
        "finish_reason": (1, 4)}
    assert all(tensor.dtype == (np.float32 if "log" in name else np.int32) for name, tensor in tensors.items())
    for beam, (text, total, _) in enumerate(expected):
        count = len(text)
        assert tensors["sequence_length"][0, beam] == 3 + count
        assert (tensors["output_ids"][0, beam, 3 + count:] == 5).all()
        assert (plain["output_ids"][0, beam, 3 + count:] == 3).all()            # no pad_id: the end id
        log_probs = tensors["output_log_probs"][0, beam]
        assert (log_probs[count:] == 0).all()
        for position, token in enumerate(text):
            follows = expected_candidates([*prompt, *text[:position]], 8, vocab_size=VOCAB)
            assert log_probs[position] == pytest.approx(dict(follows)[token])
            assert tensors["generation_logits"][0, beam, position].argmax() == follows[0][0]
        ending = 0.0
        if tensors["finish_reason"][0, beam] == END:
            ending = dict(expected_candidates([*prompt, *text], 8, vocab_size=VOCAB))[3]
        assert tensors["cum_log_probs"][0, beam] == pytest.approx(total)
        assert float(log_probs.sum()) + ending == pytest.approx(total)
    assert (plain["cum_log_probs"] == 0).all() and plain["output_log_probs"].shape == (1, 4, longest)
    assert (plain["output_log_probs"] == 0).all() and plain["generation_logits"].shape == (1, 1, 1, 1)


def test_the_prompt_may_be_left_out(make_world, new_request):
    world = make_world(backend={"vocab_size": VOCAB}, max_beam_width=2, exclude_input=True)
    world.client.pending = [new_request(1, [1, 2, 3], 5, beam_width=2)]
    world.run()
    final = world.client.final(1)
    assert [final.tokens(beam) for beam in range(2)] == [text for text, *_ in search([1, 2, 3], 5, beam_width=2)]


@pytest.mark.parametrize("rate", [0.0, 0.7])
@pytest.mark.parametrize("why", ["stop", "deadline"])
def test_a_request_that_is_cut_short_has_its_live_beams(make_world, new_request, why, rate):
    """A request that is stopped or times out returns its live beams, best first."""
    world = make_world(backend={"vocab_size": VOCAB}, max_beam_width=3)
    world.client.pending = [new_request(1, [4, 2], 50, beam_width=3, beam_search_diversity_rate=rate, deadline_s=9.0,
                                        return_log_probs=True, return_generation_logits=True)]
    world.step(5)
    if why == "stop":
        world.client.stops = {1}
    else:
        world.clock.now += 10
    world.step()
    final = world.client.final(1)
    expected = sorted(live_beams([4, 2], 3, 6, rate), key=lambda beam: -beam[0])
    assert [final.tokens(beam)[2:] for beam in range(3)] == [text for _, text in expected]
    assert final.tensors["cum_log_probs"][0].tolist() == pytest.approx([total for total, _ in expected])
    assert final.tensors["output_log_probs"].sum(2)[0].tolist() == pytest.approx([total for total, _ in expected])
    assert final.tensors["generation_logits"].shape == (1, 3, 6, VOCAB)
    reason = FinishReason.CANCELLED if why == "stop" else FinishReason.TIMED_OUT
    assert final.tensors["finish_reason"][0].tolist() == [reason] * 3
    assert world.loop.kv.used_blocks == 0


class HandedOverWhole(list):
    """A list of which every slice is the whole list, so that get returns all requests whatever its argument."""

    def __getitem__(self, index):
        return list(self) if isinstance(index, slice) else super().__getitem__(index)

    def __setitem__(self, index, value):
        self.clear()


def test_a_request_that_is_stopped_while_it_is_paused_or_waits_has_its_prompt_in_every_row(make_world, new_request):
    world = make_world(backend={"vocab_size": VOCAB, "num_blocks": 7, "tokens_per_block": 4}, max_beam_width=3,
                       max_batch_size=2)
    asked = {0: ([0, 1, 2], 9, 2), 1: ([1] * 5, 3, 3), 2: ([9], 5, 2)}
    world.client.pending = HandedOverWhole(new_request(i, prompt, count, beam_width=width, return_log_probs=True)
                                           for i, (prompt, count, width) in asked.items())
    while not paused(world):
        assert world.step()
    assert world.loop.active.get(1).is_context and world.loop.active.get(1).num_pauses and len(world.loop.intake) == 1
    world.client.stops = {1, 2}
    world.step()
    for i, (prompt, _, width) in list(asked.items())[1:]:
        final = world.client.final(i)
        assert [final.tokens(beam) for beam in range(width)] == [prompt] * width
        assert final.tensors["cum_log_probs"].tolist() == [[0.0] * width]
        assert final.tensors["finish_reason"].tolist() == [[FinishReason.CANCELLED] * width]
    world.client.stops = set()
    world.run()
    assert_right(world, {0: ([0, 1, 2], 9, {"beam_width": 2})})


def test_a_vocabulary_smaller_than_the_beams(make_world, new_request):
    """Six beams search a vocabulary of three tokens, one of which is the end id.

    After one step, three rows of the response have results. The other three have a sum of -inf and NOT_FINISHED.
    """
    world = make_world(backend={"vocab_size": 3}, max_beam_width=6)
    world.client.pending = [new_request(1, [0], 1, beam_width=6, end_id=2, return_log_probs=True),
                            new_request(2, [0], 4, beam_width=6, end_id=2, return_log_probs=True)]
    world.run()
    final = world.client.final(1)
    assert final.tensors["cum_log_probs"][0].tolist()[3:] == [-np.inf] * 3
    assert final.tensors["finish_reason"][0].tolist()[3:] == [FinishReason.NOT_FINISHED] * 3
    assert [len(final.tokens(beam)) for beam in range(3, 6)] == [1, 1, 1]
    assert sorted(final.tokens(beam)[1:] for beam in range(3)) == [[], [0], [1]]
    assert np.isfinite(world.client.final(2).tensors["cum_log_probs"]).all()


@pytest.mark.parametrize("where", ["on_step", "on_finish"])
def test_a_step_that_is_run_again_in_parts_changes_no_beam(make_world, new_request, where):
    failures = itertools.cycle([True, True, False, False, True, False])

    def fail_now_and_then(batch):
        if batch.num_sequences > 1 and next(failures):
            raise RuntimeError("planted")

    world = make_world(backend={"vocab_size": VOCAB, "num_blocks": 60, "tokens_per_block": 4, where: fail_now_and_then},
                       max_beam_width=4)
    asked, world.client.pending = random_requests(new_request, 8, 11, widths=(1, 4, 4), early_stopping=2)
    world.run()
    assert_right(world, asked)
    assert json.loads(world.client.stats[-1])["Failed Steps"] > 3


@pytest.mark.parametrize("where", ["on_step", "on_finish"])
def test_contexts_that_are_run_again_apart_from_the_beams_of_their_step(make_world, new_request, where):
    """When a failed step is bisected, a half that has only contexts runs without the beams of the other half."""
    failed = []

    def fail_once(batch):
        if len(batch.context) == 2 and batch.generation.beam_width == 3 and not failed:
            failed.append(batch.num_sequences)
            raise RuntimeError("planted")

    world = make_world(backend={"vocab_size": VOCAB, where: fail_once}, max_beam_width=3)
    asked = {i: ([i, 2, 3], 6, {"beam_width": 1 if i else 3, "end_id": -1}) for i in range(3)}
    requests = [new_request(i, prompt, count, return_log_probs=True, **options)
                for i, (prompt, count, options) in asked.items()]
    world.client.pending = requests[:1]
    world.step(2)
    world.client.pending = requests[1:]
    world.run()
    assert failed == [3]
    assert_right(world, asked)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_beam_that_goes_on_with_a_token_there_is_not_ends_its_request_alone(make_world, new_request, token, last):
    """A token outside the vocabulary in a beam or in a hypothesis ends only that request."""
    spoiled = []

    class Spoiler(ScriptedBackend):
        def start(self, batch):
            step = super().start(batch)
            output = step.output
            for row, slot in enumerate(output.slots.tolist()):
                if slot == 0 and (slot in output.hypotheses) == last:
                    spoiled.append(slot)
                    start, stop = output.row_starts[row:row + 2]
                    tokens = output.hypotheses[slot][-1].tokens if last else output.tokens[start:stop]
                    assert last or len(tokens) == 3
                    tokens[-1] = token
            return step

    world = make_world(backend=Spoiler(vocab_size=VOCAB), max_beam_width=3)
    asked = {i: ([i, 2, 3], 6, {"beam_width": 3}) for i in range(2)}
    world.client.pending = [new_request(i, prompt, count, return_log_probs=True, **options)
                            for i, (prompt, count, options) in asked.items()]
    world.run()
    assert spoiled and world.client.final(0).code == "INVALID_TOKEN"
    assert_right(world, {1: asked[1]})


def test_values_that_are_not_finite_end_that_request_and_every_block_of_its_beams_is_cleared(make_world, new_request):
    planted = []

    def poison(batch):
        if batch.iteration == 4:
            planted.append(True)
            return {0: RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted")}
        return None

    world = make_world(backend={"vocab_size": VOCAB, "num_blocks": 40, "tokens_per_block": 4, "on_step": poison},
                       max_beam_width=3)
    asked = {i: ([i, i, i], 12, {"beam_width": 3}) for i in range(2)}
    world.client.pending = [new_request(i, prompt, count, return_log_probs=True, **options)
                            for i, (prompt, count, options) in asked.items()]
    world.run()
    assert planted and world.client.final(0).code == "NON_FINITE_LOGITS"
    assert_right(world, {1: asked[1]})
    asked = {i: ([i, i, i], 12, {"beam_width": 3}) for i in range(2, 6)}    # the cleared blocks are clean
    world.client.pending = [new_request(i, prompt, count, return_log_probs=True, **options)
                            for i, (prompt, count, options) in asked.items()]
    world.run()
    assert_right(world, asked)


class EverybodyAtOnce(RequestScheduler):
    def schedule_request(self, active_requests, inflight_request_ids):
        contexts = [request for request in active_requests if request.is_context]
        return SchedulerOutput(contexts, [request for request in active_requests if request.is_generating], [])


def test_a_scheduler_that_mixes_widths_in_generation_breaks_its_contract(make_world, new_request):
    world = make_world(backend={"vocab_size": VOCAB}, max_beam_width=3, parts={"scheduler": EverybodyAtOnce()})
    world.client.pending = [new_request(1, [1], 5, beam_width=2), new_request(2, [1], 5, beam_width=3)]
    world.step(2)
    assert "beam widths 2, 3" in world.client.final(1).error and world.client.final(2).error
    world.client.pending = [new_request(3, [1], 5, beam_width=2), new_request(4, [2], 5, beam_width=2)]
    world.run()
    assert world.client.final(3).error == world.client.final(4).error == ""


@pytest.mark.parametrize(("tensors", "parts"), [
    ({"beam_width": 5}, ["beam_width is 5", "max_beam_width is 4"]),
    ({"beam_width": 2, "streaming": True}, ["beam_width is 2", "only supported with beam width of 1"]),
    ({"beam_width": 2, "len_penalty": -0.5}, ["len_penalty is -0.5", "at least 0"]),
    ({"beam_width": 2, "len_penalty": float("nan")}, ["len_penalty"]),
    ({"beam_width": 2, "early_stopping": 2**31}, ["early_stopping is 2147483648", "-2147483648..2147483647"]),
    ({"beam_width": 2, "beam_search_diversity_rate": -1.0}, ["beam_search_diversity_rate is -1.0", "at least 0"]),
], ids=str)
def test_a_bad_value_is_refused_with_its_name_the_value_and_the_range(make_world, new_request, tensors, parts):
    world = make_world(backend={"vocab_size": VOCAB}, max_beam_width=4)
    world.client.pending = [new_request(1, [1], 5, **tensors)]
    world.run()
    assert world.client.final(1).code == "INVALID_REQUEST"
    assert all(part in world.client.final(1).error for part in parts)


def test_beams_that_no_step_has_room_for_are_refused(make_world, new_request):
    world = make_world(backend={"vocab_size": VOCAB}, max_beam_width=8, max_num_tokens=16, enable_chunked_context=True)
    world.client.pending = [new_request(1, [1], 5, beam_width=8)]
    world.run()
    assert world.client.final(1).error == ""
    world = make_world(backend={"vocab_size": VOCAB, "tokens_per_block": 4}, max_beam_width=8, max_num_tokens=7,
                       enable_chunked_context=True)
    world.client.pending = [new_request(1, [1], 5, beam_width=8)]
    world.run()
    assert "beam_width is 8 and max_num_tokens is 7" in world.client.final(1).error


@pytest.mark.parametrize("policy", [MAX, GUARANTEED])
@pytest.mark.parametrize(("prompt", "new_tokens", "needed"), [(5, 6, 1 + 2 * 3), (8, 8, 2 + 2 * 3), (3, 1, 3)])
def test_c8_what_fits_the_pool_runs_and_what_never_could_is_refused_at_once(
        make_world, new_request, policy, prompt, new_tokens, needed):
    for num_blocks in (needed, needed - 1):
        world = make_world(policy=policy, max_beam_width=3,
                           backend={"vocab_size": VOCAB, "tokens_per_block": 4, "num_blocks": num_blocks})
        world.client.pending = [new_request(1, [2] * prompt, new_tokens, beam_width=3)]
        world.run()
        final = world.client.final(1)
        if num_blocks == needed:
            assert final.error == ""
        else:
            assert final.code == "TOO_LARGE_FOR_KV_CACHE"
            assert f"{needed} blocks of 4 tokens for 3 beams, and the pool has {num_blocks}" in final.error


def test_c21_a_copy_that_cannot_be_made_fails_steps_until_it_is_made_and_the_engine_lives(make_world, new_request):
    """Each launch repeats a failed block copy until the copy succeeds, whichever requests the launch runs.

    The copy is not dropped, because a live request may hold its block.
    """
    class Copies(ScriptedBackend):
        tried, done, is_broken = [], [], True

        def _carry_out(self, operation):
            if isinstance(operation, BlockCopy):
                self.tried.append(operation)
                if self.is_broken:
                    raise ZeroDivisionError
                self.done.append(operation)
            super()._carry_out(operation)

    backend = Copies(vocab_size=VOCAB, tokens_per_block=4)
    world = make_world(backend=backend, max_beam_width=2)
    world.client.pending = [new_request(1, [1, 2], 5, beam_width=2)]
    world.run()
    assert world.client.final(1).code == "MODEL_ERROR" and world.loop.failure is None
    world.client.pending = [new_request(2, [3], 5)]
    world.run()
    assert world.client.final(2).code == "MODEL_ERROR" and not backend.done
    (first,) = set(backend.tried)
    assert len(backend.tried) == 2

    backend.is_broken = False
    asked = {i: ([i, 2, 3], 6, {"beam_width": 2}) for i in range(3, 6)}
    world.client.pending = [new_request(i, prompt, count, return_log_probs=True, **options)
                            for i, (prompt, count, options) in asked.items()]
    world.run()
    assert_right(world, asked)
    assert backend.done[0] is first and backend.done == backend.tried[2:], "in order, and each once"
