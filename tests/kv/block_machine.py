"""Operations of the block manager in random order, against the model of dicts and sets in block_model.py.

The rules do to a request what the loop does: they allocate its prompt, compute and commit it chunk by chunk, fork its
beams, extend it token by token, and free it. Computed tokens are written into the blocks of the model. Each block that
a prompt finds in the cache is compared with its expected content, so every wrong reuse is found.
"""

from itertools import chain

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batch_manager.errors import InternalError
from batch_manager.requests.llm_request import LlmRequest
from tests.conformance.estimates import Estimates
from tests.harness.scripted_adapters import adapter_of

from .block_laboratory import MOST_DRAFTS, PROMPT_KINDS, SLOTS, BlockLaboratory

# Few draws of plain integers: a draw of Hypothesis takes longer than a call of the manager.
PAIRS = st.integers(0, PROMPT_KINDS**2 - 1)
NUMBERS = st.integers(0, 2**20 - 1)


class BlockMachine(BlockLaboratory, RuleBasedStateMachine):
    @initialize(num_blocks=st.sampled_from([24, 16, 12, 8, 5, 3, 2, 1]), unit=st.sampled_from([2, 1, 3, 4]),
                beams=st.sampled_from([1, 1, 2, 3]), host_blocks=st.sampled_from([0, 0, 0, 2]), partial=st.booleans(),
                secret=st.integers(0, 255), reuse=st.sampled_from([True, True, True, False]))
    def begin(self, **options):
        self.open(**options)

    @rule(prompts=PAIRS, number=NUMBERS)
    def allocate(self, prompts, number):
        """Claim blocks for one or two new requests, sometimes with the next tokens of generating requests.

        Some prompts are computed in the same operation.
        """
        self.calls["allocate"] += 1
        number, kind = divmod(number, 8)
        beams = [1 + number // 4**place % self.model.max_beam_width for place in range(2)]
        pair = zip(divmod(prompts, PROMPT_KINDS), beams, strict=True)
        new = self.place([self.request(*one) for one in pair][:1 + kind % 2])
        growing = self.chosen(number, generating=True) if kind == 2 else []
        if self.claim(new, growing):
            self.grow(growing, number)
            for request in new if kind > 2 else ():
                self.compute(request, request.prompt_len, number)

    @precondition(lambda self: any(request.is_generating for request in self.running.values()))
    @rule(number=NUMBERS)
    def extend(self, number):
        """Claim the next token of some generating requests, and append it."""
        self.calls["extend"] += 1
        growing = self.chosen(number, generating=True)
        if self.claim([], growing):
            self.grow(growing, number // 128)

    @precondition(lambda self: any(request.is_generating for request in self.running.values()))
    @rule(number=NUMBERS, drafts=NUMBERS)
    def draft(self, number, drafts):
        """Claim draft tokens for some generating requests, accept some of them, and rewind the rejected ones."""
        self.calls["draft"] += 1
        growing = self.chosen(number, generating=True)
        counts = [drafts // 7**place % (MOST_DRAFTS + 1) for place in range(len(growing))]
        accepted = [drafts // 5**place % (count + 1) for place, count in enumerate(counts)]
        rejected = [count - one for count, one in zip(counts, accepted, strict=True)]
        if self.draft_and_reject(growing, counts, rejected):
            for request, count in zip(growing, accepted, strict=True):
                for place in range(count + 1):
                    self.grow([request], number // 128 + place)

    @precondition(lambda self: any(request.is_context for request in self.running.values()))
    @rule(number=NUMBERS)
    def commit(self, number):
        """For each context, compute and publish a chunk, or end the request after a failed step without publishing."""
        self.calls["commit"] += 1
        for request in [request for request in self.running.values() if request.is_context]:
            number, chunk = divmod(number, 8)
            if chunk == 7:
                self.model.spoil(request.seq_slot, 0, request.context_position)
                self.release(request, 0)
            else:
                end = (request.context_position // self.unit + 1 + chunk) * self.unit
                self.compute(request, min(end, request.prompt_len), number)

    @precondition(lambda self: any(request.is_generating and request.beam_width > 1
                                   for request in self.running.values()))
    @rule(number=NUMBERS)
    def reorder(self, number):
        """Replace each beam of a request by a copy of its parent: some beams are forked, and some end."""
        self.calls["reorder"] += 1
        request = self.any_of(number, (request for request in self.running.values()
                                       if request.is_generating and request.beam_width > 1))
        parents = [number // 3**beam % request.beam_width for beam in range(request.beam_width)]
        free = self.kv.free_blocks
        self.model.copy(self.kv.reorder(request, parents))
        assert self.kv.free_blocks >= free
        request.tokens = [list(request.tokens[parent]) for parent in parents]
        self.model.update(self.kv.claim([], []).table_updates)                    # the next claim reports the tables

    @rule(first=PAIRS, second=PAIRS)
    def look_up(self, first, second):
        """Look up the prompts of four requests that hold no blocks, and compare the result with the model."""
        self.calls["look_up"] += 1
        for prompt in chain(divmod(first, PROMPT_KINDS), divmod(second, PROMPT_KINDS)):
            request = self.request(prompt)
            self.look_at(request)
            if self.reuse:
                self.kv.cache.forget_request(request)

    @precondition(lambda self: self.running)
    @rule(number=NUMBERS)
    def salt(self, number):
        """Look up a running request's prompt with another salt, and with another adapter. Both find no cached block."""
        self.calls["salt"] += 1
        known = self.any_of(number, self.running.values())
        self.ids += 1
        for salt, adapter in ((self.ids, known.adapter), (known.cache_salt, adapter_of(self.ids))):
            other = LlmRequest(self.ids, known.tokens[0], 1, cache_salt=salt, adapter=adapter)
            assert self.kv.reusable_tokens(other) == 0 and Estimates(self.kv).reusable_blocks(other) == (0, 0)
            self.look_at(other)

    @precondition(lambda self: self.running)
    @rule(number=NUMBERS)
    def free(self, number):
        """Release the blocks of a request, as at its end or at a pause, and mostly publish them."""
        self.calls["free"] += 1
        request = self.any_of(number // 8, self.running.values())
        computed = request.context_position if request.is_context else request.num_tokens
        self.release(request, 0 if number % 8 == 7 else computed)

    @rule(number=NUMBERS)
    def double_free(self, number):
        """Release a request a second time, which has no effect.

        The pool also refuses the release of a free block, and of a list that contains a block twice.
        """
        self.calls["double_free"] += 1
        before = self.state()
        if self.gone:
            self.kv.release(self.any_of(number, self.gone), number % 7)
        used = sorted(self.model.used())
        wrong = [used[number % len(used)]] * 2 if used and number % 2 else self.kv.pool.free_order()[:1]
        if wrong:
            with pytest.raises(InternalError):
                self.kv.pool.give_back([*used[:1], *wrong])
        assert self.state() == before

    @precondition(lambda self: len(self.running) < len(SLOTS) and self.kv.free_blocks)
    @rule(share=st.integers(1, 6))
    def evict(self, share):
        """Let an unrelated request overwrite some or all free blocks."""
        self.calls["evict"] += 1
        count = max(self.kv.free_blocks * share // 6, 1)
        (stranger,) = self.place([self.stranger(count * self.unit)])
        assert self.claim([stranger], [])
        self.release(stranger, 0)
        if share == 6:
            assert self.kv.pool.num_cached == 0

    @rule(number=NUMBERS)
    def fail_nth(self, number):
        """Claim blocks for several requests, of which the last one does not fit. No request gets blocks."""
        self.calls["fail_nth"] += 1
        growing, fitting = divmod(number, 5)
        new = self.place([*(self.stranger(1) for _ in range(fitting)),
                          self.stranger(self.kv.free_blocks * self.unit + 1)])
        if len(new) == fitting + 1:
            assert not self.claim(new, self.chosen(growing, generating=True))
            assert not any(map(self.kv.owns, new))

    @rule(rarely=st.integers(0, 5))
    def clear(self, rarely):
        """End all requests, and let an unrelated request overwrite the whole pool. No block is cached afterwards."""
        if rarely < 5:
            return
        self.calls["clear"] += 1
        for request in list(self.running.values()):
            self.release(request, request.context_position)
        assert self.kv.used_blocks == 0
        (stranger,) = self.place([self.stranger(self.kv.num_blocks * self.unit)])
        assert self.claim([stranger], [])
        self.release(stranger, 0)
        assert self.kv.pool.num_cached == 0 and not self.model.found
        assert not self.reuse or not self.kv.cache.index.nodes

    @precondition(lambda self: self.running or self.gone)
    @rule(number=NUMBERS)
    def strangers_are_refused(self, number):
        """Claim blocks for a new request in a taken slot, and for a token of an ended request. Both claims raise."""
        self.calls["strangers"] += 1
        before = self.state()
        if self.running:
            intruder = self.stranger(1)
            intruder.seq_slot = self.any_of(number, self.running.values()).seq_slot
            with pytest.raises(InternalError):
                self.kv.claim([intruder], [])
        if self.gone:
            with pytest.raises(InternalError):
                self.kv.claim([], [self.any_of(number, self.gone)])
        assert self.state() == before

    @invariant()
    def the_model_agrees(self):
        if hasattr(self, "kv"):
            self.compare()


class MachineOfFullDigests(BlockMachine):
    """Operations with full digests, as in the engine. The model predicts exactly which blocks are found."""


class MachineOfFourBits(BlockMachine):
    """Operations with sixteen digests for all blocks, so that blocks with different contents often collide."""

    digest_bits = 4
