"""The two values that host and device side exchange: the host sends `ScheduledBatch`, the device `StepOutput`.

Both contain numbers and numpy arrays, but no request objects and no torch tensors. A `SlotSetup` also refers to the
logits post-processor of its request. A *slot* is a row of the device's per-sequence state. The host chooses the slot
when a request becomes active, and may reuse it after the request has released it. The options of a request are sent as
`SlotSetup` with its first context chunk, and again after a pause. From then on the device keeps the last token of every
slot, and a generation step carries slots and lengths only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from .adapter_values import AdapterContent
from .names import ErrorCode, FinishReason
from .sampling_config import NEUTRAL, SamplingConfig


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LogitsPostProcessor:
    """A user's function that changes the logits of one sequence, before all other stages.

    request_id   id that identifies the sequence to the function
    function     the function, in one of the two forms in decoding/logits_post_processors.py
    token_ids    function () -> for each beam, a new list of the prompt's tokens and the tokens generated so far
    is_batched   whether one call of the function serves all sequences of a step that use this function
    allowed_drafts   the function's method of this name; None: it has none, and the sequence gets no drafts

    The host passes the object by reference. The device keeps a weak reference only, and the object lives as long as the
    host keeps it.
    """

    request_id: int
    function: Callable[..., Any]
    token_ids: Callable[[], list[list[int]]]
    is_batched: bool = False
    allowed_drafts: Callable[..., Any] | None = None


def num_beam_candidates(width: int, end_ids: Sequence[int], stop_words: Sequence[Sequence[int]]) -> int:
    """The number of continuations that a step of beam search considers. At least `width` of them do not end a beam.

    Each end id, and each last token of a stop word, can end one continuation per beam.
    """
    ends = {word[-1] for word in stop_words}.union(end_ids)
    return max(2, 1 + len(ends)) * width


def added_log_probs(cum_log_probs: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Return cum_log_probs + log_probs, float32. The sum of two finite numbers saturates at the largest float32.

    With an embedding bias or a penalty, the log-probabilities of beams are as large as the bias or the penalty.
    """
    with np.errstate(over="ignore"):
        sums: np.ndarray = cum_log_probs + log_probs
    if np.isinf(sums).any():
        largest = np.finfo(np.float32).max
        np.clip(sums, -largest, largest, out=sums, where=np.isfinite(cum_log_probs) & np.isfinite(log_probs))
    return sums


@dataclass(frozen=True, slots=True, eq=False)
class SlotSetup:
    """The options of a sequence. The device gets them before the sequence's first token, and again after a pause.

    sampling                how tokens are sampled, and how beams compete
    request_id              id of the request of the sequence
    end_id                  token that ends the sequence and is not part of the output; -1: no end id
    more_end_ids            up to 7 more end ids; empty if end_id is -1
    bad_words, stop_words   words, each a tuple of tokens. The last token of a bad word is not sampled after the other
                            tokens of the word. A stop word ends the sequence with its last token
    embedding_bias          [vocab] float32, added to the logits; None: no bias
    return_log_probs        fill the rows of `StepOutput.log_probs` for this slot
    top_log_probs           number of likeliest tokens to return in `StepOutput.top_log_probs`; always 0 with beams
    raw_log_probs           take both kinds of log-probabilities from the model's unchanged logits at temperature 1;
                            always False with beams
    return_context_logits   return the logits of context rows in `StepOutput.context_logits`
    return_generation_logits   return the model's logits for each token in `StepOutput.generation_logits`
    logits_post_processor   function that changes the logits before all other stages; None: no change
    prompt_length           tokens of the user's prompt; all later tokens were generated, also after a pause
    max_new_tokens          tokens after which a search with several beams ends. For other sequences the host counts
                            tokens
    history                 [n] int32, all tokens of the sequence so far; None until `continuing` sets the history
    adapter_pages           the pages with the sequence's adapter, in order of rank; empty: no adapter. Their content is
                            the sequence's until it leaves its slot
    """

    sampling: SamplingConfig = NEUTRAL
    request_id: int = 0
    end_id: int = -1
    more_end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: np.ndarray | None = None
    return_log_probs: bool = False
    top_log_probs: int = 0
    raw_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    logits_post_processor: LogitsPostProcessor | None = None
    prompt_length: int = 0
    max_new_tokens: int = 0
    history: np.ndarray | None = None
    adapter_pages: tuple[int, ...] = ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All end ids of the sequence."""
        return (self.end_id, *self.more_end_ids) if self.end_id >= 0 else ()

    @property
    def has_beams(self) -> bool:
        """Whether the sequence has more than one beam."""
        return self.sampling.beam_width > 1

    def continuing(self, tokens: Sequence[int] | np.ndarray) -> "SlotSetup":
        """Return the setup with these tokens as history, for a sequence that starts, or continues after a pause."""
        return replace(self, history=np.asarray(tokens, np.int32))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlotSetup) and all(
            _same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    return bool(first == second)


@dataclass(frozen=True, slots=True)
class ContextWork:
    """One context chunk of one sequence.

    token_ids       [n] int32, n >= 1: the chunk, then `num_drafts` draft tokens. An id at or above the vocabulary size
                    is a prompt-tuning token, whose embedding is in `embeddings`
    start           tokens of this sequence already in the KV cache, equal to the position of token_ids[0]. More than 0
                    in a first chunk if the beginning of the prompt was cached
    is_last_chunk   whether the chunk completes the context, so that the step also yields tokens of the sequence
    setup           options of the sequence, sent with its first chunk and its first chunk after a pause; else None
    embeddings      [v, hidden size] float32, of the v prompt-tuning tokens of the chunk, in order; None if v is 0
    num_drafts      number of draft tokens after a last chunk. The step yields 1 to 1 + num_drafts tokens
    draft_logits    [num_drafts, vocab] float32: logits from which the client drew its drafts, which are then tested by
                    ratios. None: drafts are accepted that equal the sequence's tokens
    """

    slot: int
    token_ids: np.ndarray
    start: int
    is_last_chunk: bool
    setup: SlotSetup | None = None
    embeddings: np.ndarray | None = None
    num_drafts: int = 0
    draft_logits: np.ndarray | None = None

    @property
    def end(self) -> int:
        """The position after the chunk, where the draft tokens begin."""
        return self.start + len(self.token_ids) - self.num_drafts


@dataclass(frozen=True, slots=True)
class GenerationWork:
    """The generating sequences of a step, and the draft tokens that the step verifies.

    slots          [g] int32, in batch order
    kv_lengths     [g] int32: tokens in the KV cache before the step, equal to the position of the first input token
    beam_width     beams of each sequence; equal for all sequences of a step. A sequence with beams has one row per
                   beam; the rows are adjacent and of equal length
    num_drafts     [g] int32: draft tokens of each sequence, which follow its last token in the input. The step yields
                   1 to 1 + num_drafts tokens of the sequence. None: no drafts; always None with beams
    draft_tokens   [sum of num_drafts] int32, in batch order; None if num_drafts is None
    """

    slots: np.ndarray
    kv_lengths: np.ndarray
    beam_width: int = 1
    num_drafts: np.ndarray | None = None
    draft_tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, indices: np.ndarray) -> "GenerationWork":
        """Return the work of some of the sequences.

        indices   [k] indices of these sequences, in the order of the result
        """
        if not len(indices):
            return NO_GENERATION
        num_drafts = draft_tokens = None
        if self.num_drafts is not None and self.draft_tokens is not None:
            num_drafts, ends = self.num_drafts[indices], np.cumsum(self.num_drafts)
            draft_tokens = np.concatenate([self.draft_tokens[ends[i] - self.num_drafts[i]:ends[i]] for i in indices])
        return GenerationWork(self.slots[indices], self.kv_lengths[indices], self.beam_width, num_drafts, draft_tokens)


NO_GENERATION = GenerationWork(np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class BlockTableUpdates:
    """Entries of the block tables that changed since the last batch: `table[slots[i], indices[i]] = block_ids[i]`.

    slots, indices, block_ids   [u] int32. With beams, `slots` has rows of the table: slot *
                                ScheduledBatch.max_beam_width + beam

    Apply the updates in order. Applying them twice is harmless. Do not read entries past the length of a sequence, or
    entries between its sink tokens and its attention window: these entries are -1, or a block that may belong to
    another sequence.
    """

    slots: np.ndarray
    indices: np.ndarray
    block_ids: np.ndarray

    def where(self, kept: np.ndarray) -> "BlockTableUpdates":
        """Return the updates selected by `kept` [u] bool."""
        return BlockTableUpdates(self.slots[kept], self.indices[kept], self.block_ids[kept])

    def then(self, later: "BlockTableUpdates") -> "BlockTableUpdates":
        """Return these updates followed by `later`. Each table entry occurs once, with its last value, so the result is
        never longer than the tables."""
        slots, indices, block_ids = (np.concatenate([first, second]) for first, second in (
            (self.slots, later.slots), (self.indices, later.indices), (self.block_ids, later.block_ids)))
        entries = slots.astype(np.int64) << 32 | indices
        _, from_the_end = np.unique(entries[::-1], return_index=True)
        last = len(entries) - 1 - from_the_end
        return BlockTableUpdates(slots[last], indices[last], block_ids[last])


NO_UPDATES = BlockTableUpdates(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A device operation that copies the first tokens of a KV cache block to another block, in every layer.

    num_tokens           least number of tokens to copy; copying more tokens of the block does no harm
    from_host, to_host   whether the source, or the destination, is a host block
    """

    source: int
    destination: int
    num_tokens: int
    from_host: bool = False
    to_host: bool = False


@dataclass(frozen=True, slots=True)
class BlockClear:
    """A device operation that fills a KV cache block with zeros, so that no later owner reads the old content.

    first_token   index within the block from which to fill; the content of earlier tokens stays
    """

    block_id: int
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A device operation that loads an adapter into pages of the device.

    page_ids   the pages in order, one for each rank; the load overwrites their content. Page j gets row j of each A and
               column j of each B, and zeros for parts of at most j ranks
    content    the adapter, by reference
    """

    task_id: int
    page_ids: tuple[int, ...]
    content: AdapterContent | None = None


DeviceOperation = BlockCopy | BlockClear | AdapterLoad


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """All work of one step. The contexts come before the generating sequences.

    block_table_updates   updates that the device applies before everything else
    operations            operations that the device runs before the step, in order. Each operation of an engine has a
                          number. An operation is listed in every batch until the output of one of these batches has
                          been read, but the device runs it only once; `new_operations` returns those not run yet
    first_operation       number of operations[0], counted over the life of the engine
    num_padded_rows       rows for generation in a padded layout: one for each member of a static batch, also for
                          finished members; 0: one for each generating sequence. Other schemes ignore the number
    max_beam_width        rows of the block tables per slot; the same in every batch

    When `start` or `finish` raises, the loop runs the batch again without its drafts, and bisects one without drafts to
    find the sequences at fault. A failed run must therefore not affect a second run of the batch, or of a part of it.
    With steps in flight the second run may come after the following step: see seams.ModelBackend.
    """

    iteration: int
    micro_batch_id: int = 0
    context: tuple[ContextWork, ...] = ()
    generation: GenerationWork = NO_GENERATION
    block_table_updates: BlockTableUpdates = NO_UPDATES
    num_padded_rows: int = 0
    max_beam_width: int = 1
    operations: tuple[DeviceOperation, ...] = ()
    first_operation: int = 0

    @property
    def num_sequences(self) -> int:
        return len(self.context) + len(self.generation)

    @property
    def num_context_tokens(self) -> int:
        return sum(len(work.token_ids) for work in self.context)

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies draft tokens of a sequence."""
        return self.generation.num_drafts is not None or any(work.num_drafts for work in self.context)

    def without_drafts(self) -> "ScheduledBatch":
        """Return the batch without its draft tokens. The step then yields one token of each sequence."""
        context = tuple([replace(work, token_ids=work.token_ids[:-work.num_drafts], num_drafts=0, draft_logits=None)
                         if work.num_drafts else work for work in self.context])
        generation = replace(self.generation, num_drafts=None, draft_tokens=None) if len(self.generation) else (
            self.generation)
        return replace(self, context=context, generation=generation)

    @property
    def yielding(self) -> np.ndarray:
        """[r] int32: the slots of the rows of the step's output, contexts with their last chunk, then generation."""
        last_chunks = [work.slot for work in self.context if work.is_last_chunk] if self.context else ()
        if not last_chunks:
            return self.generation.slots
        return np.concatenate([np.array(last_chunks, np.int32), self.generation.slots])

    def slots(self) -> list[int]:
        """Every slot of the batch, in batch order."""
        slots = [work.slot for work in self.context]
        slots += self.generation.slots.tolist()
        return slots

    def new_operations(self, num_done: int) -> tuple[DeviceOperation, ...]:
        """Return the operations left for a device that has run the first `num_done` operations of the engine's life."""
        return self.operations[max(num_done - self.first_operation, 0):] if self.operations else ()

    def take(self, indices: Sequence[int]) -> "ScheduledBatch":
        """Return a batch of some of the sequences. It has no padded rows for the sequences that are left out.

        indices   ascending indices in batch order
        """
        contexts = len(self.context)
        return ScheduledBatch(
            iteration=self.iteration,
            micro_batch_id=self.micro_batch_id,
            context=tuple(self.context[index] for index in indices if index < contexts),
            generation=self.generation.take(np.array([i - contexts for i in indices if i >= contexts], int)),
            block_table_updates=self.block_table_updates,
            max_beam_width=self.max_beam_width,
            operations=self.operations,
            first_operation=self.first_operation,
        )


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The reason why one row of a step is unusable. The other rows of the step can be used."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One result of a beam search.

    tokens          [n] int32, without the end id; a stop word is part of it
    cum_log_prob    sum of the log-probabilities of its tokens, including the end id
    log_probs       [n] float32, log-probabilities of `tokens`
    rows            [n] int32: index of the beam that each token continued. The token was chosen from the row with
                    this index in the logits of its step
    finish          FinishReason: END_ID, STOP_WORDS or LENGTH
    """

    tokens: np.ndarray
    cum_log_prob: float
    log_probs: np.ndarray
    rows: np.ndarray
    finish: int


@dataclass(frozen=True, slots=True, eq=False)
class TopLogProbs:
    """The likeliest tokens at each position of a row, likeliest first. Of equally likely tokens, lower ids come first.

    ids         [row's tokens, k] int32; 0 where fewer than k tokens are possible
    log_probs   [row's tokens, k] float32; -inf where fewer than k tokens are possible
    """

    ids: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of a step: one row for each context whose last chunk ran, then one row for each generating sequence.

    A row has the new tokens of one sequence. Without drafts and beams, there is one token. With drafts, there are the
    accepted drafts and one more token. With beams, there is one token per beam, or no token if the search has ended.

    slots               [r] int32, in batch order
    tokens              [n] int32: the tokens of all rows, in order. For the slots in `failures`, tokens, finish,
                        parents and log_probs are ignored
    finish              [r] uint8, the device's FinishReason for the last token of the row: END_ID (the token is the end
                        id and not part of the output), STOP_WORDS or NOT_FINISHED. The host checks lengths. Ignored
                        if a search has ended
    row_starts          [r + 1] int32: row i has tokens row_starts[i]..row_starts[i + 1]; None: each row has one token
    log_probs           [n] float32; None if no sequence of the batch has beams or asked for log-probabilities. They are
                        taken after all stages and the temperature, and before top-k and top-p. For slots with
                        `raw_log_probs`, they are taken from the model's unchanged logits. With beams, biases, penalties
                        and bans change the log-probabilities themselves; -inf for a beam without a continuation
    parents             [n] int32: with beams, the beam that each token continues; 0 after a context, which has one
                        beam. None: no sequence has beams
    hypotheses          slot -> results of a search that has ended, best first, at most one per beam
    context_logits      slot -> [chunk tokens, vocab] float32, the model's unchanged logits, for slots that asked
    generation_logits   slot -> [row's tokens, vocab] float32, the model's unchanged logits for each token, for slots
                        that asked and have a row. With beams: [beams before the step, vocab]
    top_log_probs       slot -> TopLogProbs of the row's tokens, for slots that asked and have a row; from the same
                        distribution as log_probs
    failures            slot -> the reason why its row is unusable
    """

    micro_batch_id: int
    slots: np.ndarray
    tokens: np.ndarray
    finish: np.ndarray
    row_starts: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    parents: np.ndarray | None = None
    hypotheses: dict[int, tuple[Hypothesis, ...]] = field(default_factory=dict)
    context_logits: dict[int, np.ndarray] = field(default_factory=dict)
    generation_logits: dict[int, np.ndarray] = field(default_factory=dict)
    top_log_probs: dict[int, TopLogProbs] = field(default_factory=dict)
    failures: dict[int, RowFailure] = field(default_factory=dict)

    @staticmethod
    def merge(parts: "list[StepOutput]", micro_batch_id: int) -> "StepOutput":
        """Join the outputs of the parts of a batch, in order, as if the batch had run as a whole."""
        if not parts:
            none = np.empty(0, np.int32)
            return StepOutput(micro_batch_id, none, none, np.empty(0, np.uint8))
        row_starts = None
        if any(part.row_starts is not None for part in parts):
            lengths = [np.ones(len(part.slots), np.int32) if part.row_starts is None else np.diff(part.row_starts)
                       for part in parts]
            row_starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32)
        return StepOutput(
            micro_batch_id=micro_batch_id,
            slots=np.concatenate([part.slots for part in parts]),
            tokens=np.concatenate([part.tokens for part in parts]),
            finish=np.concatenate([part.finish for part in parts]),
            row_starts=row_starts,
            log_probs=_joined([(part.log_probs, len(part.tokens)) for part in parts], np.float32),
            parents=_joined([(part.parents, len(part.tokens)) for part in parts], np.int32),
            hypotheses={slot: found for part in parts for slot, found in part.hypotheses.items()},
            context_logits={slot: logits for part in parts for slot, logits in part.context_logits.items()},
            generation_logits={slot: logits for part in parts for slot, logits in part.generation_logits.items()},
            top_log_probs={slot: top for part in parts for slot, top in part.top_log_probs.items()},
            failures={slot: failure for part in parts for slot, failure in part.failures.items()},
        )


def _joined(columns: "list[tuple[np.ndarray | None, int]]", dtype: type) -> np.ndarray | None:
    """Concatenate the columns, with zeros for each column that is None. Returns None if all columns are None."""
    if all(column is None for column, _ in columns):
        return None
    return np.concatenate([np.zeros(length, dtype) if column is None else column for column, length in columns])


# The finish codes of a backend, as plain integers for numpy comparisons on the hot path.
NOT_FINISHED = int(FinishReason.NOT_FINISHED)
END_ID = int(FinishReason.END_ID)
STOP_WORDS = int(FinishReason.STOP_WORDS)
LENGTH = int(FinishReason.LENGTH)
