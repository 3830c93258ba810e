"""The two values that cross between the towers: `ScheduledBatch` down, `StepOutput` up.

Integers and numpy arrays only; no request object, no tensor of torch. A *slot* is a row of the device's per-sequence
state: the host picks it when a request becomes active and may give it to another one once it was released. What a
request asked for travels once, as `SlotSetup`, with its first context chunk (again after a pause); afterwards the
device knows the last token of every slot, so a generation step carries slots and lengths and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from .names import ErrorCode, FinishReason
from .sampling_config import NEUTRAL, SamplingConfig


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LogitsPostProcessor:
    """A function of the user's that changes the logits of one sequence before anything else does.

    request_id   what the function knows the sequence by
    function     what decoding/logits_post_processors.py describes, in one of its two forms
    token_ids    () -> per beam, the prompt and what was generated so far: new lists at every call
    is_batched   the function takes all sequences of a step that have the same one

    Crosses by reference. The device keeps no hold of it: it is gone when the host has dropped it.
    """

    request_id: int
    function: Callable[..., Any]
    token_ids: Callable[[], list[list[int]]]
    is_batched: bool = False


def num_beam_candidates(width: int, end_ids: Sequence[int], stop_words: Sequence[Sequence[int]]) -> int:
    """Continuations that a step of beam search looks at: so many that `width` are left, however many of them end.

    A beam has at most one continuation by each last token of a stop word, and one by each end id.
    """
    ends = {word[-1] for word in stop_words}.union(end_ids)
    return max(2, 1 + len(ends)) * width


@dataclass(frozen=True, slots=True, eq=False)
class SlotSetup:
    """What the device must know about a sequence before its first token, written once per admission or resume.

    sampling                how its tokens are sampled, and how its beams compete
    request_id              of the request that it belongs to
    end_id                  token that ends the sequence and is not part of the output; -1: none
    more_end_ids            up to 7 more of them, where end_id is one
    bad_words, stop_words   words, each a tuple of tokens: the last token of a bad word is not sampled after the others;
                            a stop word ends the sequence with its last token
    embedding_bias          [vocab] float32, added to the logits; None: nothing
    return_log_probs        rows of `StepOutput.log_probs` are filled for this slot
    top_log_probs           how many of the likeliest tokens are returned in `StepOutput.top_log_probs`; 0: none. Not
                            with beams
    raw_log_probs           both are of the model's own distribution, before anything is done to its logits, at
                            temperature 1. Not with beams
    return_context_logits   the step's context rows are returned in `StepOutput.context_logits`
    return_generation_logits   the model's logits for each token are returned in `StepOutput.generation_logits`
    logits_post_processor   changes the logits before anything else does; None: there is none
    prompt_length           tokens of the user's prompt; whatever follows was generated, also after a resume
    max_new_tokens          tokens after which a search of several beams ends; otherwise the host counts them
    history                 [n] int32, all tokens of the sequence so far; None: not given yet, see `continuing`
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

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end the sequence."""
        return (self.end_id, *self.more_end_ids) if self.end_id >= 0 else ()

    @property
    def has_beams(self) -> bool:
        """Whether several continuations of the sequence compete."""
        return self.sampling.beam_width > 1

    def continuing(self, tokens: Sequence[int] | np.ndarray) -> "SlotSetup":
        """The setup of a sequence that starts, or goes on after a pause, with these tokens."""
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

    token_ids       [n] int32, n >= 1: the chunk. An id that is not below the vocabulary is that of a prompt-tuning
                    token: it has a place among the others and an embedding of its own
    start           tokens of this sequence already in the KV cache = position of token_ids[0]; more than 0 also in a
                    first chunk, when the beginning of the prompt was found in the cache
    is_last_chunk   the step also yields tokens of the sequence
    setup           given with the first chunk after admission or resume, else None
    embeddings      [v, hidden size] float32: those of the v prompt-tuning tokens of the chunk, in order; None: it
                    has none
    num_drafts      of a last chunk, how many of its last tokens are draft tokens: the step yields 1 to 1 + num_drafts
                    tokens
    """

    slot: int
    token_ids: np.ndarray
    start: int
    is_last_chunk: bool
    setup: SlotSetup | None = None
    embeddings: np.ndarray | None = None
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class GenerationWork:
    """One step of every generating sequence.

    slots          [g] int32, in batch order
    kv_lengths     [g] int32: tokens in the KV cache before the step = position of the first input token
    beam_width     beams of each of these sequences: a step has one width. A sequence of several is several rows of
                   tokens, one after the other, all of one length
    num_drafts     [g] int32: draft tokens of each sequence, which follow its last token in the input: the step yields
                   1 to 1 + num_drafts tokens. None: no sequence has any. Not with beams
    draft_tokens   [sum of num_drafts] int32, in batch order; None where num_drafts is
    """

    slots: np.ndarray
    kv_lengths: np.ndarray
    beam_width: int = 1
    num_drafts: np.ndarray | None = None
    draft_tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, indices: np.ndarray) -> "GenerationWork":
        """These sequences alone, in this order. indices [k]"""
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

    slots, indices, block_ids   [u] int32. Where sequences may have beams, what is called a slot here is the row of one
                                beam: slot * ScheduledBatch.max_beam_width + beam
    They are applied in order; doing so twice is harmless. Entries past a sequence's length are stale and must not be
    read, and so are those of blocks that were given back because they left the window: -1, or a block of another
    sequence by now.
    """

    slots: np.ndarray
    indices: np.ndarray
    block_ids: np.ndarray

    def where(self, kept: np.ndarray) -> "BlockTableUpdates":
        """Those that are to be kept. kept [u] bool"""
        return BlockTableUpdates(self.slots[kept], self.indices[kept], self.block_ids[kept])

    def then(self, later: "BlockTableUpdates") -> "BlockTableUpdates":
        """Both, in order, with each entry once: no longer than the tables have entries, however often this is done."""
        slots, indices, block_ids = (np.concatenate([mine, theirs]) for mine, theirs in (
            (self.slots, later.slots), (self.indices, later.indices), (self.block_ids, later.block_ids)))
        entries = slots.astype(np.int64) << 32 | indices
        _, from_the_end = np.unique(entries[::-1], return_index=True)
        last = len(entries) - 1 - from_the_end
        return BlockTableUpdates(slots[last], indices[last], block_ids[last])


NO_UPDATES = BlockTableUpdates(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first tokens of a KV cache block to another block, in every layer.

    num_tokens           tokens to copy, at least; more of the block does no harm
    from_host, to_host   the source, or the destination, is a block of the host's pool
    """

    source: int
    destination: int
    num_tokens: int
    from_host: bool = False
    to_host: bool = False


@dataclass(frozen=True, slots=True)
class BlockClear:
    """Fill a KV cache block with zeros from one of its tokens on: what is there must not be read by a later owner.

    first_token   index within the block; what precedes it stays
    """

    block_id: int
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Bring an adapter to these pages of the device.

    page_ids   in order; what they hold is overwritten
    """

    task_id: int
    page_ids: tuple[int, ...]


DeviceOperation = BlockCopy | BlockClear | AdapterLoad


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """All work of one step: contexts before generation, in this order.

    block_table_updates   applied before anything else
    operations            what the device does before the step, in order. It does each once: they are repeated in later
                          batches, under the same numbers, until a step that had them was read
    first_operation       number of the first of them, counted over the life of the engine; `new_operations` picks those
                          that a device has not done
    num_places       sequences that a padded layout keeps rows for in generation: the members of a static batch, those
                     that are done included; 0: as many as there are. Other layouts do not look at it.
    max_beam_width   rows of the block tables that belong to a slot; the same in every batch

    A backend that raises from `start` or `finish` must have changed nothing that a second run of the same batch, or of
    any part of it, would notice: the loop narrows a failure down by running halves. With steps in flight the second run
    may come after the step that followed: see seams.ModelBackend.
    """

    iteration: int
    micro_batch_id: int = 0
    context: tuple[ContextWork, ...] = ()
    generation: GenerationWork = NO_GENERATION
    block_table_updates: BlockTableUpdates = NO_UPDATES
    num_places: int = 0
    max_beam_width: int = 1
    operations: tuple[DeviceOperation, ...] = ()
    first_operation: int = 0

    @property
    def num_sequences(self) -> int:
        return len(self.context) + len(self.generation)

    @property
    def num_context_tokens(self) -> int:
        return sum(len(work.token_ids) for work in self.context)

    def slots(self) -> list[int]:
        """Every slot of the batch, in batch order."""
        slots = [work.slot for work in self.context]
        slots += self.generation.slots.tolist()
        return slots

    def new_operations(self, num_done: int) -> tuple[DeviceOperation, ...]:
        """The operations that a device has to do which has done the first `num_done` of the engine's life."""
        return self.operations[max(num_done - self.first_operation, 0):] if self.operations else ()

    def take(self, indices: Sequence[int]) -> "ScheduledBatch":
        """These sequences alone, as a batch of its own without rows for others.

        indices   rising, into the batch order
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
    """One sequence whose row of a step is unusable; the others of the batch are fine."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One of the texts that a beam search came to.

    tokens          [n] int32, without the end id; a stop word is part of it
    cum_log_prob    sum of the log-probabilities of its tokens, the end id's included
    log_probs       [n] float32, of `tokens`
    rows            [n] int32: the beam that each token continued, so the row it was drawn from in its step
    finish          FinishReason: END_ID, STOP_WORDS or LENGTH
    """

    tokens: np.ndarray
    cum_log_prob: float
    log_probs: np.ndarray
    rows: np.ndarray
    finish: int


@dataclass(frozen=True, slots=True, eq=False)
class TopLogProbs:
    """The likeliest tokens where each token of a row was sampled, likeliest first; of equals the lowest id first.

    ids         [row's tokens, k] int32; 0 where there are fewer than k
    log_probs   [row's tokens, k] float32; -inf where there are fewer than k
    """

    ids: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step yielded: one row for each context whose last chunk ran, then one for each generating sequence.

    A row has the tokens of one sequence: one, where there are no drafts and no beams. With drafts it has those that
    follow one another. With beams it has one token for each beam, or none when the search is over.

    slots               [r] int32, in batch order
    tokens              [n] int32: the tokens of all rows, one row after the other; meaningless where `failures` names
                        the slot, as are finish, parents and log_probs
    finish              [r] uint8, FinishReason as decided on the device, of the row's last token: END_ID (it is the end
                        id and not part of the output), STOP_WORDS or NOT_FINISHED; lengths are counted by the host. Of
                        a search that is over it is not looked at
    row_starts          [r + 1] int32: row i has tokens row_starts[i]..row_starts[i + 1]; None: each row has one
    log_probs           [n] float32, or None when no request of the batch asked and none has beams; under the
                        distribution the token was sampled from, after everything done to its logits and the
                        temperature, before top-k and top-p; under the model's own for the slots that asked for
                        `raw_log_probs`. With beams, with what biases, penalties and bans made of them; -inf: there are
                        fewer continuations than beams, this beam has none
    parents             [n] int32: with beams, the beam that each token continues; 0 after a context, when there is
                        but one. None: no sequence has beams
    hypotheses          slot -> the results of a search that is over, best first, as many as beams or fewer
    context_logits      slot -> [chunk tokens, vocab] float32, for the slots that asked; as the model gave them
    generation_logits   slot -> [row's tokens, vocab] float32, for the slots that asked and have a row: what each token
                        was sampled from, as the model gave it. With beams [beams, vocab], a row for each beam that was
                        continued
    top_log_probs       slot -> TopLogProbs of the row's tokens, for the slots that asked and have a row; of the
                        distribution that log_probs is of
    failures            slot -> why its row is unusable
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
        """The outputs of the parts of one batch, in order, as if it had run whole."""
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
    """The columns one after the other, zeros for one that is None; None where all are."""
    if all(column is None for column, _ in columns):
        return None
    return np.concatenate([np.zeros(length, dtype) if column is None else column for column, length in columns])


# The finish codes a backend may report, as plain integers for numpy comparisons on the hot path.
NOT_FINISHED = int(FinishReason.NOT_FINISHED)
END_ID = int(FinishReason.END_ID)
STOP_WORDS = int(FinishReason.STOP_WORDS)
LENGTH = int(FinishReason.LENGTH)
