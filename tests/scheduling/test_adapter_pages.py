"""A plan does not give the pages of an adapter in use to another adapter."""

from batch_manager.kv.peft_cache_manager import PeftCacheManager
from batch_manager.scheduling.capacity import GuaranteedNoEvictScheduler, MaxUtilizationScheduler
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
