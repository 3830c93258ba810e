"""A subscriber written for vLLM's events, with classes of its own, follows the prefix cache of an engine."""

import threading

import msgspec
import pytest
import zmq

from batch_manager import ConfigError, KvCacheConfig, KvEvent
from batch_manager.extras import kv_events as publishing
from batch_manager.extras.kv_events import KvEventPublisher
from tests.harness.client import Client
from tests.harness.kv_replay import KEY
from tests.harness.waiting import until

SIZE, END = 4, (-1).to_bytes(8, "big", signed=True)
LOCAL = "tcp://127.0.0.1:*"
Hash = bytes | int


def schema(layout: str):
    """Return the class of a batch, as subscribers of vLLM (maps, arrays) and SGLang (mixed) define it."""
    def struct(name, fields, in_arrays=layout == "arrays", **more):
        return msgspec.defstruct(name, fields, array_like=in_arrays, omit_defaults=True,
                                 namespace={"__module__": __name__}, **more)

    stored = struct("BlockStored", [
        ("block_hashes", list[Hash]), ("parent_block_hash", Hash | None), ("token_ids", list[int]),
        ("block_size", int), ("lora_id", int | None), ("medium", str | None), ("lora_name", str | None),
        ("extra_keys", list | None, None), ("group_idx", int | None, None), ("kv_cache_spec_kind", str | None, None),
        ("kv_cache_spec_sliding_window", int | None, None)], tag=True)
    removed = struct("BlockRemoved", [("block_hashes", list[Hash]), ("medium", str | None),
                                      ("group_idx", int | None, None)], tag=True)
    cleared = struct("AllBlocksCleared", [], tag=True)
    return struct("KVEventBatch", [("ts", float), ("events", list[stored | removed | cleared]),
                                   ("data_parallel_rank", int | None, None)], layout != "maps")


class Subscriber:
    """Follows the events of one publisher. `blocks` is what it believes: (medium, hash) of all blocks."""

    def __init__(self, addresses: list[str], layout: str) -> None:
        self.context, self.decoder = zmq.Context(), msgspec.msgpack.Decoder(schema(layout))
        self.events, self.replay = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.events.connect(addresses[0])
        self.events.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.replay.connect(addresses[1])
        self.blocks: set[tuple[str, Hash]] = set()
        self.tokens: dict[Hash, list[int]] = {}
        self.expected = 0

    def apply(self, number: int, payload: bytes) -> None:
        assert number == self.expected
        self.expected += 1
        batch = self.decoder.decode(payload)
        assert batch.data_parallel_rank == 0                       # Dynamo reads no batch without it
        for event in batch.events:
            match type(event).__name__:
                case "AllBlocksCleared":
                    self.blocks.clear()
                case "BlockStored":
                    self.blocks |= {(event.medium, name) for name in event.block_hashes}
                    for place, name in enumerate(event.block_hashes):
                        self.tokens[name] = event.token_ids[place * event.block_size:(place + 1) * event.block_size]
                case "BlockRemoved":
                    self.blocks -= {(event.medium, name) for name in event.block_hashes}

    def catch_up(self) -> None:
        """Ask for all batches from the next one on."""
        self.replay.send_multipart((b"", self.expected.to_bytes(8, "big")))
        while True:
            assert self.replay.poll(10_000)
            _, number, payload = self.replay.recv_multipart()
            if number == END:
                return
            self.apply(int.from_bytes(number, "big"), payload)

    def follow(self, last: int) -> None:
        """Read events until batch `last`."""
        while self.expected <= last:
            assert self.events.poll(10_000)
            topic, number, payload = self.events.recv_multipart()
            assert topic == b"kv"
            if int.from_bytes(number, "big") >= self.expected:
                self.apply(int.from_bytes(number, "big"), payload)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def publish(make_manager, new_request):
    """publish(**options) returns a manager with host blocks and little room, its publisher, and ask(ids)."""
    publishers = []

    def make(**options):
        publisher = KvEventPublisher(LOCAL, replay_endpoint=LOCAL, topic="kv", **options)
        publishers.append(publisher)
        client = Client()
        manager = make_manager(
            client, backend={"tokens_per_block": SIZE, "num_blocks": 10, "host_blocks": 4},
            parts={"kv_events": publisher}, kv_cache_config=KvCacheConfig(
                enable_block_reuse=True, host_cache_size=1, event_hash_key=KEY, event_tokens=True))

        def ask(request_ids):
            for request_id in request_ids:
                client.pending.append(new_request(request_id, [request_id, *range(12)], 4))
                manager.notify()
                client.wait_for_finals(request_id)
            manager.kv_snapshot()                                  # the iteration of the last final is over
        return manager, publisher, ask

    yield make
    for publisher in publishers:
        publisher.close()


@pytest.mark.parametrize("layout", publishing.LAYOUTS)
def test_a_foreign_subscriber_knows_what_the_engine_can_find(publish, layout):
    manager, publisher, ask = publish(layout=layout)
    ask(range(3))                                                  # before anybody listens
    subscriber = Subscriber(publisher.addresses, layout)
    try:
        subscriber.catch_up()
        assert subscriber.expected == publisher._next
        ask(range(3, 9))
        subscriber.catch_up()
        blocks = [block for event in manager.kv_snapshot() for block in event.blocks if block.is_full]
        assert subscriber.blocks == {(("GPU", "CPU")[block.cache_level], block.block_hash) for block in blocks}
        assert {medium for medium, _ in subscriber.blocks} == {"GPU", "CPU"}
        assert all(tuple(subscriber.tokens[block.block_hash]) == block.token_ids for block in blocks)
        first = subscriber.expected
        while not subscriber.events.poll(20):                      # subscribed, at some time after it has connected
            ask([first])
            first += 1
        subscriber.follow(publisher._next - 1)
        assert {name for _, name in subscriber.blocks} == {
            block.block_hash for event in manager.kv_snapshot() for block in event.blocks if block.is_full}
    finally:
        subscriber.close()


class Slow:
    """An event whose thread waits until the test goes on."""

    def __init__(self):
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def to_vllm(self):
        self.has_begun.set()
        assert self.goes_on.wait(10)
        return []


@pytest.mark.parametrize("is_idle", [False, True])
def test_batches_without_room_and_ones_that_cannot_be_written_are_gaps_and_no_other_is_lost(is_idle, monkeypatch):
    """Even in the last moment: `close` publishes what waits. A batch ends the long wait of an idle thread."""
    monkeypatch.setattr(publishing, "LOOKS_UNTIL_IDLE", 3 if is_idle else 10**9)
    monkeypatch.setattr(publishing, "SECONDS_BETWEEN_IDLE_LOOKS", 60)
    created, slow, sent = KvEvent(0, "created", 1, SIZE), Slow(), []
    publisher = KvEventPublisher("inproc://events", max_queue_size=3)
    publisher._publisher.send_multipart = sent.append
    if is_idle:
        until(lambda: publisher._is_idle)
    publisher([slow])
    assert slow.has_begun.wait(10)
    for events in ([created], ["no event"], [created], [created], [created]):     # the thread has the first one already
        publisher(events)
    assert (publisher.num_dropped, len(publisher._waiting)) == (2, 3)
    slow.goes_on.set()
    until(lambda: not publisher._waiting)
    publisher([created])
    publisher.close()
    publisher.close()
    assert [int.from_bytes(number, "big") for _, number, _ in sent] == [0, 1, 3, 6]


@pytest.mark.parametrize("text, expected", [
    ("{", "cannot be read as JSON"),
    ("[]", "is JSON of type list; expected a JSON object"), ('{"hwm": 1, "hwm": 2}', "twice"),
    ('{"port": 5}', "has 'port'; known are buffer_steps, enable_kv"),
    ('{"publisher": "kafka"}', "publisher is 'kafka'.*expected zmq or null"),
    ('{"endpoint": "tcp://nowhere"}', "the address of KV events is 'tcp://nowhere'"),
    *((f'{{"endpoint": "tcp://{host}:{port}"}}', f":{port}'; expected a port in 0..65535")
      for host, port in (("*", 65536), ("127.0.0.1", 99999), ("10.0.0.1", 10**30))),
    ('{"replay_endpoint": "tcp://*:99999", "endpoint": "tcp://127.0.0.1:*"}', "expected a port in"),
    ('{"endpoint": 5}', "endpoint is 5; expected a text"),
    ('{"topic": "\\ud800"}', "topic is '.ud800'; expected a text"),
    ('{"hwm": 0}', "hwm is 0; expected an integer in 1"),
    ('{"layout": "rows"}', "layout is 'rows'; expected one of maps, arrays, mixed")])
def test_what_is_wrong_in_a_configuration_is_named(text, expected):
    with pytest.raises(ConfigError, match=expected):
        KvEventPublisher.of_json(text)


def test_vllms_configuration_is_understood():
    for text in ('{"publisher": "null"}', '{"enable_kv_cache_events": false}'):
        assert KvEventPublisher.of_json(text) is None
    with KvEventPublisher.of_json('{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:*",'
                                  '"replay_endpoint": "tcp://127.0.0.1:*", "topic": "kv@host@model", '
                                  '"buffer_steps": 5}') as publisher:
        assert len(publisher.addresses) == 2
