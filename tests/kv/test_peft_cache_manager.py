"""Adapter pages on the device: active requests hold them, idle adapters stay cached, and no two adapters share one."""

import pytest

from batch_manager.errors import OutOfResourceError
from batch_manager.kv.peft_cache_manager import PeftCacheManager
from tests.harness.scripted_adapters import adapter_of


def adapted(task_id):
    """Return the options of a request with an adapter of as many pages as its id."""
    return {"lora_task_id": task_id, "adapter": adapter_of(task_id, task_id)}


@pytest.fixture
def peft():
    """Return an adapter cache manager with six pages. Adapter n takes n pages."""
    return PeftCacheManager(6)


def test_an_adapter_is_loaded_once_and_stays_until_others_need_its_room(peft, make_request):
    first, second, third = (make_request(slot, 4, **adapted(task)) for slot, task in enumerate((2, 2, 5)))
    (load,) = peft.claim([first, second])
    assert load.task_id == 2 and tuple(peft.pages(first)) == tuple(peft.pages(second)) == load.page_ids
    peft.release(first)
    assert peft.free_pages == 4
    with pytest.raises(OutOfResourceError, match="5 adapter pages are needed and 4 are free"):
        peft.claim([third])
    assert peft.pages(third) == [] and tuple(peft.pages(second)) == load.page_ids
    peft.release(second)
    assert peft.free_pages == 6
    assert peft.claim([make_request(3, 4, **adapted(2))]) == [], "it was still there"
    peft.claim([make_request(4, 4, **adapted(4))])
    assert peft.figures() == {"LoRA Device Pages": 6, "Free LoRA Device Pages": 0, "Used LoRA Device Pages": 6,
                              "LoRA Adapters On Device": 2, "LoRA Loads": 2, "LoRA Evictions": 0}


def test_a_claim_that_does_not_fit_changes_nothing(peft, make_request):
    small, large = make_request(0, 4, **adapted(2)), make_request(1, 4, **adapted(5))
    with pytest.raises(OutOfResourceError):
        peft.claim([small, large])
    assert (peft.pages(small), peft.free_pages, list(peft.faults())) == ([], 6, [])


def a_page_is_lost(peft, request):
    peft._free.pop()


def a_user_is_miscounted(peft, request):
    peft._users[request.adapter_digest] += 1


def an_adapter_is_idle_and_in_use(peft, request):
    peft._idle[request.adapter_digest] = None


@pytest.mark.parametrize(("damage", "words"), [
    (a_page_is_lost, "neither free nor taken"), (a_user_is_miscounted, "user counts of the adapters"),
    (an_adapter_is_idle_and_in_use, "neither in use nor idle, or both")])
def test_books_that_are_wrong_are_named(peft, make_request, damage, words):
    request = make_request(0, 4, **adapted(3))
    peft.claim([request])
    assert list(peft.faults()) == []
    damage(peft, request)
    assert any(words in fault for fault in peft.faults())
