"""LoRA adapters, from the tensors of a request to its tokens (C7, C8, C12).

The tokens of the backend depend on what the adapter's pages hold.
"""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import numpy as np
import pytest

from batch_manager import KvCacheConfig, PeftCacheConfig, SchedulerOutput, SchedulerPolicy, TrtGptModelType
from batch_manager.errors import BatchManagerError, ConfigError, ManagerClosedError, OutOfResourceError
from batch_manager.scheduling.capacity import STARVED_PLANS
from batch_manager.testing.scripted_backend import ADAPTER_MODULES
from tests.harness.scripted_adapters import adapter_tensors, content_of
from tests.harness.waiting import until

PAGES = 6
ONE_RANK = 4 * ADAPTER_MODULES.page_elements      # bytes of an adapter of rank 1 in float32


@pytest.fixture
def make_adapted(make_world):
    """Return the function that makes a World whose engine has adapters: six pages, and 100,000 bytes on the host."""
    made = []

    def make(backend=None, peft=None, **options):
        config = PeftCacheConfig(**{"host_cache_size": 100_000, "max_adapter_size": PAGES} | (peft or {}))
        made.append(make_world(backend={"adapter_pages": PAGES} | (backend or {}), peft_cache_config=config, **options))
        return made[-1]

    yield make
    for world in made:
        world.loop.preparing.close()


def settle(world):
    """Run iterations until every request has its final. The helper thread may need some time."""
    preparing, jobs = world.loop.preparing, 0
    while world.client.pending or not world.loop.is_empty:
        if not world.step():
            jobs += 1
            assert jobs < 60_000
            sleep(0.001)
        assert not list(world.loop.adapters.faults())
    assert not preparing and not world.loop.adapters.store.users and world.loop.adapters.free_pages == PAGES


def generated(world, number, prompt):
    final = world.client.final(number)
    assert final.error == ""
    return final.tokens()[len(prompt):]


def test_each_request_of_a_mixture_gets_the_tokens_of_its_adapter(make_adapted, new_request):
    world = make_adapted()
    first, second = adapter_tensors(1), adapter_tensors(2, rank=3)
    for number, (task, tensors) in enumerate([(7, first), (2**64 - 1, second), (None, {}), (7, {}), (-1, {})]):
        ids = {} if task is None else {"lora_task_id": task}
        world.client.pending.append(new_request(number, [5, 6, 7], 9, **ids, **tensors))
    settle(world)
    expected = [world.backend.expected([5, 6, 7], 9, adapter=content) for content in
                (content_of(first), content_of(second), None, content_of(first), content_of(second))]
    assert [generated(world, i, [5, 6, 7]) for i in range(5)] == expected and len(set(map(tuple, expected))) == 3
    last = json.loads(world.client.stats[-1])
    assert (last["LoRA Device Pages"], last["LoRA Adapters On Device"], last["LoRA Adapters On Host"]) == (PAGES, 2, 2)
    assert last["Used LoRA Host Cache Bytes"] == 4 * ONE_RANK and last["LoRA Host Cache Bytes"] == 100_000
    shown = [json.loads(record) for record in world.client.stats]
    assert any(record["Running LoRA Tasks"] == f"7,{2**64 - 1}" and record["Requests With LoRA"] == 4
               for record in shown)


def requests_of(new_request, tasks, *, known=(), output=6):
    """Return requests with these task ids; the first of each id brings an adapter of rank 1 + id % 3."""
    seen, made = set(known), []
    for number, task in enumerate(tasks):
        given = {} if task is None else {"lora_task_id": task}
        if task not in seen and task is not None:
            given |= adapter_tensors(task, 1 + task % 3)
            seen.add(task)
        made.append(new_request(number, [number % 5 + 1] * (3 + number % 7), output + number % 4, **given))
    return made


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
@pytest.mark.parametrize("options", [
    {}, {"backend": {"is_asynchronous": True}}, {"enable_trt_overlap": True},
    {"enable_chunked_context": True, "kv_cache_config": KvCacheConfig(enable_block_reuse=True)},
    {"backend": {"num_blocks": 9, "tokens_per_block": 4}}, {"max_beam_width": 2}])
def test_more_adapters_than_pages_and_bytes(make_adapted, new_request, policy, options):
    """40 requests over 12 adapters, in pages for two to six of them: each gets the tokens that it gets alone."""
    options = {"peft": {"host_cache_size": 18 * ONE_RANK}, "max_queued_requests": 100, "max_num_sequences": 6} | options
    world = make_adapted(policy=policy, **options)
    tasks = [None if number % 7 == 3 else (number * 5 + number // 7) % 12 for number in range(40)]
    world.client.pending = requests = requests_of(new_request, tasks)
    requests = list(requests)
    for request, task in zip(requests, tasks):
        if task is not None:                                        # the host cache holds few: each brings its own
            for name, value in adapter_tensors(task, 1 + task % 3).items():
                setattr(request, name, value)
    settle(world)
    for number, (request, task) in enumerate(zip(requests, tasks)):
        final = world.client.final(number)
        content = None if task is None else content_of(adapter_tensors(task, 1 + task % 3))
        assert final.error == "" and generated(world, number, request.input_ids) == world.backend.expected(
            request.input_ids, request.request_output_len, adapter=content)
    last = json.loads(world.client.stats[-1])
    assert last["LoRA Loads"] >= last["LoRA Evictions"] > 3


def test_an_id_reused_for_other_content_finds_no_block_of_the_old_one(make_adapted, new_request):
    world = make_adapted(kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    prompt, reused = list(range(1, 30)), []
    for round_, seed in enumerate((1, 2, 1)):
        for number in (2 * round_, 2 * round_ + 1):
            world.client.pending = [new_request(number, prompt, 5, lora_task_id=3, **adapter_tensors(seed))]
            settle(world)
            assert generated(world, number, prompt) == world.backend.expected(
                prompt, 5, adapter=content_of(adapter_tensors(seed)))
            reused.append(json.loads(world.client.stats[-1])["Reused KV cache blocks"])
        assert world.loop.adapters.store.forget(3)
    assert reused == [0, reused[1], reused[1], reused[3], reused[4], reused[5]] and sorted(set(reused)) == [
        0, reused[1], reused[3], reused[4], reused[5]]    # of the same content only, even after a time


def test_the_old_content_goes_with_its_last_request_while_the_new_one_runs(make_adapted, new_request):
    world = make_adapted()
    store = world.loop.adapters.store
    world.client.pending = [new_request(1, [1, 2], 30, lora_task_id=3, **adapter_tensors(1))]
    while not world.loop.active.in_order:
        world.step()
    world.step(3)
    assert store.forget(3) and not store.forget(3) and len(store) == 1
    world.client.pending = [new_request(2, [1, 2], 30, lora_task_id=3, **adapter_tensors(2)),
                            new_request(3, [1, 2], 30, lora_task_id=3)]
    settle(world)
    assert len(store) == 1 and [generated(world, i, [1, 2]) for i in (1, 2, 3)] == [
        world.backend.expected([1, 2], 30, adapter=content_of(adapter_tensors(seed))) for seed in (1, 2, 2)]


def config_of(*rows):
    return {"lora_config": np.array(rows), "lora_weights": np.ones((len(rows), 99), np.float32)}


BAD = {
    "an id alone that is not known": ({"lora_task_id": 5}, "LORA_TASK_NOT_CACHED", "LoRA task 5 not found in cache"),
    "other content": ({"lora_task_id": 1, **adapter_tensors(9)}, "INVALID_REQUEST", "LoRA task 1 is in the cache with"),
    "too many pages": ({"lora_task_id": 5, **adapter_tensors(5, PAGES + 1)}, "INVALID_REQUEST", "adapter size 7"),
    "too many bytes": ({"lora_task_id": 5, **adapter_tensors(5, PAGES)}, "TOO_LARGE_FOR_KV_CACHE", "host_cache_size"),
    "no id": (adapter_tensors(5), "INVALID_REQUEST", "lora_weights and lora_config are set without lora_task_id"),
    "no weights": ({"lora_task_id": 5, "lora_config": [[1, 0, 1]]}, "INVALID_REQUEST", "without lora_weights"),
    "no config": ({"lora_task_id": 5, "lora_weights": [[1.0]]}, "INVALID_REQUEST", "without lora_config"),
    "an id out of range": ({"lora_task_id": 2**64}, "INVALID_REQUEST", "lora_task_id is"),
    "a module that the family has not": ({"lora_task_id": 5, **config_of((0, 0, 1))}, "INVALID_REQUEST", "module id 0"),
    "an unknown module": ({"lora_task_id": 5, **config_of((15, 0, 1))}, "INVALID_REQUEST", "module id 15"),
    "a layer out of range": ({"lora_task_id": 5, **config_of((1, 2, 1))}, "INVALID_REQUEST", "layer 2 for attn_q"),
    "rank 0": ({"lora_task_id": 5, **config_of((1, 0, 0))}, "INVALID_REQUEST", "adapter size 0"),
    "a module twice": ({"lora_task_id": 5, **config_of((1, 0, 1), (1, 0, 1))}, "INVALID_REQUEST", "row 0 has attn_q"),
    "a row that is too short": ({"lora_task_id": 5, "lora_config": [[1, 0, 2]], "lora_weights": [[0.5] * 13]},
                                "INVALID_REQUEST", "row 0 of lora_weights has 13 elements"),
    "DoRA": ({"lora_task_id": 5, **config_of((1, 0, 1, 1))}, "INVALID_REQUEST", "DoRA"),
    "NaN": ({"lora_task_id": 5, **config_of((1, 0, 1)), "lora_weights": [[np.nan] * 9]}, "INVALID_REQUEST", "finite"),
    "rows that differ": ({"lora_task_id": 5, **config_of((1, 0, 1)), "lora_weights": [[1.0], [1.0]]}, "INVALID_REQUEST",
                         "rows of lora_weights is 2"),
    "more bytes than a request": ({"lora_task_id": 5, **config_of((1, 0, 1)), "lora_weights": np.ones((1, 20_000))},
                                  "INVALID_REQUEST", "max_request_bytes"),
}


def test_bad_adapters_are_refused_by_name_and_their_neighbours_run_on(make_adapted, new_request):
    world = make_adapted(peft={"host_cache_size": 3 * ONE_RANK}, max_request_bytes=30_000, max_queued_requests=100)
    world.client.pending = [new_request(100, [1, 2], 40, lora_task_id=1, **adapter_tensors(1)),
                            new_request(101, [1, 2], 40)]
    while len(world.loop.active) < 2:
        world.step()
    for number, (tensors, _, _) in enumerate(BAD.values()):
        world.client.pending.append(new_request(number, [4, 5], 4, **tensors))
    settle(world)
    for number, (_, code, says) in enumerate(BAD.values()):
        final = world.client.final(number)
        assert final.code == code and says in final.error and f"request {number}: " in final.error
    assert generated(world, 100, [1, 2]) == world.backend.expected([1, 2], 40, adapter=content_of(adapter_tensors(1)))
    assert generated(world, 101, [1, 2]) == world.backend.expected([1, 2], 40)


def test_the_same_content_again_is_a_hit_and_a_full_host_cache_may_be_tried_again(make_adapted, new_request):
    world = make_adapted(peft={"host_cache_size": 2 * ONE_RANK})
    world.client.pending = [new_request(i, [i], 20, lora_task_id=task, **adapter_tensors(task))
                            for i, task in enumerate((1, 1, 2, 3))]
    settle(world)
    assert [world.client.final(i).code for i in range(4)] == ["", "", "", "QUEUE_FULL"]
    store = world.loop.adapters.store
    assert len(store) == 2 and store.used_bytes == 2 * ONE_RANK
    for later in (new_request(4, [4], 3, lora_task_id=3, **adapter_tensors(3)), new_request(5, [4], 3, lora_task_id=1)):
        world.client.pending = [later]
        settle(world)
    assert world.client.final(4).error == "" and world.client.final(5).code == "LORA_TASK_NOT_CACHED"    # the oldest


def test_requests_wait_for_the_check_in_order_and_can_end_meanwhile(make_adapted, new_request):
    world = make_adapted()
    preparing = world.loop.preparing
    run, jobs = preparing.check, []
    preparing._helper, preparing._jobs = "not started", type("Jobs", (), {"put": staticmethod(jobs.append)})
    adapter = {"lora_task_id": 1, **adapter_tensors(1)}
    world.client.pending = [new_request(1, [1], 3, **adapter), new_request(2, [2], 3, lora_task_id=1),
                            new_request(3, [3], 3), new_request(4, [4], 3, **adapter, deadline_s=5),
                            new_request(5, [5], 3, **adapter), new_request(1, [1], 3)]
    world.step(4)
    assert world.client.final(3).error == "" and world.client.final(1).code == "DUPLICATE_REQUEST_ID"
    assert len(world.loop.intake) == 4 and len(jobs) == 3
    assert world.loop.intake.figures()["Queued Tokens"] == 4
    world.clock.now += 6
    world.client.stops = {5}
    world.step(2)
    assert world.client.final(4).code == "DEADLINE" and world.client.final(5).finish_reason == 5
    world.client.responses.clear()
    for job in jobs:
        job.run(run)
    preparing._helper = None
    settle(world)
    assert sorted(world.client.responses) == [1, 2] and all(world.client.final(i).error == "" for i in (1, 2))


def test_a_starved_adapter_gets_in(make_adapted, new_request):
    """Small adapters come all the time and leave too few pages for a large one, until it has been skipped 64 times."""
    world = make_adapted(policy=SchedulerPolicy.GUARANTEED_NO_EVICT, max_batch_size=8)
    number, longest = 0, 20

    def more():
        nonlocal number
        while len(world.client.pending) < 4 and number < 400:
            world.client.pending.append(new_request(number, [1], 5 + number * 7 % 16, lora_task_id=number % 6,
                                                    **adapter_tensors(number % 6)))
            number += 1

    def step():
        world.step()
        more()
        until(lambda: all(each.job is None or each.job.is_done for each in world.loop.preparing.waiting))

    for _ in range(10):
        step()
    world.client.pending.insert(0, new_request(1000, [2], 3, lora_task_id=99, **adapter_tensors(99, PAGES - 1)))
    started = None
    for iteration in range(STARVED_PLANS + 4 * longest):
        step()
        if world.client.finals(1000):
            started = iteration
            break
    assert started is not None and started > STARVED_PLANS
    settle(world)
    assert world.client.final(1000).error == ""


def test_v1_and_backends_without_adapters_are_refused(make_adapted, make_world, new_request):
    with pytest.raises(ConfigError, match="peft_cache_config is set with TrtGptModelType.V1"):
        make_adapted(model_type=TrtGptModelType.V1)
    with pytest.raises(ConfigError, match="ScriptedBackend has no adapters"):
        make_adapted(backend={"adapter_pages": 0})
    with pytest.raises(ConfigError, match="lora_modules has mlp_gate; the model has attn_q, attn_dense, mlp_4h_to_h"):
        make_adapted(peft={"lora_modules": ("attn_q", "mlp_gate")})
    world = make_world()
    world.client.pending = [new_request(1, [1], 2, lora_task_id=3)]
    world.run()
    assert world.client.final(1).code == "INVALID_REQUEST" and "lora_task_id asks for" in world.client.final(1).error


class Own:
    """A scheduler of the user's own: everybody runs. It plans no pages."""

    def __init__(self, plans_adapters=None):
        if plans_adapters is not None:
            self.plans_adapters = plans_adapters

    def schedule_request(self, active_requests, inflight_request_ids):
        return SchedulerOutput([request for request in active_requests if request.is_context],
                               [request for request in active_requests if request.is_generating], [])


def test_a_scheduler_of_the_users_own_plans_adapters_or_is_refused(make_adapted, new_request):
    for scheduler in (Own(), Own(False), lambda limits, kv: Own()):
        with pytest.raises(ConfigError, match="plans_adapters = True"):
            make_adapted(parts={"scheduler": scheduler})
    given = []
    world = make_adapted(parts={"scheduler": lambda limits, kv, peft: given.append(peft) or Own(True)})
    assert given == [world.loop.adapters]
    world.client.pending = [new_request(i, [i], 3, lora_task_id=i, **adapter_tensors(i, 3)) for i in (1, 2, 3)]
    for _ in range(2000):
        world.step()
        sleep(0.0005)
        if len(world.client.finals(3)) == 1:
            break
    errors = [world.client.final(i).error for i in (1, 2, 3)]
    assert any("adapter pages and its pauses leave" in error for error in errors)
    world.client.pending = [new_request(4, [4], 3, lora_task_id=1)]
    settle(world)
    assert world.client.final(4).error == ""


def test_adapters_loaded_by_name_stay_until_they_are_forgotten(make_manager, new_client, new_request):
    client = new_client()
    manager = make_manager(client, backend={"adapter_pages": PAGES},
                           peft_cache_config=PeftCacheConfig(host_cache_size=3 * ONE_RANK, max_adapter_size=PAGES))
    info = manager.load_adapter(7, adapter_tensors(1, rank=2))
    assert (info.task_id, info.adapter_size, info.num_bytes) == (7, 2, 2 * ONE_RANK)
    assert info.modules == ("attn_q", "attn_dense", "mlp_4h_to_h") and info.digest == content_of(
        adapter_tensors(1, rank=2)).digest.hex()
    assert manager.load_adapter(np.int64(7), adapter_tensors(1, rank=2)) == info
    for task_id, adapter, error in ((7, adapter_tensors(2), "with other content"), (8, adapter_tensors(2, 4), "host_"),
                                    (8, adapter_tensors(2, 2), "adapters in use or kept have"),
                                    (8, adapter_tensors(2, PAGES + 1), "adapter size 7"), (-(2**63) - 1, {}, "task_id"),
                                    ("8", {}, "lora_task_id"), (8, {"lora_weights": [[1.0]]}, "the tensors of an")):
        with pytest.raises(BatchManagerError, match=error):
            manager.load_adapter(task_id, adapter)
    with pytest.raises(ConfigError, match="no model_path"):
        manager.load_adapter(8, "a folder")
    in_callback = []
    client.on_send = lambda number, response: in_callback.append(
        (manager.forget_adapter(7), manager.load_adapter(7, adapter_tensors(2)).adapter_size)) if number == 1 else None
    client.pending = [new_request(1, [1, 2], 4, lora_task_id=7)]
    client.wait_for_finals(1)
    client.pending = [new_request(2, [1, 2], 4, lora_task_id=7)]
    client.wait_for_finals(2)
    assert in_callback == [(True, 1)]
    for number, content in ((1, content_of(adapter_tensors(1, rank=2))), (2, content_of(adapter_tensors(2)))):
        assert client.final(number).tokens()[2:] == manager._loop.backend.expected([1, 2], 4, adapter=content)
    assert manager.forget_adapter(7) and not manager.forget_adapter(7)
    manager.shutdown()
    with pytest.raises(ManagerClosedError):
        manager.load_adapter(7, adapter_tensors(1))
    with pytest.raises(ManagerClosedError):
        manager.forget_adapter(7)


def test_an_engine_without_a_cache_loads_nothing(make_manager, new_client):
    with pytest.raises(ConfigError, match="peft_cache_config is None"):
        make_manager(new_client()).load_adapter(7, adapter_tensors(1))


def test_a_command_that_the_worker_cannot_carry_out_any_more_ends(make_manager, new_client, new_request):
    """The worker hangs in a callback and is then shut down: the caller gets ManagerClosedError."""
    client, is_inside, may_go = new_client(), threading.Event(), threading.Event()
    manager = make_manager(client, backend={"adapter_pages": PAGES}, peft_cache_config=PeftCacheConfig())

    def hang():
        if not is_inside.is_set():
            is_inside.set()
            may_go.wait(60)

    client.on_get = hang
    assert is_inside.wait(60)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(manager.load_adapter, 7, adapter_tensors(1))
        until(lambda: manager._control.commands)
        manager._control.ask_to_abort()
        may_go.set()
        with pytest.raises(ManagerClosedError):
            loading.result(60)


def test_a_load_whose_step_fails_to_get_blocks_is_done_all_the_same(make_adapted, new_request):
    """The plan with the load breaks the contract, for want of blocks; the adapter counts as loaded from then on."""
    world = make_adapted()
    world.client.pending = [new_request(1, [1], 3, lora_task_id=1, **adapter_tensors(1))]
    claim = world.loop.kv.claim

    def fails(*given):
        raise OutOfResourceError("planted")

    world.loop.kv.claim = fails
    settle(world)
    assert world.client.final(1).code == "ENGINE_FAILED" and world.backend.num_steps == 0
    world.loop.kv.claim = claim
    world.client.pending = [new_request(2, [1], 3, lora_task_id=1)]
    settle(world)
    assert generated(world, 2, [1]) == world.backend.expected([1], 3, adapter=content_of(adapter_tensors(1)))


def pass_through(make_manager, new_client, new_request, count):
    """Send `count` adapters, each with one request, through one manager.

    Returns the numbers of objects of the interpreter after the first half and at the end, without responses.
    """
    client = new_client()
    manager = make_manager(client, backend={"adapter_pages": PAGES}, peft_cache_config=PeftCacheConfig(
        host_cache_size=20 * ONE_RANK, max_adapter_size=PAGES), max_batch_size=4)
    objects = []
    for first in range(0, count, 4):
        ids = range(first, first + 4)
        client.pending += [new_request(i, [i % 9 + 1], 2, lora_task_id=i, **adapter_tensors(i, 1 + i % 3)) for i in ids]
        client.wait_for_finals(*ids)
        assert not [i for i in ids if client.final(i).error]
        for record in (client.responses, client.events, client.stats, client.asked):
            record.clear()
        if first + 4 in (count // 2, count):
            gc.collect()
            objects.append(len(gc.get_objects()))
    adapters = manager._loop.adapters
    assert not list(adapters.faults()) and not adapters.store.users and adapters.free_pages == PAGES
    assert 10 * ONE_RANK < adapters.store.used_bytes <= 20 * ONE_RANK
    assert adapters.figures()["LoRA Loads"] == count
    return objects


def test_hundreds_of_adapters_through_one_manager_leave_nothing(make_manager, new_client, new_request):
    halfway, end = pass_through(make_manager, new_client, new_request, 200)
    assert abs(end - halfway) < 200
