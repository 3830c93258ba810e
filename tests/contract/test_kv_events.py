"""C12, C15, C26: events of the prefix cache say what can be found, and nothing else."""

import hashlib
import json
from array import array

import numpy as np
import pytest

from batch_manager import (
    ConfigError,
    KvCacheConfig,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
    kv_block_hashes,
)
from tests.harness.client import Client
from tests.harness.kv_replay import KEY, Replay

SIZE = 4
PROMPT = list(range(100, 110))                                     # two full blocks and two tokens
# What TensorRT-LLM's serializer writes for each kind.
JSON_FIELDS = {"created": {"type", "num_blocks_per_cache_level"}, "stored": {"type", "parent_hash", "blocks"},
               "removed": {"type", "block_hashes"}, "updated": {"type", "block_hash", "cache_level", "priority"}}
# What vLLM's event classes require.
VLLM_FIELDS = {"AllBlocksCleared": set(), "BlockRemoved": {"block_hashes", "medium"},
               "BlockStored": {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
                               "lora_name"}}


@pytest.fixture
def watched(make_world, new_request):
    """make(**options) returns a world with `events`, and `ask(request_id, prompt, ...)`, which runs a request."""
    def make(kv=None, num_blocks=40, backend=None, hook=None, **options):
        events, replay = [], Replay()

        def take(new):
            events.extend(new)
            replay(new)
            if hook is not None:
                hook(new)

        kv = KvCacheConfig(**{"enable_block_reuse": True, "event_hash_key": KEY, "event_tokens": True, **(kv or {})})
        backend = {"num_blocks": num_blocks, "tokens_per_block": SIZE, **(backend or {})}
        world = make_world(backend=backend, kv_cache_config=kv, parts={"kv_events": take}, **options)
        world.events, world.replay, step = events, replay, world.step

        def checked_step(*arguments, **named):
            busy = step(*arguments, **named)
            assert not list(replay.faults(world.loop.kv))
            return busy

        def ask(request_id, prompt, count=3, retention=None, **request_options):
            request = new_request(request_id, prompt, count, **request_options)
            request.kv_cache_retention_config = retention
            world.client.pending.append(request)
            world.run()
            return world.client.final(request_id).tokens()

        world.step, world.ask, world.request = checked_step, ask, new_request
        return world
    return make


def test_blocks_are_stored_when_they_can_be_found_under_names_that_anybody_can_compute(watched):
    world = watched()
    tokens = world.ask(1, PROMPT)[:-1]                             # the newest token is not in the cache
    created, *stored = world.events
    assert (created.kind, created.num_blocks_per_cache_level, created.event_id) == ("created", (40, 0), 0)
    assert {event.kind for event in stored} == {"stored"}
    blocks = [block for event in stored for block in event.blocks]
    assert [token for block in blocks for token in block.token_ids] == tokens
    assert [block.is_full for block in blocks] == [True] * (len(tokens) // SIZE)
    assert [block.block_hash for block in blocks] == kv_block_hashes(tokens, SIZE, event_hash_key=KEY)

    def field(name, value):
        data = value if isinstance(value, bytes) else repr(value).encode()
        return f"{name}:{type(value).__name__}:{len(data)}:".encode() + data

    digest = b"".join(field(*pair) for pair in (("adapter", None), ("salt", None), ("extra", False)))
    for block in blocks:                                           # the definition, written again
        digest = hashlib.blake2b(digest, key=KEY, digest_size=8).digest() if block is blocks[0] else digest
        digest = hashlib.blake2b(field("parent", digest) + field("tokens", array("q", block.token_ids).tobytes()),
                                 key=KEY, digest_size=8).digest()
        assert int.from_bytes(digest, "big") == block.block_hash


def test_what_a_failed_step_computed_is_not_stored(watched):
    def fails(*_):
        raise ValueError("planted")

    world = watched(backend={"on_step": fails})
    world.client.pending.append(world.request(1, PROMPT, 3))
    world.run()
    assert world.client.final(1).code == "MODEL_ERROR"
    assert [event.kind for event in world.events] == ["created"]


def test_evicted_blocks_go_to_the_host_and_are_removed_children_first(watched):
    world = watched({"host_cache_size": 1}, num_blocks=6, backend={"host_blocks": 2})
    for request_id in range(8):
        world.ask(request_id, [request_id] * 10, 8)
    world.ask(8, [7] * 10, 2)                                      # comes back from the host or the pool
    assert {event.kind for event in world.events} == {"created", "stored", "updated", "removed"}
    assert world.replay.levels == (6, 2)
    moved = [event for event in world.events if event.kind == "updated"]
    assert {(event.previous.cache_level, event.blocks[0].cache_level) for event in moved} >= {(0, 1)}
    kinds = [each["type"] for event in moved for each in event.to_vllm()]
    assert kinds == ["BlockStored", "BlockRemoved"] * (len(kinds) // 2) and kinds


def test_priorities_are_told_when_they_are_set_and_when_they_end(watched):
    world = watched()
    world.ask(1, PROMPT)
    world.ask(2, PROMPT, retention=KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, 80, duration_ms=1000)]))
    world.clock.now += 2
    world.ask(3, [1, 2, 3])
    told = [(event.previous.priority, event.blocks[0].priority) for event in world.events if event.kind == "updated"]
    assert told[:2] == [(35, 80)] * 2 and told[2:] == [(80, 35)] * len(told[2:]) and len(told) >= 4
    assert not [each for event in world.events if event.kind == "updated" for each in event.to_vllm()]


def test_each_kind_has_the_fields_of_the_original_and_of_vllm(watched):
    world = watched({"host_cache_size": 1}, num_blocks=6, backend={"host_blocks": 2, "window": 12}, max_seq_len=40)
    for request_id in range(8):
        world.ask(request_id, [request_id] * 10, 8)
    seen, seen_vllm = set(), set()
    for event in world.events:
        text = json.loads(json.dumps(event.to_json()))
        assert text.keys() == {"event_id", "data", "window_size"} and text["window_size"] == 12
        data = text["data"]
        assert data.keys() == JSON_FIELDS[data["type"]]
        seen.add(data["type"])
        for block in data.get("blocks", ()):
            assert block.keys() == {"type", "block_hash", "tokens", "cache_level", "priority"}
            assert all(token.keys() == {"type", "token_id", "token_extra_id"} for token in block["tokens"])
        for each in event.to_vllm():
            extra = {"kv_cache_spec_kind", "kv_cache_spec_sliding_window"} if each["type"] == "BlockStored" else set()
            assert each.keys() == {"type"} | VLLM_FIELDS[each["type"]] | extra
            seen_vllm.add(each["type"])
            if each["type"] == "BlockStored":
                assert len(each["token_ids"]) == SIZE * len(each["block_hashes"])
    assert seen == JSON_FIELDS.keys() and seen_vllm == VLLM_FIELDS.keys()


@pytest.mark.parametrize("kv, salt", [({"event_tokens": False}, None), ({}, "a secret")])
def test_prompts_are_not_disclosed(watched, kv, salt):
    world = watched(kv)
    world.ask(1, [777, *PROMPT], cache_salt=salt)
    blocks = [block for event in world.events for block in event.blocks]
    assert blocks and {(block.token_ids, block.token_extra_ids) for block in blocks} == {(None, None)}
    assert "secret" not in repr(world.events)
    assert repr(KEY) not in repr(world.loop.kv) and "hash_key" not in repr(KvCacheConfig(event_hash_key=KEY))


def test_salts_extra_ids_and_keys_name_other_blocks():
    plain = {"event_hash_key": KEY}
    ways = [plain, {"event_hash_key": b"x"}, {**plain, "cache_salt": "a"}, {**plain, "cache_salt": b"a"},
            {**plain, "adapter_digest": bytes(32)}, {**plain, "token_extra_ids": [0] * 8}]
    names = [tuple(kv_block_hashes([1, 2, 3, 4] * 2, SIZE, **way)) for way in ways]
    assert len(set(names)) == len(names) and {len(each) for each in names} == {2}


@pytest.mark.parametrize("changed, text", [
    ({"token_ids": 5}, "token_ids is of type int; expected a list of integers in 0..2"),
    ({"token_ids": b"abcd"}, "^token_ids is of type bytes;"), ({"token_ids": "abcd"}, "^token_ids is of type str;"),
    ({"token_ids": [1, 2, 3, 4.0]}, r"^token_ids\[3\] is of type float; expected a list"),
    ({"token_ids": [1, 2, 3, True]}, r"^token_ids\[3\] is of type bool;"),
    ({"token_ids": [1, 2, -3, -1]}, r"^token_ids\[2\] is out of range;"),
    ({"token_ids": [1, 2, 3, 2**63]}, r"^token_ids\[3\] is out"),
    ({"token_ids": [10**9999]}, r"^token_ids\[0\] is out"),
    ({"token_ids": [[1, 2], [3, 4]]}, r"^token_ids\[0\] is of type list;"),
    ({"tokens_per_block": 0}, "tokens_per_block is 0; expected an integer of at least 1"),
    ({"tokens_per_block": 4.0}, "tokens_per_block is 4.0"), ({"tokens_per_block": True}, "tokens_per_block is True"),
    ({"event_hash_key": b""}, "event_hash_key is of type bytes and has 0 bytes; expected 1 to 64 bytes"),
    ({"event_hash_key": "key"}, "event_hash_key is of type str"), ({"event_hash_key": None}, "of type NoneType"),
    ({"cache_salt": 5}, "cache_salt is of type int; expected a str, bytes or None"),
    ({"adapter_digest": b"x"}, "adapter_digest is b'x'; expected 32 bytes"),
    ({"adapter_digest": "00" * 32}, "adapter_digest is '00"),
    ({"token_extra_ids": [1, 2, 3]}, "token_extra_ids has 3 ids and token_ids has 4; expected one for each"),
    ({"token_extra_ids": [1, 2, 3, "4"]}, r"^token_extra_ids\[3\] is of type str; expected a list")])
def test_arguments_of_names_that_are_refused(changed, text):
    good = {"token_ids": [1, 2, 3, 4], "tokens_per_block": SIZE, "event_hash_key": KEY}
    assert kv_block_hashes(**{**good, "token_ids": np.array([1, 2, 3, 4], np.uint8)}) == kv_block_hashes(**good)
    with pytest.raises(ConfigError, match=text):
        kv_block_hashes(**good | changed)


def test_a_hook_that_raises_costs_its_events_only(watched):
    def raises(events):
        raise ValueError("planted")

    world = watched(hook=raises)
    assert world.ask(1, PROMPT) == PROMPT + world.expected(PROMPT, 3)
    record = json.loads(world.client.stats[-1])
    assert record["Failed kv_events Callbacks"] >= 1 and record["KV Events"] >= 1


def test_events_are_kept_for_a_reader_and_the_oldest_are_dropped(make_manager, new_request):
    client = Client()
    manager = make_manager(client, backend={"tokens_per_block": SIZE}, kv_cache_config=KvCacheConfig(
        enable_block_reuse=True, event_buffer_max_size=3, event_hash_key=KEY))
    for request_id in range(6):
        client.pending.append(new_request(request_id, [request_id] * 9, 2))
    client.wait_for_finals(*range(6))
    snapshot = manager.kv_snapshot()
    replay = Replay()
    for event in snapshot:
        replay.take(event)
    assert not list(replay.faults(manager._loop.kv)) and {event.event_id for event in snapshot} != {-1}
    kept = manager.take_kv_events()
    assert len(kept) == 3 and kept[-1].event_id == snapshot[0].event_id
    assert manager.take_kv_events() == []
    assert manager._loop.kv_events.num_dropped == kept[0].event_id
    manager.shutdown()


def test_a_snapshot_in_a_callback_replaces_all_events_up_to_its_number(watched):
    world, snapshots = watched(), []
    world.client.on_send = lambda *_: snapshots.append(list(world.loop.kv_events.snapshot()))
    for request_id in range(4):
        world.ask(request_id, [*PROMPT[:5], *[request_id] * 6], 9, streaming=True)
    assert len(snapshots) > 20
    for snapshot in snapshots:
        begins, goes_on = Replay(), Replay()
        for event in snapshot:
            begins.take(event)
        for event in world.events[:snapshot[0].event_id + 1]:
            goes_on.take(event)
        assert begins.blocks == goes_on.blocks and not begins.complaints


def test_callbacks_of_two_managers_may_each_ask_the_other(make_manager, new_request):
    clients, managers, asked = [Client(), Client()], [], [0, 0]

    def ask_the_other(own):
        if len(managers) == 2:
            asked[own] += len(managers[1 - own].kv_snapshot()) > 0

    for number, client in enumerate(clients):
        client.on_send = lambda *_, number=number: ask_the_other(number)
        managers.append(make_manager(client, backend={"tokens_per_block": SIZE}, kv_cache_config=KvCacheConfig(
            enable_block_reuse=True, event_buffer_max_size=3)))
        client.pending.extend(new_request(each, [each] * 9, 30, streaming=True) for each in range(3))
    for client, manager in zip(clients, managers):
        client.wait_for_finals(0, 1, 2)
        assert manager.shutdown(timeout=20)
    assert min(asked) > 0


@pytest.mark.parametrize("kv, parts, text", [
    ({"event_buffer_max_size": 3}, {}, "enable_block_reuse is not set"),
    ({}, {"kv_events": print}, "enable_block_reuse is not set"),
    ({"event_hash_key": b""}, {}, "event_hash_key is of type bytes and has 0 bytes; expected 1 to 64"),
    ({"event_hash_key": "text"}, {}, "event_hash_key is of type str; expected 1 to 64 bytes")])
def test_what_cannot_be_is_refused(make_world, kv, parts, text):
    with pytest.raises(ConfigError, match=text):
        make_world(kv_cache_config=KvCacheConfig(**kv), parts=parts)


def test_without_a_hook_or_a_buffer_there_is_nothing(make_manager):
    manager = make_manager(Client(), kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    for call in (manager.take_kv_events, manager.kv_snapshot):
        with pytest.raises(ConfigError, match="makes no KV events"):
            call()
    cache = manager._loop.kv.cache
    assert cache.events is cache.index.observer is cache.pool.priority_changed is None
    manager.shutdown()
