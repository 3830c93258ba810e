"""Drafts by a second, smaller model, which has a KV cache of its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..config import MAX_DRAFT_TOKENS
from ..errors import ConfigError, OutOfResourceError, counted
from ..handover import (
    NO_UPDATES,
    BlockClear,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from ..kv.kv_cache_manager import KvCacheManager
from ..kv.window import AttentionWindow
from ..requests.llm_request import LlmRequest
from ..seams import MemoryUsage, ModelBackend, PendingStep
from ..steps.device_work import DeviceWork

MOST_GROWN = 128    # tokens by which a text may have grown; a sequence of a longer one starts again
# With one of these, a token depends on the text before it, of which the device has only the sampled tokens.
READING = ("top_p_decay", "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size",
           "min_length")

_Running = tuple[ScheduledBatch, PendingStep]    # a launched step


def room_for_drafts(window: AttentionWindow) -> AttentionWindow:
    """Return the window of a draft model's cache. A sequence has blocks for drafts that may not become text, and up to
    a block more; a claim makes room for these and for what the text has grown by."""
    ahead = MAX_DRAFT_TOKENS + window.tokens_per_block
    return replace(window, unread_steps=ahead, max_draft_len=MOST_GROWN + ahead)


def setup_of_drafts(setup: SlotSetup) -> SlotSetup:
    """Return the setup with which a draft model samples: that of the request, without what only the text needs."""
    return replace(setup, stop_words=(), return_log_probs=False, top_log_probs=0, raw_log_probs=False,
                   return_context_logits=False, return_generation_logits=False, logits_post_processor=None,
                   adapter_pages=(), history=None)


class _Sequence:
    """The text of a request in the draft model.

    copy       has its blocks. Its prompt is the text at its start
    setup      see `setup_of_drafts`
    is_set_up  whether the device has the setup
    length     tokens of the text whose keys and values are in the cache
    drafts     tokens after them whose keys and values are in the cache too
    room       tokens for which it has blocks
    """

    __slots__ = ("copy", "setup", "is_set_up", "length", "drafts", "room")

    def __init__(self, copy: LlmRequest, setup: SlotSetup, length: int) -> None:
        self.copy, self.setup, self.length = copy, setup, length
        self.room, self.is_set_up = copy.prompt_len, False
        self.drafts: list[int] = []

    def follow(self, tokens: Sequence[int]) -> None:
        """Count the drafts that have become text."""
        for draft in self.drafts:
            if self.length == len(tokens) or tokens[self.length] != draft:
                break
            self.length += 1
        self.drafts = []


class _Row:
    """A sequence in a call of `propose`.

    end     tokens of the text that are computed at the end of the call
    most    most drafts; 0: the model computes a part of the text only
    drafts  the drafts so far
    """

    __slots__ = ("request", "sequence", "start", "end", "most", "drafts", "has_ended")

    def __init__(self, request: LlmRequest, sequence: _Sequence, start: int, end: int, most: int) -> None:
        self.request, self.sequence = request, sequence
        self.start, self.end, self.most = start, end, most
        self.drafts: list[int] = []
        self.has_ended = False


class DraftModel:
    """The Drafter of SpeculativeConfig("draft_model"). It samples as the request does, with the same seed and
    positions, so that it often draws the tokens that the request's model draws.

    A call first computes what the texts have grown by, and as much of new prompts as a step holds; the last rows yield
    the first drafts. Each further draft of all sequences is a step. A sequence for which there are too few blocks gets
    no drafts in that call. One that was in a failed step, or whose row failed, gets none until its request ends or is
    paused.

    backend   the draft model, which `close` closes. It has the vocabulary of the request's model
    kv_cache_manager   of the backend's pool, see `room_for_drafts`
    most_tokens   tokens in the largest step

    seconds_per_draft   time of a step that drafts a token for all sequences, lately; 0.0 before the first one
    """

    def __init__(self, backend: ModelBackend, kv_cache_manager: KvCacheManager, most_tokens: int,
                 monotonic: Callable[[], float]) -> None:
        self._backend, self._kv, self._most_tokens, self._monotonic = backend, kv_cache_manager, most_tokens, monotonic
        self._vocab_size, self._device_work = backend.info.vocab_size, DeviceWork()
        self._setups: dict[LlmRequest, SlotSetup] = {}
        self._of: dict[LlmRequest, _Sequence] = {}
        self._lost: set[LlmRequest] = set()
        self._num_steps = 0
        self.seconds_per_draft = 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError if the model of the requests has other token ids."""
        if self._vocab_size != vocab_size:
            raise ConfigError(f"the draft model has {counted(self._vocab_size, 'token id')} and the model "
                              f"{vocab_size:,}", "a draft is a token of both", "use a draft model of the same family")

    def set_up(self, request: LlmRequest, setup: SlotSetup) -> None:
        """Note how the tokens of a request are sampled."""
        self._setups[request] = setup_of_drafts(setup)

    def propose(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        began = self._monotonic()
        rows = self._plan(requests, max_lengths)
        if rows:
            try:
                self._run(rows)
            except BaseException:
                for row in rows:
                    self._lose(row.request)
                raise
            if longest := max(len(row.drafts) for row in rows):
                num_more = sum(row.end - row.start - 1 for row in rows)    # prompts, and growth
                seconds = (self._monotonic() - began) / (longest + self._backend.info.draft_cost * num_more)
                self.seconds_per_draft += (seconds - self.seconds_per_draft) * (0.2 if self.seconds_per_draft else 1)
        drafts = {row.request: row.drafts for row in rows if row.request not in self._lost}
        return [drafts.get(request, ()) for request in requests]

    def release(self, request: LlmRequest) -> None:
        self._setups.pop(request, None)
        self._lost.discard(request)
        self._give_back(request)

    def memory_usage(self) -> MemoryUsage:
        """Return the bytes on the host. Those on a GPU are in the figure of the other model, which is torch's own."""
        return replace(self._backend.memory_usage(), gpu=0)

    def close(self) -> None:
        self._backend.close()

    def _plan(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> list[_Row]:
        """Return what to compute of each request, with room for it; those that are almost up to date come first."""
        rows, left, unit = [], self._most_tokens, self._kv.tokens_per_block
        for request, most in zip(requests, max_lengths):
            sequence, length = self._sequence(request), request.num_tokens
            if sequence is not None and length <= self._kv.max_seq_len:
                start, prompt = min(sequence.length, length - 1), sequence.copy.prompt_len
                if start < prompt < length:                # its blocks are claimed, and those of later tokens are not
                    length, most = prompt, 0
                rows.append(_Row(request, sequence, start, length, min(most, self._kv.max_seq_len - length + 1)))
        rows.sort(key=lambda row: row.end - row.start)
        planned = []
        for row in rows:
            if row.end - row.start > left:                 # chunks end with a block
                row.end, row.most = (row.start + left) // unit * unit, 0
            if row.end > row.start and self._has_room(row.sequence, row.end + max(row.most - 1, 0)):
                planned.append(row)
                left -= row.end - row.start
        return planned

    def _sequence(self, request: LlmRequest) -> _Sequence | None:
        """Return the sequence of a request, which is started if it is new; None if it has none."""
        tokens, sequence = request.tokens[0], self._of.get(request)
        if sequence is not None:
            sequence.follow(tokens)
            if len(tokens) - max(sequence.length, sequence.copy.prompt_len) <= MOST_GROWN:
                return sequence
            self._give_back(request)
        if request in self._lost or len(tokens) >= self._kv.max_seq_len:
            return None
        if max(tokens) >= self._vocab_size:   # embeddings that only the request's model gets
            self._lost.add(request)
            return None
        copy = LlmRequest(request.request_id, tokens, min(request.final_length, self._kv.max_seq_len) - len(tokens),
                          cache_salt=request.cache_salt, token_extra_ids=request.token_extra_ids)
        copy.seq_slot = request.seq_slot
        if not self._claim(copy, [copy], ()):
            return None
        self._of[request] = sequence = _Sequence(copy, self._setups[request], self._kv.reused_tokens(copy))
        return sequence

    def _has_room(self, sequence: _Sequence, length: int) -> bool:
        """Claim blocks for the first `length` tokens of a sequence. Returns whether it has them."""
        if length <= sequence.room:
            return True
        unit = self._kv.tokens_per_block
        room = -(-length // unit) * unit
        if not self._claim(sequence.copy, (), [sequence.copy], [room - sequence.room - 1]):
            return False
        sequence.room = room
        return True

    def _claim(self, copy: LlmRequest, first_chunks: Sequence[LlmRequest], growing: Sequence[LlmRequest],
               num_more: Sequence[int] | None = None) -> bool:
        try:
            claim = self._kv.claim(first_chunks, growing, num_more)
        except OutOfResourceError:
            return False
        if len(claim.table_updates.slots):
            self._device_work.update_tables(claim.table_updates, [copy.seq_slot] if first_chunks else [])
        self._device_work.add(claim.copies)
        return True

    def _run(self, rows: Sequence[_Row]) -> None:
        """Compute the texts of the rows, and draft. Adds the drafts to the rows."""
        by_slot = {row.sequence.copy.seq_slot: row for row in rows}
        context, tables = [], NO_UPDATES
        for row in rows:
            sequence, tokens = row.sequence, row.request.tokens[0]
            setup = None
            if not sequence.is_set_up or row.most and self._reads_text(sequence.setup):
                setup, sequence.is_set_up = sequence.setup.continuing(tokens), True    # which resets the slot's table
                tables = tables.then(BlockTableUpdates(*self._kv.sequences.entries(sequence.copy)))
            is_last = row.most > 0 or row.end == sequence.copy.prompt_len
            context.append(ContextWork(sequence.copy.seq_slot, np.array(tokens[row.start:row.end], np.int32), row.start,
                                       is_last, setup))
            sequence.length = row.start
        running: _Running | None = self._launch(
            ScheduledBatch(self._num_steps, context=tuple(context), block_table_updates=tables))
        ahead, drafting = self._backend.info.is_asynchronous, [row for row in rows if row.most]
        for place in range(1, max((row.most for row in drafting), default=0)):
            if not ahead:
                self._read(running, by_slot)
                running = None
            drafting = [row for row in drafting if row.most > place and not row.has_ended]
            if not drafting:
                break
            following = self._launch(ScheduledBatch(self._num_steps, generation=GenerationWork(
                np.array([row.sequence.copy.seq_slot for row in drafting], np.int32),
                np.array([row.end + place - 1 for row in drafting], np.int32))))
            self._read(running, by_slot)
            running = following
        self._read(running, by_slot)
        for row in rows:
            sequence = row.sequence
            sequence.length, sequence.drafts = row.end, row.drafts[:-1]
            if self._kv.enable_block_reuse and row.request in self._of and row.start < sequence.copy.prompt_len:
                self._kv.publish_context(sequence.copy, sequence.length)

    @staticmethod
    def _reads_text(setup: SlotSetup) -> bool:
        return bool(setup.bad_words) or setup.sampling.sets(READING)

    def _launch(self, batch: ScheduledBatch) -> _Running:
        if self._device_work.has_pending:
            batch = self._device_work.attached_to(batch)
        self._num_steps += 1
        pending = self._backend.start(batch)
        if self._device_work.has_pending:
            self._device_work.launched()
        return batch, pending

    def _read(self, running: _Running | None, by_slot: dict[int, _Row]) -> None:
        """Read a step, if there is one, and add its tokens to the rows that draft."""
        if running is None:
            return
        batch, pending = running
        output = pending.finish()
        if batch.operations:
            self._device_work.done(batch)
        for slot in output.failures:
            by_slot[slot].has_ended = True
            self._lose(by_slot[slot].request)
        for slot, token, finish in zip(output.slots.tolist(), output.tokens.tolist(), output.finish.tolist()):
            row = by_slot[slot]
            if row.most and not row.has_ended:
                row.drafts.append(token)
                row.has_ended = finish != 0

    def _lose(self, request: LlmRequest) -> None:
        """Give up a sequence after a failure. Its blocks are cleared, as a failed step may have left any values there.
        """
        if sequence := self._of.pop(request, None):
            self._device_work.add([BlockClear(block_id) for block_id in self._kv.own_blocks(sequence.copy)])
            self._kv.release(sequence.copy, is_garbage=True)
        self._lost.add(request)

    def _give_back(self, request: LlmRequest) -> None:
        """Release the blocks of a request, if it has any. What is text stays for later prompts."""
        if sequence := self._of.pop(request, None):
            sequence.follow(request.tokens[0])
            sequence.copy.tokens = [request.tokens[0][:]]
            self._kv.release(sequence.copy, sequence.length + 1 if sequence.length else 0)
