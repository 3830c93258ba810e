"""StepWindow: which requests may have rows in two steps in flight, and what happens to steps after a failed step."""

from types import SimpleNamespace

import pytest

from batch_manager import ContextChunkingPolicy, InferenceRequest, KvCacheConfig
from batch_manager.handover import BlockClear
from batch_manager.names import LlmRequestState
from tests.contract.test_run_ahead import Late

SIZE = 4
LONG = 30


class Device(Late):
    """An asynchronous scripted backend that records every launched batch, and fails some steps once.

    fails             iterations whose step fails when it is read
    fails_to_launch   iterations whose launch fails
    """

    def __init__(self, *, fails=(), fails_to_launch=(), **options):
        super().__init__(**options, on_finish=self.fail_once)
        self.fails, self.fails_to_launch, self.launches, self.reads = set(fails), set(fails_to_launch), [], 0

    def start(self, batch):
        self.launches.append(batch)
        if batch.iteration in self.fails_to_launch:
            self.fails_to_launch.remove(batch.iteration)
            raise RuntimeError("planted")
        pending = super().start(batch)

        def finish():
            self.reads += 1
            return pending.finish()

        return SimpleNamespace(finish=finish)

    def fail_once(self, batch):
        if batch.iteration in self.fails:
            self.fails.remove(batch.iteration)
            raise RuntimeError("planted")


@pytest.fixture
def ahead(make_world):
    def make(requests, device=None, **options):
        world = make_world(backend=device or Device(), run_ahead=True, **options)
        world.client.pending = list(requests)
        return world
    return make


def request_of(world, request_id):
    return world.loop.active.get(request_id)


def in_flight(world):
    return {request.request_id for request in world.loop.active if world.loop.window.holds(request)}


@pytest.mark.parametrize(("options", "depth", "runs_ahead"), [
    ({"run_ahead": False}, 1, False), ({"run_ahead": True}, 2, True),
    ({"enable_trt_overlap": True}, 2, False)], ids=str)
def test_how_many_steps_are_in_flight(make_world, new_request, options, depth, runs_ahead):
    world = make_world(backend=Device(), **options)
    window, most = world.loop.window, 0
    assert (window.depth, window.runs_ahead, len(window), window.is_full) == (depth, runs_ahead, 0, False)
    world.client.pending = [new_request(i, [i], LONG) for i in range(4)]
    launch = window.launch

    def noted(batch, requests):
        nonlocal most
        launch(batch, requests)
        most = max(most, len(window))
        assert window.is_full == (len(window) == depth)

    window.launch = noted
    world.run()
    assert most == depth and len(window) == 0


def test_who_is_in_flight_is_blocked_where_steps_are_of_disjoint_requests(make_world, new_request):
    world = make_world(backend=Device(), enable_trt_overlap=True)
    world.client.pending = [new_request(i, [i], LONG) for i in range(4)]
    world.step(3)
    assert set(world.loop.window.blocked_request_ids()) == in_flight(world) and len(in_flight(world)) == 2
    world.run()
    assert not world.loop.window.blocked_request_ids()


def test_who_is_blocked_where_steps_run_ahead(ahead, new_request):
    def function(request_id, logits, token_ids):
        return logits

    world = ahead([
        new_request(1, [1], LONG), new_request(2, [2], 1), new_request(3, [3], 2),
        new_request(4, [4], LONG, beam_width=2),
        InferenceRequest(5, {"input_ids": [5], "request_output_len": LONG}, logits_post_processor=function)],
        max_beam_width=2)
    world.step()
    assert in_flight(world) == {1, 2, 3, 4, 5}
    assert set(world.loop.window.blocked_request_ids()) == {2, 4, 5}, "one has its last token, two run in lockstep"
    world.step()
    assert request_of(world, 2) is None and request_of(world, 3).state is LlmRequestState.GENERATION_TO_COMPLETE
    assert {3} <= set(world.loop.window.blocked_request_ids()), "its last token is in flight now"
    world.run()
    assert all(world.client.final(i).error == "" for i in range(1, 6))


@pytest.mark.parametrize("prompt_len", [5, 12])
def test_a_context_that_was_not_read_keeps_its_blocks(ahead, new_request, prompt_len):
    """A request is not launched again before its context is read, if the next step would release blocks.

    Blocks are released when they leave the attention window.
    """
    world = ahead([new_request(1, [1] * prompt_len, LONG), new_request(2, [2], LONG)],
                  Device(window=5), kv_cache_config=KvCacheConfig(max_attention_window=5))
    world.step()
    assert set(world.loop.window.blocked_request_ids()) == ({1} if prompt_len == 12 else set())
    world.step()
    assert in_flight(world) == ({2} if prompt_len == 12 else {1, 2})
    world.run()


# After a failed step

def kv_length(world, request_id):
    return world.loop.kv.kv_length(request_of(world, request_id))


def test_rows_that_ran_on_a_step_that_failed_are_void_and_their_room_is_given_back(ahead, new_request):
    device = Device(fails={3})
    world = ahead([new_request(i, [i] * 4, LONG) for i in (1, 2)], device)
    world.step(4)
    assert in_flight(world) == {1, 2} and [kv_length(world, i) for i in (1, 2)] == [7, 7]
    assert [request_of(world, i).num_tokens for i in (1, 2)] == [7, 7], "one token fewer was read than is launched for"

    held = world.loop.kv.used_blocks
    world.step()                                                  # the step of positions 7 and, after it, 8
    assert [launch.iteration for launch in device.launches] == [0, 1, 2, 3, 4, 3, 3], "the step that failed, in halves"
    assert len(world.loop.window) == 1 and in_flight(world) == set() == set(world.loop.window.blocked_request_ids())
    assert [request_of(world, i).num_tokens for i in (1, 2)] == [8, 8]
    assert [kv_length(world, i) for i in (1, 2)] == [7, 7], "of the last token nothing is in the cache"
    assert world.loop.kv.used_blocks == held
    blocks = [world.loop.kv.block_ids(request_of(world, i))[1] for i in (1, 2)]
    assert device.launches[5].operations == tuple(BlockClear(block_id, 3) for block_id in blocks), "before all others"

    world.step()                                                  # launched again; the void rows are read
    assert device.launches[-1].iteration == 5 and device.launches[-1].generation.kv_lengths.tolist() == [7, 7]
    assert [request_of(world, i).num_tokens for i in (1, 2)] == [8, 8], "a void row is nobody's token"
    assert world.loop.window.num_discarded_tokens == 2 and in_flight(world) == {1, 2}
    world.run()
    assert all(world.client.final(i).tokens() == [i] * 4 + world.expected([i] * 4, LONG) for i in (1, 2))


def test_a_block_that_a_void_row_took_goes_back(ahead, new_request):
    """Void rows that took a new block give it back, and the next launch clears it.

    The rows are void because they ran after a failed step.
    """
    device = Device(fails={4})
    world = ahead([new_request(i, [i] * 4, LONG) for i in (1, 2)], device)
    world.step(5)
    assert [kv_length(world, i) for i in (1, 2)] == [8, 8] and world.loop.kv.used_blocks == 4
    in_use = {block_id for i in (1, 2) for block_id in world.loop.kv.block_ids(request_of(world, i))}
    world.step()                                                  # launches position 8, and takes it back
    assert device.launches[5].generation.kv_lengths.tolist() == [8, 8]
    assert [kv_length(world, i) for i in (1, 2)] == [8, 8] and world.loop.kv.used_blocks == 4
    taken = set(device.launches[5].block_table_updates.block_ids.tolist())
    assert len(taken) == 2 and not taken & in_use
    assert set(device.launches[6].operations) == {BlockClear(block_id) for block_id in taken}
    world.run()
    assert all(world.client.final(i).tokens() == [i] * 4 + world.expected([i] * 4, LONG) for i in (1, 2))


def test_the_only_sequence_of_a_step_that_failed_is_lost_and_its_void_row_with_it(ahead, new_request):
    world = ahead([new_request(1, [1] * 4, LONG, streaming=True)], Device(fails={4}))
    world.run()
    assert world.client.final(1).code == "MODEL_ERROR" and world.client.streamed(1) == world.expected([1] * 4, 4)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_chunk_that_ran_on_one_that_failed_is_launched_again(ahead, new_request, failing):
    """If the step with a chunk of two prompts fails, the next chunk, which ran ahead, is launched again.

    Each prompt has three chunks.
    """
    device = Device(fails={failing})
    prompts = {1: [1] * 10, 2: [2] * 10}
    world = ahead([new_request(i, prompt, 6) for i, prompt in prompts.items()], device, enable_chunked_context=True,
                  max_num_tokens=2 * SIZE, context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS)
    world.step(failing + 1)
    launched = [request_of(world, i).context_position for i in (1, 2)]
    world.step()
    read = [request_of(world, i).context_read for i in (1, 2)]
    assert read == launched == [request_of(world, i).context_position for i in (1, 2)], "back where it was read to"
    assert [request_of(world, i).is_context for i in (1, 2)] == [position < 10 for position in launched]
    before = len(device.launches)
    world.step()
    again = device.launches[before]
    assert [work.start for work in again.context] == [position for position in launched if position < 10]
    world.run()
    assert all(world.client.final(i).tokens() == prompt + world.expected(prompt, 6) for i, prompt in prompts.items())


def test_what_starts_beside_void_rows_is_not_void(ahead, new_request):
    device = Device(fails={3})
    world = ahead([new_request(i, [i], LONG) for i in (1, 2)], device)
    world.step(4)
    world.client.pending = [new_request(3, [3] * 5, LONG)]
    world.step()                                                  # launched in the step after the failing one
    assert in_flight(world) == {3} and kv_length(world, 3) == 5
    world.step()
    assert request_of(world, 3).num_tokens == 6 and world.loop.window.num_discarded_tokens == 2
    world.run()
    assert all(world.client.final(i).error == "" for i in (1, 2, 3))


def test_nothing_is_planned_on_top_of_a_step_that_could_not_be_launched(ahead, new_request):
    device = Device(fails_to_launch={2})
    world = ahead([new_request(i, [i], LONG) for i in (1, 2)], device)
    world.step(3)
    window = world.loop.window
    assert window.must_be_read and len(window) == 1, "the one before it was read"
    world.step()
    assert [launch.iteration for launch in device.launches] == [0, 1, 2, 2, 2] and not window.must_be_read
    assert [request_of(world, i).num_tokens for i in (1, 2)] == [4, 4] and window.num_discarded_tokens == 0
    world.run()
    assert all(world.client.final(i).tokens() == [i, *world.expected([i], LONG)] for i in (1, 2))


def test_who_has_ended_is_not_run_again_whoever_has_its_slot(ahead, new_request):
    device = Device(fails={3})
    world = ahead([new_request(i, [i], LONG) for i in (1, 2, 3)], device, max_num_sequences=3)
    world.step(4)
    ended = request_of(world, 2).seq_slot
    world.client.stops = {2}
    # The failing step and the next one are in flight from here on. Neither was read.
    world.loop._poll_stops()
    world.client.stops = set()
    world.client.pending = [new_request(4, [4] * 3, LONG)]
    world.step()
    assert request_of(world, 4).seq_slot == ended and in_flight(world) == {4}
    again = [launch for launch in device.launches[5:] if launch.iteration == 3]
    assert again and all(ended not in launch.slots() for launch in again)
    world.run()
    for i, prompt in {1: [1], 3: [3], 4: [4] * 3}.items():
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, LONG)
    assert len(world.client.finals(2)) == 1


def test_a_step_of_requests_that_have_all_ended_is_not_run_again(ahead, new_request):
    device = Device(fails={3})
    world = ahead([new_request(i, [i], LONG) for i in (1, 2)], device)
    world.step(4)
    world.client.stops = {1, 2}
    world.loop._poll_stops()
    world.client.stops = set()
    world.client.pending = [new_request(3, [3] * 3, 4)]
    world.run()
    assert [launch.iteration for launch in device.launches].count(3) == 1 and not device.fails
    assert world.client.final(3).tokens() == [3] * 3 + world.expected([3] * 3, 4)


def test_a_row_is_judged_by_what_was_asked_when_it_was_launched(ahead, new_request):
    """The output of a row is checked by what the row's request asked for, even if its slot has a new request when read.

    The new request asks for log-probs and logits, which the row does not have.
    """
    device = Device()
    world = ahead([new_request(i, [i], LONG) for i in (1, 2)], device, max_num_sequences=2)
    world.step(4)
    world.client.stops = {2}
    world.step()
    world.client.stops = set()
    world.client.pending = [new_request(3, [3], 6, return_log_probs=True, return_generation_logits=True)]
    world.run()
    assert world.loop._runner.num_failed_steps == 0
    final = world.client.final(3)
    assert final.tokens() == [3, *world.expected([3], 6)] and final.tensors["generation_logits"].shape[2] == 6


def test_dropping_waits_for_every_step_and_forgetting_for_none(ahead, new_request):
    for wanted, name, waits in ((1, "drop_all", True), (0, "forget", False)):
        device = Device()
        world = ahead([new_request(1, [1], LONG)], device)
        world.step(3)
        read = device.reads
        getattr(world.loop.window, name)()
        assert len(world.loop.window) == 0 and device.reads - read == waits
        assert world.loop.window.num_discarded_tokens == wanted
