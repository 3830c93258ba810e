"""A plan does not give the pages of an adapter in use to another adapter, and loads few adapters at a time."""

from batch_manager import ContextChunkingPolicy, Limits, SchedulerOutput, SchedulerPolicy
from batch_manager.kv.peft_cache_manager import PeftCacheManager
from batch_manager.scheduling.capacity import GuaranteedNoEvictScheduler, MaxUtilizationScheduler
from batch_manager.scheduling.waiting import ADAPTER_PAGES, waiting_reasons
from tests.harness.scripted_adapters import adapter_of


def two_adapters(make_line):
    """Return a Line in which a new request comes before a running one. The adapter pages cannot hold both adapters."""
    line = make_line()
    line.new, line.running = (
        make(8, lora_task_id=task, adapter=adapter_of(task, 2))
        for task, make in enumerate((line.waiting, line.between_chunks)))
    line.peft = PeftCacheManager(3)
    line.peft.claim([line.running])
    return line


def test_no_evict_sets_aside_what_a_started_context_holds(make_line):
    line = two_adapters(make_line)
    scheduler = GuaranteedNoEvictScheduler(9, line.kv, line.peft)
    assert scheduler.schedule_request(line.requests) == ([line.running], [])


def test_a_request_in_flight_keeps_its_pages(make_line):
    line = two_adapters(make_line)
    scheduler = MaxUtilizationScheduler(9, line.kv, peft_cache_manager=line.peft)
    assert scheduler.schedule_request(line.requests) == ([line.new], [line.running])
    line.kv.inflight_request_ids = {line.running.request_id}
    fitting, paused = scheduler.schedule_request(line.requests)
    assert line.new not in fitting and paused == []


def test_a_plan_loads_64_mib_or_one_adapter_and_pauses_nobody_for_more(make_line):
    no_evict, utilization = GuaranteedNoEvictScheduler, MaxUtilizationScheduler
    for make, sizes, started in ((no_evict, (40, 40, 20), [0, 2]), (no_evict, (99,), [0]),
                                 (utilization, (40, 40, 20), [0, 2]), (utilization, (99, 1), [0])):
        line = make_line()
        running = line.generating(8)
        new = [line.waiting(8, lora_task_id=task, adapter=adapter_of(task, 1, size << 20))
               for task, size in enumerate(sizes)]
        peft = PeftCacheManager(9)
        fitting, paused = make(9, line.kv, peft_cache_manager=peft).schedule_request(line.requests)
        assert (fitting, paused) == ([running, *(new[index] for index in started)], [])
        peft.claim(fitting)
        peft.claim([request for request in new if request not in fitting])
        assert make(9, line.kv, peft_cache_manager=peft).schedule_request(line.requests)[0] == [running, *new]


def test_a_request_waits_for_adapter_pages(make_line):
    line = make_line()
    running = line.between_chunks(8, lora_task_id=0, adapter=adapter_of(0, 2))
    others = [line.waiting(8, lora_task_id=task, adapter=adapter_of(task, task)) for task in (1, 2)]
    peft = PeftCacheManager(3)
    peft.claim([running])
    plan = SchedulerOutput([running, others[0]])
    for policy in SchedulerPolicy:
        limits = Limits(max_batch_size=9, max_num_tokens=99, max_seq_len=100, max_beam_width=1, max_num_requests=9,
                        max_num_sequences=9, unbounded_sequences=False, vocab_size=100, num_blocks=line.kv.num_blocks,
                        tokens_per_block=line.kv.tokens_per_block, enable_chunked_context=True, scheduler_policy=policy,
                        context_chunking_policy=ContextChunkingPolicy.FIRST_COME_FIRST_SERVED)
        found = waiting_reasons(plan, line.requests, (), line.kv, limits, peft)
        assert found == {ADAPTER_PAGES: (others[1].request_id,)}
