"""Resources other than blocks are claimed with a request's blocks, all or none, and are released exactly once."""

import json

import pytest

from batch_manager import SchedulerPolicy, TrtGptModelType
from batch_manager.errors import OutOfResourceError
from batch_manager.handover import RowFailure
from batch_manager.names import ErrorCode


class Licences:
    """A resource with a fixed number of pieces, of which each request needs one. It logs claims and releases.

    holders   ids of the requests that hold a piece
    """

    def __init__(self, name, log, pieces=100):
        self.name, self.log, self.pieces, self.holders = name, log, pieces, set()

    def claim(self, requests):
        ids = [request.request_id for request in requests]
        assert not self.holders & set(ids)
        if len(self.holders) + len(ids) > self.pieces:
            raise OutOfResourceError(f"{len(ids)} licences of {self.name} were asked for")
        self.holders |= set(ids)
        self.log += [("claim", self.name, i) for i in ids]

    def release(self, request):
        self.holders.remove(request.request_id)                    # a KeyError if the request holds none
        self.log.append(("release", self.name, request.request_id))

    def set_up(self, request, setup):
        assert request.request_id in self.holders
        return setup

    def figures(self):
        return {f"Licences Of {self.name}": self.pieces, f"Used Licences Of {self.name}": len(self.holders)}


def licensed(make_world, pieces=(100, 100), **options):
    log = []
    world = make_world(**options)
    world.licences = [Licences(name, log, n) for name, n in zip("ab", pieces)]
    world.loop._resources.others = tuple(world.licences)
    world.log = log
    return world


def assert_each_was_given_back(world, claims):
    for i, count in claims.items():
        of_one = [(what, name) for what, name, j in world.log if j == i]
        assert of_one == [("claim", "a"), ("claim", "b"), ("release", "b"), ("release", "a")] * count, i
    assert not any(licences.holders for licences in world.licences)


@pytest.mark.parametrize("model_type", [TrtGptModelType.InflightFusedBatching, TrtGptModelType.V1])
def test_they_are_claimed_in_order_and_released_in_the_opposite_one_however_a_request_ends(
        make_world, new_request, model_type):
    def faults(batch):
        slots = {request.request_id: request.seq_slot for request in world.loop.active}
        ran = batch.slots()
        if slots.get(4) in ran:
            raise RuntimeError
        if slots.get(5) in ran:
            return {slots[5]: RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted")}
        return None

    world = licensed(make_world, backend={"on_step": faults}, model_type=model_type)
    end_id = world.expected([2, 2], 5)[3]
    world.client.pending = [new_request(1, [1, 1], 4), new_request(2, [2, 2], 90, end_id=end_id),
                            new_request(3, [3, 3], 90, deadline_s=5), new_request(4, [4, 4], 9),
                            new_request(5, [5, 5], 9), new_request(6, [6, 6], 90)]
    world.step(8)
    world.clock.now += 6
    world.client.stops = {6}
    world.run()
    assert [world.client.final(i).code or world.client.final(i).finish_reason for i in range(1, 7)] == [
        3, 1, 4, "MODEL_ERROR", "NON_FINITE_LOGITS", 5]
    assert_each_was_given_back(world, dict.fromkeys(range(1, 7), 1))


def test_a_request_that_never_ran_has_nothing_to_give_back(make_world, new_request):
    world = licensed(make_world, backend={"num_blocks": 4, "tokens_per_block": 8},
                     policy=SchedulerPolicy.GUARANTEED_NO_EVICT)
    world.client.pending = [new_request(1, [1] * 20, 12), new_request(2, [2] * 20, 12)]
    world.step(2)
    world.client.stops = {2}
    world.run()
    assert_each_was_given_back(world, {1: 1, 2: 0})


def test_a_pause_gives_them_back_and_the_next_start_claims_them_again(make_world, new_request):
    world = licensed(make_world, backend={"num_blocks": 6, "tokens_per_block": 4})
    world.client.pending = [new_request(i, [i + 1] * 5, 12) for i in range(3)]
    world.run()
    pauses = {i: sum(what == "claim" and name == "a" and j == i for what, name, j in world.log) for i in range(3)}
    assert pauses[0] == 1 and max(pauses.values()) > 1
    assert_each_was_given_back(world, pauses)


def test_statistics_say_what_each_resource_says_of_itself(make_world, new_request):
    world = licensed(make_world, pieces=(100, 50))
    world.client.pending = [new_request(1, [1], 4), new_request(2, [1], 2)]
    world.run()
    used = [(record["Used Licences Of a"], record["Used Licences Of b"], record["Licences Of b"])
            for record in map(json.loads, world.client.stats)]
    assert used[0] == (2, 2, 50) and (1, 1, 50) in used and used[-1] == (0, 0, 50)
    assert "Licences Of a" not in make_plain_record(make_world, new_request)


def make_plain_record(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 2)]
    world.run()
    return json.loads(world.client.stats[-1])


def test_what_was_claimed_is_given_back_when_the_next_has_too_little(make_world, new_request):
    """If a plan needs more pieces of a resource than are free, all its claims are undone and all requests fail.

    The errors say that the scheduler broke its contract. Later requests are served.
    """
    world = licensed(make_world, pieces=(100, 2))
    world.client.pending = [new_request(1, [1], 9)]
    world.step(2)
    world.client.pending = [new_request(2, [2], 9), new_request(3, [3], 9)]
    world.step()
    assert {world.client.final(i).code for i in (1, 2, 3)} == {"ENGINE_FAILED"}
    assert "2 licences of b were asked for" in world.client.final(1).error
    assert "broke the scheduler contract" in world.client.final(1).error
    assert world.loop.kv.used_blocks == 0 and world.loop.failure is None
    ends = [("release", "b", 1), ("release", "a", 1)]
    assert world.log == [("claim", "a", 1), ("claim", "b", 1), ("claim", "a", 2), ("claim", "a", 3),
                         ("release", "a", 2), ("release", "a", 3), *ends]
    world.client.pending = [new_request(4, [4], 3)]
    world.run()
    assert world.client.final(4).error == ""
