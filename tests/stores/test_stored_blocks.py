"""C12, C13: blocks from a store are those of the same prompt of the same model, and no request waits for ever."""

import json
import threading
from random import Random

import pytest

from batch_manager import ConfigError, KvCacheConfig, PeftCacheConfig, StoredBlock, TrtGptModelType
from batch_manager.stores.stored_blocks import MOST_FAILURES, REST_S, SECONDS_TO_LOAD
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.harness.client import Client
from tests.harness.kv_replay import KEY, Replay
from tests.harness.scripted_adapters import adapter_tensors
from tests.harness.store_threads import HeldThreads

SIZE = 4
PROMPT = list(range(100, 141))                                     # ten full blocks and one token


class Memory:
    """A store in memory. `faults`: name of a method -> what its next calls do, in order."""

    def __init__(self) -> None:
        self.blocks: dict[StoredBlock, bytes] = {}
        self.faults: dict[str, list] = {}
        self.calls: list[str] = []

    def _begin(self, name, *given):
        self.calls.append(name)
        if self.faults.get(name):
            fault = self.faults[name].pop(0)
            if isinstance(fault, BaseException):
                raise fault
            return fault(*given) if callable(fault) else fault
        return None

    def count(self, blocks):
        fault = self._begin("count", blocks)
        known = next((place for place, block in enumerate(blocks) if block not in self.blocks), len(blocks))
        return known if fault is None else fault

    def load(self, blocks, buffers):
        fault = self._begin("load")
        for block, buffer in zip(blocks, buffers, strict=True):
            buffer[:] = self.blocks[block]
        return len(blocks) if fault is None else fault

    def save(self, block, content):
        self._begin("save")
        self.blocks[block] = bytes(content)

    def figures(self):
        return self._begin("figures") or {}

    def close(self):
        self._begin("close")


@pytest.fixture
def engine(make_world, new_request):
    """engine(store) returns a world with `threads`, `end()` and ask(request_id, prompt) -> computed prompt tokens."""
    def make(store, kv=None, backend=None, **options):
        trace, parts = [], {"block_store": store, **options.pop("parts", {})}
        world = make_world(
            backend={"num_blocks": 40, "tokens_per_block": SIZE, "host_blocks": 24, **(backend or {})},
            kv_cache_config=KvCacheConfig(**{"enable_block_reuse": True, "disk_min_tokens": 8, "host_cache_size": 1,
                                             **(kv or {})}),
            parts={"trace": trace.append, **parts}, **options)
        world.threads = world.loop.stored._threads = HeldThreads()

        def ask(request_id, prompt, count=5, **request_options):
            del trace[:]
            world.client.pending.append(new_request(request_id, prompt, count, **request_options))
            world.run()
            final = world.client.final(request_id)
            assert final.error == "" and final.tokens() == prompt + world.expected(prompt, count)
            return sum(size for iteration in trace for number, _, size in iteration.context if number == request_id)

        def end():
            world.threads.waits = False
            world.threads.run()
            for _ in range(1000):
                world.step()
                world.loop.stored.collect()
                if not world.loop.stored.is_saving:
                    break
            world.loop.stored.close()

        world.ask, world.end, world.new_request = ask, end, new_request
        return world
    return make


def figures(world):
    return world.loop.stored.figures()


def test_a_prompt_begins_where_the_store_ends(engine):
    store = Memory()
    first = engine(store)
    assert first.ask(1, PROMPT) == 41
    first.end()
    assert len(store.blocks) == 11 and figures(first)["Store Saved Blocks"] == 11     # 45 tokens of prompt and output

    replay = Replay()
    second = engine(store, {"event_hash_key": KEY}, parts={"kv_events": replay})
    assert second.ask(1, PROMPT) == 1, "the last token is always computed"
    assert not list(replay.faults(second.loop.kv))
    assert second.ask(2, PROMPT) == 1 and store.calls.count("load") == 1, "found in the cache the second time"
    assert second.ask(3, [*PROMPT[:21], *range(50)]) == 50, "the beginning alone is the same"
    second.end()
    assert figures(second)["Store Loaded Blocks"] == 10
    assert (figures(second)["External Lookup Tokens"], figures(second)["External Hit Tokens"]) == (41 + 71 - 20, 40)
    third = engine(store, backend={"key": 5})
    assert third.ask(1, PROMPT) == 41, "another model"
    assert third.ask(2, PROMPT, cache_salt="a") == 41, "another salt"
    assert third.ask(3, PROMPT, input_token_extra_ids=[1] * 41) == 41, "another content"
    assert third.ask(4, PROMPT, return_context_logits=True, return_log_probs=True) == 41, "logits are computed"
    third.end()
    fourth = engine(store, backend={"key": 5})
    assert fourth.ask(1, PROMPT, cache_salt="a") == fourth.ask(2, PROMPT, input_token_extra_ids=[1] * 41) == 1
    assert fourth.ask(3, PROMPT, return_context_logits=True) == 41
    assert len({block.key for block in store.blocks}) == len(store.blocks)


def test_events_of_loaded_blocks_name_the_adapter(engine):
    store, seen = Memory(), []
    for _ in range(2):
        events = []
        world = engine(store, backend={"adapter_pages": 2}, peft_cache_config=PeftCacheConfig(),
                       parts={"kv_events": events.extend})
        world.client.pending.append(world.new_request(1, PROMPT, 5, lora_task_id=7, **adapter_tensors(1, 1)))
        world.run()
        world.end()
        world.loop.preparing.close()
        seen += [block.lora_task_id for event in events if event.kind == "stored" for block in event.blocks]
    assert figures(world)["Store Loaded Blocks"] == 10 and {*seen} == {7} and len(seen) > 20


def test_of_a_request_with_beams_the_prompt_is_saved(engine):
    store = Memory()
    first = engine(store, max_beam_width=2)
    first.client.pending.append(first.new_request(1, PROMPT, 5, beam_width=2))
    first.run()
    first.end()
    assert {block.token_ids for block in store.blocks} == {tuple(PROMPT[at:at + SIZE]) for at in range(0, 40, SIZE)}
    second = engine(store)
    assert second.ask(1, PROMPT) == 1
    second.end()


@pytest.mark.parametrize("faults, computed, figure", [
    ({"count": [OSError("planted")]}, 41, None), ({"load": [OSError("planted")]}, 41, "Store Failed Loads"),
    ({"load": [4]}, 41 - 4 * SIZE, "Store Failed Loads"), ({"load": [-1]}, 41, "Store Failed Loads"),
    ({"count": [SystemExit(1)], "figures": [KeyboardInterrupt()]}, 41, None),
    ({"load": [SystemExit(1)]}, 41, "Store Failed Loads"),
    ({"load": [11]}, 41, "Store Failed Loads"), ({"load": [10.0]}, 41, "Store Failed Loads"),
    ({"figures": [{"Mine": 2**64}], "load": [10]}, 1, None), ({"count": [10]}, 41, "Store Failed Loads"),
    ({"figures": [{"a": 1, "\udcff": 2}]}, 1, None),
    ({"count": [lambda blocks: blocks.reverse(), lambda blocks: blocks.pop()]}, 41, None),
    *(({"count": [answer]}, 41, None) for answer in (11, -1, True, 10.0, "10"))])
def test_what_a_store_fails_to_give_is_computed(engine, faults, computed, figure):
    store = Memory()
    first = engine(store)
    first.ask(1, PROMPT)
    first.end()
    if faults.get("count") == [10]:
        store.blocks = dict(list(store.blocks.items())[:3])        # it promises blocks that it does not have
    second = engine(store)
    store.faults = {name: list(each) for name, each in faults.items()}
    assert second.ask(1, PROMPT) == computed
    second.end()
    assert figure is None or figures(second)[figure] == 1
    assert second.loop.kv.cache.host._reserved == set()


def test_after_many_failures_the_store_rests(engine):
    store = Memory()
    store.faults = {"save": [OSError("full")] * 100}
    world = engine(store)
    world.ask(1, PROMPT)
    while world.loop.stored.is_saving:
        world.step()
    assert store.calls.count("save") >= MOST_FAILURES and not store.blocks
    calls = store.calls[:]
    world.ask(2, PROMPT[::-1])
    assert set(store.calls[len(calls):]) <= {"figures"}, "it rests"
    world.clock.now += REST_S
    store.faults = {}
    world.ask(3, [*PROMPT, 5])
    world.end()
    assert store.blocks


def test_a_late_load_is_not_waited_for_and_one_load_serves_two_requests(engine):
    store = Memory()
    first = engine(store)
    first.ask(1, PROMPT)
    first.end()
    for late in (False, True):
        world = engine(store)
        world.threads.waits = True
        world.loop.stored.begin()
        world.threads.run()
        world.client.pending += [world.new_request(1, PROMPT, 3), world.new_request(2, PROMPT, 3)]
        for _ in range(5):
            world.step()
        assert world.loop.health()["queued_requests"] == 2 and len(world.threads.jobs) == 1
        assert world.loop.stored.num_tokens == 82 and json.loads(json.dumps(figures(world)))["Requests Loading"] == 2
        if late:
            world.clock.now += SECONDS_TO_LOAD
        else:
            world.threads.run()
        world.run()
        assert [world.client.final(number).tokens() for number in (1, 2)] == [PROMPT + world.expected(PROMPT, 3)] * 2
        world.end()
        assert figures(world)["Store Loaded Blocks"] == (0 if late else 10)
        assert world.loop.kv.cache.host._reserved == set()


def test_requests_that_wait_can_be_stopped_and_time_out(engine):
    store = Memory()
    first = engine(store)
    first.ask(1, PROMPT)
    first.end()
    world = engine(store)
    world.threads.waits = True
    world.loop.stored.begin()
    world.threads.run()
    world.client.pending += [world.new_request(1, PROMPT, 3), world.new_request(2, PROMPT, 3, deadline_s=1.0)]
    world.step(2)
    world.client.stops = {1}
    world.clock.now += 1.5
    world.step()
    assert world.client.final(1).finish_reason and world.client.final(2).code == "DEADLINE"
    world.end()
    world.run()


def test_an_engine_under_pressure_saves_and_loads_and_no_token_changes(engine):
    """Little room everywhere: evictions, host blocks that come and go, loads that find too little room."""
    store, draw = Memory(), Random(3)
    store.faults = {name: [OSError("planted") if draw.random() < 0.1 else None for _ in range(1000)]
                    for name in ("save", "load", "count")}
    replay = Replay()
    for run in range(3):
        replay = Replay()
        world = engine(store, {"event_hash_key": KEY},
                       {"num_blocks": 24, "host_blocks": 12, "is_asynchronous": run > 0},
                       parts={"kv_events": replay}, run_ahead=run == 1, max_batch_size=3)
        world.threads.waits = run > 0
        trunks = [[number] * 20 for number in range(6)]
        for number in range(60):
            prompt = [*draw.choice(trunks), *[draw.randrange(50) for _ in range(draw.randrange(1, 20))]]
            world.client.pending.append(world.new_request(number, prompt, draw.randrange(1, 9)))
        for turn in range(3000):
            if turn % 4 == 3:
                world.threads.run()
            if not world.step() and world.loop.is_empty and not world.client.pending:
                break
            assert not list(replay.faults(world.loop.kv))
        assert world.loop.is_empty and all(world.client.final(number).error == "" for number in range(60))
        for number in range(60):
            tokens = world.client.final(number).tokens()
            length = len(tokens)
            given = next(size for size in range(21, length) if tokens[size:] == world.expected(tokens[:size],
                                                                                              length - size))
            assert given <= 40
        world.end()
        assert world.loop.kv.cache.host._reserved == set()
        assert figures(world)["Store Saved Blocks"] > 10 and (run == 0 or figures(world)["Store Loaded Blocks"] > 10)


def test_a_real_manager_saves_what_it_has_when_it_is_shut_down(make_manager, new_request):
    store = Memory()
    for computed in (False, True):
        client = Client()
        manager = make_manager(client, backend={"tokens_per_block": SIZE, "host_blocks": 24},
                               parts={"block_store": store}, kv_cache_config=KvCacheConfig(
                                   enable_block_reuse=True, host_cache_size=1, disk_min_tokens=8))
        client.pending.append(new_request(1, PROMPT, 5))
        manager.notify()
        client.wait_for_finals(1)
        store.faults = {"close": [SystemExit(1)]}
        assert manager.shutdown(timeout=20) and manager.health()["failure"] == ""
        assert len(store.blocks) == 11 and ("load" in store.calls) == computed
        assert store.calls[-1] == "close"


def test_a_store_that_hangs_does_not_keep_the_engine_from_its_end(make_manager, new_request, monkeypatch):
    monkeypatch.setattr("batch_manager.stores.stored_blocks.SECONDS_WITHOUT_A_SAVE", 0.2)
    client, returns, store = Client(), threading.Event(), Memory()
    store.save = lambda block, content: returns.wait(60)
    manager = make_manager(client, backend={"tokens_per_block": SIZE, "host_blocks": 24}, parts={"block_store": store},
                           kv_cache_config=KvCacheConfig(enable_block_reuse=True, host_cache_size=1))
    try:
        client.pending.append(new_request(1, PROMPT, 5))
        manager.notify()
        client.wait_for_finals(1)
        assert manager.shutdown(timeout=20) and "close" not in store.calls
    finally:
        returns.set()
    for thread in [each for each in threading.enumerate() if each.name.startswith("batch_manager store")]:
        thread.join(20)
    assert store.calls.count("close") == 1 and store.calls[-1] == "close"


def test_a_store_that_is_always_too_slow_rests(engine):
    store = Memory()
    first = engine(store)
    for number in range(MOST_FAILURES + 1):
        first.ask(number, [number, *PROMPT])
    first.end()
    world = engine(store)
    world.threads.waits = True
    world.loop.stored.begin()
    world.threads.run()
    for number in range(MOST_FAILURES + 1):
        world.client.pending.append(world.new_request(number, [number, *PROMPT], 5))
        world.step(3)
        is_waiting = figures(world)["Requests Loading"] == 1
        assert is_waiting == (number < MOST_FAILURES)
        world.clock.now += SECONDS_TO_LOAD
        world.step()
        world.threads.run()                                        # late, and right
        world.run()
    world.end()


class WithoutHostBlocks(ScriptedBackend):
    host_block = None


@pytest.mark.parametrize("kv, options, text", [
    ({}, {"backend": {"host_blocks": 0}}, "host_cache_size is 1"),
    ({"host_cache_size": 0}, {"backend": {"host_blocks": 0}}, "Parts.block_store is set; the backend has no blocks in"),
    ({}, {"backend": WithoutHostBlocks(host_blocks=4)}, "lacks host_block"),
    ({"disk_cache_path": "x", "disk_cache_size": 5}, {}, "Parts.block_store and disk_cache_path are both set"),
    ({"disk_cache_path": "x"}, {}, "disk_cache_size is not set"),
    ({"disk_cache_size": 5}, {}, "disk_cache_path is not"),
    ({"enable_block_reuse": False, "host_cache_size": 0, "disk_cache_path": "x", "disk_cache_size": 5}, {},
     "enable_block_reuse is not set")])
def test_what_cannot_be_is_refused(make_world, kv, options, text):
    with pytest.raises(ConfigError, match=text):
        make_world(kv_cache_config=KvCacheConfig(**{"enable_block_reuse": True, "host_cache_size": 1, **kv}),
                   **{"backend": {"host_blocks": 4}, "parts": {"block_store": Memory()}, **options})


def test_static_batches_have_no_store(make_world):
    world = make_world(model_type=TrtGptModelType.V1, backend={"host_blocks": 4}, parts={"block_store": Memory()},
                       kv_cache_config=KvCacheConfig(enable_block_reuse=True, host_cache_size=1))
    assert world.loop.stored is None
