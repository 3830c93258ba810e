"""A leader and its followers over memory: the frames, what happens when one is wrong, and the start together."""

import struct
import threading
from zlib import crc32

import numpy as np
import pytest

from batch_manager.errors import ConfigError, DeviceLostError
from batch_manager.handover import ScheduledBatch
from batch_manager.names import ErrorCode
from batch_manager.parallel.channel import HEADER_SIZE, Channel, Kind, LostError, MemoryTransport
from batch_manager.parallel.leader import Leader, RankError, RankOutOfMemoryError
from batch_manager.parallel.leading import LeadingBackend
from batch_manager.parallel.link import Link
from tests.harness.ranks import RANK_TIMEOUT_S, DrawingBackend, MemoryRanks, ScriptedRank, different_tokens
from tests.harness.requests import request

OPTIONS = {"num_blocks": 64, "tokens_per_block": 4, "num_slots": 8, "max_seq_len": 64}


def channels() -> tuple[Channel, Channel, MemoryTransport]:
    """Return both ends, and the transport to the second."""
    first, second = MemoryTransport.pair()
    ends = Channel(first, 1.0), Channel(second, 1.0)
    for end in ends:
        end.trust()
    return *ends, second


class Ranks:
    """An engine of several scripted ranks without threads."""

    def __init__(self, make_world, num_ranks: int = 3, late_ranks=None, **options) -> None:
        local = DrawingBackend(**OPTIONS)
        self.others = {rank: ScriptedRank(local.info) for rank in range(1, num_ranks)}
        self.ranks = MemoryRanks(self.others)
        self.world = make_world(backend=LeadingBackend(local, self.ranks.leader, late_ranks),
                                exclude_input=True, **options)

    def step(self) -> bool:
        is_busy = self.world.step()
        if not self.world.loop.window:
            for rank in self.others.values():
                own = self.world.backend.local._pool.reshape(rank.pool.shape)
                assert different_tokens(self.world.loop, own, rank) == ""
        return is_busy


@pytest.fixture
def make_ranks(make_world):
    return lambda **options: Ranks(make_world, **options)


# ---------------------------------------------------------------------- frames


def test_frames_arrive_in_order_however_they_are_cut():
    first, second, transport = channels()
    for number in range(5):
        first.send(Kind.DONE, (number, None))
    first.beat()
    data = b"".join(transport.arrives)
    transport.arrives.clear()
    transport.arrives.extend(data[at:at + 1] for at in range(len(data)))
    frames = []
    while transport.arrives:
        frames += second.receive()
    assert frames == [(Kind.DONE, (number, None)) for number in range(5)]
    assert second.receive() == []


def altered(at: int, bit: int = 0):
    return lambda data: [data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:]]


def frame(payload: bytes, kind: int = Kind.STEP, length: int | None = None) -> bytes:
    header = struct.pack("<4sBBHQI", b"BMrk", 1, kind, 0, 0, len(payload) if length is None else length)
    return header + struct.pack("<II", crc32(header), crc32(payload)) + payload


@pytest.mark.parametrize("change, says", [
    (lambda data: [data, data], "frame 0 where frame 1 was due"),
    (lambda data: [], "frame 1 where frame 0 was due"),
    (altered(0), "no frame"), (altered(4), "version"), (altered(5), "header with a wrong checksum"),
    (altered(6), "no frame"), (altered(8), "header with a wrong checksum"),
    *[(altered(16 + at, bit), "header with a wrong checksum") for at in range(4) for bit in range(8)],    # the length
    (altered(20), "header with a wrong checksum"), (altered(24), "frame with a wrong checksum"),
    (altered(HEADER_SIZE), "frame with a wrong checksum"), (altered(-1 % 40), "frame with a wrong checksum"),
    (lambda data: [frame(b"", length=(1 << 31) + 1)], "2,147,483,649 bytes"),
    (lambda data: [frame(b"", kind=99)], "kind 99"), (lambda data: [data[:-1]], ""),
])
def test_a_frame_that_is_altered_missing_repeated_or_cut_ends_the_channel(change, says):
    first, second, transport = channels()
    first.send(Kind.ASK, ("x" * 40, 5))
    transport.arrives.extend(change(transport.arrives.pop()))
    first.send(Kind.ASK, ("y" * 40, 6))
    with pytest.raises(LostError) as raised:
        for _ in range(4):
            second.receive()
    assert says in str(raised.value)


def test_a_frame_whose_bytes_are_no_value_ends_the_channel():
    first, second, transport = channels()
    transport.arrives.append(frame(b"\xff\xff"))
    with pytest.raises(LostError, match="cannot be read"):
        second.receive()


def test_frames_that_came_before_the_end_are_read_first():
    first, second, _ = channels()
    first.send(Kind.END, (False, ""))
    first.close()
    assert second.receive() == [(Kind.END, (False, ""))]
    with pytest.raises(LostError, match="closed"):
        second.receive()


def test_a_long_frame_is_handed_over_in_pieces():
    first, second, transport = channels()
    array = np.arange(5 << 18, dtype=np.int32)
    first.send(Kind.ASK, array)
    assert len(transport.arrives) == 6
    found = []
    while not found:
        found = second.receive()
    assert np.array_equal(found[0][1], array)


def test_a_beat_never_waits_and_leaves_no_half_frame():
    class Full(MemoryTransport):
        room = 7

        def send(self, data: bytes) -> int:
            taken = min(self.room, len(data))
            self.room -= taken
            return super().send(data[:taken]) if taken else 0

    transport, other = Full(), MemoryTransport()
    transport.peer, other.peer = other, transport
    channel, receiver = Channel(transport, 0.01), Channel(other, 1.0)
    receiver.trust()
    channel.beat()
    channel.beat()
    with pytest.raises(LostError, match="takes no bytes"):
        channel.send(Kind.DONE, (1, None))
    transport.room = 1000
    channel.beat()
    while other.arrives:
        assert receiver.receive() in ([], [(Kind.DONE, (1, None))])


# ---------------------------------------------------------------------- steps


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_runs_the_steps_of_rank_0_and_has_its_tokens(make_ranks, num_ranks):
    ranks = make_ranks(num_ranks=num_ranks)
    prompts = [[1, 2, 3], [4] * 9, [5, 6]]
    for number, prompt in enumerate(prompts):
        ranks.world.client.pending.append(request(number, prompt, 7))
    while ranks.step():
        continue
    for number, prompt in enumerate(prompts):
        assert ranks.world.client.final(number).tokens() == ranks.world.backend.local.expected(prompt, 7)
    assert {rank.num_steps for rank in ranks.others.values()} == {ranks.world.backend.local.num_steps}
    assert ranks.world.loop.backend.figures()["World Size"] == num_ranks


def test_the_ranks_of_rank_0s_stage_begin_a_step_with_rank_0(make_ranks):
    """All ranks run the steps in one order, also those that run again after a failure."""
    ranks, steps = make_ranks(late_ranks=[1], enable_trt_overlap=True), {}
    local = ranks.world.backend.local
    for rank, backend in {0: local, **ranks.others}.items():
        steps[rank] = []
        backend.on_step = steps[rank].append

    def fail(batch):
        steps[1].append(batch)
        if any(2 in work.token_ids for work in batch.context):
            raise RuntimeError("planted")
    ranks.others[1].on_step = fail
    is_late = False
    for number in range(4):
        ranks.world.client.pending.append(request(number, [number + 1] * 5, 4))
        ranks.step()
        ranks.ranks.run()
        assert len(steps[0]) == len(steps[1])
        is_late |= len(steps[2]) > len(steps[1])
    while ranks.step():
        continue
    assert is_late
    orders = [[(step.iteration, step.slots()) for step in steps[rank]] for rank in range(3)]
    assert orders[0] == orders[1] == orders[2]
    client = ranks.world.client
    assert client.final(1).code == "MODEL_ERROR"
    for number in (0, 2, 3):
        assert client.final(number).tokens() == local.expected([number + 1] * 5, 4)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_late_step_that_raises_fails_no_step_that_begins_after_it(make_ranks, error):
    """The second micro-batch begins when a half of the first one, which failed, is run again."""
    ranks = make_ranks(late_ranks=[], enable_trt_overlap=True)
    local, first_of = ranks.world.backend.local, {}

    def fail(batch):
        slots = batch.slots()
        if first_of.setdefault(slots[0], batch) is batch and 2 in slots:
            raise error                                # the second micro-batch, once
        if 1 in slots:
            raise RuntimeError
    local.on_step = fail
    for number in range(4):
        ranks.world.client.pending.append(request(number, [number + 1] * 5, 4))
    while ranks.step():
        continue
    client = ranks.world.client
    assert client.final(1).code == "MODEL_ERROR"
    for number in (0, 2, 3):
        assert client.final(number).tokens() == local.expected([number + 1] * 5, 4)
    assert not ranks.ranks.leader._running


@pytest.mark.parametrize("error, code", [(RuntimeError, ErrorCode.MODEL_ERROR), (MemoryError, ErrorCode.OUT_OF_MEMORY)])
@pytest.mark.parametrize("in_finish", [False, True])
def test_a_step_that_raises_on_another_rank_is_narrowed_down_as_on_one(make_ranks, error, code, in_finish):
    """C21: only the sequence that fails alone is lost, and the others go on."""
    ranks = make_ranks()
    broken = ranks.others[2]

    def fail(batch):
        if 1 in batch.slots():
            raise error("secret")
    if in_finish:
        steps = []
        broken.on_step = steps.append
        broken.finish = lambda: fail(steps[-1])
    else:
        broken.on_step = fail
    for number in range(4):
        ranks.world.client.pending.append(request(number, [number + 1] * 5, 4))
    while ranks.step():
        continue
    client = ranks.world.client
    assert client.final(1).code == code.value
    for number in (0, 2, 3):
        assert client.final(number).tokens() == ranks.world.backend.local.expected([number + 1] * 5, 4)


def two_ranks() -> tuple[MemoryRanks, ScriptedRank]:
    rank = ScriptedRank(DrawingBackend().info)
    return MemoryRanks({1: rank}), rank


@pytest.mark.parametrize("error, raised", [(ValueError("secret"), RankError), (MemoryError(), RankOutOfMemoryError),
                                           (DeviceLostError("secret", ""), DeviceLostError)])
def test_the_error_of_another_rank_names_it_and_its_class_and_has_no_content(error, raised):
    ranks, rank = two_ranks()

    def fail(batch):
        raise error
    rank.on_step = fail
    number = ranks.leader.send_step(ScheduledBatch(0))
    with pytest.raises(raised) as caught:
        ranks.leader.wait_done(number)
    assert "rank 1" in str(caught.value) and type(error).__name__ in str(caught.value)
    assert "secret" not in str(caught.value)
    assert rank.closed == (raised is DeviceLostError)


# ---------------------------------------------------------------------- losses


def lose_by_closing(ranks: MemoryRanks) -> None:
    for end in ranks.transports[2]:
        end.close()


def lose_by_stopping(ranks: MemoryRanks) -> None:
    ranks.stopped.add(2)


def lose_by_an_altered_frame(ranks: MemoryRanks) -> None:
    ranks.transports[2][0].arrives.append(b"x" * 100)


def lose_by_the_end_of_its_program(ranks: MemoryRanks) -> None:
    ranks.end(2, None)


@pytest.mark.parametrize("lose", [lose_by_closing, lose_by_stopping, lose_by_an_altered_frame,
                                  lose_by_the_end_of_its_program])
@pytest.mark.parametrize("is_idle", [False, True])
def test_a_lost_rank_ends_all_with_one_final_each(make_ranks, lose, is_idle):
    ranks, client = make_ranks(), None
    client = ranks.world.client
    if not is_idle:
        for number in range(3):
            client.pending.append(request(number, [number + 1] * 5, 20))
        ranks.step()
        ranks.step()
    lose(ranks.ranks)
    with pytest.raises(DeviceLostError, match="^rank 2 ") as raised:
        for _ in range(200):
            ranks.ranks.run()
            ranks.ranks.tick()
            ranks.world.step()
    loop = ranks.world.loop
    loop.fail(raised.value)
    assert loop.health()["state"] == "FAILED" and "rank 2" in loop.health()["failure"]
    client.pending.append(request(9, [1], 1))
    loop.step(accept_new=True)
    for number in [9] if is_idle else [0, 1, 2, 9]:
        assert client.final(number).code == "ENGINE_FAILED"
    ranks.ranks.run()
    assert "rank 2" in ranks.ranks.followers[1].health()["failure"]
    assert ranks.others[1].closed
    assert ranks.ranks.leader.health()[2]["state"] == "LOST" and ranks.ranks.leader.health()[1]["state"] == "STOPPED"


def test_the_lost_rank_is_named_if_an_exchange_with_it_fails_before_its_channel_does(make_ranks):
    ranks = make_ranks()

    def fail(batch):
        lose_by_stopping(ranks.ranks)
        raise DeviceLostError("the exchange failed", "")
    ranks.world.backend.local.on_step = fail
    ranks.world.client.pending.append(request(1, [1] * 5, 20))
    with pytest.raises(DeviceLostError, match="^rank 2 was silent"):
        ranks.step()


def test_beats_keep_a_rank_alive_in_a_long_step_and_silence_is_counted_in_own_beats():
    ranks, _ = two_ranks()
    for _ in range(100):
        ranks.tick()
    assert ranks.leader.lost is None
    assert ranks.leader.health()[1]["seconds_since_heard"] <= ranks.leader.beat_s
    ranks.stopped.add(1)
    for _ in range(round(RANK_TIMEOUT_S / ranks.leader.beat_s)):
        ranks.tick()
    assert ranks.leader.lost is None
    ranks.tick()
    assert "silent for 4 s" in str(ranks.leader.lost)
    raised = []
    for _ in range(2):
        with pytest.raises(DeviceLostError) as caught:
            ranks.leader.check()
        raised.append(caught.value)
    assert raised[0] is not raised[1] and str(raised[0]) == str(raised[1])    # a raise adds to an exception's traceback


def test_an_exception_while_rank_0_closes_leaves_nothing_open(make_ranks, monkeypatch):
    ranks = make_ranks()
    backend, leader = ranks.world.backend, ranks.ranks.leader
    closed = []
    monkeypatch.setattr(backend.local, "close", lambda: closed.append(True))
    monkeypatch.setattr(leader, "_wait", lambda seconds, others: exec("raise SystemExit"))
    with pytest.raises(SystemExit):
        backend.close()
    assert closed and all(mine.is_closed for mine, _ in ranks.ranks.transports.values())


def test_the_other_ranks_end_when_rank_0_does():
    ranks, rank = two_ranks()
    ranks.leader.close()
    ranks.run()
    assert rank.closed and ranks.followers[1].failure is None and ranks.followers[1].health()["state"] == "RUNNING"


def test_a_rank_that_loses_rank_0_ends_by_itself():
    ranks, rank = two_ranks()
    ranks.transports[1][0].close()
    ranks.run()
    assert rank.closed and "rank 0 has closed" in ranks.followers[1].health()["failure"]


@pytest.mark.parametrize("drain", [True, False])
def test_a_shutdown_of_another_rank_asks_rank_0(drain):
    ranks, _ = two_ranks()
    asked = []
    ranks.leader.on_end = asked.append
    for _ in range(3):
        assert not ranks.followers[1].is_done(draining=True, aborting=not drain)
    ranks.leader.tick()
    assert asked == [drain]


# ---------------------------------------------------------------------- the start


class Starting:
    """A leader and two links that start, in threads over memory."""

    def __init__(self) -> None:
        pairs = {rank: MemoryTransport.pair() for rank in (1, 2)}
        ends = {rank: (Channel(mine, 1.0), Channel(theirs, 1.0)) for rank, (mine, theirs) in pairs.items()}
        self.leader = Leader({rank: mine for rank, (mine, _) in ends.items()}, self._wait, 1e6)
        self.links = [Link(rank, 3, theirs, self._wait, 1e6) for rank, (_, theirs) in ends.items()]

    @staticmethod
    def _wait(seconds, ranks):
        threading.Event().wait(0.001)
        return ranks

    def run(self, *bodies) -> list:
        """Run one body in the start of each rank. Return their results or exceptions."""
        results = [None] * 3

        def start(index: int, ranks: Leader | Link) -> None:
            try:
                with ranks.starting():
                    results[index] = bodies[index](ranks)
            except BaseException as error:
                results[index] = error
        threads = [threading.Thread(target=start, args=item) for item in enumerate([self.leader, *self.links])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


def test_ranks_that_start_get_the_values_of_all():
    def body(ranks):
        ranks.compare("the version", "1.0", "install one version")
        return min(ranks.exchange("num_blocks", 100 - ranks.rank)), ranks.exchange("ready")
    start = Starting()
    assert start.run(body, body, body) == [(98, [None] * 3)] * 3
    assert not start.leader.is_starting


def test_values_that_must_be_equal_are_an_error_on_every_rank_with_all_values():
    def body(ranks):
        ranks.compare("the digest", "ab" if ranks.rank == 1 else "cd", "copy the file")
    errors = Starting().run(body, body, body)
    assert {str(error) for error in errors} == {
        "the digest is cd on ranks 0, 2 and ab on rank 1; expected the same on every rank; copy the file"}


def test_arguments_that_differ_are_named_and_not_again_with_their_parts():
    of_rank = [{"a": "1", "cache": "None"},
               {"a": "1", "cache": "a Cache", "cache.size": "3"},
               {"a": "2", "cache": "None"}]
    errors = Starting().run(*[lambda ranks: ranks.compare_named("arguments", of_rank[ranks.rank], "fix it")] * 3)
    assert {str(error) for error in errors} == {
        "a is 1 on ranks 0, 1 and 2 on rank 2; cache is None on ranks 0, 2 and a Cache on rank 1; expected the same on "
        "every rank; fix it"}


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("error", [ConfigError("the model is missing", "expected one"), RuntimeError("no disk"),
                                   KeyboardInterrupt()])
def test_a_rank_that_fails_fails_all_with_its_reason(rank, error):
    def body(ranks):
        if ranks.rank == rank:
            raise error
        ranks.exchange("loaded")
    errors = Starting().run(body, body, body)
    assert errors.pop(rank) is error
    for other in errors:
        assert type(other) is ConfigError and other.fact.startswith(f"rank {rank}: ")
        assert (str(error) or "KeyboardInterrupt") in str(other)


def test_a_failure_interrupts_a_rank_that_is_still_loading():
    seen = []

    def fails(ranks):
        raise RuntimeError("no disk")

    def loads(ranks):
        interrupted = threading.Event()
        ranks.on_failure = lambda error: (seen.append(str(error)), interrupted.set())
        while not interrupted.wait(0.001):
            ranks.tick()
        ranks.exchange("loaded")
    errors = Starting().run(loads, loads, fails)
    assert len(seen) == 2 and all("rank 2: no disk" in text for text in [*seen, *map(str, errors[:2])])


def test_ranks_of_other_code_are_found_by_the_names_of_their_phases():
    errors = Starting().run(lambda ranks: ranks.exchange("b"), lambda ranks: ranks.exchange("b"),
                            lambda ranks: ranks.exchange("a"))
    assert all(type(error) is ConfigError and "'a'" in str(error) for error in errors)
