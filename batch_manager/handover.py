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


def num_beam_candidates(width: int, end_id: int, stop_words: Sequence[Sequence[int]]) -> int:
    """Continuations that a step of beam search looks at: so many that `width` are left, however many of them end.

    A beam has at most one continuation by each last token of a stop word, and one by the end id (-1: none).
    """
    ends = {word[-1] for word in stop_words} | ({end_id} - {-1})
    return max(2, 1 + len(ends)) * width


@dataclass(frozen=True, slots=True, eq=False)
class SlotSetup:
    """What the device must know about a sequence before its first token, written once per admission or resume.

    sampling                how its tokens are sampled, and how its beams compete
    request_id              of the request that it belongs to
    end_id                  token that ends the sequence and is not part of the output; -1: none
    bad_words, stop_words   words, each a tuple of tokens: the last token of a bad word is not sampled after the others;
                            a stop word ends the sequence with its last token
    embedding_bias          [vocab] float32, added to the logits; None: nothing
    return_log_probs        rows of `StepOutput.log_probs` are filled for this slot
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
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: np.ndarray | None = None
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    logits_post_processor: LogitsPostProcessor | None = None
    prompt_length: int = 0
    max_new_tokens: int = 0
    history: np.ndarray | None = None

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

    __hash__ = None


def _same(first: object, second: object) -> bool:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    return first == second


@dataclass(frozen=True, slots=True)
class ContextWork:
    """One context chunk of one sequence.

    token_ids       [n] int32, n >= 1: the chunk. An id that is not below the vocabulary is that of a virtual token: it
                    has a place among the others and an embedding of its own
    start           tokens of this sequence already in the KV cache = position of token_ids[0]; more than 0 also in a
                    first chunk, when the beginning of the prompt was found in the cache
    is_last_chunk   the step also yields the next token of the sequence
    setup           given with the first chunk after admission or resume, else None
    embeddings      [v, hidden size] float32: those of the v virtual tokens of the chunk, in order; None: it has none
    """

    slot: int
    token_ids: np.ndarray
    start: int
    is_last_chunk: bool
    setup: SlotSetup | None = None
    embeddings: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class GenerationWork:
    """One step of every generating sequence.

    slots        [g] int32, in batch order
    kv_lengths   [g] int32: tokens in the KV cache before the step = position of the token that is fed
    beam_width   beams of each of these sequences: a step has one width. A sequence of several is several rows of
                 tokens, one after the other, all of one length
    """

    slots: np.ndarray
    kv_lengths: np.ndarray
    beam_width: int = 1

    def __len__(self) -> int:
        return len(self.slots)


NO_GENERATION = GenerationWork(np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class BlockTableUpdates:
    """Entries of the block tables that changed since the last batch: `table[slots[i], indices[i]] = block_ids[i]`.

    slots, indices, block_ids   [u] int32. Where sequences may have beams, what is called a slot here is the row of one
                                beam: slot * ScheduledBatch.max_beam_width + beam
    They are applied in order; doing so twice is harmless. Entries past a sequence's length are stale and must not be
    read, and so are those of blocks that were given back because they left the window: -1, or a block that is somebody
    else's by now.
    """

    slots: np.ndarray
    indices: np.ndarray
    block_ids: np.ndarray

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
    Copies are carried out in order, before the step writes anything.
    """

    source: int
    destination: int
    num_tokens: int
    from_host: bool = False
    to_host: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """All work of one step: contexts before generation, in this order.

    num_places       sequences that a padded layout keeps rows for in generation: the members of a static batch, those
                     that are done included; 0: as many as there are. Other layouts do not look at it.
    max_beam_width   rows of the block tables that belong to a slot; the same in every batch

    A backend that raises from `start` or `finish` must have changed nothing that a second run of the same batch, or of
    any part of it, would notice: the loop narrows a failure down by running halves.
    """

    iteration: int
    micro_batch_id: int = 0
    context: tuple[ContextWork, ...] = ()
    generation: GenerationWork = NO_GENERATION
    block_table_updates: BlockTableUpdates = NO_UPDATES
    num_places: int = 0
    max_beam_width: int = 1

    @property
    def num_sequences(self) -> int:
        return len(self.context) + len(self.generation)

    @property
    def num_context_tokens(self) -> int:
        return sum(len(work.token_ids) for work in self.context)

    def slots(self) -> list[int]:
        """Every slot of the batch, in batch order."""
        return [work.slot for work in self.context] + self.generation.slots.tolist()

    def before(self, later: "ScheduledBatch") -> BlockTableUpdates:
        """What both batches say of the block tables, in order, for a device that may have missed what this one said.

        Nothing of slots in which the later one starts a sequence: what this one said of them was of another.
        """
        mine, started = self.block_table_updates, [work.slot for work in later.context if work.setup is not None]
        kept = ~np.isin(mine.slots // self.max_beam_width, started)
        return BlockTableUpdates(mine.slots[kept], mine.indices[kept], mine.block_ids[kept]).then(
            later.block_table_updates)

    def part(self, start: int, stop: int) -> "ScheduledBatch":
        """Sequences start..stop of the batch order, as a batch of its own, without places for others."""
        contexts = len(self.context)
        rows = slice(max(start - contexts, 0), max(stop - contexts, 0))
        generation = GenerationWork(self.generation.slots[rows], self.generation.kv_lengths[rows],
                                    self.generation.beam_width)
        return ScheduledBatch(
            iteration=self.iteration,
            micro_batch_id=self.micro_batch_id,
            context=self.context[start:stop],
            generation=generation if len(generation) else NO_GENERATION,
            block_table_updates=self.block_table_updates,
            max_beam_width=self.max_beam_width,
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


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """What a step yielded for the beams of one sequence.

    tokens          [width] int32: the token each beam goes on with
    parents         [width] int32: the beam whose text it continues; 0 behind a context, when there is but one
    cum_log_probs   [width] float32: the log-probability of each text, best first unless a diversity rate has its say.
                    -inf: there are fewer texts than beams, this one is none
    log_probs       [width] float32: of the tokens, with what biases, penalties and bans made of them
    hypotheses      the search is over, and these are its results, best first, `width` or fewer; nothing else of this
                    matters then. None: it goes on
    """

    tokens: np.ndarray
    parents: np.ndarray
    cum_log_probs: np.ndarray
    log_probs: np.ndarray
    hypotheses: tuple[Hypothesis, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step yielded: one row for each context whose last chunk ran, then one for each generating sequence.

    slots               [r] int32, in batch order
    tokens              [r] int32: the token chosen; meaningless where `failures` or `beams` names the slot, as are
                        finish and log_probs
    finish              [r] uint8, FinishReason as decided on the device: END_ID (the token is the end id and is not
                        part of the output), STOP_WORDS or NOT_FINISHED; lengths are counted by the host
    log_probs           [r] float32, or None when nobody in the batch asked; under the distribution the token was drawn
                        from, after everything done to its logits and the temperature, before top-k and top-p
    context_logits      slot -> [chunk tokens, vocab] float32, for the slots that asked; as the model gave them
    generation_logits   slot -> [vocab] float32, for the slots that asked and have a row; as the model gave them. With
                        beams [beams, vocab], a row for each beam that was continued
    failures            slot -> why its row is unusable
    beams               slot -> what its beams yielded, for the slots that have several
    """

    micro_batch_id: int
    slots: np.ndarray
    tokens: np.ndarray
    finish: np.ndarray
    log_probs: np.ndarray | None = None
    context_logits: dict[int, np.ndarray] = field(default_factory=dict)
    generation_logits: dict[int, np.ndarray] = field(default_factory=dict)
    failures: dict[int, RowFailure] = field(default_factory=dict)
    beams: dict[int, BeamOutput] = field(default_factory=dict)

    @staticmethod
    def merge(parts: "list[StepOutput]", micro_batch_id: int) -> "StepOutput":
        """The outputs of the parts of one batch, in order, as if it had run whole."""
        if not parts:
            none = np.empty(0, np.int32)
            return StepOutput(micro_batch_id, none, none, np.empty(0, np.uint8))
        log_probs = None
        if any(part.log_probs is not None for part in parts):
            log_probs = np.concatenate([
                np.zeros(len(part.slots), np.float32) if part.log_probs is None else part.log_probs for part in parts])
        return StepOutput(
            micro_batch_id=micro_batch_id,
            slots=np.concatenate([part.slots for part in parts]),
            tokens=np.concatenate([part.tokens for part in parts]),
            finish=np.concatenate([part.finish for part in parts]),
            log_probs=log_probs,
            context_logits={slot: logits for part in parts for slot, logits in part.context_logits.items()},
            generation_logits={slot: logits for part in parts for slot, logits in part.generation_logits.items()},
            failures={slot: failure for part in parts for slot, failure in part.failures.items()},
            beams={slot: beams for part in parts for slot, beams in part.beams.items()},
        )


def with_beams(output: StepOutput, batch: ScheduledBatch, beams: dict[int, BeamOutput]) -> StepOutput:
    """The output of a batch, from one with rows for its sequences without beams, and what those with beams yielded."""
    last_chunks = np.array([work.slot for work in batch.context if work.is_last_chunk], np.int32)
    slots = np.concatenate([last_chunks, batch.generation.slots])
    rows = np.flatnonzero(np.isin(slots, output.slots))

    def spread(column: np.ndarray) -> np.ndarray:
        whole = np.zeros(len(slots), column.dtype)
        whole[rows] = column
        return whole

    return replace(output, slots=slots, tokens=spread(output.tokens), finish=spread(output.finish), beams=beams,
                   log_probs=None if output.log_probs is None else spread(output.log_probs))


# The finish codes a backend may report, as plain integers for numpy comparisons on the hot path.
NOT_FINISHED = int(FinishReason.NOT_FINISHED)
END_ID = int(FinishReason.END_ID)
STOP_WORDS = int(FinishReason.STOP_WORDS)
LENGTH = int(FinishReason.LENGTH)
