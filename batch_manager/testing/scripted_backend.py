"""A ModelBackend without a model: the next token is a keyed hash of the tokens before it, see scripted_tokens.py.

The backend stores tokens in its block pool and reads the history back through the block tables. A wrong table, a block
freed too early or a lost token therefore changes all later output. `expected_tokens` computes the correct output
independently.

The mark of a token's adapter is computed in its step, from the pages of its sequence, and is stored beside the token.
So a wrong or stale page, or a block that was computed with another adapter, also changes all later output.

The backend needs only numpy, so tests and dry runs of the host side work without torch. A logits post-processor gets
logits that are 1 at the next token and 0 elsewhere. It causes torch to be imported, and cannot be combined with beams.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import numpy as np

from ..adapter_values import LARGEST_ADAPTER_SIZE, AdapterContent, AdapterModules
from ..attention.windows import blocks_seen
from ..config import MAX_DRAFT_TOKENS
from ..decoding.beam_search import BeamSearches
from ..decoding.output_rows import columns_with_beams
from ..decoding.position_ring import PositionRing, columns_for
from ..errors import ConfigError, InternalError
from ..handover import (
    END_ID,
    NOT_FINISHED,
    AdapterLoad,
    BlockClear,
    BlockCopy,
    DeviceOperation,
    RowFailure,
    ScheduledBatch,
    StepOutput,
    TopLogProbs,
)
from ..names import ErrorCode
from ..runtime.block_tables import BlockTables, generation_rows
from ..seams import BackendInfo, MemoryUsage
from .scripted_tokens import (
    POSITION_FACTOR,
    TOKEN_FACTOR,
    WORD,
    best_candidates,
    expected_samples,
    log_probs_of,
    mark_of,
    mix_array,
    page_words,
    salt_of,
)

if TYPE_CHECKING:
    from ..decoding.logits_post_processors import LogitsPostProcessors

UNWRITTEN = -1
NO_TOKEN_AFTER_DRAFTS = -2    # of a row after drafts that has none: the text goes on from the row before
UNLOADED = 0              # no word of an adapter page is even
# The projections that the adapters of this backend change: small, and not the same in every layer.
ADAPTER_MODULES = AdapterModules({"attn_q": ((3, 4), (3, 4)), "attn_dense": ((4, 3), (4, 3)),
                                  "mlp_4h_to_h": ((5, 3), None)})

Script = Callable[[list[int]], int | None]
StepHook = Callable[[ScheduledBatch], Mapping[int, RowFailure] | None]


class ScriptedBackend:
    """Generates tokens from a hash or a script, and checks each batch against the rules of handover.py.

    Supported request options: lengths, `end_id`, `random_seed`, streaming, beams, log-probs, logits, logits
    post-processors and draft tokens. There are no model logits, so temperature, penalties, bad words,
    `min_length`, `embedding_bias` and n-gram bans have no effect. Stop words have an effect only with beams. A backend
    object serves one engine.

    script            function (history) -> next token; if it returns None, the hash determines the token. The history
                      is the prompt and the generated tokens. Cannot be combined with beams or a window
    on_step           function (batch), called once per step, after its tokens were written to the cache and before
                      the next tokens are chosen. May raise, or return {slot: RowFailure}. NON_FINITE_LOGITS also
                      poisons the blocks that the step wrote: every sequence with such a block fails until the block is
                      cleared
    on_finish         function (batch), called by `finish`, with the same effects as `on_step`
    is_asynchronous   `start` queues steps, which run in order when `finish` waits for one of them. `finish` raises the
                      exception of its step, even if later steps have been launched
    step_seconds      simulated device time of a step. `finish` waits for it; steps run one after another, and
                      `idle_seconds` accumulates the time between steps
    window, sink      the part of the history that the hash covers, as in attention/windows.py; window None: all of it.
                      With a window, the history is read back in every step, even without `verify`, and blocks outside
                      the window may be freed
    host_blocks       number of blocks in the host pool, for evicted blocks
    adapter_pages     number of pages for adapters, see seams.BackendInfo; 0: the backend has no adapters
    on_load           function (AdapterLoad), called before the pages are written. If it raises, the pages have garbage
    verify            read the whole history back in every step, and check each batch. False: keep a running hash per
                      slot and check nothing, for benchmarks of the host; a successful step cannot run again

    Draft tokens are verified if `verify` is set and there is no script.
    """

    def __init__(self, *, vocab_size: int = 1000, max_seq_len: int = 1024, num_blocks: int = 256,
                 tokens_per_block: int = 8, num_slots: int = 16, key: int = 0, script: Script | None = None,
                 on_step: StepHook | None = None, on_finish: StepHook | None = None, verify: bool = True,
                 window: int | None = None, sink: int = 0, host_blocks: int = 0, is_asynchronous: bool = False,
                 step_seconds: float = 0.0, adapter_pages: int = 0,
                 on_load: Callable[[AdapterLoad], None] | None = None) -> None:
        if script is not None and window is not None:
            raise ConfigError("a ScriptedBackend was given a script and a window",
                              "a script gets the whole history, never a window", "remove one")
        self.info = BackendInfo(vocab_size=vocab_size, max_seq_len=max_seq_len, num_blocks=num_blocks,
                                tokens_per_block=tokens_per_block, num_slots=num_slots, dispatch="scripted",
                                device="none", dtype="int32", attention_window=window, sink_tokens=sink,
                                host_blocks=host_blocks, is_asynchronous=is_asynchronous, copies_blocks=True,
                                max_draft_tokens=MAX_DRAFT_TOKENS if verify and script is None else 0,
                                max_adapter_size=min(adapter_pages, LARGEST_ADAPTER_SIZE), adapter_pages=adapter_pages,
                                adapter_modules=ADAPTER_MODULES if adapter_pages else None)
        self.key, self.script, self.verify = key & WORD, script, verify
        self.on_step, self.on_finish, self.on_load = on_step, on_finish, on_load
        self.window, self.sink = window, sink
        self.num_steps = 0
        self.step_seconds = step_seconds
        self.idle_seconds = 0.0
        self.closed = False
        self._busy_until: float | None = None
        self._queue: deque[ScriptedStep] = deque()
        self._num_operations = 0                                  # device operations done so far
        self._pool = np.full(num_blocks * tokens_per_block, UNWRITTEN, np.int32)
        self._host = np.zeros(host_blocks * tokens_per_block, HOST_TOKEN)
        self._host["token"] = UNWRITTEN
        self._pages = np.full(adapter_pages, UNLOADED, np.uint64)  # the word of each adapter page
        self._pages_of: dict[int, tuple[int, ...]] = {}            # slot -> pages of its adapter
        self._marks = np.zeros(len(self._pool) * bool(adapter_pages), np.uint64)
        self._poisoned = np.zeros((num_blocks, tokens_per_block), bool)    # tokens with non-finite values
        self._any_poisoned = False
        self._tables = BlockTables(num_slots, -(-max_seq_len // tokens_per_block))
        self._state = np.zeros(max(num_slots, 1), SLOT_STATE)
        self._last_tokens = PositionRing(
            np.zeros((len(self._state), columns_for(self.info.max_draft_tokens)), np.int32))
        self._searches = BeamSearches()
        self._any_extras = False                                  # log-probs or logits requested so far
        self._rows_per_slot = 1                                   # of the block tables
        self._post_processors: LogitsPostProcessors | None = None

    # ModelBackend

    def start(self, batch: ScheduledBatch) -> "ScriptedStep":
        """Run the step, or queue it; see seams.ModelBackend."""
        step = ScriptedStep(self, batch)
        if self.step_seconds:
            now = perf_counter()
            if self._busy_until is not None:
                self.idle_seconds += max(now - self._busy_until, 0.0)
            self._busy_until = step.done_at = max(now, self._busy_until or now) + self.step_seconds
        if self.info.is_asynchronous:
            self._queue.append(step)
        else:
            self.run(step)
            if step.error is not None:
                raise step.error
        return step

    def run(self, step: "ScriptedStep") -> None:
        """Run a step. An exception is stored in the step."""
        try:
            step.output = self._run(step)
        except BaseException as error:
            step.error = error

    def run_up_to(self, step: "ScriptedStep") -> None:
        """Run the queued steps up to and including `step`."""
        while step in self._queue:
            self.run(self._queue.popleft())

    def _run(self, step: "ScriptedStep") -> StepOutput:
        batch = step.batch
        self._rows_per_slot = batch.max_beam_width
        self._tables.update(batch)
        for operation in batch.new_operations(self._num_operations):
            self._carry_out(operation)
            self._num_operations += 1
        if not batch.num_sequences:
            return StepOutput.merge([], batch.micro_batch_id)
        self._set_up(batch)
        step.layout = layout = self._lay_out(batch)
        if self.verify:
            self._check(batch, layout)

        self._pool[layout.pool_slots] = layout.tokens
        if len(self._pages):
            self._marks[layout.pool_slots] = layout.marks
        if self._any_poisoned:
            self._poisoned.reshape(-1)[layout.pool_slots] = False
        sums = self._sums(batch, layout)
        failures = dict(self.on_step(batch) or {}) if self.on_step else {}
        self._poison(failures, layout)
        if self._any_poisoned:
            failures = {**self._poisoned_rows(layout), **failures}

        output = self._decode(batch, layout, sums, failures)
        self._state["length"][layout.slots] = layout.starts + layout.counts
        if batch.has_drafts:    # `_keep_tokens` adds the accepted ones
            for slot, drafts in draft_tokens_of(batch).items():
                self._state["length"][slot] -= len(drafts)
        self._state["sum"][layout.slots] = sums
        self._keep_tokens(output)
        self.num_steps += 1
        return output

    def _keep_tokens(self, output: StepOutput) -> None:
        """Store the last tokens of sequences without beams for the next step. Beam searches store their own tokens."""
        slots, tokens = output.slots, output.tokens
        if output.row_starts is not None:
            single = np.array([slot not in self._searches for slot in slots.tolist()], bool)
            slots, tokens = slots[single], tokens[output.row_starts[1:][single] - 1]
            # With drafts, all new tokens but the last are in the cache.
            self._state["length"][slots] += np.diff(output.row_starts)[single] - 1
        self._last_tokens.put(slots, self._state["length"][slots], tokens)

    def _carry_out(self, operation: DeviceOperation) -> None:
        size = self.info.tokens_per_block
        match operation:
            case BlockCopy():    # copies exactly num_tokens, so that a wrong count is detected
                here = {"token": self._pool, "mark": self._marks, "poisoned": self._poisoned.reshape(-1)}
                sources = self._host if operation.from_host else here
                targets = self._host if operation.to_host else here
                for name, count in (("token", operation.num_tokens), ("poisoned", size),
                                    ("mark", operation.num_tokens if len(self._pages) else 0)):
                    start, to = operation.source * size, operation.destination * size
                    targets[name][to:to + count] = sources[name][start:start + count]
                if not operation.to_host:
                    self._any_poisoned |= bool(self._poisoned[operation.destination].any())
            case BlockClear():
                self.clear_block(operation.block_id, operation.first_token)
            case AdapterLoad():
                self._pages[list(operation.page_ids)] = UNLOADED
                if self.on_load is not None:
                    self.on_load(operation)
                assert operation.content is not None
                self._pages[list(operation.page_ids)] = np.array(page_words(operation.content), np.uint64)

    def clear_block(self, block_id: int, first_token: int) -> None:
        """Mark a block's tokens from index `first_token` on as finite. The stored tokens stay."""
        self._poisoned[block_id, first_token:] = False
        self._any_poisoned = bool(self._poisoned.any())

    def host_block(self, host_id: int) -> memoryview:
        """The tokens of a host block and what is beside them, as bytes."""
        size = self.info.tokens_per_block
        return memoryview(self._host[host_id * size:(host_id + 1) * size].view(np.uint8))

    def fingerprint(self) -> bytes:
        return f"scripted {self.key} {self.window} {self.sink}".encode()

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage(cpu=self._pool.nbytes + self._tables.rows.nbytes + self._state.nbytes)

    def close(self) -> None:
        self.closed = True

    # for tests

    def poison_blocks(self, block_ids: list[int]) -> None:
        """Mark blocks as containing non-finite values, as after a fault."""
        self._poisoned[block_ids] = True
        self._any_poisoned = bool(self._poisoned.any())

    def history(self, slot: int, length: int) -> list[int]:
        """Read the first `length` tokens of a slot's sequence (the first beam) through its block table."""
        positions, size, row = np.arange(length), self.info.tokens_per_block, slot * self._rows_per_slot
        return self._pool[self._tables.rows[row, positions // size] * size + positions % size].tolist()

    def expected(self, prompt: Sequence[int], count: int, *, end_id: int | Sequence[int] = -1,
                 random_seed: int | None = None, adapter: AdapterContent | None = None) -> list[int]:
        """Return the tokens that this backend must generate for a prompt; see `expected_tokens`."""
        return self.expected_tokens(prompt, count, vocab_size=self.info.vocab_size, key=self.key, end_id=end_id,
                                    random_seed=random_seed, window=self.window, sink=self.sink, adapter=adapter)

    @staticmethod
    def expected_tokens(prompt: Sequence[int], count: int, *, vocab_size: int = 1000, key: int = 0,
                        end_id: int | Sequence[int] = -1,
                        random_seed: int | None = None, window: int | None = None, sink: int = 0,
                        adapter: AdapterContent | None = None) -> list[int]:
        """Oracle: return up to `count` tokens after `prompt`, without the end id. Uses plain Python integers.

        random_seed   None: greedy
        """
        return [token for token, _ in expected_samples(prompt, count, vocab_size=vocab_size, key=key, end_id=end_id,
                                                       random_seed=random_seed, window=window, sink=sink,
                                                       adapter=adapter)]

    # one step

    def _set_up(self, batch: ScheduledBatch) -> None:
        for work in batch.context:
            if work.setup is None:
                continue
            if work.slot >= len(self._state):
                grown = np.zeros(max(2 * len(self._state), work.slot + 1), SLOT_STATE)
                grown[: len(self._state)] = self._state
                self._state = grown
                last_tokens = np.zeros((len(grown), self._last_tokens.values.shape[1]), np.int32)
                last_tokens[: len(self._last_tokens.values)] = self._last_tokens.values
                self._last_tokens.values = last_tokens
            setup, state = work.setup, self._state
            if setup.has_beams:
                assert self.script is None and setup.logits_post_processor is None, "not with beams"
            self._searches.set_up(work.slot, setup)
            end_ids = [*setup.end_ids, *[-1] * (8 - len(setup.end_ids))]
            state[work.slot] = (work.start, 0, end_ids, salt_of(setup), setup.return_log_probs,
                                setup.top_log_probs, setup.return_generation_logits, setup.return_context_logits, True)
            if len(self._pages):
                self._pages_of[work.slot] = setup.adapter_pages
            self._any_extras |= (setup.return_log_probs or setup.return_generation_logits
                                    or setup.top_log_probs > 0)
            if setup.logits_post_processor is not None and self._post_processors is None:
                from ..decoding.logits_post_processors import LogitsPostProcessors

                self._post_processors = LogitsPostProcessors()
            if self._post_processors is not None:
                self._post_processors.set_up(work.slot, setup)

    def _lay_out(self, batch: ScheduledBatch) -> "_Layout":
        """Compute positions and pool slots of the step's tokens. Contexts come first."""
        size, (generation_slots, kv_lengths, table_rows) = self.info.tokens_per_block, generation_rows(batch)
        if batch.generation.beam_width == 1:
            inputs = self._last_tokens.at(generation_slots, kv_lengths)
        else:
            inputs = self._searches.input_tokens(batch.generation)
        num_drafts = batch.generation.num_drafts
        if not batch.context and num_drafts is None:
            slots, starts, positions, owners = generation_slots, kv_lengths, kv_lengths, None
            counts, tokens = np.ones(len(slots), np.int32), inputs
            token_rows = table_rows
        else:
            context_slots = np.array([work.slot for work in batch.context], np.int32)
            slots = np.concatenate([context_slots, generation_slots])
            table_rows = np.concatenate([context_slots * np.int32(batch.max_beam_width), table_rows])
            starts = np.concatenate([[work.start for work in batch.context], kv_lengths]).astype(np.int32)
            counts = np.ones(len(slots), np.int32)
            counts[: len(batch.context)] = [len(work.token_ids) for work in batch.context]
            if num_drafts is not None:
                counts[len(batch.context):] += num_drafts
                after_inputs = np.repeat(np.arange(1, len(inputs) + 1), num_drafts)
                inputs = np.insert(inputs, after_inputs, batch.generation.draft_tokens)
            tokens = np.concatenate([*(work.token_ids for work in batch.context), inputs])
            owners = np.repeat(np.arange(len(slots)), counts)
            positions = np.arange(len(tokens)) + (starts - np.cumsum(counts) + counts)[owners]
            token_rows = table_rows[owners]
        pool_slots = self._tables.rows[token_rows, positions // size] * size + positions % size
        marks = None
        if len(self._pages):
            marks = np.array([mark_of(self._pages[list(self._pages_of[slot])].tolist()) for slot in slots.tolist()],
                             np.uint64)
            marks = marks if owners is None else marks[owners]
        return _Layout(slots, table_rows, starts, counts, tokens, positions, owners, pool_slots, marks)

    def _sums(self, batch: ScheduledBatch, step: "_Layout") -> np.ndarray:
        """Return, per sequence, the sum of the hash terms of all tokens that its last token attends to.

        The last token is included. The module docstring defines the terms.
        """
        if (self.verify or self.window is not None or batch.generation.beam_width > 1
                or batch.has_drafts):
            return self._read_back(step.table_rows, step.starts + step.counts)
        terms = self._terms(step.positions, step.tokens, step.marks)
        if step.owners is not None:
            terms = np.add.reduceat(terms, np.cumsum(step.counts) - step.counts)
        before = self._state["sum"][step.slots]
        for row, work in enumerate(batch.context):
            if work.setup is not None and work.start:             # reused blocks
                before[row] = self._read_back(step.table_rows[row: row + 1], step.starts[row: row + 1])[0]
        return before + terms

    def _read_back(self, table_rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Read the pool and return, per row, the sum of the hash terms of all tokens that its last token attends to.

        The module docstring defines the terms.

        lengths   [n] number of tokens of each row
        """
        if not len(table_rows):
            return np.empty(0, np.uint64)
        size = self.info.tokens_per_block
        starts = np.cumsum(lengths) - lengths
        owners = np.repeat(np.arange(len(table_rows)), lengths)
        positions = np.arange(len(owners)) - starts[owners]
        if self.window is not None:
            seen = (positions >= lengths[owners] - self.window) | (positions < self.sink)
            owners, positions = owners[seen], positions[seen]
            counts = np.bincount(owners)
            starts = np.cumsum(counts) - counts
        pool_slots = self._tables.rows[table_rows[owners], positions // size] * size + positions % size
        marks = self._marks[pool_slots] if len(self._pages) else None
        return np.add.reduceat(self._terms(positions, self._pool[pool_slots], marks), starts)

    def _terms(self, positions: np.ndarray, tokens: np.ndarray, marks: np.ndarray | None = None) -> np.ndarray:
        term = (positions + 1).astype(np.uint64)
        term *= np.uint64(POSITION_FACTOR)
        token_part = (tokens + 1).astype(np.uint64)
        token_part *= np.uint64(TOKEN_FACTOR)
        term += token_part
        term += np.uint64(self.key)
        if marks is not None:
            term += marks
        return mix_array(term)

    def _words(self, sums: np.ndarray, salts: np.ndarray) -> np.ndarray:
        words = sums ^ salts
        words ^= np.uint64(self.key)
        return mix_array(words)

    def _next_tokens(self, words: np.ndarray) -> np.ndarray:
        return ((words >> np.uint64(16)) % np.uint64(self.info.vocab_size)).astype(np.int32)

    def _decode(self, batch: ScheduledBatch, step: "_Layout", sums: np.ndarray,
                failures: dict[int, RowFailure]) -> StepOutput:
        slots, lengths, context_logits = step.slots, step.starts + step.counts, {}
        if batch.context:
            context_logits = self._context_logits(batch, step, sums)
            yields = np.ones(len(slots), bool)
            yields[: len(batch.context)] = [work.is_last_chunk for work in batch.context]
            slots, sums, lengths = slots[yields], sums[yields], lengths[yields]
        beam_steps, generation_logits, all_slots = {}, {}, slots
        if self._searches:
            is_beam = np.array([slot in self._searches for slot in slots.tolist()], bool)
            if is_beam.any():
                beam_steps, generation_logits = self._search(slots[is_beam], sums[is_beam], lengths[is_beam])
                all_slots = _without_repetitions(slots)
                slots, sums, lengths = slots[~is_beam], sums[~is_beam], lengths[~is_beam]
        words = self._words(sums, self._state["salt"][slots])
        tokens = self._next_tokens(words)
        if self.script is not None:
            self._follow_script(slots, lengths, tokens, failures)
        if self._post_processors and not batch.has_drafts:
            tokens = self._post_process(slots, tokens, failures)
        if batch.has_drafts:
            return self._accept_drafts(batch, step, slots, failures, context_logits, generation_logits, all_slots,
                                       beam_steps)

        log_probs, top_log_probs = None, {}
        if self._any_extras:
            asked = self._state["log_probs"][slots]
            log_probs = np.where(asked, log_probs_of(words), np.float32(0)) if asked.any() else None
            generation_logits |= {int(slots[row]): self._logits(tokens[row: row + 1])
                                  for row in np.nonzero(self._state["generation_logits"][slots])[0]}
            top_log_probs = {int(slots[row]): self._top_log_probs(int(slots[row]), tokens[row: row + 1],
                                                                  words[row: row + 1])
                             for row in np.nonzero(self._state["top_log_probs"][slots])[0]}
        finish = (tokens[:, None] == self._state["end_ids"][slots]).any(1).astype(np.uint8) * np.uint8(END_ID)
        columns = {"slots": slots, "tokens": tokens, "finish": finish, "log_probs": log_probs}
        if beam_steps:
            columns = columns_with_beams(all_slots, slots, tokens, finish, log_probs, beam_steps)
        return StepOutput(batch.micro_batch_id, **columns, context_logits=context_logits,
                          generation_logits=generation_logits, top_log_probs=top_log_probs, failures=failures)

    def _top_log_probs(self, slot: int, tokens: np.ndarray, words: np.ndarray) -> TopLogProbs:
        """Return the likeliest tokens at the position of each token in `tokens`.

        The first of them is the token itself. The others are the ids that follow its id, in order. The log-prob of
        each of the others is 1 lower than the log-prob of the one before it.
        """
        after = np.arange(self._state["top_log_probs"][slot], dtype=np.int32)
        ids = (tokens[:, None] + after) % np.int32(self.info.vocab_size)
        log_probs = log_probs_of(words)[:, None] - after.astype(np.float32)
        log_probs[:, self.info.vocab_size:], ids[:, self.info.vocab_size:] = -np.inf, 0
        return TopLogProbs(ids, log_probs)

    def _accept_drafts(self, batch: ScheduledBatch, step: "_Layout", slots: np.ndarray,
                       failures: dict[int, RowFailure], context_logits: dict[int, np.ndarray],
                       logits: dict[int, np.ndarray], all_slots: np.ndarray, beam_steps: dict) -> StepOutput:
        """Return the output of a step with drafts.

        slots, all_slots   slots of the sequences without beams, and of all sequences
        logits             generation logits of the sequences with beams

        Samples a token after the input token and after each draft. Accepts the drafts before the first draft that
        differs from the token sampled in its position.
        """
        rows = {slot: row for row, slot in enumerate(step.slots.tolist())}
        drafts_of = draft_tokens_of(batch)
        accepted, log_probs, top_log_probs, finish = [], [], {}, []
        for slot in slots.tolist():
            row, mine = rows[slot], drafts_of.get(slot, [])
            count = len(mine)
            end = int(step.starts[row] + step.counts[row])
            lengths = np.arange(end - count, end + 1)
            words = self._words(self._read_back(np.full(count + 1, step.table_rows[row]), lengths),
                                np.full(count + 1, self._state["salt"][slot]))
            sampled, ends, words = self._draw_with_drafts(slot, words, lengths)
            if self._post_processors is not None:
                plain, sampled = sampled, self._post_process(np.full(count + 1, slot), np.array(sampled), failures,
                                                             (np.array([count]), np.array(mine, np.int32))).tolist()
                ends = [end if token == before else END_ID * (token in self._state["end_ids"][slot])
                        for token, before, end in zip(sampled, plain, ends)]
            kept = next((i + 1 for i, end in enumerate(ends) if end or i == count or mine[i] != sampled[i]))
            kept -= sampled[kept - 1] == NO_TOKEN_AFTER_DRAFTS
            finish.append(ends[kept - 1])
            accepted.append(sampled[:kept])
            log_probs.append(np.where(self._state["log_probs"][slot], log_probs_of(words[:kept]), np.float32(0)))
            if self._state["generation_logits"][slot]:
                logits[slot] = self._logits(np.array(sampled[:kept]))
            if self._state["top_log_probs"][slot]:
                top_log_probs[slot] = self._top_log_probs(slot, np.array(sampled[:kept], np.int32), words[:kept])
        columns = columns_with_beams(
            all_slots, slots, np.concatenate(accepted).astype(np.int32), np.array(finish, np.uint8),
            np.concatenate(log_probs), beam_steps, np.array([len(tokens) for tokens in accepted], np.int32))
        return StepOutput(batch.micro_batch_id, **columns, context_logits=context_logits, generation_logits=logits,
                          top_log_probs=top_log_probs, failures=failures)

    def _draw_with_drafts(self, slot: int, words: np.ndarray,
                          lengths: np.ndarray) -> tuple[list[int], list[int], np.ndarray]:
        """Return the token after the first lengths[i] tokens, its finish code and the hash of its log-prob, for each i.

        Drafts are the tokens from lengths[0] on. `words` are the hashes that decide the tokens.
        """
        sampled, end_ids = self._next_tokens(words).tolist(), set(self._state["end_ids"][slot].tolist())
        return sampled, [END_ID if token in end_ids else NOT_FINISHED for token in sampled], words

    def _search(self, slots: np.ndarray, sums: np.ndarray, lengths: np.ndarray) -> tuple[dict, dict]:
        """Advance each beam search by one step. Returns ({slot: BeamStep}, {slot: logits}).

        Only slots that request generation logits have logits.

        slots   [rows] slot of each beam; the rows of a slot are contiguous
        """
        words = self._words(sums, np.zeros(len(sums), np.uint64))
        steps, logits = {}, {}
        for slot, first, count in zip(*(column.tolist() for column in np.unique(
                slots, return_index=True, return_counts=True))):
            position, rows = int(lengths[first]), slice(first, first + count)
            before = self._searches.at(slot, position)
            after, steps[slot] = before.advance(*best_candidates(before, words[rows], self.info.vocab_size))
            self._searches.keep(slot, position, after)
            if self._state["generation_logits"][slot]:
                logits[slot] = self._logits(self._next_tokens(words[rows]))
        return steps, logits

    def _follow_script(self, slots: np.ndarray, lengths: np.ndarray, tokens: np.ndarray,
                       failures: dict[int, RowFailure]) -> None:
        for row, slot in enumerate(slots.tolist()):
            token = self.script(self.history(slot, int(lengths[row])))
            if token is None:
                continue
            if 0 <= token < self.info.vocab_size:
                tokens[row] = token
            else:
                tokens[row] = 0
                failures.setdefault(slot, RowFailure(
                    ErrorCode.INVALID_TOKEN, f"the script returned token {token}; expected a token id in "
                    f"0..{self.info.vocab_size - 1}; correct the script"))

    def _post_process(self, slots: np.ndarray, tokens: np.ndarray, failures: dict[int, RowFailure],
                      drafts: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
        """Run logits post-processors on one-hot logits of `tokens`; return the tokens with the largest logits.

        drafts   the rows are those of one sequence, with these drafts; its rows after drafts do not fail
        """
        import torch

        from ..decoding.logits_post_processors import NO_TOKEN

        logits = torch.from_numpy(self._logits(tokens))
        processed = self._post_processors.apply(logits, slots, drafts)
        if processed is not None:
            maxima, best = logits.max(1)
            tokens = best.numpy().astype(np.int32)
            for slot, failure in processed.failures.items():
                failures.setdefault(slot, failure)
            not_finite = ~maxima.isfinite().numpy()
            if drafts is not None:
                tokens[1:][not_finite[1:]], not_finite = NO_TOKEN_AFTER_DRAFTS, not_finite[:1]
            for slot in slots[:len(not_finite)][not_finite].tolist():
                failures.setdefault(slot, RowFailure(ErrorCode.NON_FINITE_LOGITS, NO_TOKEN))
        return tokens

    def _context_logits(self, batch: ScheduledBatch, step: "_Layout", sums: np.ndarray) -> dict[int, np.ndarray]:
        """Return slot -> one-hot logits of the next token at each position, for slots that request context logits."""
        logits, stop = {}, 0
        for row, work in enumerate(batch.context):
            begin, stop = stop, stop + len(work.token_ids)
            if self._state["context_logits"][work.slot]:
                positions = step.positions[begin: stop - work.num_drafts]
                if self.window is None and not work.num_drafts:
                    terms = self._terms(positions, step.tokens[begin:stop],
                                        None if step.marks is None else step.marks[begin:stop])
                    before = sums[row: row + 1] - terms.sum(keepdims=True)
                    prefixes = before + np.cumsum(terms)
                else:
                    row = work.slot * batch.max_beam_width
                    prefixes = self._read_back(np.full(len(positions), row), positions + 1)
                salts = np.full(len(prefixes), self._state["salt"][work.slot])
                logits[work.slot] = self._logits(self._next_tokens(self._words(prefixes, salts)))
        return logits

    def _logits(self, tokens: np.ndarray) -> np.ndarray:
        return (np.arange(self.info.vocab_size) == tokens[:, None]).astype(np.float32)

    # faults

    def _poison(self, failures: dict[int, RowFailure], step: "_Layout") -> None:
        for slot, failure in failures.items():
            if failure.code is ErrorCode.NON_FINITE_LOGITS:
                owners = np.nonzero(step.slots == slot)[0]
                written = step.pool_slots[owners if step.owners is None else np.isin(step.owners, owners)]
                self._poisoned.reshape(-1)[written] = True
                self._any_poisoned = True

    def _poisoned_rows(self, step: "_Layout") -> dict[int, RowFailure]:
        failures = {}
        seen = blocks_seen(step.starts, step.starts + step.counts, self.info.tokens_per_block, self.window, self.sink)
        for slot, row, sinks, skipped, count in zip(step.slots.tolist(), step.table_rows.tolist(), *seen):
            columns = np.arange(count)
            columns[sinks:] += skipped
            if self._poisoned[self._tables.rows[row, columns]].any():
                failures[slot] = RowFailure(
                    ErrorCode.NON_FINITE_LOGITS, "a KV cache block of the request contains non-finite values; "
                    "expected finite values in all blocks that a step reads; clear blocks before they are reused")
        return failures

    def _check(self, batch: ScheduledBatch, step: "_Layout") -> None:
        """Check that the step follows the rules of handover.py. Raises InternalError for a bug of the engine."""
        state, size = self._state, self.info.tokens_per_block
        ends = step.starts + step.counts
        _require(len(np.unique(step.table_rows)) == len(step.slots), "a slot occurs twice", step.slots)
        _require(int(step.slots.max(initial=0)) < len(state) and bool(state["set_up"][step.slots].all()),
                 "a slot was never set up", step.slots)
        _require(bool((step.counts > 0).all()), "a context chunk is empty", step.slots)
        for slot in step.slots.tolist() if self._pages_of else ():
            pages = list(self._pages_of[slot])
            _require(bool((self._pages[pages] != UNLOADED).all()), "an adapter page of a slot was never loaded",
                     np.array(pages))
        lengths = state["length"][step.slots]                     # greater than `start` if the step runs again
        _require(bool((step.starts <= lengths).all()), "a start exceeds the cached length", lengths, step.starts)
        _require(bool((ends <= self._tables.mapped[step.table_rows] * size).all()),
                 "lengths exceed the mapped blocks", ends, self._tables.mapped[step.table_rows])
        width = batch.generation.beam_width
        _require(width <= batch.max_beam_width, "beam_width exceeds max_beam_width")
        for slot in batch.generation.slots.tolist() if self._searches or width > 1 else ():
            search_width = self._searches.width(slot)
            _require(search_width == width, "the beam width of a slot differs from that of its step",
                     np.array([search_width]))
        _require(bool((ends <= self.info.max_seq_len).all()), "lengths exceed max_seq_len", ends)
        _require(batch.num_padded_rows in (0, max(batch.num_padded_rows, batch.num_sequences)),
                 "the step has more sequences than padded rows", batch.num_padded_rows, batch.num_sequences)
        _require(len(np.unique(step.pool_slots)) == len(step.tokens), "two tokens write to one pool slot", step.slots)
        _require(bool(((step.tokens >= 0) & (step.tokens < self.info.vocab_size)).all()), "a token id is out of range")
        _require(all(work.is_last_chunk or (work.start + len(work.token_ids)) % size == 0 for work in batch.context),
                 "a chunk that is not the last does not end at a block boundary", ends)


class ScriptedStep:
    """A launched step. After it has run, it has an output or an exception."""

    def __init__(self, backend: ScriptedBackend, batch: ScheduledBatch) -> None:
        self.batch = batch
        self.layout: _Layout | None = None
        self.output: StepOutput | None = None
        self.error: BaseException | None = None
        self.done_at = 0.0
        self._backend = backend
        self._is_read = False

    def finish(self) -> StepOutput:
        """Wait for the step and return its output; see seams.PendingStep."""
        assert not self._is_read, "finish was called twice"
        self._is_read = True
        self._backend.run_up_to(self)
        if self.done_at:
            _sleep_until(self.done_at)
        if self.error is not None:
            raise self.error
        if self._backend.on_finish is not None:
            planted = dict(self._backend.on_finish(self.batch) or {})
            self._backend._poison(planted, self.layout)
            self.output.failures.update(planted)
        return self.output


def draft_tokens_of(batch: ScheduledBatch) -> dict[int, list[int]]:
    """Return slot -> draft tokens, without sequences that have none."""
    drafts = {work.slot: work.token_ids[-work.num_drafts:].tolist() for work in batch.context if work.num_drafts}
    generation = batch.generation
    if generation.num_drafts is not None:
        parts = np.split(generation.draft_tokens, np.cumsum(generation.num_drafts)[:-1])
        drafts |= {slot: part.tolist() for slot, part in zip(generation.slots.tolist(), parts) if len(part)}
    return drafts


def _sleep_until(moment: float) -> None:
    """Wait without holding the GIL, as a wait for a device does."""
    while (left := moment - perf_counter()) > 0:
        sleep(left)


def _without_repetitions(slots: np.ndarray) -> np.ndarray:
    """Return each slot once, in order. Equal slots are adjacent."""
    return slots[np.flatnonzero(np.diff(slots, prepend=-1))]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of a step with n sequences and T tokens. Each beam is a sequence.

    slots        [n] slot of each sequence
    table_rows   [n] row of each sequence in the block tables
    starts       [n] position of the first token of each sequence in the step
    counts       [n] number of tokens of each sequence in the step
    tokens       [T] input tokens, sequence by sequence
    positions    [T] position of each token in its sequence
    owners       [T] index of each token's sequence; None if every sequence has one token
    pool_slots   [T] index of each token in the pool, counted in tokens
    marks        [T] mark of the adapter of each token; None if the backend has no adapters
    """

    slots: np.ndarray
    table_rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    owners: np.ndarray | None
    pool_slots: np.ndarray
    marks: np.ndarray | None = None


HOST_TOKEN = np.dtype([("token", np.int32), ("mark", np.uint64), ("poisoned", np.bool_)])
SLOT_STATE = np.dtype([
    ("length", np.int32), ("sum", np.uint64), ("end_ids", np.int32, (8,)), ("salt", np.uint64),
    ("log_probs", bool), ("top_log_probs", np.int32), ("generation_logits", bool), ("context_logits", bool),
    ("set_up", bool)])


def _require(holds: bool, rule: str, *numbers: np.ndarray) -> None:
    if not holds:
        details = " / ".join(str(np.asarray(array).tolist()) for array in numbers)
        raise InternalError(f"the batch violates a rule of handover.py: {rule}{f': {details}' if details else ''}")
