"""The manager against a model of dicts and sets, whatever the order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batch_manager.errors import InternalError
from batch_manager.kv.audit import audit
from batch_manager.kv.block_pool import OutOfBlocksError
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.requests.llm_request import LlmRequest

SLOTS = [0, 1, 2, 3, 5, 8, 300]


class ManagerAgainstAModel(RuleBasedStateMachine):
    """The model: slot -> (request, tokens). The device's view: what the table updates said, never asked again."""

    @initialize(num_blocks=st.integers(1, 14), tokens_per_block=st.sampled_from([1, 2, 3, 8]))
    def begin(self, num_blocks, tokens_per_block):
        self.kv = KvCacheManager(num_blocks, tokens_per_block, 1000)
        self.running: dict[int, tuple[LlmRequest, int]] = {}
        self.gone: list[LlmRequest] = []
        self.device: dict[tuple[int, int], int] = {}
        self.ids = 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.kv.tokens_per_block)

    @property
    def used(self) -> int:
        return sum(self.blocks(tokens) for _, tokens in self.running.values())

    @rule(data=st.data())
    def claim(self, data):
        free_slots = [slot for slot in SLOTS if slot not in self.running]
        starting = data.draw(st.lists(st.sampled_from(free_slots), unique=True, max_size=3) if free_slots
                             else st.just([]))
        growing = data.draw(st.lists(st.sampled_from(sorted(self.running)), unique=True) if self.running
                            else st.just([]))
        new = []
        for slot in starting:
            self.ids += 1
            new.append(LlmRequest(self.ids, [0] * data.draw(st.integers(1, 20)), 1000))
            new[-1].seq_slot = slot
        after = {slot: (request, tokens + (slot in growing)) for slot, (request, tokens) in self.running.items()}
        after |= {request.seq_slot: (request, request.prompt_len) for request in new}
        needed = sum(self.blocks(tokens) for _, tokens in after.values()) - self.used

        generation = [self.running[slot][0] for slot in growing]
        assert self.kv.blocks_to_claim(new, generation) == needed
        if needed > self.kv.num_blocks - self.used:
            with pytest.raises(OutOfBlocksError):
                self.kv.claim(new, generation)
            return
        updates = self.kv.claim(new, generation)
        assert len(updates.slots) == needed
        for slot, index, block_id in zip(updates.slots, updates.indices, updates.block_ids, strict=True):
            self.device[int(slot), int(index)] = int(block_id)
        self.running = after

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        request, _ = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.kv.release(request)
        self.gone.append(request)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def release_again(self, data):
        self.kv.release(data.draw(st.sampled_from(self.gone)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def start_in_a_taken_slot(self, data):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        intruder = LlmRequest(0, [0], 1)
        intruder.seq_slot = slot
        with pytest.raises(InternalError):
            self.kv.claim([intruder], [])

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def generate_after_the_end(self, data):
        with pytest.raises(InternalError):
            self.kv.claim([], [data.draw(st.sampled_from(self.gone))])

    @invariant()
    def the_model_agrees(self):
        if not hasattr(self, "kv"):
            return
        audit(self.kv)
        assert self.kv.used_blocks == self.used
        everywhere = [block for request, _ in self.running.values() for block in self.kv.block_ids(request)]
        assert len(set(everywhere)) == len(everywhere)
        for slot, (request, tokens) in self.running.items():
            assert self.kv.kv_length(request) == tokens
            assert self.kv.held_blocks(request) == self.blocks(tokens)
            assert self.kv.block_ids(request) == [self.device[slot, index] for index in range(self.blocks(tokens))]
        for request in self.gone:
            assert not self.kv.owns(request)


TestManagerAgainstAModel = ManagerAgainstAModel.TestCase
TestManagerAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
