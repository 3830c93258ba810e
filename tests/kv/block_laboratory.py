"""The operations of block_machine.py. Each one calls the block manager and its model, and compares their states."""

from collections import Counter
from itertools import chain

import pytest

from batch_manager.kv.audit import audit
from batch_manager.kv.block_pool import OutOfBlocksError
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.requests.llm_request import LlmRequest
from tests.conformance.estimates import Estimates
from tests.harness.scripted_adapters import adapter_of

from .block_model import BlockModel, Text, domain_of

SLOTS = (0, 1, 2, 3, 5, 8, 300)
TEXTS = (tuple(map(int, "010011010001101001110100")), tuple(map(int, "110100001110010110001011")))
SALTS = (None, None, None, "a")
MOST_TOKENS = 1000
MOST_DRAFTS = 5
ADAPTER = 10**9                       # larger than any request id: ids are salts and adapters of unrelated requests

# A prompt is encoded as a number: salt and text, tail, number of tokens of the text.
TAILS = ((), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 1))
SHARED = 13
PROMPT_KINDS = len(SALTS) * 4 * len(TAILS) * SHARED


class BlockLaboratory:
    """A block manager and its model. Each operation runs on both, and the results are compared.

    digest_bits   number of bits of a block digest; with few bits, blocks with different contents collide
    calls         numbers of calls of each operation and of other events, over all runs
    """

    digest_bits = 256
    calls: Counter[str] = Counter()

    def open(self, num_blocks: int, unit: int, beams: int, host_blocks: int, partial: bool, secret: int,
             reuse: bool) -> None:
        self.kv = KvCacheManager(num_blocks, unit, MOST_TOKENS, max_beam_width=beams, enable_block_reuse=reuse,
                                 enable_partial_reuse=partial, host_blocks=host_blocks, max_draft_len=MOST_DRAFTS,
                                 digest_bits=self.digest_bits)
        if reuse:
            self.kv.cache.index._secret = bytes([secret] * 32)     # a replayed run has the same collisions
        self.unit, self.partial, self.reuse = unit, partial, reuse
        # The model predicts neither which of two texts with one digest is stored nor what is moved to the host.
        self.exact = reuse and self.digest_bits == 256 and not host_blocks
        self.model = BlockModel(unit, beams)
        self.running: dict[int, LlmRequest] = {}
        self.gone: list[LlmRequest] = []
        self.ids = 0

    # Requests.

    def request(self, prompt: int, beams: int = 1) -> LlmRequest:
        """Make a request without a slot. The number `prompt` encodes the tokens, the salt and the adapter."""
        prompt, shared = divmod(prompt, SHARED)
        prompt, tail = divmod(prompt, len(TAILS))
        salt, which = divmod(prompt, 4)
        self.ids += 1
        return LlmRequest(self.ids, [*TEXTS[which == 3][:shared], *TAILS[tail]] or [2], MOST_TOKENS, beam_width=beams,
                          cache_salt=SALTS[salt], adapter=adapter_of(ADAPTER) if salt == 1 else None)

    def stranger(self, num_tokens: int) -> LlmRequest:
        """Make a request that shares no blocks with any other."""
        self.ids += 1
        return LlmRequest(self.ids, [0] * num_tokens, MOST_TOKENS, cache_salt=self.ids)

    def chosen(self, mask: int, generating: bool) -> list[LlmRequest]:
        return [self.running[slot] for place, slot in enumerate(SLOTS)
                if mask >> place & 1 and slot in self.running and self.running[slot].is_generating is generating]

    def any_of(self, number: int, requests) -> LlmRequest | None:
        requests = list(requests)
        return requests[number % len(requests)] if requests else None

    # Claims.

    def place(self, new: list[LlmRequest]) -> list[LlmRequest]:
        """Give free slots to the requests `new`, in order. Returns the requests that got a slot."""
        free = [slot for slot in SLOTS if slot not in self.running]
        for request, slot in zip(new, free, strict=False):
            request.seq_slot = slot
        return new[:len(free)]

    def needed(self, new: list[LlmRequest], growing: list[LlmRequest]) -> int:
        """Return the number of free blocks that a claim takes. A reused block counts if no request holds it yet."""
        blocks, used, unit = 0, self.model.used(), self.unit
        to_wake: set[object] = set()
        for request in new:
            if self.reuse:
                found = self.kv.cache.shareable(request)
                to_wake |= {node for node in found if node.block_id not in used}
                blocks += -(-request.prompt_len // unit) - 1 + request.beam_width - len(found)
            else:
                shared, rest = divmod(request.prompt_len, unit)
                blocks += shared + (request.beam_width if rest else 0)
        blocks += sum(request.beam_width for request in growing if (request.num_tokens - 1) % unit == 0)
        return blocks + len(to_wake)

    def claim(self, new: list[LlmRequest], growing: list[LlmRequest]) -> bool:
        """Claim blocks and update the model. Returns False if there are too few free blocks.

        Checks that a claim that fails changes nothing.
        """
        for request in new:
            self.look_at(request)
        needed, free, before = self.needed(new, growing), self.kv.free_blocks, self.state()
        assert self.kv.blocks_to_claim(new, growing) == needed
        if needed > free:
            with pytest.raises(OutOfBlocksError):
                self.kv.claim(new, growing)
            assert self.state() == before, "a claim that failed changed something"
            return False
        expected = self.expected_reuse(new[0]) if new and self.exact else None
        found = {request: len(self.kv.cache.shareable(request)) if self.reuse else 0 for request in new}
        claim = self.kv.claim(new, growing)
        self.model.update(claim.table_updates)
        self.model.copy(claim.copies)
        assert claim.slots.tolist() == [request.seq_slot for request in growing]
        assert claim.kv_lengths.tolist() == [request.num_tokens - 1 for request in growing]
        assert free - self.kv.free_blocks == needed
        copied = {one.destination for one in claim.copies if not one.to_host}
        for request in new:
            self.running[request.seq_slot] = request
            self.started(request, found[request], copied)
        for request in growing:
            for beam in range(request.beam_width):
                if (request.num_tokens - 1) % self.unit == 0:
                    index = (request.num_tokens - 1) // self.unit
                    self.model.overwrite(self.model.tables[request.seq_slot, beam][index])
        if expected is not None:
            assert self.kv.reused_tokens(new[0]) == expected
        return True

    def expected_reuse(self, request: LlmRequest) -> int:
        tokens, unit = request.tokens[0], self.unit
        start = min(len(self.model.matched(domain_of(request), tokens)), (len(tokens) - 1) // unit) * unit
        if request.beam_width == 1 or start // unit < -(-len(tokens) // unit) - 1:
            return start + self.model.begun(domain_of(request), tokens, start, self.partial)
        return start

    def started(self, request: LlmRequest, num_shared: int, copied: set[int]) -> None:
        """Check that the reused tokens of a started request are in its blocks, and overwrite its other blocks."""
        slot, reused, model = request.seq_slot, self.kv.reused_tokens(request), self.model
        first_row = model.tables[slot, 0]
        begun = first_row.get(num_shared) if reused > num_shared * self.unit else None
        if begun is not None and begun not in copied and begun in model.found.values():
            model.evicted -= 1                                      # taken with its content, so not lost
        for beam in range(request.beam_width):
            table = model.tables[slot, beam]
            for index, block_id in table.items():
                if index >= num_shared:
                    model.overwrite(block_id)
        assert reused < request.prompt_len and model.reads(slot, 0, domain_of(request), request.tokens[0][:reused])
        request.skip_context(reused)
        self.calls["reused tokens"] += reused

    def state(self) -> tuple:
        """Return all state that a failed claim must not change."""
        pool, sequences = self.kv.pool, self.kv.sequences
        nodes = frozenset(self.kv.cache.index.nodes.items()) if self.reuse else frozenset()
        return (pool.free_order(), list(pool._owners), pool.extra_owners, pool.num_cached, nodes,
                list(sequences.owners), sequences.kv_lengths.tolist(), sequences.ends.tolist(),
                dict(sequences.reused_tokens), self.kv.usage())

    def draft_and_reject(self, growing: list[LlmRequest], counts: list[int], rejected: list[int]) -> bool:
        """Claim a token and `counts` drafts for each request, then rewind the rejected drafts.

        Returns False if there are too few free blocks.
        """
        free, unit = self.kv.free_blocks, self.unit
        needed = sum(request.beam_width * (-(-(request.num_tokens + count) // unit)
                                           - -(-(request.num_tokens - 1) // unit))
                     for request, count in zip(growing, counts, strict=True))
        before = self.state()
        assert self.kv.blocks_to_claim([], growing, (), counts) == needed
        if needed > free:
            with pytest.raises(OutOfBlocksError):
                self.kv.claim([], growing, counts)
            assert self.state() == before, "a claim that failed changed something"
            return False
        claim = self.kv.claim([], growing, counts)
        assert free - self.kv.free_blocks == needed
        self.model.update(claim.table_updates)
        self.model.copy(claim.copies)
        for request in growing:
            for beam in range(request.beam_width):
                for index in range(-(-(request.num_tokens - 1) // unit), self.kv.held_blocks(request)):
                    self.model.overwrite(self.model.tables[request.seq_slot, beam][index])
        self.kv.rewind(growing, rejected)
        for request in growing:
            self.model.shorten(request.seq_slot, self.kv.held_blocks(request))
        return True

    # Progress of a request.

    def grow(self, requests: list[LlmRequest], tokens: int) -> None:
        for request in requests:
            for beam, text in enumerate(request.tokens):
                self.model.write(request.seq_slot, beam, domain_of(request), text, len(text) - 1)
                text.append((tokens >> beam) % 3)

    def compute(self, request: LlmRequest, end: int, tokens: int) -> None:
        start, domain = request.context_position, domain_of(request)
        self.model.write(request.seq_slot, 0, domain, request.tokens[0][:end], start)
        request.advance_context(end - start)
        request.read_context(request.context_position)
        self.kv.publish_context(request, end)
        if self.exact:
            full = (end - 1) // self.unit
            self.model.commit(domain, request.tokens[0][:full * self.unit], self.row(request))
        if request.is_generating:
            self.fork(request, tokens)

    def fork(self, request: LlmRequest, tokens: int) -> None:
        """Fork the beams of a request whose prompt is computed, and append the first token to each."""
        self.model.copy(self.kv.fork(request))
        for beam, text in enumerate(request.tokens):
            assert self.model.reads(request.seq_slot, beam, domain_of(request), text)
            text.append((tokens >> beam) % 3)
        self.calls["forks"] += request.beam_width > 1

    def look_at(self, request: LlmRequest) -> None:
        if not self.reuse:
            assert self.kv.reusable_tokens(request) == 0
            return
        self.calls["look-ups"] += 1
        domain, tokens, unit = domain_of(request), request.tokens[0], self.unit
        nodes = self.kv.cache.matched(request)
        self.calls["blocks found"] += len(nodes)
        for place, node in enumerate(nodes):
            text = Text(domain, tuple(tokens[:(place + 1) * unit]))
            there = self.model.host.get(node.host_id) if node.block_id is None else (
                text if self.model.holds(node.block_id, text) else self.model.written.get(node.block_id))
            assert there == text, f"wrong reuse: {text} was looked up and {there} found"
        if self.exact:
            assert [node.block_id for node in nodes] == self.model.matched(domain, tokens)
        usable = min(len(nodes), (len(tokens) - 1) // unit)
        assert self.kv.reusable_tokens(request) == usable * unit
        used = self.model.used()
        assert Estimates(self.kv).reusable_blocks(request) == (sum(node.block_id in used for node in nodes), len(nodes))

    def release(self, request: LlmRequest, computed: int) -> None:
        if self.exact and computed > 1 and request.beam_width == 1:
            self.model.commit(domain_of(request), request.tokens[0][:computed - 1], self.row(request))
        self.kv.release(request, computed)
        self.model.forget(request.seq_slot)
        del self.running[request.seq_slot]
        self.gone = [*self.gone[-5:], request]

    def row(self, request: LlmRequest) -> list[int]:
        return [block_id for _, block_id in sorted(self.model.tables[request.seq_slot, 0].items())]

    def compare(self) -> None:
        """Audit the accounting, and compare block tables, contents and cached blocks with the model."""
        kv, model = self.kv, self.model
        audit(kv)
        used = model.used()
        assert kv.used_blocks == len(used)
        for slot, request in self.running.items():
            computed = request.context_position if request.is_context else request.num_tokens - 1
            assert kv.kv_length(request) == max(request.prompt_len, computed)
            for beam, tokens in enumerate(request.tokens):
                table = model.tables[slot, beam]
                assert kv.block_ids(request, beam) == [table[index] for index in range(len(table))]
                if beam == 0 or request.is_generating:
                    assert model.reads(slot, beam, domain_of(request), tokens[:computed]), f"{request} reads others"
        if self.exact:
            assert kv.pool.num_cached == len(set(model.found.values()) - used)
            assert kv.usage().evicted_blocks == model.evicted
            assert {node.block_id for node in chain(kv.cache.index)} == set(model.found.values())
        assert not any(map(kv.owns, self.gone))
